/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The caches of verdicts, which policy.h looks up before rules and sessions. */
#pragma once
#include "common/ways.h"
#include "policy/ct_table.h"

/* The verdict cache: pre-actions of a session, and how long its packets need no check. Direct-mapped and per CPU as the
 * flow cache (flow.h). A packet of an established session touches one cache line of it. */
#define VERDICT_SLOTS 4096

struct verdict {
	struct session_key key;
	__u32 generation; /* of the rules */
	__u32 apps;	  /* of both ends, if the addresses do not contain them */
	__u64 until;	  /* jiffies; 0: check each packet */
	struct pre_actions pre;
	__be32 nat; /* translation that the session uses */
	__u8 rest[32];
};
/* The slot has pre-actions that came with a packet. What the rules of this node say may differ. */
#define from_packet key.zero[0]
_Static_assert(sizeof(struct verdict) == 128, "two lines of the data cache, of which most packets need the first");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE); /* begins at a page, so that no slot straddles cache lines */
	__type(key, __u32);
	__type(value, struct verdict);
	__uint(max_entries, VERDICT_SLOTS); /* times the number of CPUs, set at load */
} pil_verdicts SEC(".maps");

/* Of sessions with hosts outside of the cluster, so that a container that sends to many of them evicts no verdicts
 * between containers; nor, by its ways, those of other tenants. */
struct verdict_set {
	struct verdict ways[WAYS];
};

#define VERDICT_SETS 256

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct verdict_set);
	__uint(max_entries, VERDICT_SETS); /* times the number of CPUs, set at load */
} pil_overdicts SEC(".maps");

/* How long packets of an established session pass without updating it, in jiffies: 0.1 to 1 s, much less than its
 * timeout. */
#define VERDICT_TTL 100

static __always_inline __u64 verdict_hash(const struct addr *local, const struct addr *remote, __u32 ports)
{
	__u64 h = (local->lo ^ remote->hi) * 0x9e3779b97f4a7c15ULL;

	return (h ^ remote->lo ^ ports) * 0xc2b2ae3d27d4eb4fULL;
}

static __always_inline struct verdict *verdict_slot(const struct addr *local, const struct addr *remote, __u32 ports)
{
	__u32 slot = bpf_get_smp_processor_id() * VERDICT_SLOTS + (verdict_hash(local, remote, ports) >> 52);

	_Static_assert(VERDICT_SLOTS == 1 << 12, "the slot is the top 12 bits");
	return bpf_map_lookup_elem(&pil_verdicts, &slot);
}

static __always_inline __u32 ports_of(const struct session_key *k)
{
	return *(const __u32 *)&k->local_port;
}

static __always_inline struct verdict_set *outside_verdicts(const struct addr *local, const struct addr *remote,
							    __u32 ports)
{
	__u32 number = bpf_get_smp_processor_id() * VERDICT_SETS + (verdict_hash(local, remote, ports) >> 56);

	_Static_assert(VERDICT_SETS == 1 << 8, "the set is the top 8 bits");
	return bpf_map_lookup_elem(&pil_overdicts, &number);
}

/* outside_verdict returns the verdict in the cache that has these addresses and ports, or NULL. */
static __noinline struct verdict *outside_verdict(const struct addr *local, const struct addr *remote, __u32 ports)
{
	struct verdict_set *set = outside_verdicts(local, remote, ports);

	if (!set)
		return NULL;
#pragma unroll
	for (int i = 0; i < WAYS; i++) {
		struct verdict *v = &set->ways[i];

		if (same_addr(&v->key.remote, remote) && same_addr(&v->key.local, local) && ports_of(&v->key) == ports)
			return v;
	}
	return NULL;
}

/* keep_outside_verdict puts a verdict that the cache does not have into it. Only a packet that may pass, of a session
 * that both ends have confirmed, does so: so no scan takes a slot. A verdict that has expired is free. */
static __noinline void keep_outside_verdict(const struct verdict *v)
{
	struct verdict_set *set = outside_verdicts(&v->key.local, &v->key.remote, ports_of(&v->key));
	struct ways w = {.owner = v->key.tenant};

	if (!set)
		return;
#pragma unroll
	for (int i = 0; i < WAYS; i++) {
		const struct verdict *has = &set->ways[i];

		if (has->generation == v->generation && has->until > bpf_jiffies64())
			w.owners[i] = has->key.tenant;
	}
	set->ways[way_to_take(&w) % WAYS] = *v;
}
