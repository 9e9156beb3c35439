/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Containers of an encrypted tenant see a node at an alias: the ciphertext of (node, tenant id, NODE_APP, index), with
 * the first index whose ciphertext is in the private prefix. So each node computes the alias of every other node, and
 * no table has them. The slow path of uplink.h calls node_alias. */
#pragma once
#include "net/netpila/crypto.h"

/* About 2^length of the private prefix tries are needed, at most 2^10. With this many none is found once in 2^90. */
#define ALIAS_TRIES 65536

struct alias_search {
	struct addr plain; /* with index 0 */
	struct addr found;
	__u32 tenant;
	__u32 why; /* 0: found */
};

static long try_alias(__u32 i, struct alias_search *s)
{
	struct addr a = s->plain;
	int why;

	a.lo |= bpf_cpu_to_be64(i + 1);
	why = crypt(s->tenant, &a, ENCRYPT);
	if (why) {
		s->why = why;
		return 1;
	}
	if (!in_private(&a))
		return 0;
	s->found = a;
	s->why = 0;
	return 1;
}

struct alias_key {
	__u64 node; /* its /64 */
	__u32 tenant;
	__u32 zero;
};

/* A cache: what it evicts is computed again. */
#define ALIASES 4096

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct alias_key);
	__type(value, struct addr);
	__uint(max_entries, ALIASES);
} pil_aliases SEC(".maps");

/* node_alias replaces the address of a node by its alias under the key of a tenant id. It returns 0 or a reason. */
static __noinline int node_alias(__u32 tenant, struct addr *node)
{
	struct alias_key key = {.node = node->hi, .tenant = tenant};
	struct addr *known = bpf_map_lookup_elem(&pil_aliases, &key);
	struct alias_search s = {.tenant = tenant, .why = REASON_NO_KEY};

	if (known) {
		*node = *known;
		return 0;
	}
	s.plain.hi = node->hi;
	s.plain.lo = bpf_cpu_to_be64((__u64)tenant << 40 | (__u64)NODE_APP << 24);
	bpf_loop(ALIAS_TRIES, try_alias, &s, 0);
	if (s.why)
		return s.why;
	bpf_map_update_elem(&pil_aliases, &key, &s.found, BPF_ANY);
	*node = s.found;
	return 0;
}
