/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the next hop of a flow to another node. The slow paths of networks call it. */
#pragma once
#include "net/netpila/flow.h"

/* the node's end of the device pair between its stack and the containers */
volatile const __u32 node_ifindex;

/* find_next_hop asks the FIB as a router would, for a packet from a device that forwards. It returns the next hop only
 * if the neighbour is reachable. Unlike the stack's lookup, this one does not skip a dead router, so the choice is then
 * left to the stack. length is that of the packet on the wire, or 1 to have the MTU of the route in f->mtu. */
static __always_inline int find_next_hop(struct __sk_buff *skb, struct flow *f, __u32 length, struct addr *next_hop)
{
	struct bpf_fib_lookup fib = {.family = AF_INET6, .ifindex = node_ifindex, .flowinfo = bpf_htonl(f->key.path)};
	long found;

	__builtin_memcpy(fib.ipv6_src, &f->src, sizeof(f->src));
	__builtin_memcpy(fib.ipv6_dst, &f->dst, sizeof(f->dst));
	fib.tot_len = length > 0xffff ? 0xffff : length;
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	f->mtu = fib.mtu_result; /* without a neighbour this is still our own length, which fits */
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return REASON_TOO_BIG;
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return REASON_NO_ROUTE;
	if (!is_uplink(fib.ifindex))
		return REASON_NO_ROUTE;
	f->ifindex = fib.ifindex;
	if (found == BPF_FIB_LKUP_RET_NO_NEIGH)
		return 0;
	__builtin_memcpy(next_hop, fib.ipv6_dst, sizeof(*next_hop));
	__builtin_memcpy(f->dmac, fib.dmac, ETH_ALEN);
	__builtin_memcpy(f->smac, fib.smac, ETH_ALEN);
	f->expires = bpf_jiffies64() + NEXT_HOP_LIFE;
	f->egress = EGRESS_UPLINK;
	return 0;
}
