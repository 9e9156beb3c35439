/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the node says to a container of the second network about a packet that goes no further, as the next hop that it
 * has inside. */
#pragma once
#include "nimitz_nat.h"

#define ICMP4_UNREACHABLE	   3
#define ICMP4_FRAGMENTATION_NEEDED 4
#define ICMP4_TIME_EXCEEDED	   11

/* An error is no longer than any host takes (RFC 1812 §4.3.2.3). */
#define ICMP4_ERROR_HLEN (20 + 8)
#define QUOTE4_MAX	 (576 - ICMP4_ERROR_HLEN)

struct icmp4_error {
	struct eth_ip4 frame;
	__u8 type, code;
	__u16 checksum;
	__be16 unused, mtu;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct icmp4_error) == ETH_HLEN + ICMP4_ERROR_HLEN, "Ethernet, IPv4 and ICMP headers");

/* The gateways of internal/network/nimitz. */
#define GATEWAY_4 bpf_htonl(0xa9fe0101) /* 169.254.1.1 */
static const struct addr gateway_6 = {.hi = bpf_cpu_to_be64(0xfe80000000000000), .lo = bpf_cpu_to_be64(1)};

/* Of a later fragment nobody is told anything (RFC 1812 §4.3.2.7). */
static __always_inline bool icmp4_error_wanted(struct __sk_buff *skb, const struct packet *p)
{
	return p->l4 && !is_error4(p) && skb->pkt_type != PACKET_BROADCAST && skb->pkt_type != PACKET_MULTICAST;
}

static __always_inline int icmp4_error_build(struct __sk_buff *skb, __u32 device, __be32 to, __u32 mtu)
{
	__u32 length = trim_to_quote(skb, QUOTE4_MAX, ICMP4_ERROR_HLEN), sum;
	struct icmp4_error a = {};

	if (!length)
		return TC_ACT_SHOT;
	mac_of(device, a.frame.eth.h_dest);
	__builtin_memcpy(a.frame.eth.h_source, gateway_mac, ETH_ALEN);
	a.frame.eth.h_proto = bpf_htons(ETH_P_IP);
	a.frame.version_length = 0x45;
	a.frame.length = bpf_htons(ICMP4_ERROR_HLEN + length);
	a.frame.ttl = ICMP_ERROR_HOPS;
	a.frame.proto = PROTO_ICMP4;
	a.frame.src = GATEWAY_4;
	a.frame.dst = to;
	a.frame.check = ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&a.frame.version_length, 20, 0));
	a.type = mtu ? ICMP4_UNREACHABLE : ICMP4_TIME_EXCEEDED;
	a.code = mtu ? ICMP4_FRAGMENTATION_NEEDED : 0;
	a.mtu = bpf_htons(mtu);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&a.type, 8, 0);
	sum = csum_payload(skb, sizeof(a), sizeof(a) + length, sum);
	a.checksum = ~csum_fold(sum);
	if (bpf_skb_store_bytes(skb, 0, &a, sizeof(a), 0))
		return TC_ACT_SHOT;
	return return_to_sender(skb, device);
}

static __always_inline int icmp6_error_build(struct __sk_buff *skb, __u32 device, const struct addr *to, __u32 mtu)
{
	struct icmp6_error a = {.type = mtu ? ICMPV6_TOO_BIG : ICMPV6_TIME_EXCEEDED, .mtu = bpf_htonl(mtu)};

	a.frame.src = gateway_6;
	a.frame.dst = *to;
	return icmp_error_build(skb, device, &a);
}

/* nimitz_icmp_error drops a container's packet, which nobody has changed yet, and sends the error about it. */
__slowpath int nimitz_icmp_error(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j)
{
	__u32 device;

	if (!p || !j)
		return TC_ACT_SHOT;
	drop(skb, j->why, HOOK_CONTAINER);
	device = device_of(skb);
	if (j->why == REASON_NO_ROUTE ||
	    !(j->family == FAMILY_4 ? icmp4_error_wanted(skb, p) : icmp_error_wanted(skb, p)) ||
	    !icmp_error_allowed(device))
		return TC_ACT_SHOT;
	if (j->family == FAMILY_4)
		return icmp4_error_build(skb, device, ip4_unmapped(&j->orig_src), j->mtu);
	return icmp6_error_build(skb, device, &j->orig_src, j->mtu);
}
