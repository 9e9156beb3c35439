/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The other interfaces of the node. Nothing of containers comes in or leaves by them, so no packet there may
 * claim to be of one, nor to be the node when it comes in. All else is not ours. Nothing is delivered here. */
#pragma once
#include "common/border.h"
#include "common/event.h"
#include "common/tunnel.h"
#include "net/nimitz/tables.h"

static __always_inline bool is_vtep(const struct addr *a)
{
	return a->lo == VTEP_HOST && (in_base(a) || is_peer(a));
}

/* spoofs_vtep tells of a packet from a tunnel address, or to one (as which other region's, this node may not know),
 * what nodes would take for another's tunnel: UDP to VXLAN's port, or what may be a fragment of that. */
__slowpath int spoofs_vtep(struct __sk_buff *skb, const struct addr *src, const struct addr *dst, __u32 nexthdr)
{
	__be16 port = 0;

	if (!src || !dst || !(is_vtep(src) || is_vtep(dst)))
		return false;
	if (nexthdr != NEXTHDR_UDP)
		return nexthdr != NEXTHDR_TCP && nexthdr != NEXTHDR_ICMP;
	return bpf_skb_load_bytes(skb, ip_offset(skb) + IPV6_HLEN + 2, &port, sizeof(port)) ||
	       port == bpf_htons(UDP_VXLAN);
}

/* Tunnels come in by the uplink alone, and only our own device sends any. */
static __always_inline bool is_tunnel(struct __sk_buff *skb, const struct addr *src, const struct addr *dst,
				      __u8 nexthdr)
{
	return (src->lo == VTEP_HOST || dst->lo == VTEP_HOST) && spoofs_vtep(skb, src, dst, nexthdr);
}

static __always_inline int check_host_if(struct __sk_buff *skb, bool inward, __u32 hook)
{
	struct eth_ip6 f = {};
	struct addr src, dst;
	int why;

	/* A VLAN has a device of its own, where its frames are looked at. */
	if (in_vlan(skb) || !load_headers(skb, &f))
		return TCX_NEXT;
	if (hides_in_tag(&f))
		return drop(skb, REASON_MALFORMED, hook);
	if (f.eth.h_proto != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	src = f.src;
	dst = f.dst;
	why = inward ? check_inward(&src, &dst) : check_outward(&src, &dst);
	if (!why && is_tunnel(skb, &src, &dst, f.nexthdr))
		why = inward ? REASON_PEER_UNKNOWN : REASON_TUNNEL_FORGED;
	return why ? drop(skb, why, hook) : TCX_NEXT;
}

/* What comes in by the loopback device, the first of every namespace, is what the node's own stack says: by there a
 * process reaches the tunnels' device, and on the way in nothing is past the hook. */
#define LOOPBACK 1

static __always_inline int host_if_in(struct __sk_buff *skb)
{
	return skb->pkt_type == PACKET_OTHERHOST ? TCX_NEXT
						 : check_host_if(skb, skb->ifindex != LOOPBACK, HOOK_EDGE_IN);
}

/* A bridge or a bond takes away what its ports receive, but for frames to addresses that never pass a bridge (IEEE
 * 802.1Q, table 8-1): those the stack sees at the port, whatever is in them. */
static __always_inline int bridge_port_in(struct __sk_buff *skb)
{
	static const __u8 reserved[] = {0x01, 0x80, 0xc2, 0x00, 0x00};
	__u8 to[ETH_ALEN] = {};

	if (bpf_skb_load_bytes(skb, 0, to, sizeof(to)) || __builtin_memcmp(to, reserved, sizeof(reserved)) ||
	    to[5] > 0x0f)
		return TCX_NEXT;
	return check_host_if(skb, true, HOOK_EDGE_IN);
}

static __always_inline int host_if_out(struct __sk_buff *skb)
{
	return check_host_if(skb, false, HOOK_EDGE_OUT);
}
