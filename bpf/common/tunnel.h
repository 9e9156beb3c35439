/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What identifies tunnel packets: UDP ports, and the mark by which the programs of a node recognise tunnel packets that
 * one of them has accepted. The node's stack and netfilter are between them, and other software uses bits of the mark.
 * Ours are bits without known users; the programs ignore the rest. */
#pragma once
#include "common/context.h"
#include <bpf/bpf_helpers.h>

CONSTANT __u32 tunnel_mark = 0, tunnel_bits = 0;

#define TUNNEL_HOPS 64 /* of the outer header */

/* UDP ports of the tunnels of all networks; 0: end of the list. */
#define TUNNEL_PORTS 4
CONSTANT __be16 tunnel_ports[TUNNEL_PORTS] = {};

/* The prefix of the nodes' IPv4 tunnel addresses; without one the mask is 0 and no IPv4 packet is a tunnel's. */
CONSTANT __be32 vtep4_prefix = 0, vtep4_mask = 0;

static __always_inline bool is_tunnel_port(__be16 port)
{
#pragma unroll
	for (int i = 0; i < TUNNEL_PORTS; i++)
		if (tunnel_ports[i] && port == tunnel_ports[i])
			return true;
	return false;
}

static __always_inline bool is_known_tunnel(const struct __sk_buff *skb)
{
	return (skb->mark & tunnel_bits) == tunnel_mark;
}

/* was_made_here reports whether a process of the node sent the packet: the packet entered by no device, and the kernel
 * has not encapsulated anything in it. A process can set tunnel_mark only if it guesses the value, so the mark does not
 * count here. */
static __always_inline bool was_made_here(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return !skb->ingress_ifindex && !kernel->inner_protocol;
}

/* is_own_tunnel reports whether a packet that leaves the node comes from our tunnel device. */
static __always_inline bool is_own_tunnel(struct __sk_buff *skb)
{
	return !was_made_here(skb) && is_known_tunnel(skb);
}
