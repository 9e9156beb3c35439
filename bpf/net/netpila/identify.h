/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which endpoint a container's packet is from. The slow paths of container.h and egress_stages.h call it. */
#pragma once
#include "common/reason.h"
#include "net/netpila/flow.h"

/* What the stages of a miss find out about a packet. What later packets of its flow need is in the flow. */
struct miss {
	struct ep_src *from;
	struct tenant *own;
};

/* Stage identity: the endpoint that the packet is from, and its tenant. */
static __always_inline int identify(const struct flow_key *key, struct miss *m)
{
	m->from = bpf_map_lookup_elem(&pil_sources_v2, &key->src);
	if (!m->from || m->from->ifindex != key->device)
		return REASON_SRC_NOT_OWN;
	m->own = bpf_map_lookup_elem(&pil_tenants_v2, &m->from->tenant_id);
	return m->own ? 0 : REASON_NO_KEY;
}
