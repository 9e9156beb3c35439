/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tables of the packet path that the agent fills: two entries per endpoint and two per tenant id, none for other nodes
 * (NETPILA §6.1, fig. 14). A changed layout gets a new map name. */
#pragma once
#include "common/address.h"
#include <bpf/bpf_helpers.h>

/* An endpoint as a source; the key is the address as its container sees it. */
struct ep_src {
	struct addr plain;
	__u32 ifindex; /* the container's device on the node; packets with this source must come from it */
	__u32 endpoint;
	__u32 tenant_id;
	__u32 checksum; /* checksum difference address -> plain */
};
_Static_assert(sizeof(struct ep_src) == 32, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct ep_src);
	__uint(max_entries, 1); /* set at load */
} pil_sources_v2 SEC(".maps");

/* An endpoint as a destination. The key is the low half of its plaintext address; the high half is own_node. */
struct ep_dst {
	struct addr address; /* as the container sees it */
	__u32 ifindex;
	__u32 endpoint;
	__u32 checksum; /* checksum difference plain -> address */
	__u32 zero;
};
_Static_assert(sizeof(struct ep_dst) == 32, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct ep_dst);
	__uint(max_entries, 1); /* set at load */
} pil_locals_v1 SEC(".maps");

/* Tenants with endpoints here, by each of their ids. Two ids belong to one tenant if they are in the same list. A
 * tenant has a second id while its key is being rotated. */
#define MAX_TENANT_IDS 4

struct tenant {
	__u32 ids[MAX_TENANT_IDS]; /* 0: end of the list */
	__u32 clear;		   /* 1: containers see plaintext addresses, nothing is translated */
	__u32 services;		   /* number of its prefix for services; 0: it has none */
	struct addr gateway;	   /* this node's alias, as containers see it under the key of the id */
};
_Static_assert(sizeof(struct tenant) == 40, "no implicit padding");

static __always_inline bool has_id(const struct tenant *t, __u32 id)
{
	for (int i = 0; i < MAX_TENANT_IDS; i++)
		if (t->ids[i] == id)
			return id != 0;
	return false;
}

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* tenant id */
	__type(value, struct tenant);
	__uint(max_entries, 1); /* set at load */
} pil_tenants_v2 SEC(".maps");

/* Devices of endpoints that another network serves, alone or beside NETPILA. */
struct dev_ep {
	__u32 endpoint; /* number of the endpoint */
	__u32 network;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* number of the device */
	__type(value, struct dev_ep);
	__uint(max_entries, 1); /* set at load */
} pil_ports_v1 SEC(".maps");

/* The programs of the networks beside NETPILA. */
enum network {
	NETWORK_NIMITZ = 0,
	NETWORK_COUNT,
	NETWORK_OVS = 0xff /* no program: a switch reads the device itself and already has the packet */
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, NETWORK_COUNT);
} pil_networks_v1 SEC(".maps");

/* Counts changes of the tables above. The agent writes the tables first and then counts. A program reads the count
 * once, before any lookup, so no cache entry can outlive the tables that it was made from. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} pil_generation_v1 SEC(".maps");

static __always_inline __u32 generation(void)
{
	__u32 zero = 0, *g = bpf_map_lookup_elem(&pil_generation_v1, &zero);

	return g ? *(volatile __u32 *)g : 0;
}
