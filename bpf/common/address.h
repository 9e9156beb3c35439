/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* NETPILA addresses (§6.1): node prefix 64 bits | tenant id 24 | app 16 | index 24. This header reads their
 * fields; every other header uses it. */
#pragma once
#include "common/addr.h"
#include "common/context.h"
#include <bpf/bpf_endian.h>

#define FIRST_RESERVED_APP 0xff00
#define NODE_APP	   0xff00 /* a node, as a tenant's containers see it */
#define EGRESS_APP	   0xff01 /* with tenant id 0: a container or a gateway, as hosts outside see it */

/* Prefixes and masks of at most 64 bits. Like hi, they are in network byte order. */
CONSTANT __u64 base_prefix = 0, base_mask = 0;
CONSTANT __u64 private_prefix = 0, private_mask = 0;
CONSTANT __u64 own_node = 0; /* the /64 that the fabric routes to this node */

static __always_inline bool in_base(const struct addr *a)
{
	return (a->hi & base_mask) == base_prefix;
}

/* Locators and identifiers' prefixes of network ila have a prefix of their own. The initial values match no address. */
CONSTANT __u64 ila_prefix = -1, ila_mask = 0;

static __always_inline bool in_ila(const struct addr *a)
{
	return (a->hi & ila_mask) == ila_prefix;
}

static __always_inline bool in_private(const struct addr *a)
{
	return (a->hi & private_mask) == private_prefix;
}

/* The /64 of this node with its egress addresses: own_node, or one of the egress prefix, to which all of them belong.
 * The initial mask and prefix match no address. */
CONSTANT __u64 own_egress = 0, egress_prefix = -1, egress_mask = 0;

#define NODE_HOST (bpf_cpu_to_be64(1)) /* the second half of a node's address */

static __always_inline bool is_node_address(const struct addr *a)
{
	return a->lo == NODE_HOST && in_base(a);
}

static __always_inline __u32 tenant_id(const struct addr *plain)
{
	return bpf_be64_to_cpu(plain->lo) >> 40;
}

static __always_inline __u16 app_id(const struct addr *plain)
{
	return bpf_be64_to_cpu(plain->lo) >> 24;
}

/* claims_app reports whether an address can only be a container's of this base prefix, and so contains its app. */
static __always_inline bool claims_app(const struct addr *a)
{
	return in_base(a) && tenant_id(a);
}

/* is_egress reports whether an address is an egress address of any node. */
static __always_inline bool is_egress(const struct addr *a)
{
	return (a->lo & bpf_cpu_to_be64(~0xffffffULL)) == bpf_cpu_to_be64((__u64)EGRESS_APP << 24) &&
	       (in_base(a) || (a->hi & egress_mask) == egress_prefix);
}
