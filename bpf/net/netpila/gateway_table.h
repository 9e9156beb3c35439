/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Connections of egress gateways (gateway.h), by the address that hosts outside see. */
#pragma once
#include "common/addr.h"
#include <bpf/bpf_helpers.h>

/* A connection at a gateway: an entry for packets of the container, and one for answers. */
struct nat_key {
	struct addr local, remote;	/* container and host outside; of answers, gateway and host outside */
	__be16 local_port, remote_port; /* of ICMPv6 echo, both are the identifier */
	__u8 proto;
	__u8 zero[3];
};

struct nat_entry {
	struct addr address; /* that replaces local */
	__be16 port;
	/* Of an exposed port, else 0: */
	__u8 seen;     /* exposed_seen */
	__u8 used;     /* when a packet has last used it, see exposed_time */
	__u32 backend; /* number of the backend */
};
_Static_assert(sizeof(struct nat_key) == 40 && sizeof(struct nat_entry) == 24, "no implicit padding");
const struct nat_key *unused_nat_key __attribute__((unused)); /* keep the types in BTF */
const struct nat_entry *unused_nat_entry __attribute__((unused));

struct nat_connections {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct nat_key);
	__type(value, struct nat_entry);
	__uint(max_entries, 65536);
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__type(key, struct addr); /* of the gateway, as hosts outside see it: each belongs to one tenant */
	__uint(max_entries, 1024);
	__array(values, struct nat_connections);
} pil_gwnat_v1 SEC(".maps");

/* is_gateway_source reports whether an address is this node's as an egress gateway. */
static __always_inline bool is_gateway_source(const struct addr *a)
{
	struct addr key = *a;

	return bpf_map_lookup_elem(&pil_gwnat_v1, &key);
}
