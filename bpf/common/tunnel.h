/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How the programs of a node know tunnels that one of them has let by. Between them lie the node's stack and netfilter,
 * where others set bits of the mark for themselves: ours are those that nobody is known to use, and only they are
 * looked at. */
#pragma once
#include "common/context.h"
#include <bpf/bpf_helpers.h>

CONSTANT __u32 tunnel_mark = 0, tunnel_bits = 0;

static __always_inline bool is_known_tunnel(const struct __sk_buff *skb)
{
	return (skb->mark & tunnel_bits) == tunnel_mark;
}

/* was_made_here tells of a packet that a process of the node sends: it came by no device, and the kernel has put
 * nothing around it. Such a one may be marked as our own by somebody who has guessed the mark. */
static __always_inline bool was_made_here(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return !skb->ingress_ifindex && !kernel->inner_protocol;
}
