/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Egress to a container or the gateway, behind a switch that reads their devices itself (Open vSwitch). The switch does
 * not parse extension headers or what an ICMP error quotes, so this program drops what stages.h would drop for those
 * reasons. */
#pragma once
#include "net/nimitz/nat.h"

/* NETPILA's packets reach a container by the same device and have been checked. Only NETPILA uses such addresses. */
static __always_inline bool is_netpila(const struct pkt_ctx *j)
{
	return j->family == FAMILY_6 && (in_private(&j->src) || in_base(&j->src)) &&
	       (in_private(&j->dst) || in_base(&j->dst));
}

static __always_inline int ovs_port_egress(struct __sk_buff *skb)
{
	struct pkt_ctx j = {};
	struct packet p = {};
	int why = parse_any(skb, &j, &p);

	if (is_netpila(&j))
		return TCX_NEXT;
	if (!why && is_any_error(&p, j.family) && !quote_matches(skb, &p, &j, &j.src))
		why = REASON_ICMP_QUOTE;
	if (!why)
		return TCX_NEXT;
	drop(skb, why, HOOK_SWITCH);
	return TC_ACT_STOLEN; /* with TC_ACT_SHOT the switch would not send the packets that it has queued behind this
				 one */
}
