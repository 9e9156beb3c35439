/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* To a container or the gateway from a switch that reads their devices itself, and sees neither behind the fixed
 * headers nor what an ICMP error quotes: what the stages of nimitz.h drop for what is there. */
#pragma once
#include "net/nimitz/nat.h"

/* Netpila's packets go to a container by its device too, and are judged. No other network has such addresses. */
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
	return TC_ACT_STOLEN; /* told of a drop, the switch would not send what it has behind this one */
}
