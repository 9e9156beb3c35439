/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which addresses a packet may have that enters or leaves the node outside of the packet path of containers. */
#pragma once
#include "common/address.h"
#include "common/reason.h"

static __always_inline bool claims_tenant(const struct addr *a)
{
	return in_base(a) && tenant_id(a);
}

static __always_inline struct addr node_address(void)
{
	return (struct addr){.hi = own_node, .lo = bpf_cpu_to_be64(1)};
}

/* Only containers and their node see the private prefix: on a wire it is wrong as either address. */
static __always_inline int check_private(const struct addr *src, const struct addr *dst)
{
	return in_private(src) || in_private(dst) ? REASON_PRIVATE_OUTSIDE : 0;
}

/* What the host's own stack may not send, by whichever device. */
static __always_inline int check_outward(const struct addr *src, const struct addr *dst)
{
	return claims_tenant(src) ? REASON_HOST_CLAIMS_TENANT : check_private(src, dst);
}

/* What may not come in where no container's packets do. Other addresses with tenant id 0 in our /64 may be of
 * services behind this very device. */
static __always_inline int check_inward(const struct addr *src, const struct addr *dst)
{
	struct addr node = node_address();

	if (src->hi == own_node && (tenant_id(src) || same_addr(src, &node)))
		return REASON_OWN_SOURCE;
	if (claims_tenant(src))
		return REASON_TENANT_TO_NODE;
	return check_private(src, dst);
}
