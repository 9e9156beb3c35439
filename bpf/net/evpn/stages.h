/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network evpn: NIMITZ's stages with tunnels over IPv4, as other EVPN speakers have them. Packets between nodes of the
 * cluster are routed (symmetric IRB, RFC 9135): their VNI is the tenant's L3 VNI, and VXLAN's group policy field has
 * the sender's app. Packets of other speakers' VTEPs have no app. They may be routed or bridged, and only sources that
 * the VTEP has announced are accepted from it (lookup_remote_sender). */
#pragma once
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

	return nimitz_decapped(skb, &j, evpn_decap(skb, &j));
}
