/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The last steps of a packet that is forwarded by a flow: hop limit and MTU, MACs, and the way out of the program. The
 * forwarding code of NETPILA and of network ila calls them. */
#pragma once
#include "common/event.h"
#include "net/netpila/flow.h"

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
		return bpf_check_mtu(skb, uplinks[0], &none, 0, BPF_MTU_CHK_SEGS) > 0 ? whole : 0;
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

static __always_inline bool leaves_node(enum flow_egress egress)
{
	return egress != EGRESS_LOCAL && egress != EGRESS_DEVICE;
}

/* dec_hop_limit does what a router does with a packet to another node. It returns the reason why the packet cannot go
 * on; the packet is then unchanged, because an ICMP error quotes it. */
static __always_inline int dec_hop_limit(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
					 const struct flow *f)
{
	if (h->hop_limit <= 1)
		return REASON_HOP_LIMIT;
	if (skb->len - ETH_HLEN > f->mtu && wire_length(skb, p) > f->mtu)
		return REASON_TOO_BIG;
	h->hop_limit--;
	if (clear_dscp)
		set_dscp_0(h);
	return 0;
}

/* address_frame writes the MACs, unless the kernel's neighbour table does. */
static __always_inline void address_frame(struct __sk_buff *skb, struct eth_ip6 *h, const struct flow *f,
					  enum flow_egress egress)
{
	/* The packet is for this container, whatever MAC the sender wrote. */
	if (!leaves_node(egress) && skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (egress != EGRESS_NEIGHBOUR)
		set_macs(h, f);
}

/* leave_node sends a packet to the fabric. next_hop is for EGRESS_NEIGHBOUR only; NULL leaves the choice to the
 * kernel's routing. */
static __always_inline int leave_node(struct __sk_buff *skb, struct flow *f, enum flow_egress egress,
				      struct addr *next_hop)
{
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

/* leave_program sends a packet, which is complete, to where its flow leads. */
static __always_inline int leave_program(struct __sk_buff *skb, struct flow *f, enum flow_egress egress,
					 struct addr *next_hop, enum hook hook)
{
	if (leaves_node(egress))
		return leave_node(skb, f, egress, next_hop);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, f->ifindex, egress == EGRESS_LOCAL && on_way_in(skb, f->key.device),
			    hook == HOOK_UPLINK_IN);
}
