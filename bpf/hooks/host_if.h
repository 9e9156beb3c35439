/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* All interfaces of the node other than the uplink and the containers' (bridges, bonds, physical devices, loopback). No
 * container's packet enters or leaves by them. So their programs drop as spoofed: packets with the source of a
 * container, incoming packets with the source of this node, packets with private addresses, and tunnel packets. All
 * other packets pass; nothing is delivered here. */
#pragma once
#include "common/border.h"
#include "common/event.h"
#include "common/tunnel.h"
#include "net/netpila/exposed_table.h"
#include "net/nimitz/tables.h"

static __always_inline bool is_vtep(const struct addr *a)
{
	return a->lo == VTEP_HOST && (in_base(a) || is_peer(a));
}

/* spoofs_vtep reports whether a node might accept the packet as a tunnel packet: its source or its destination is a
 * VTEP address, and it is UDP to a tunnel port or may be a fragment of such a packet. One VTEP address is enough,
 * because this node does not know the VTEPs of all regions. */
__slowpath int spoofs_vtep(struct __sk_buff *skb, const struct addr *src, const struct addr *dst, __u32 nexthdr)
{
	__be16 port = 0;

	if (!src || !dst || !(is_vtep(src) || is_vtep(dst)))
		return false;
	if (nexthdr != NEXTHDR_UDP)
		return nexthdr != NEXTHDR_TCP && nexthdr != NEXTHDR_ICMP;
	return bpf_skb_load_bytes(skb, ip_offset(skb) + IPV6_HLEN + 2, &port, sizeof(port)) || is_tunnel_port(port);
}

/* Tunnel packets enter only by the uplink, and only our own tunnel device sends them. */
static __always_inline bool is_tunnel(struct __sk_buff *skb, const struct addr *src, const struct addr *dst,
				      __u8 nexthdr)
{
	return (src->lo == VTEP_HOST || dst->lo == VTEP_HOST) && spoofs_vtep(skb, src, dst, nexthdr);
}

/* is_tunnel4 does the same for IPv4. A later fragment has no port, so it counts as part of a tunnel packet. */
__slowpath int is_tunnel4(struct __sk_buff *skb)
{
	__u32 at = ip_offset(skb);
	struct eth_ip4 h = {};
	__be16 port = 0;

	if (has_ethernet(skb) &&
	    (bpf_skb_load_bytes(skb, 0, &h.eth, sizeof(h.eth)) || h.eth.h_proto != bpf_htons(ETH_P_IP)))
		return false;
	if (bpf_skb_load_bytes(skb, at, &h.version_length, sizeof(h) - sizeof(h.eth)) || h.version_length >> 4 != 4 ||
	    h.proto != NEXTHDR_UDP)
		return false;
	if ((h.src & vtep4_mask) != vtep4_prefix && (h.dst & vtep4_mask) != vtep4_prefix)
		return false;
	if (h.fragment & bpf_htons(IP4_FRAGMENT_OFFSET))
		return true;
	at += (h.version_length & 15) * 4;
	return bpf_skb_load_bytes(skb, at + 2, &port, sizeof(port)) || is_tunnel_port(port);
}

static __always_inline int check_host_if(struct __sk_buff *skb, bool inward, __u32 hook)
{
	struct eth_ip6 f = {};
	struct addr src, dst;
	int why;

	/* Frames of a VLAN are checked at the VLAN's own device. */
	if (in_vlan(skb))
		return TCX_NEXT;
	if (vtep4_mask && is_tunnel4(skb))
		return drop(skb, inward ? REASON_PEER_UNKNOWN : REASON_TUNNEL_FORGED, hook);
	if (!load_headers(skb, &f))
		return TCX_NEXT;
	if (hides_in_tag(&f))
		return drop(skb, REASON_MALFORMED, hook);
	if (f.eth.h_proto != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	src = f.src;
	dst = f.dst;
	why = inward ? check_inward(&src, &dst) : check_outward(&src, &dst);
	if (!why && !inward && (is_gateway_source(&src) || is_exposed_source(&src)))
		why = REASON_HOST_CLAIMS_TENANT;
	if (!why && is_tunnel(skb, &src, &dst, f.nexthdr))
		why = inward ? REASON_PEER_UNKNOWN : REASON_TUNNEL_FORGED;
	return why ? drop(skb, why, hook) : TCX_NEXT;
}

/* ifindex of the loopback device in every namespace. Packets that enter by it come from the node's own stack, so they
 * are checked as outgoing packets. Processes can reach the tunnel device this way, and only the ingress hook sees all
 * such packets. */
#define LOOPBACK 1

static __always_inline int host_if_in(struct __sk_buff *skb)
{
	return skb->pkt_type == PACKET_OTHERHOST ? TCX_NEXT
						 : check_host_if(skb, skb->ifindex != LOOPBACK, HOOK_EDGE_IN);
}

/* A bridge or bond consumes the frames that its ports receive, except for frames to link-local MACs, which a bridge
 * never forwards (IEEE 802.1Q, table 8-1). The stack receives such frames from the port, so they are checked here. */
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
