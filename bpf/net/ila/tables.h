/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tables of network ila: an entry for each container of this node, and one for each container elsewhere of the tenants
 * that this node hosts. The key is the identifier as containers see it. It contains the tenant's VNID. A changed layout
 * gets a new map name. */
#pragma once
#include "net/netpila/tables.h"

struct ila_local {
	__u32 ifindex; /* the container's device on the node */
	__u32 endpoint;
	__u32 app;
	__u32 zero;
	__u64 former; /* the locator from which the container moved here; 0: none */
	__u64 until;  /* CLOCK_MONOTONIC, ns: that node forwards packets before */
};
_Static_assert(sizeof(struct ila_local) == 32, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct ila_local);
	__uint(max_entries, 1); /* set at load */
} ila_locals_v2 SEC(".maps");

/* The mapping of an identifier elsewhere. */
struct ila_peer {
	__u64 locator;
	__u64 former; /* the locator before the container moved; 0: none */
	__u64 until;  /* CLOCK_MONOTONIC, ns: packets from the former locator are accepted before */
	__u32 app;
	__u32 used; /* see mark_used; 0: by no packet yet */
};
_Static_assert(sizeof(struct ila_peer) == 32, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct ila_peer);
	__uint(max_entries, 1); /* set at load */
} ila_peers_v1 SEC(".maps");

/* Counts changes of the tables above, as pil_generation_v1 does for the other tables: changes of mappings are frequent,
 * and leave the flows of other networks valid. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} ila_changes_v1 SEC(".maps");

/* Both counts only increase, so their sum changes with each of them. */
static __always_inline __u32 ila_generation(void)
{
	__u32 zero = 0, *changes = bpf_map_lookup_elem(&ila_changes_v1, &zero);

	return generation() + (changes ? *(volatile __u32 *)changes : 0);
}
