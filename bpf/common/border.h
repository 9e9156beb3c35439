/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Source and destination checks for packets that enter or leave the node outside of the containers' path. The programs
 * of host interfaces, of the uplink and of the gateway call these checks. They drop a packet that fails, because it
 * spoofs a container, a tenant or this node. */
#pragma once
#include "common/address.h"
#include "common/reason.h"

/* claims_tenant reports whether an address on the fabric can only be a container's. */
static __always_inline bool claims_tenant(const struct addr *a)
{
	return claims_app(a) || in_ila(a);
}

static __always_inline struct addr node_address(void)
{
	return (struct addr){.hi = own_node, .lo = NODE_HOST};
}

/* Only containers and their node use the private prefix. So no packet to or from another host may have such an address.
 */
static __always_inline int check_private(const struct addr *src, const struct addr *dst)
{
	return in_private(src) || in_private(dst) ? REASON_PRIVATE_OUTSIDE : 0;
}

/* A packet that the node's own stack sends, by any interface, may not have the source of a container, as the fabric or
 * as hosts outside see it. */
static __always_inline int check_outward(const struct addr *src, const struct addr *dst)
{
	return claims_tenant(src) || is_egress(src) ? REASON_HOST_CLAIMS_TENANT : check_private(src, dst);
}

/* A packet that enters by an interface without container traffic may not have the source of a container or of this
 * node. Other addresses with tenant id 0 in our /64 are allowed: they may belong to services behind that interface. */
static __always_inline int check_inward(const struct addr *src, const struct addr *dst)
{
	struct addr node = node_address();

	if (src->hi == own_node && (tenant_id(src) || same_addr(src, &node)))
		return REASON_OWN_SOURCE;
	if (is_egress(src))
		return src->hi == own_egress ? REASON_OWN_SOURCE : REASON_TENANT_TO_NODE;
	if (claims_tenant(src))
		return REASON_TENANT_TO_NODE;
	return check_private(src, dst);
}
