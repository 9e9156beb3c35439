/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends a packet as its flow says: applies policy, checks ICMP errors, hop limit and MTU, writes MACs and addresses,
 * and redirects. The hooks call forward on a cache hit and at the end of the slow path. */
#pragma once
#include "common/rewrite.h"
#include "net/netpila/icmp.h"
#include "net/netpila/leave.h"
#include "net/netpila/policy.h"
#include "net/netpila/service_table.h"

/* Updates the checksum of the quoted transport header. Otherwise a container would learn 16 bits of the address that
 * its packets went to. The field and the quoted addresses cancel out in the error's own checksum. A quote without the
 * field (a later fragment, or cut short) changes the error's checksum instead. Dropped: quotes whose headers cannot be
 * parsed, which never left a node, and quotes of errors (RFC 4443 §2.4). */
static __always_inline int translate_quoted_checksum(struct __sk_buff *skb, const struct packet *p, __u32 difference)
{
	struct packet q = {.l4 = p->l4 + ICMPV6_HLEN + IPV6_HLEN, .end = p->end};
	__u32 field;
	__u16 sum = 0;

	if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)))
		return REASON_MALFORMED;
	if (find_transport(skb, &q))
		return REASON_ICMP_QUOTE;
	if (q.proto == NEXTHDR_ICMP && q.l4 && q.l4 < q.end) {
		if (bpf_skb_load_bytes(skb, q.l4, &q.icmp_type, sizeof(q.icmp_type)) || is_error(&q))
			return REASON_ICMP_QUOTE;
	}
	field = q.l4 + l4_csum_offset(q.proto);
	if (q.l4 && field > q.l4 && field + sizeof(sum) <= p->end) {
		if (bpf_skb_load_bytes(skb, field, &sum, sizeof(sum)))
			return REASON_MALFORMED;
		if (sum || q.proto != NEXTHDR_UDP) {
			sum = ~csum_fold(csum_add(difference, (__u16)~sum));
			if (!sum)
				sum = 0xffff; /* the same number in ones' complement; UDP allows only this one */
			return bpf_skb_store_bytes(skb, field, &sum, sizeof(sum), 0) ? REASON_MALFORMED : 0;
		}
	}
	return bpf_l4_csum_replace(skb, p->l4 + 2, 0, difference, 0) ? REASON_MALFORMED : 0;
}

/* An ICMPv6 error must quote a packet that the receiver of the error sent to its sender. Any other error would let a
 * container disturb the connections of others, so it is dropped. The quote is translated like the header. */
__slowpath int check_quote(struct __sk_buff *skb, const struct packet *p, const struct flow *f)
{
	struct addr quoted[2];
	__u32 at;

	if (!p || !f)
		return REASON_ICMP_QUOTE;
	at = p->l4 + QUOTED_ADDRESSES;
	if (at + sizeof(quoted) > p->end || bpf_skb_load_bytes(skb, at, quoted, sizeof(quoted)))
		return REASON_ICMP_QUOTE;
	if (!same_addr(&quoted[0], &f->key.dst) || !same_addr(&quoted[1], &f->key.src))
		return REASON_ICMP_QUOTE;
	if (!(f->translate & TRANSLATE))
		return 0;
	quoted[0] = f->dst;
	quoted[1] = f->src;
	if (bpf_skb_store_bytes(skb, at, quoted, sizeof(quoted), 0))
		return REASON_MALFORMED;
	return translate_quoted_checksum(skb, p, f->checksum);
}

/* write_addresses writes those of the flow, and the checksums. It returns 0 or the reason of a drop. */
static __always_inline int write_addresses(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
					   const struct flow *f)
{
	if (p->l4 && l4_csum_offset(p->proto)) {
		*src_of(h) = f->src;
		*dst_of(h) = f->dst;
		return fix_checksum(skb, p, f->checksum) ? REASON_MALFORMED : 0;
	} else {
		struct addr both[2] = {f->src, f->dst};

		/* without a transport checksum a checksum over the whole packet changes */
		return bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), both, sizeof(both), BPF_F_RECOMPUTE_CSUM)
			       ? REASON_MALFORMED
			       : 0;
	}
}

/* may_be_answer reports whether a backend and the client, as the client sees both, have a session of a service. An
 * error may be about one of either protocol. */
static __always_inline bool may_be_answer(const struct flow *f, const struct packet *p, enum hook hook)
{
	const struct addr *client = hook == HOOK_UPLINK_IN ? &f->dst : &f->key.dst;
	const struct addr *backend = hook == HOOK_UPLINK_IN ? &f->src : &f->key.src;

	if (p->proto == NEXTHDR_ICMP)
		return service_pair_lives(client, backend, NEXTHDR_TCP) ||
		       service_pair_lives(client, backend, NEXTHDR_UDP);
	return service_pair_lives(client, backend, p->proto);
}

/* forward_allowed sends a packet that policy allows as its flow says. */
static __always_inline int forward_allowed(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
					   struct flow *f, enum flow_egress egress, struct addr *next_hop,
					   enum hook hook)
{
	if (is_error(p)) {
		int why = check_quote(skb, p, f);

		if (why)
			return drop(skb, why, hook);
		h = eth_ip6_of(skb);
		if (!h)
			return drop(skb, REASON_MALFORMED, hook);
	}
	if (leaves_node(egress)) {
		int why = dec_hop_limit(skb, h, p, f);

		if (why)
			return icmp_error_send(skb, p, f, why);
	}
	address_frame(skb, h, f, egress);
	if (f->translate & TRANSLATE && write_addresses(skb, h, p, f))
		return drop(skb, REASON_MALFORMED, hook);
	if (f->translate & MAY_ANSWER && may_be_answer(f, p, hook)) {
		bpf_tail_call(skb, &pil_services_v1, SERVICE_IN);
		return drop(skb, REASON_NO_PROGRAM, hook);
	}
	return leave_program(skb, f, egress, next_hop, hook);
}

/* forward writes the packet and sends it as the flow says. next_hop is for EGRESS_NEIGHBOUR only; NULL leaves the
 * choice to the kernel's routing. */
static __always_inline int forward(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p, struct flow *f,
				   enum flow_egress egress, struct addr *next_hop, enum hook hook)
{
	if (hook != HOOK_NODE && f->policy_ep[TX] | f->policy_ep[RX]) {
		/* Between two containers of the node the policies of both apply. */
		if ((f->policy_ep[TX] && policy_enforce(skb, p, f, TX, hook)) ||
		    (f->policy_ep[RX] && policy_enforce(skb, p, f, RX, hook)))
			return TC_ACT_SHOT;
		h = eth_ip6_of(skb);
		if (!h)
			return drop(skb, REASON_MALFORMED, hook);
	}
	return forward_allowed(skb, h, p, f, egress, next_hop, hook);
}
