/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network evpn: NIMITZ's stages with tunnels over IPv4, as other EVPN speakers have them. Packets between nodes of the
 * cluster are routed (symmetric IRB, RFC 9135): their VNI is the tenant's L3 VNI, and VXLAN's group policy field has
 * the sender's app. Packets of other speakers' VTEPs have no app. They may be routed or bridged, and only sources that
 * the VTEP has announced are accepted from it (lookup_remote_sender). */
#pragma once
#include "net/evpn/neighbours.h"
#include "net/evpn/tables.h"
#include "net/nimitz/stages.h"

/* evpn_decap accepts packets that came by the uplink. The key of another speaker's VTEP is its address as the second
 * half of an IPv4-mapped address, which is no node's /64. */
static __always_inline int evpn_decap(struct __sk_buff *skb, struct pkt_ctx *j)
{
	struct vxlan_metadata policy = {};
	struct bpf_tunnel_key key = {};
	__be32 from;

	if (bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0) || !is_known_tunnel(skb))
		return REASON_PEER_UNKNOWN;
	from = bpf_htonl(key.remote_ipv4);
	if (from == own_vtep4)
		return REASON_OWN_SOURCE;
	j->vni = key.tunnel_id;
	if ((from & vtep4_mask) != vtep4_prefix)
		j->remote_edge = ip4_mapped(from).lo;
	else if (bpf_skb_get_tunnel_opt(skb, &policy, sizeof(policy)) > 0)
		j->identity = policy.gbp & GBP_IDENTITY;
	return 0;
}

/* Packets from the tunnel device; the program of network nimitz makes a tail call. */
static __always_inline int evpn_from_tunnel(struct __sk_buff *skb)
{
	struct pkt_ctx j = {.hook = HOOK_TUNNEL, .from = PORT_VXLAN};
	int why = evpn_decap(skb, &j);

	if (!why && may_be_neighbour(skb)) {
		struct neighbour_msg n = {};

		if (read_neighbour(skb, &n))
			return neighbour_from_tunnel(skb, &n, j.remote_edge >> 32, j.vni);
	}
	if (!why && (skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST))
		why = REASON_NOT_REPLICATED;
	return nimitz_decapped(skb, &j, why);
}

static __always_inline int evpn_from_container(struct __sk_buff *skb)
{
	if (may_be_neighbour(skb)) {
		struct neighbour_msg n = {};

		if (read_neighbour(skb, &n) && asks_as_container(&n))
			return neighbour_from_container(skb, &n);
		if (skb->protocol == bpf_htons(ETH_P_ARP))
			return drop(skb, REASON_NOT_REPLICATED, HOOK_CONTAINER);
	}
	return nimitz_from_container(skb);
}
