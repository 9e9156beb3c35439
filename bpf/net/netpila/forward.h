/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends a packet as its flow says: applies policy, checks ICMP errors, hop limit and MTU, writes MACs and addresses,
 * and redirects. The hooks call forward on a cache hit and at the end of the slow path. */
#pragma once
#include "common/rewrite.h"
#include "net/netpila/icmp.h"
#include "net/netpila/policy.h"

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
	if (!f->translate)
		return 0;
	quoted[0] = f->dst;
	quoted[1] = f->src;
	if (bpf_skb_store_bytes(skb, at, quoted, sizeof(quoted), 0))
		return REASON_MALFORMED;
	return translate_quoted_checksum(skb, p, f->checksum);
}

/* Returns the length of the longest packet that this one becomes on the wire, from the IPv6 header on. The device may
 * cut it into segments that repeat the headers up to and including the transport header whose checksum is pending. */
__noinline __u32 wire_length(struct __sk_buff *skb, const struct packet *p)
{
	__u32 size = skb->gso_size, whole = skb->len - ETH_HLEN, none = 0, at, header = 8;
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);
	__u8 octet = 0, length[3] = {};

	if (!p)
		return whole;
	at = p->pending ? p->pending : p->l4;
	if (!size || !at)
		return whole;
	/* the common case, a TCP stream; with a hop-by-hop header the segments would be longer */
	if (at == sizeof(struct eth_ip6) && p->proto == NEXTHDR_TCP) {
		__u8 *tcp = CTX_POINTER(skb, data) + sizeof(struct eth_ip6);

		if ((void *)(tcp + TCP_OFFSET + 1) <= CTX_POINTER(skb, data_end))
			return IPV6_HLEN + (tcp[TCP_OFFSET] >> 4 << 2) + size;
	}
	/* SCTP segments are a list of packets with lengths of their own. */
	if (size == GSO_BY_FRAGS)
		return bpf_check_mtu(skb, uplink_ifindex, &none, 0, BPF_MTU_CHK_SEGS) > 0 ? whole : 0;
	if (at == p->l4 ? p->proto == NEXTHDR_TCP : kernel->csum_offset == 16) {
		bpf_skb_load_bytes(skb, at + TCP_OFFSET, &octet, sizeof(octet));
		header = octet >> 4 << 2;
	}
	/* BIG TCP's option has the total length; the segments do not have it. */
	bpf_skb_load_bytes(skb, offsetof(struct eth_ip6, payload_len), length, sizeof(length));
	if (!length[0] && !length[1] && length[2] == NEXTHDR_HOP)
		at -= JUMBO_OPTION;
	return at - ETH_HLEN + header + size;
}

CONSTANT bool clear_dscp = false; /* packets to the fabric have DSCP 0, so that no container chooses its priority */

/* The traffic class is DSCP and ECN; ECN stays. */
static __always_inline void set_dscp_0(struct eth_ip6 *h)
{
	h->priority_version &= 0xf0;
	h->flow[0] &= 0x3f;
}

static __always_inline int redirect_to_neighbour(struct flow *f, struct addr *next_hop)
{
	struct bpf_redir_neigh hop = {.nh_family = AF_INET6};

	if (!next_hop)
		return bpf_redirect_neigh(f->ifindex, NULL, 0, 0);
	__builtin_memcpy(hop.ipv6_nh, next_hop, sizeof(*next_hop));
	return bpf_redirect_neigh(f->ifindex, &hop, sizeof(hop), 0);
}

/* forward writes the packet and sends it as the flow says. next_hop is for EGRESS_NEIGHBOUR only; NULL leaves the
 * choice to the kernel's routing. */
static __always_inline int forward(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p, struct flow *f,
				   enum flow_egress egress, struct addr *next_hop, enum hook hook)
{
	bool out = egress != EGRESS_LOCAL && egress != EGRESS_DEVICE;

	if (hook != HOOK_NODE && f->policy_ep[TX] | f->policy_ep[RX]) {
		/* Between two containers of the node the policies of both apply. */
		if ((f->policy_ep[TX] && policy_enforce(skb, p, f, TX, hook)) ||
		    (f->policy_ep[RX] && policy_enforce(skb, p, f, RX, hook)))
			return TC_ACT_SHOT;
		h = eth_ip6_of(skb);
		if (!h)
			return drop(skb, REASON_MALFORMED, hook);
	}
	if (is_error(p)) {
		int why = check_quote(skb, p, f);

		if (why)
			return drop(skb, why, hook);
		h = eth_ip6_of(skb);
		if (!h)
			return drop(skb, REASON_MALFORMED, hook);
	}
	if (out) {
		if (h->hop_limit <= 1)
			return icmp_error_send(skb, p, f, REASON_HOP_LIMIT);
		if (skb->len - ETH_HLEN > f->mtu && wire_length(skb, p) > f->mtu)
			return icmp_error_send(skb, p, f, REASON_TOO_BIG);
		h->hop_limit--;
		if (clear_dscp)
			set_dscp_0(h);
	}
	/* The packet is for this container, whatever MAC the sender wrote. */
	if (!out && skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (egress != EGRESS_NEIGHBOUR) {
		set_macs(h, f);
	}
	if (f->translate) {
		if (p->l4 && l4_csum_offset(p->proto)) {
			*src_of(h) = f->src;
			*dst_of(h) = f->dst;
			if (fix_checksum(skb, p, f->checksum))
				return drop(skb, REASON_MALFORMED, hook);
		} else {
			struct addr both[2] = {f->src, f->dst};

			/* without a transport checksum a checksum over the whole packet changes */
			if (bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), both, sizeof(both),
						BPF_F_RECOMPUTE_CSUM))
				return drop(skb, REASON_MALFORMED, hook);
		}
	}
	if (!out) {
		skb->mark = 0;
		skb->tstamp = 0;
		return to_container(skb, f->ifindex, egress == EGRESS_LOCAL && on_way_in(skb, f->key.device),
				    hook == HOOK_UPLINK_IN);
	}
	if (egress == EGRESS_UPLINK && f->key.device & ON_UPLINK)
		return pass(skb);
	skb->mark = !macvlan && on_way_in(skb, f->key.device) ? packet_mark : accept_mark;
	/* With macvlans a mark is not enough evidence for to_fabric, but the node's own route is. */
	if (macvlan && !(f->key.device & ON_UPLINK))
		return redirect_to_neighbour(f, NULL);
	if (egress == EGRESS_NEIGHBOUR)
		return redirect_to_neighbour(f, next_hop);
	return bpf_redirect(f->ifindex, 0);
}
