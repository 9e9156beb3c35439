/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the network of a packet from the fabric by the packet's destination. from_fabric (uplink.h) handles NETPILA's
 * packets itself. Networks set their classes at load; the verifier removes the comparisons with unused ones. */
#pragma once
#include "common/border.h"
#include "common/event.h"
#include "common/packet4.h"
#include "common/tunnel.h"
#include "net/netpila/exposed_table.h"

enum uplink_action {
	CLASS_END = 0,	   /* no further class */
	CLASS_TUNNEL = 1,  /* to a program of the network if there is one, else to the kernel's tunnel device */
	CLASS_PROGRAM = 2, /* to a program of the network */
};

/* this node's IPv4 tunnel address, in the programs of the uplink; 0: it has none */
CONSTANT __be32 uplink_vtep4 = 0;

struct uplink_class {
	__u64 hi, hi_mask, lo, lo_mask; /* of the destination, in network byte order */
	__u32 action;
	__u32 program; /* index in pil_uplinks_v1; of CLASS_TUNNEL 0: none */
};
_Static_assert(sizeof(struct uplink_class) == 40, "no implicit padding");

/* Further programs in pil_uplinks_v1. */
#define UPLINK_TUNNEL4	   3 /* of tunnels over IPv4 */
#define UPLINK_OFFLOAD_OUT 4 /* of packets to frontends and backends */
#define PROGRAM_EGRESS_OUT 5 /* of packets from containers to hosts outside */
#define PROGRAM_EGRESS_IN  6 /* of packets to egress addresses */
#define PROGRAM_EGRESS_GW  7 /* of packets from and to egress gateways */

#define UPLINK_CLASSES	   6
CONSTANT struct uplink_class uplink_classes[UPLINK_CLASSES] = {};

/* Programs of networks for packets of a class. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 8);
} pil_uplinks_v1 SEC(".maps");

/* from_fabric4 marks tunnel packets over IPv4 to this node's address, as classify does. The tunnel device has one
 * program, which finds the network. A later fragment needs no mark: the packet gets that of its first one. */
static __always_inline int from_fabric4(struct __sk_buff *skb)
{
	struct eth_ip4 *h = eth_ip4_of(skb);
	__be32 src, dst;
	__be16 port = 0;
	__u32 at;

	if (!h || h->eth.h_proto != bpf_htons(ETH_P_IP) || h->version_length >> 4 != 4 || h->proto != NEXTHDR_UDP)
		return TCX_NEXT;
	src = h->src;
	dst = h->dst;
	at = ETH_HLEN + (h->version_length & 15) * 4;
	if (dst != uplink_vtep4 || h->fragment & bpf_htons(IP4_FRAGMENT_OFFSET) ||
	    bpf_skb_load_bytes(skb, at + 2, &port, sizeof(port)) || !is_tunnel_port(port))
		return TCX_NEXT;
	if (src == uplink_vtep4)
		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);
	skb->mark = tunnel_mark;
	return TCX_NEXT;
}

/* classify hands a packet, whose addresses have been checked, to its network. A packet of no class goes to the node's
 * stack. */
static __always_inline int classify(struct __sk_buff *skb, const struct addr *dst)
{
#pragma unroll
	for (int i = 0; i < UPLINK_CLASSES; i++) {
		const volatile struct uplink_class *c = &uplink_classes[i];

		if (c->action == CLASS_END)
			break;
		if ((dst->hi & c->hi_mask) != c->hi || (dst->lo & c->lo_mask) != c->lo)
			continue;
		if (c->action == CLASS_TUNNEL) {
			/* The tunnel device accepts packets with this mark: they came by the uplink, not from a process
			 * of this node. */
			skb->mark = tunnel_mark;
			if (c->program)
				bpf_tail_call(skb, &pil_uplinks_v1, c->program);
			return TCX_NEXT;
		}
		bpf_tail_call(skb, &pil_uplinks_v1, c->program);
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN); /* the network is not on this node */
	}
	/* A gateway's address may be any that the fabric routes here. */
	if (bpf_map_lookup_elem(&pil_gwnat_v1, dst)) {
		bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);
	}
	if (is_exposed_address(dst)) {
		bpf_tail_call(skb, &pil_services_v1, EXPOSED_IN);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);
	}
	return TCX_NEXT;
}
