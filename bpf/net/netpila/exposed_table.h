/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Addresses with exposed ports of services (exposed.h). */
#pragma once
#include "net/netpila/gateway_table.h"
#include "net/netpila/service_table.h"

enum exposed_kind {
	EXPOSED_ADDRESS = 1, /* all ports of the address belong to services */
	EXPOSED_NODE = 2,    /* the address is the node's own: its other ports are those of its processes */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);	/* exposed_kind */
	__uint(max_entries, 1); /* set at load */
} pil_exposed_v1 SEC(".maps");

static __always_inline __u32 exposed_kind_of(const struct addr *a)
{
	struct addr key = *a;
	__u32 *kind = bpf_map_lookup_elem(&pil_exposed_v1, &key);

	return kind ? *kind : 0;
}

static __always_inline bool is_exposed_address(const struct addr *a)
{
	return exposed_kind_of(a);
}

/* is_exposed_source reports whether only services send with this address, and not the node's own stack. */
static __always_inline bool is_exposed_source(const struct addr *a)
{
	return exposed_kind_of(a) == EXPOSED_ADDRESS;
}
