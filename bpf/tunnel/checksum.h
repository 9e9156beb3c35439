/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The checksum of the outer UDP header, for receivers that want one over IPv6 (the kernel's device unless it has
 * udp6zerocsumrx). It costs no walk over the payload (local checksum offload): a transport header with a complete
 * checksum, or with one that a device completes later, adds up to the negative sum of its pseudo header. */
#pragma once
#include "tunnel/headers.h"

struct ip4_header {
	__u8 version_length, tos;
	__be16 length, id, fragment;
	__u8 ttl, proto;
	__u16 check;
	__be32 src, dst;
};
_Static_assert(sizeof(struct ip4_header) == 20, "IPv4 header without options");

struct ip6_start {
	__be32 tos_flow;
	__be16 payload_len;
	__u8 nexthdr, hop_limit;
};
_Static_assert(sizeof(struct ip6_start) == 8, "an IPv6 header up to its addresses");

/* A UDP checksum of 0 says nothing about the payload, and none is over what follows the datagram in its packet (RFC
 * 9868). */
static __always_inline bool sums_up(struct __sk_buff *skb, __u32 l4, __u8 proto)
{
	__be16 length_check[2] = {};

	if (proto == NEXTHDR_TCP)
		return true;
	return proto == NEXTHDR_UDP && !bpf_skb_load_bytes(skb, l4 + 4, length_check, sizeof(length_check)) &&
	       length_check[1] && l4 + bpf_ntohs(length_check[0]) == skb->len;
}

/* The header has a checksum of its own, so its words add up to zero, and only the pseudo header counts. ICMP has no
 * pseudo header. */
static __always_inline bool inner4_sum(struct __sk_buff *skb, __u32 *sum)
{
	struct ip4_header h;
	__u32 pseudo;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)) || h.version_length != 0x45 ||
	    h.fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET) ||
	    ETH_HLEN + bpf_ntohs(h.length) != skb->len)
		return false;
	if (h.proto == PROTO_ICMP4)
		return true;
	if (!sums_up(skb, ETH_HLEN + sizeof(h), h.proto))
		return false;
	pseudo = csum_add(csum_add(h.src, h.dst), bpf_htons(h.proto));
	pseudo = csum_add(pseudo, bpf_htons(bpf_ntohs(h.length) - sizeof(h)));
	*sum = csum_add(*sum, ~pseudo);
	return true;
}

/* Addresses and length are in both the header and the pseudo header, so they cancel out. */
static __always_inline bool inner6_sum(struct __sk_buff *skb, __u32 *sum)
{
	struct ip6_start h;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)) ||
	    ETH_HLEN + IPV6_HLEN + bpf_ntohs(h.payload_len) != skb->len)
		return false;
	if (h.nexthdr != NEXTHDR_ICMP && !sums_up(skb, ETH_HLEN + IPV6_HLEN, h.nexthdr))
		return false;
	*sum = csum_add(*sum, h.tos_flow);
	*sum = csum_add(*sum, bpf_htons(h.nexthdr << 8 | h.hop_limit));
	*sum = csum_add(*sum, ~(__u32)bpf_htons(h.nexthdr));
	return true;
}

/* udp_checksum is the field's value: sum is that of everything behind the VXLAN header. A mapped IPv4 address adds the
 * same as the address. */
static __always_inline __u16 udp_checksum(const struct udp_vxlan *u, const struct tunnel *t, __u32 sum)
{
	struct addr ends[2] = {t->src, t->dst};
	__u16 check;

	sum = bpf_csum_diff(NULL, 0, (__be32 *)ends, sizeof(ends), sum);
	sum = csum_add(sum, bpf_htons(NEXTHDR_UDP));
	sum = csum_add(sum, u->len); /* of the pseudo header */
	sum = csum_add(sum, (__u32)u->sport + u->dport + u->len);
	sum = csum_add(sum, WIDE(__be32, u, flags));
	sum = csum_add(sum, WIDE(__be32, u, vni));
	check = ~csum_fold(sum);
	return check ? check : 0xffff;
}
