/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the network of a packet from the fabric by the packet's destination. from_fabric (uplink.h) handles NETPILA's
 * packets itself. Networks set their classes at load; the verifier removes the comparisons with unused ones. */
#pragma once
#include "common/border.h"
#include "common/event.h"
#include "common/tunnel.h"

enum uplink_action {
	CLASS_END = 0,	   /* no further class */
	CLASS_TUNNEL = 1,  /* to a program of the network if there is one, else to the kernel's tunnel device */
	CLASS_PROGRAM = 2, /* to a program of the network */
};

struct uplink_class {
	__u64 hi, hi_mask, lo, lo_mask; /* of the destination, in network byte order */
	__u32 action;
	__u32 program; /* index in pil_uplinks_v1; of CLASS_TUNNEL 0: none */
};
_Static_assert(sizeof(struct uplink_class) == 40, "no implicit padding");

#define UPLINK_CLASSES 4
CONSTANT struct uplink_class uplink_classes[UPLINK_CLASSES] = {};

/* Programs of networks for packets of a class. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 8);
} pil_uplinks_v1 SEC(".maps");

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
	return TCX_NEXT;
}
