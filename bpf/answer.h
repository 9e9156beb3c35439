/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the node itself says to a container about a packet that goes no further (RFC 4443). */
#pragma once
#include "event.h"
#include "flow.h"

#define ICMPV6_TOO_BIG	     2
#define ICMPV6_TIME_EXCEEDED 3

#define PACKET_BROADCAST     1
#define PACKET_MULTICAST     2

#define ANSWER_HOPS	     64
#define IPV6_MIN_MTU	     1280 /* an error is no longer than any link can take */
#define ANSWER_HLEN	     (IPV6_HLEN + ICMPV6_HLEN)
#define QUOTE_MAX	     (IPV6_MIN_MTU - ANSWER_HLEN)

struct answer {
	struct frame frame;
	__u8 type, code;
	__u16 checksum;
	__be32 mtu; /* of packet too big, else 0 */
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct answer) == ETH_HLEN + ANSWER_HLEN, "Ethernet, IPv6 and ICMPv6 headers");

/* A container hears ANSWER_BURST errors one by one, enough for a traceroute that asks all at once, and
 * then one in 10 ms. Devices that share a slot share its pace; two CPUs may count one answer as none. */
#define ANSWER_INTERVAL 10000000ULL
#define ANSWER_BURST	32
#define ANSWER_SLOTS	1024

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64); /* when the next answer would be due at one in ANSWER_INTERVAL */
	__uint(max_entries, ANSWER_SLOTS);
} pil_answers SEC(".maps");

static __always_inline bool may_answer(__u32 device)
{
	__u32 slot = device % ANSWER_SLOTS;
	__u64 *pace = bpf_map_lookup_elem(&pil_answers, &slot), now = bpf_ktime_get_ns(), due;

	if (!pace)
		return false;
	due = *pace < now ? now : *pace;
	if (due - now > ANSWER_BURST * ANSWER_INTERVAL)
		return false;
	*pace = due + ANSWER_INTERVAL;
	return true;
}

#define SUM_CHUNK 64

/* sum_up adds the bytes from at to end, at most IPV6_MIN_MTU of them, to a checksum. */
__noinline __u32 sum_up(struct __sk_buff *skb, __u32 at, __u32 end, __u32 sum)
{
	for (int i = 0; i < IPV6_MIN_MTU / SUM_CHUNK; i++) {
		__u8 chunk[SUM_CHUNK] = {};
		__u32 n = end - at;

		asm volatile("" : "+r"(n)); /* the verifier must see the tests of the very value it is to bound */
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

/* Nobody answers an error, nor what was sent to many (RFC 4443 §2.4). A later fragment of ICMPv6 may be
 * part of an error. */
static __always_inline bool wants_answer(struct __sk_buff *skb, const struct packet *p)
{
	if (is_error(p) || (p->proto == NEXTHDR_ICMP && !p->l4))
		return false;
	return skb->pkt_type != PACKET_BROADCAST && skb->pkt_type != PACKET_MULTICAST;
}

/* answer drops a container's packet and makes of it the error about itself, which comes from the node as
 * the container's tenant sees it and quotes what the container sent, as it sent it. */
__noinline int answer(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 reason)
{
	__u32 length = skb->len - ETH_HLEN, sum, id;
	struct answer a = {};
	struct tenant *own;

	drop(skb, reason, HOOK_CONTAINER);
	if (!p || !f || !wants_answer(skb, p) || !may_answer(f->key.device))
		return TC_ACT_SHOT;
	id = tenant_id(&f->src);
	own = bpf_map_lookup_elem(&pil_tenants_v2, &id);
	if (!own)
		return TC_ACT_SHOT;
	if (length > QUOTE_MAX)
		length = QUOTE_MAX;
	/* Both take away what only makes sense of the packet it was, such as its segments. */
	if (bpf_skb_change_tail(skb, ETH_HLEN + length, 0) ||
	    bpf_skb_adjust_room(skb, ANSWER_HLEN, BPF_ADJ_ROOM_MAC, 0))
		return TC_ACT_SHOT;

	length += ICMPV6_HLEN;
	mac_of(f->key.device, a.frame.eth.h_dest);
	__builtin_memcpy(a.frame.eth.h_source, gateway_mac, ETH_ALEN);
	a.frame.eth.h_proto = bpf_htons(ETH_P_IPV6);
	a.frame.priority_version = 6 << 4;
	a.frame.payload_len = bpf_htons(length);
	a.frame.nexthdr = NEXTHDR_ICMP;
	a.frame.hop_limit = ANSWER_HOPS;
	a.frame.src = own->gateway;
	a.frame.dst = f->key.src;
	a.type = reason == REASON_TOO_BIG ? ICMPV6_TOO_BIG : ICMPV6_TIME_EXCEEDED;
	if (reason == REASON_TOO_BIG)
		a.mtu = bpf_htonl(f->mtu);
	sum = bpf_htons(length) + bpf_htons(NEXTHDR_ICMP); /* in the pseudo header, with the addresses */
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&own->gateway, sizeof(own->gateway), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&f->key.src, sizeof(f->key.src), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&a.type, ICMPV6_HLEN, sum);
	sum = sum_up(skb, sizeof(a), sizeof(a) + length - ICMPV6_HLEN, sum);
	a.checksum = ~fold(sum);
	if (bpf_skb_store_bytes(skb, 0, &a, sizeof(a), 0))
		return TC_ACT_SHOT;
	bpf_skb_change_type(skb, PACKET_HOST);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, f->key.device, on_way_in(skb, f->key.device), false);
}
