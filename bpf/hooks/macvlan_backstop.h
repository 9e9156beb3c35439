/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Backstop between macvlans and the uplink, behind the programs that decide. A macvlan sends and receives all that
 * those programs do not stop, so if one is missing, this one drops every packet of a container. Packets that those
 * programs accept skip it (pass in device.h). */
#pragma once
#include "common/event.h"

static __always_inline void own_mac(struct __sk_buff *skb, __u8 *mac)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	bpf_probe_read_kernel(mac, ETH_ALEN, kernel->dev->dev_addr);
}

/* The kernel's ARP packets have neither socket nor route, in every namespace. The node's have the uplink's MAC, which
 * no macvlan may use. A packet that a container forwards from a device of its own is excluded: the container could have
 * written that MAC. */
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
 * multicast frames would reach all of them, so they get the uplink's MAC; the node's stack has already classified them.
 */
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
