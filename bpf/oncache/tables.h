/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The caches: egress in two levels, ingress, filter. User space sets the sizes at load. */
#pragma once
#include "oncache/state.h"
#include "tunnel/headers.h"

/* An inner destination. */
struct once_inner {
	__u32 address[4]; /* IPv4 addresses as IPv4-mapped ones */
	__u32 vni;
};
_Static_assert(sizeof(struct once_inner) == 20, "no implicit padding");

/* First level of egress: the way to a container of another node. */
struct once_egress {
	struct addr vtep;
	__u8 macs[2 * ETH_ALEN]; /* inner */
	__u32 mtu;		 /* of the overlay's device */
};
_Static_assert(sizeof(struct once_egress) == 32, "no implicit padding");

/* Second level of egress: the way to a VTEP. */
struct once_vtep {
	__u64 headers[9]; /* struct outer4 or outer6 as the overlay wrote it; zeros where packets differ */
	__u32 uplink;
	__u32 id; /* the next IPv4 id */
};
_Static_assert(sizeof(struct once_vtep) == 80, "no implicit padding");
_Static_assert(sizeof(struct outer6) <= 72, "the headers fit");

/* Ingress: the way to a container of this node. */
struct once_ingress {
	__u32 device; /* the node's end of its veth */
	__u32 mtu;
	__u8 macs[2 * ETH_ALEN];
};
_Static_assert(sizeof(struct once_ingress) == 20, "no implicit padding");

/* A connection; the key is the same in both directions. */
struct once_flow {
	struct addr local, remote;
	__be16 local_port, remote_port;
	__u32 vni_proto; /* VNI, then 8 bits of protocol */
};
_Static_assert(sizeof(struct once_flow) == 40, "no implicit padding");

/* Until when each direction is valid. A connection with both is established in the sense of connection tracking. */
struct once_verdict {
	__u64 out, in;
	__u32 generation;
	__u32 device;		 /* of the container; only that one may use the entry, or make it valid */
	__u8 macs[2 * ETH_ALEN]; /* of its frames: to its router, from itself */
	__u32 unused;
};
_Static_assert(sizeof(struct once_verdict) == 40, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct once_inner);
	__type(value, struct once_egress);
	__uint(max_entries, 1);
} once_egress SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct addr);
	__type(value, struct once_vtep);
	__uint(max_entries, 1);
} once_vtep SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct once_inner);
	__type(value, struct once_ingress);
	__uint(max_entries, 1);
} once_ingress SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct once_flow);
	__type(value, struct once_verdict);
	__uint(max_entries, 1);
} once_filter SEC(".maps");

/* The MAC of the frames that the overlay accepts from a container, as mac_of reads one, by its device. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
} once_sender SEC(".maps");

static __always_inline struct once_inner inner_of(const struct addr *a)
{
	struct once_inner key = {{a->hi, a->hi >> 32, a->lo, a->lo >> 32}, tunnel_vni};

	return key;
}

/* expire ends the validity of both directions of a flow. */
static __always_inline void expire(const struct once_flow *f)
{
	struct once_verdict *v = bpf_map_lookup_elem(&once_filter, f);

	if (v)
		v->out = v->in = 0;
}

/* copy copies an entry, because the map may give its memory to another key at any time: what is checked has to be what
 * is used. */
#define copy(to, entry)                                                                                                \
	({                                                                                                             \
		const typeof(*(to)) *found = entry;                                                                    \
		if (found)                                                                                             \
			*(to) = *found;                                                                                \
		found != NULL;                                                                                         \
	})

/* differ compares what is aligned to 4 bytes. */
static __always_inline bool differ(const void *a, const void *b, int size)
{
	const __u32 *x = a, *y = b;

	for (int i = 0; i < size / sizeof(*x); i++)
		if (x[i] != y[i])
			return true;
	return false;
}

/* established tells whether a flow may use the cache: CAUSE_HIT, or why not. */
static __always_inline enum once_cause established(const struct once_verdict *v, const struct once_now *now)
{
	if (v->generation != now->generation.filter)
		return CAUSE_VOID;
	return v->out > now->time && v->in > now->time ? CAUSE_HIT : CAUSE_EXPIRED;
}
