/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides about ICMPv6 errors to a container of NETPILA. The slow path of container.h and forward call icmp_error_send.
 */
#pragma once
#include "common/icmp_error.h"
#include "net/netpila/flow.h"

/* icmp_error_send drops a container's packet and sends the error about it. Its source is the node's alias in the
 * container's tenant. */
__noinline int icmp_error_send(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 reason)
{
	struct icmp6_error a = {.type = ICMPV6_TIME_EXCEEDED};
	struct tenant *own;
	__u32 id;

	drop(skb, reason, HOOK_CONTAINER);
	if (!p || !f || !icmp_error_wanted(skb, p) || !icmp_error_allowed(f->key.device))
		return TC_ACT_SHOT;
	id = tenant_id(&f->src);
	if (!id) { /* the source is an egress address */
		struct addr inside = {.hi = own_node, .lo = f->extra};

		id = tenant_id(&inside);
	}
	own = bpf_map_lookup_elem(&pil_tenants_v2, &id);
	if (!own)
		return TC_ACT_SHOT;
	a.frame.src = own->gateway;
	a.frame.dst = f->key.src;
	if (reason == REASON_TOO_BIG) {
		a.type = ICMPV6_TOO_BIG;
		a.mtu = bpf_htonl(f->mtu);
	}
	if (reason == REASON_EGRESS_DENIED) {
		a.type = ICMPV6_UNREACHABLE;
		a.code = ICMPV6_PROHIBITED;
	}
	if (reason == REASON_NO_BACKEND || reason == REASON_NO_SERVICE) {
		a.type = ICMPV6_UNREACHABLE;
		a.code = ICMPV6_PORT;
	}
	return icmp_error_build(skb, f->key.device, &a);
}
