/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How the programs of a node know tunnels that one of them has let by. Between them lie the node's stack and netfilter,
 * where others set bits of the mark for themselves: ours are those that nobody is known to use, and only they are
 * looked at. */
#pragma once
#include "context.h"
#include <bpf/bpf_helpers.h>

CONSTANT __u32 tunnel_mark = 0, tunnel_bits = 0;

static __always_inline bool is_known_tunnel(const struct __sk_buff *skb)
{
	return (skb->mark & tunnel_bits) == tunnel_mark;
}
