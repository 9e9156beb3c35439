/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends a packet of network ila as its flow says: policy, ICMP errors, addresses. Rules and sessions see the addresses
 * that containers see. */
#pragma once
#include "common/icmp_error.h"
#include "net/ila/address.h"
#include "net/netpila/leave.h"
#include "policy/policy.h"

/* seen_end returns one end of a packet as containers see it. */
static __always_inline const struct addr *seen_end(const struct flow *f, bool source, __u32 hook)
{
	if (hook == HOOK_UPLINK_IN)
		return source ? &f->src : &f->dst;
	return source ? &f->key.src : &f->key.dst;
}

/* ila_enforce applies the rules of the endpoint at one end of a packet. It returns 0 or drops the packet. */
__noinline int ila_enforce(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 dir, __u32 hook)
{
	struct policy_end end = {.dir = dir};

	if (!p || !f)
		return TC_ACT_SHOT;
	end.local = seen_end(f, dir == TX, hook);
	end.remote = seen_end(f, dir != TX, hook);
	end.endpoint = f->policy_ep[dir & 1];
	end.tenant = identifier_vnid(end.local->lo);
	end.apps = dir == TX ? (__u32)f->extra : (__u32)f->extra << 16 | (__u32)f->extra >> 16;
	return enforce_end(skb, p, &end, ENFORCE_OWN, hook);
}

/* ila_check_quote requires that an ICMPv6 error quotes a packet that its receiver sent to its sender. A container's
 * error quotes what the container saw. A router's error quotes the packet on the fabric, and the addresses in it become
 * those that the container sent; the mapping is neutral for the checksum of the error, too. */
__slowpath int ila_check_quote(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 hook)
{
	struct addr quoted[2];
	__u32 at;

	if (!p || !f)
		return REASON_ICMP_QUOTE;
	at = p->l4 + QUOTED_ADDRESSES;
	if (at + sizeof(quoted) > p->end || bpf_skb_load_bytes(skb, at, quoted, sizeof(quoted)))
		return REASON_ICMP_QUOTE;
	if (same_addr(&quoted[0], seen_end(f, false, hook)) && same_addr(&quoted[1], seen_end(f, true, hook)))
		return 0;
	if (!same_addr(&quoted[0], &f->key.dst) || !same_addr(&quoted[1], &f->key.src))
		return REASON_ICMP_QUOTE;
	quoted[0] = f->dst;
	quoted[1] = f->src;
	return bpf_skb_store_bytes(skb, at, quoted, sizeof(quoted), 0) ? REASON_MALFORMED : 0;
}

/* ila_error_send drops a container's packet and sends the ICMPv6 error about it. */
__noinline int ila_error_send(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 reason)
{
	drop(skb, reason, HOOK_CONTAINER);
	if (!p || !f || !icmp_error_wanted(skb, p) || !icmp_error_allowed(f->key.device))
		return TC_ACT_SHOT;
	return icmp6_error_build(skb, f->key.device, &f->key.src, reason == REASON_TOO_BIG ? f->mtu : 0);
}

/* ila_send writes the packet and sends it as the flow says; see forward of NETPILA. */
static __always_inline int ila_send(struct __sk_buff *skb, const struct packet *p, struct flow *f,
				    enum flow_egress egress, struct addr *next_hop, enum hook hook)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	int why;

	if (!h)
		return drop(skb, REASON_MALFORMED, hook);
	if (leaves_node(egress)) {
		why = dec_hop_limit(skb, h, p, f);
		if (why)
			return hook == HOOK_CONTAINER ? ila_error_send(skb, p, f, why) : drop(skb, why, hook);
	}
	address_frame(skb, h, f, egress);
	*src_of(h) = f->src;
	*dst_of(h) = f->dst;
	return leave_program(skb, f, egress, next_hop, hook);
}

/* ila_forward applies the policies of both ends that are here, and sends the packet. */
static __always_inline int ila_forward(struct __sk_buff *skb, const struct packet *p, struct flow *f,
				       enum flow_egress egress, struct addr *next_hop, enum hook hook)
{
	int why = 0;

	if (f->policy_ep[TX] && ila_enforce(skb, p, f, TX, hook))
		return TC_ACT_SHOT;
	if (f->policy_ep[RX] && ila_enforce(skb, p, f, RX, hook))
		return TC_ACT_SHOT;
	if (is_error(p))
		why = ila_check_quote(skb, p, f, hook);
	if (why)
		return drop(skb, why, hook);
	return ila_send(skb, p, f, egress, next_hop, hook);
}
