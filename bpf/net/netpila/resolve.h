/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the plaintext address for a destination that a container wrote. The slow path of container.h calls it. */
#pragma once
#include "net/netpila/access.h"
#include "net/netpila/crypto.h"
#include "net/netpila/forward.h"
#include "net/netpila/next_hop.h"
#include "net/netpila/tables.h"

/* decrypt tries the key of each of the tenant's ids. A forged ciphertext, or one of another tenant, decrypts to noise.
 * With probability 2^-64 the noise has our base prefix and the id of the key. */
static __always_inline int decrypt(const struct tenant *own, struct addr *dst)
{
	for (int i = 0; i < MAX_TENANT_IDS; i++) {
		struct addr plain = *dst;
		__u32 id = own->ids[i];
		int why;

		if (!id)
			break;
		why = crypt(id, &plain, DECRYPT);
		if (why)
			return why;
		if (!in_base(&plain))
			continue;
		*dst = plain;
		/* A sender that knows the key can encrypt any address; only addresses of the key's own id are assigned.
		 */
		if (tenant_id(&plain) == id)
			return 0;
		return tenant_id(&plain) ? REASON_TENANT_MISMATCH : REASON_TO_NODE;
	}
	return REASON_DST_UNDECRYPTABLE;
}

/* resolve_node turns the alias of a node into the node's address, if the tenant may reach the node. */
static __always_inline int resolve_node(struct addr *dst)
{
	if (app_id(dst) != NODE_APP)
		return REASON_APP_RESERVED;
	if (!may_reach_node(tenant_id(dst), dst->hi))
		return REASON_TO_NODE;
	dst->lo = NODE_HOST;
	return 0;
}

/* resolve turns the destination that a container wrote into a plaintext address of its own tenant, or into the address
 * of a node that the tenant may reach. It refuses addresses of other tenants, and others of reserved apps. */
static __always_inline int resolve(const struct tenant *own, struct addr *dst)
{
	int why;

	if (own->clear) {
		if (!in_base(dst))
			return REASON_DST_NOT_PRIVATE;
		if (!tenant_id(dst))
			return is_node_address(dst) && may_reach_node(own->ids[0], dst->hi) ? 0 : REASON_TO_NODE;
		if (!has_id(own, tenant_id(dst)))
			return REASON_TENANT_MISMATCH;
	} else {
		if (!in_private(dst))
			return REASON_DST_NOT_PRIVATE;
		why = decrypt(own, dst);
		if (why)
			return why;
	}
	return app_id(dst) >= FIRST_RESERVED_APP ? resolve_node(dst) : 0;
}
