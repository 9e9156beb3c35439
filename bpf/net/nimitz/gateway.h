/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets between the fabric and this node's gateway, whose stack is in a namespace of its own. Services and their
 * clients see addresses with tenant id 0 and the gateway's reserved app, which no table contains. The uplink's ingress
 * and the gateway's underlay device call it. */
#pragma once
#include "common/border.h"
#include "net/netpila/resolve.h"
#include "net/nimitz/tables.h"

#define GATEWAY_APP 0xff00

static __always_inline bool is_gateway_addr(const struct addr *a)
{
	return a->hi == own_node && !tenant_id(a) && app_id(a) == GATEWAY_APP;
}

static __always_inline int set_both_macs(struct __sk_buff *skb, __u64 to)
{
	__u8 macs[2 * ETH_ALEN];

	__builtin_memcpy(macs, &to, sizeof(to)); /* the source overwrites the two zeros */
	__builtin_memcpy(macs + ETH_ALEN, gateway_mac, ETH_ALEN);
	return bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0);
}

/* to_gateway delivers a packet from the fabric to the gateway. */
static __always_inline int to_gateway(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct nimitz_node *node = bpf_map_lookup_elem(&nim_node_v1, &zero);

	if (!node || !node->underlay)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb);
	if (set_both_macs(skb, mac_word(container_mac)))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	skb->mark = 0;
	skb->tstamp = 0;
	return bpf_redirect(node->underlay, 0);
}

/* gateway_to_fabric accepts packets with the gateway's own source addresses. Any other source is one of a container
 * that NAT has not translated, so the packet is dropped. */
static __always_inline int gateway_to_fabric(struct __sk_buff *skb)
{
	struct addr next_hop;
	struct packet p = {};
	struct flow f = {};
	struct eth_ip6 *h;
	int why;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return drop(skb, REASON_NOT_IP6, HOOK_GATEWAY);
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_GATEWAY);
	f.src = *src_of(h);
	f.dst = *dst_of(h);
	f.key.path = path_of(h);
	why = parse(skb, h, &p); /* also drops the stack's neighbour discovery and listener reports */
	if (why)
		return drop(skb, why, HOOK_GATEWAY);
	if (!is_gateway_addr(&f.src))
		return drop(skb, REASON_UNTRANSLATED, HOOK_GATEWAY);
	if (claims_tenant(&f.dst))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_GATEWAY);
	why = check_private(&f.src, &f.dst);
	if (!why)
		why = find_next_hop(skb, &f, wire_length(skb, &p), &next_hop);
	if (why)
		return drop(skb, why, HOOK_GATEWAY);
	skb->mark = accept_mark;
	return bpf_redirect_neigh(f.ifindex, NULL, 0, 0);
}
