/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Backstop programs between macvlans and the uplink. They run after the uplink's programs (uplink.h). Without those, a
 * macvlan would send and receive unchecked packets. So a backstop drops every packet of a container that reaches it.
 * Packets that the uplink's programs accept skip the backstop (pass in device.h). */
#pragma once
#include "common/event.h"

static __always_inline void own_mac(struct __sk_buff *skb, __u8 *mac)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	bpf_probe_read_kernel(mac, ETH_ALEN, kernel->dev->dev_addr);
}

/* The kernel's ARP packets have neither socket nor route, so their namespace is unknown. The node's ARP packets have
 * the uplink's MAC, which no macvlan may use. Packets that entered by a device are excluded: a container may have
 * forwarded them and written that MAC. */
static __always_inline bool is_node_arp(struct __sk_buff *skb)
{
	struct ethhdr *eth = CTX_POINTER(skb, data);
	__u8 own[ETH_ALEN] = {};

	if (skb->ingress_ifindex || (void *)(eth + 1) > CTX_POINTER(skb, data_end) ||
	    eth->h_proto != bpf_htons(ETH_P_ARP))
		return false;
	own_mac(skb, own);
	return !__builtin_memcmp(eth->h_source, own, sizeof(own));
}

static __always_inline bool from_node_netns(struct __sk_buff *skb)
{
	__u64 space = namespace_of(skb);

	return space == node_cookie || (!space && is_node_arp(skb));
}

/* for_macvlan reports whether the uplink would deliver a frame from the fabric directly to a container. Broadcast and
 * multicast frames would reach all containers, so for_macvlan writes the uplink's MAC as their destination. The node's
 * stack still handles them as before, because pkt_type is already set. */
static __always_inline bool for_macvlan(struct __sk_buff *skb)
{
	struct ethhdr *eth = CTX_POINTER(skb, data);
	__u8 own[ETH_ALEN] = {};

	if ((void *)(eth + 1) > CTX_POINTER(skb, data_end))
		return true; /* shorter than any frame */
	if (eth->h_dest[0] & 1) {
		own_mac(skb, own);
		__builtin_memcpy(eth->h_dest, own, sizeof(own));
		return false;
	}
	return eth->h_dest[0] == macvlan_mac[0] && eth->h_dest[1] == macvlan_mac[1];
}

static __always_inline int backstop_in(struct __sk_buff *skb)
{
	if (skb->mark == packet_mark)
		return pass(skb);
	return for_macvlan(skb) ? drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN) : TCX_NEXT;
}

static __always_inline int backstop_out(struct __sk_buff *skb)
{
	return from_node_netns(skb) ? TCX_NEXT : drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_OUT);
}
