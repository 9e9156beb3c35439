/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets between containers and hosts outside of the cluster. Hosts outside see a container at its egress address:
 * 1:1, without a change of ports. All these packets pass the session table, and inbound packets need a session. The
 * programs of container.h and uplink.h call this one by tail calls, so packets between containers pay nothing. Packets
 * by a gateway: gateway.h. */
#pragma once
#include "common/ways.h"
#include "net/netpila/access.h"
#include "net/netpila/forward.h"
#include "net/netpila/next_hop.h"

/* A container's egress address, by the number of its endpoint, and the way back. */
struct egress_src {
	struct addr address;
	__u32 checksum; /* checksum difference address in the container -> egress address */
	__u32 zero;
};

struct egress_dst {
	struct addr address; /* as the container sees it */
	__u64 plain;	     /* low half of its plaintext address; the high half is own_node */
	__u32 ifindex;
	__u32 endpoint;
	__u32 checksum; /* checksum difference egress address -> address in the container */
	__u32 zero;
};
_Static_assert(sizeof(struct egress_src) == 24 && sizeof(struct egress_dst) == 40, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct egress_src);
	__uint(max_entries, 1); /* set at load */
} pil_esources_v1 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64); /* low half of the egress address; the high half is own_egress */
	__type(value, struct egress_dst);
	__uint(max_entries, 1); /* set at load */
} pil_elocals_v1 SEC(".maps");

/* A flow cache of its own, so that a container that sends to many hosts evicts no flow between containers; nor, by its
 * ways, those of other tenants. */
struct flow_set {
	struct flow ways[WAYS];
};

#define OUTSIDE_SETS 256

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_set);
	__uint(max_entries, OUTSIDE_SETS); /* times the number of CPUs, set at load */
} pil_oflows SEC(".maps");

/* flow_owner returns the owner of a slot: the tenant of the container, whose address is in the flow; of an address of
 * tenant id 0, its index. */
static __always_inline __u32 flow_owner(__u64 lo)
{
	__u32 tenant;

	lo = bpf_be64_to_cpu(lo);
	tenant = lo >> 40;
	return tenant ? tenant : 1 << 24 | (lo & 0xffffff);
}

/* find_way looks a flow up in its set. */
static __always_inline struct flow *find_way(struct flow_set *set, const struct flow_key *key)
{
#pragma unroll
	for (int i = 0; i < WAYS; i++)
		if (flow_matches(&set->ways[i], key))
			return &set->ways[i];
	return NULL;
}

/* take_way returns the slot of a set for a new flow. A flow that has expired, or has had no packet for so long, is
 * free. */
static __always_inline struct flow *take_way(struct flow_set *set, __u64 owner, __u32 generation)
{
	struct ways w = {.owner = flow_owner(owner)};

#pragma unroll
	for (int i = 0; i < WAYS; i++) {
		struct flow *f = &set->ways[i];

		if (f->egress && f->key.generation == generation && f->expires > bpf_jiffies64())
			w.owners[i] = flow_owner(f->extra);
	}
	return &set->ways[way_to_take(&w) % WAYS];
}

static __always_inline struct flow_set *outside_set(const struct flow_key *key)
{
	__u32 number = bpf_get_smp_processor_id() * OUTSIDE_SETS + (flow_hash(key) >> 56);

	_Static_assert(OUTSIDE_SETS == 1 << 8, "the set is the top 8 bits");
	return bpf_map_lookup_elem(&pil_oflows, &number);
}

static __noinline struct flow *outside_flow(const struct flow_key *key)
{
	struct flow_set *set = outside_set(key);

	return set ? find_way(set, key) : NULL;
}

/* keep_outside_flow puts a new flow into the cache. Only a packet that may pass does so. */
static __noinline void keep_outside_flow(const struct flow *f)
{
	struct flow_set *set = outside_set(&f->key);

	if (set)
		*take_way(set, f->extra, f->key.generation) = *f;
}

/* begin_outside starts a flow between a container and a host outside. */
static __always_inline void begin_outside(struct flow *f, const struct flow_key *key, const struct addr *src,
					  const struct addr *dst, __u64 plain)
{
	f->egress = 0; /* invalidates the slot until all fields are written */
	f->key = *key;
	f->src = *src;
	f->dst = *dst;
	f->translate = TRANSLATE;
	f->policy_ep[TX] = f->policy_ep[RX] = 0;
	f->extra = plain;
}
