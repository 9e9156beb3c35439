/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What user space tells the programs: constants, the lease, generations; marks, which carry a generation; counters. */
#pragma once
#include "common/addr.h"
#include "common/context.h"
#include "common/proto.h"
#include <bpf/bpf_helpers.h>

CONSTANT struct addr tunnel_address = {}; /* this node's VTEP */
CONSTANT __u32 tunnel_vni = 0;
CONSTANT __u16 tunnel_port = 0;
CONSTANT __u32 overlay_device = 0; /* ifindex of the VXLAN device */
CONSTANT __u64 overlay_mac = 0;	   /* its MAC, as mac_of reads one */
CONSTANT __u64 valid_for = 0;	   /* ns after the overlay let a packet through */
CONSTANT __u32 mark_mask = 0;
CONSTANT __u32 mark_shift = 0;
CONSTANT bool tracks = true; /* conntrack is active in the namespace */
CONSTANT bool routed = true; /* the overlay routes: it decrements hop limits and writes MACs; else it bridges */

/* Both numbers are in one word, so one write changes both. */
union once_generation {
	struct {
		__u32 marks;  /* generation of learn marks, 0 while learning is paused */
		__u32 filter; /* generation of filter entries */
	};
	__u64 word;
};
_Static_assert(sizeof(union once_generation) == 8, "one word");

/* User space writes these. */
volatile __u64 once_lease = 0; /* the time until which the programs may use the cache */
volatile __u64 once_word = 0;  /* a union once_generation */

struct once_now {
	__u64 time;
	union once_generation generation;
};

/* lease reads time and generation. It fails without a lease: user space may have missed changes of the overlay. The
 * coarse clock lags by at most one tick. */
static __always_inline bool lease(struct once_now *now)
{
	now->time = bpf_ktime_get_coarse_ns();
	now->generation.word = once_word;
	return now->time < once_lease;
}

/* is_current tells whether the generations are still those of now. It orders all writes of the program before the read
 * (atomic operations with a result are full barriers): either the program sees a new generation, or user space, which
 * evicts after it has written one, sees what the program wrote. */
static __always_inline bool is_current(const struct once_now *now)
{
	return __sync_fetch_and_or(&once_word, 0) == now->generation.word;
}

/* Directions: values in marks, and of counters. */
enum once_way {
	WAY_OUT = 1,
	WAY_IN = 2,
	WAYS,
};
#define WAY_BITS 2

static __always_inline __u32 mark_of(__u32 generation, enum once_way way)
{
	return (generation << WAY_BITS | way) << mark_shift;
}

/* Marks outside of the mask belong to others. The kernel clears marks when a packet enters or leaves a container, so
 * containers cannot set them. */
static __always_inline void mark(struct __sk_buff *skb, __u32 value)
{
	skb->mark = (skb->mark & ~mark_mask) | value;
}

/* may_learn tells whether a packet has passed the overlay since learning was last paused. */
static __always_inline bool may_learn(struct __sk_buff *skb, const struct once_now *now, enum once_way way)
{
	return now->generation.marks && (skb->mark & mark_mask) == mark_of(now->generation.marks, way);
}

/* Why a packet passes the overlay, or is not learnt from; Go has the same list (stats.go). */
enum once_cause {
	CAUSE_HIT,
	CAUSE_LEASE,	 /* no lease */
	CAUSE_PACKET,	 /* not TCP or UDP, fragment, options, lengths, header checksum, MACs */
	CAUSE_HOPS,	 /* TTL or hop limit */
	CAUSE_TCP_FLAGS, /* SYN without ACK, RST: the flow is forgotten */
	CAUSE_FIN,	 /* conntrack has to see it; what follows may pass without */
	CAUSE_SEGMENTS,	 /* UDP GSO, and tunnels in tunnels */
	CAUSE_CONGESTED, /* decapsulation would change ECN */
	CAUSE_SENDER,	 /* not from the VTEP that packets to the container go to */
	/* The overlay's answer to those up to CAUSE_ROUTE can be learnt. */
	CAUSE_SYN_ACK,	  /* conntrack has to see it */
	CAUSE_UNVERIFIED, /* no device has verified the outer checksum; the kernel does */
	CAUSE_UNKNOWN,	  /* no filter entry */
	CAUSE_VOID,	  /* of an old generation */
	CAUSE_EXPIRED,	  /* one direction has no packet that the overlay let through lately */
	CAUSE_DEVICE,	  /* the flow of another container, or other MACs */
	CAUSE_ROUTE,	  /* no headers, or no device */
	CAUSE_TOO_LONG,	  /* for the MTU that the overlay has */
	CAUSE_FAILED,	  /* the kernel refused to change the packet */
	/* of learning; those of conntrack also of packets that get no mark: */
	CAUSE_LEARNT,
	CAUSE_MARK,	 /* marked before a change, or while learning is paused; not sent by a tunnel device */
	CAUSE_UNTRACKED, /* no conntrack entry */
	CAUSE_UNREPLIED, /* conntrack has not seen both directions */
	CAUSE_NAT,	 /* or a conntrack helper */
	CAUSE_CHECKSUM,	 /* IPv6 outer headers with a checksum */
	CAUSE_FLOODED,	 /* not to the MAC that the container sends from */
	CAUSE_CHANGED,	 /* a change while the program ran */
	CAUSES,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, WAYS *CAUSES);
} once_counters SEC(".maps");

static __always_inline void count(enum once_way way, enum once_cause cause)
{
	__u32 key = way * CAUSES + cause;
	__u64 *counter = bpf_map_lookup_elem(&once_counters, &key);

	if (counter)
		++*counter;
}
