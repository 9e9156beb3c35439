/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The mark by which the programs of a node recognise tunnel packets that one of them has accepted. The node's stack and
 * netfilter are between them, and other software uses bits of the mark. Ours are bits without known users; the programs
 * ignore the rest. */
#pragma once
#include "common/context.h"
#include <bpf/bpf_helpers.h>

CONSTANT __u32 tunnel_mark = 0, tunnel_bits = 0;

static __always_inline bool is_known_tunnel(const struct __sk_buff *skb)
{
	return (skb->mark & tunnel_bits) == tunnel_mark;
}

/* was_made_here reports whether a process of the node sent the packet: it entered by no device, and the kernel has not
 * encapsulated anything in it. Such a packet may have our mark only if the process guessed it. */
static __always_inline bool was_made_here(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return !skb->ingress_ifindex && !kernel->inner_protocol;
}
