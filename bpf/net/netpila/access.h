/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What containers of a tenant reach besides each other: hosts outside of the cluster, and nodes. One table has the
 * egress rules, the protected prefixes and the nodes of each tenant that this node hosts. Only misses of the flow
 * caches look it up. */
#pragma once
#include "net/netpila/tables.h"

enum access_action {
	ACCESS_DENY = 1,
	ACCESS_OUTSIDE = 2, /* leaves at this node, with the container's egress address */
	ACCESS_GATEWAY = 3, /* leaves at a gateway */
	ACCESS_NODE = 4,    /* the address of a node */
};

#define ACCESS_ALL_TENANTS 0 /* in place of a tenant id: protected prefixes */
#define RULE_GATEWAYS	   2

struct access_key {
	__u32 bits; /* prefix length, tenant id included */
	__u32 tenant;
	struct addr address;
} __attribute__((packed));

struct access_rule {
	__u32 action;
	__u32 zero;
	__u64 gateways[RULE_GATEWAYS]; /* /64s of nodes; 0: none */
};
_Static_assert(sizeof(struct access_key) == 24 && sizeof(struct access_rule) == 24, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct access_key);
	__type(value, struct access_rule);
	__uint(max_entries, 1); /* set at load */
} pil_access_v1 SEC(".maps");

static __noinline struct access_rule *access_rule_of(__u32 tenant, const struct addr *a)
{
	struct access_key key = {.bits = 32 + 128, .tenant = tenant, .address = *a};

	return bpf_map_lookup_elem(&pil_access_v1, &key);
}

static __always_inline bool is_protected(const struct addr *a)
{
	return access_rule_of(ACCESS_ALL_TENANTS, a);
}

/* may_reach_node reports whether containers of a tenant and a node reach each other. */
static __always_inline bool may_reach_node(__u32 tenant, __u64 node)
{
	struct addr a = {.hi = node, .lo = NODE_HOST};
	struct access_rule *rule = access_rule_of(tenant, &a);

	return rule && rule->action == ACCESS_NODE;
}
