/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Turns a packet that the node does not forward into the ICMP or ICMPv6 error about it (RFC 792, RFC 4443). The
 * networks decide when to send an error and from which source: net/netpila/icmp.h, net/nimitz/icmp.h. */
#pragma once
#include "common/event.h"
#include "common/packet4.h"

#define ICMPV6_UNREACHABLE   1
#define ICMPV6_PROHIBITED    1 /* a code of unreachable */
#define ICMPV6_PORT	     4 /* likewise */
#define ICMPV6_TOO_BIG	     2
#define ICMPV6_TIME_EXCEEDED 3

#define ICMP_ERROR_HOPS	     64
#define IPV6_MIN_MTU	     1280 /* an error fits into the smallest MTU of IPv6 */
#define ICMP_ERROR_HLEN	     (IPV6_HLEN + ICMPV6_HLEN)
#define QUOTE_MAX	     (IPV6_MIN_MTU - ICMP_ERROR_HLEN)

struct icmp6_error {
	struct eth_ip6 frame;
	__u8 type, code;
	__u16 checksum;
	__be32 mtu; /* of Packet Too Big, else 0 */
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct icmp6_error) == ETH_HLEN + ICMP_ERROR_HLEN, "Ethernet, IPv6 and ICMPv6 headers");

/* Rate limit: a device receives ICMP_ERROR_BURST errors at once, enough for a parallel traceroute, and then one in 10
 * ms. Devices that share a slot share its limit. Rarely, a race of two CPUs allows one error too many. */
#define ICMP_ERROR_INTERVAL 10000000ULL
#define ICMP_ERROR_BURST    32
#define ICMP_ERROR_SLOTS    1024

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64); /* when the next error is due, at one per ICMP_ERROR_INTERVAL */
	__uint(max_entries, ICMP_ERROR_SLOTS);
} pil_icmp_rate SEC(".maps");

/* The same for errors to hosts outside, by what the error is about: a tenant, or an address. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, ICMP_ERROR_SLOTS);
} pil_icmp_orate SEC(".maps");

static __always_inline bool pace_allows(__u64 *pace)
{
	__u64 now = bpf_ktime_get_ns(), due;

	if (!pace)
		return false;
	due = *pace < now ? now : *pace;
	if (due - now > ICMP_ERROR_BURST * ICMP_ERROR_INTERVAL)
		return false;
	*pace = due + ICMP_ERROR_INTERVAL;
	return true;
}

static __always_inline bool icmp_error_allowed(__u32 device)
{
	__u32 slot = device % ICMP_ERROR_SLOTS;

	return pace_allows(bpf_map_lookup_elem(&pil_icmp_rate, &slot));
}

static __always_inline bool outside_error_allowed(__u32 about)
{
	__u32 slot = about * 0x9e3779b1 >> 22;

	_Static_assert(ICMP_ERROR_SLOTS == 1 << 10, "the slot is the top 10 bits");
	return pace_allows(bpf_map_lookup_elem(&pil_icmp_orate, &slot));
}

#define SUM_CHUNK 64

/* csum_payload adds the bytes from at to end (at most IPV6_MIN_MTU) to a checksum. */
__noinline __u32 csum_payload(struct __sk_buff *skb, __u32 at, __u32 end, __u32 sum)
{
	for (int i = 0; i < IPV6_MIN_MTU / SUM_CHUNK; i++) {
		__u8 chunk[SUM_CHUNK] = {};
		__u32 n = end - at;

		asm volatile("" : "+r"(n)); /* the verifier must see the checks on the same value that it bounds */
		if (!n)
			break;
		if (n > sizeof(chunk))
			n = sizeof(chunk);
		if (bpf_skb_load_bytes(skb, at, chunk, n))
			break;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)chunk, sizeof(chunk), sum);
		at += n;
	}
	return sum;
}

/* No ICMP error is sent about a frame for several receivers (RFC 4443 §2.4, RFC 1812 §4.3.2.7). */
static __always_inline bool for_one_receiver(struct __sk_buff *skb)
{
	return skb->pkt_type != PACKET_BROADCAST && skb->pkt_type != PACKET_MULTICAST;
}

/* No ICMP error is sent about an ICMP error (RFC 4443 §2.4). A later fragment of ICMPv6 may be part of such an error.
 */
static __always_inline bool icmp_error_wanted(struct __sk_buff *skb, const struct packet *p)
{
	if (is_error(p) || (p->proto == NEXTHDR_ICMP && !p->l4))
		return false;
	return for_one_receiver(skb);
}

/* trim_to_quote cuts the packet to the part that the error quotes and makes room for headers before it. Both helpers
 * also reset skb fields that only fit the original packet, such as the segment size. trim_to_quote returns the length
 * of the quote, or 0 on failure. */
static __always_inline __u32 trim_to_quote(struct __sk_buff *skb, __u32 most, __u32 room)
{
	__u32 length = skb->len - ETH_HLEN;

	if (length > most)
		length = most;
	if (bpf_skb_change_tail(skb, ETH_HLEN + length, 0) || bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, 0))
		return 0;
	return length;
}

/* return_to_sender delivers the error, which has replaced the packet, to the device that sent the packet. */
static __always_inline int return_to_sender(struct __sk_buff *skb, __u32 device)
{
	bpf_skb_change_type(skb, PACKET_HOST);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, device, on_way_in(skb, device), false);
}

/* icmp_error_write turns a packet into the ICMPv6 error about it. The caller has set MACs, addresses, type and MTU in
 * a. The packet must still be as it was sent, because the error quotes it. */
static __always_inline int icmp_error_write(struct __sk_buff *skb, struct icmp6_error *a)
{
	__u32 length = trim_to_quote(skb, QUOTE_MAX, ICMP_ERROR_HLEN), sum;

	if (!length)
		return -1;
	length += ICMPV6_HLEN;
	a->frame.eth.h_proto = bpf_htons(ETH_P_IPV6);
	a->frame.priority_version = 6 << 4;
	a->frame.payload_len = bpf_htons(length);
	a->frame.nexthdr = NEXTHDR_ICMP;
	a->frame.hop_limit = ICMP_ERROR_HOPS;
	sum = bpf_htons(length) + bpf_htons(NEXTHDR_ICMP); /* pseudo header; the addresses follow */
	sum = bpf_csum_diff(NULL, 0, (__be32 *)src_of(&a->frame), 2 * sizeof(struct addr), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&a->type, ICMPV6_HLEN, sum);
	sum = csum_payload(skb, sizeof(*a), sizeof(*a) + length - ICMPV6_HLEN, sum);
	a->checksum = ~csum_fold(sum);
	return bpf_skb_store_bytes(skb, 0, a, sizeof(*a), 0);
}

/* icmp_error_build sends the error about a packet to the container that sent it. */
static __always_inline int icmp_error_build(struct __sk_buff *skb, __u32 device, struct icmp6_error *a)
{
	mac_of(device, a->frame.eth.h_dest);
	__builtin_memcpy(a->frame.eth.h_source, gateway_mac, ETH_ALEN);
	return icmp_error_write(skb, a) ? TC_ACT_SHOT : return_to_sender(skb, device);
}

/* The next hop inside a container of a network where the node has no address of the tenant. */
static const struct addr gateway_6 = {.hi = bpf_cpu_to_be64(0xfe80000000000000), .lo = bpf_cpu_to_be64(1)};

static __always_inline int icmp6_error_build(struct __sk_buff *skb, __u32 device, const struct addr *to, __u32 mtu)
{
	struct icmp6_error a = {.type = mtu ? ICMPV6_TOO_BIG : ICMPV6_TIME_EXCEEDED, .mtu = bpf_htonl(mtu)};

	a.frame.src = gateway_6;
	a.frame.dst = *to;
	return icmp_error_build(skb, device, &a);
}

#define ICMP4_UNREACHABLE	   3
#define ICMP4_FRAGMENTATION_NEEDED 4
#define ICMP4_TIME_EXCEEDED	   11

/* Every IPv4 host accepts an error of 576 bytes (RFC 1812 §4.3.2.3). */
#define ICMP4_ERROR_HLEN (20 + 8)
#define QUOTE4_MAX	 (576 - ICMP4_ERROR_HLEN)

struct icmp4_error {
	struct eth_ip4 frame;
	__u8 type, code;
	__u16 checksum;
	__be16 unused, mtu;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct icmp4_error) == ETH_HLEN + ICMP4_ERROR_HLEN, "Ethernet, IPv4 and ICMP headers");

/* No error is sent about a later fragment (RFC 1812 §4.3.2.7). */
static __always_inline bool icmp4_error_wanted(struct __sk_buff *skb, const struct packet *p)
{
	return p->l4 && !is_error4(p) && for_one_receiver(skb);
}

static __always_inline int icmp4_error_build(struct __sk_buff *skb, __u32 device, __be32 from, __be32 to, __u32 mtu)
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
	a.frame.src = from;
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
