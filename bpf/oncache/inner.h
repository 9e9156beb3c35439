/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses inner packets: which ones the cache may deliver, and to which flow they belong. Whatever the overlay might
 * answer, drop or change in another way is left to it. */
#pragma once
#include "oncache/tables.h"
#include "tunnel/checksum.h"
#include "tunnel/ecn.h"
#include "tunnel/pull.h"

#define TCP_HLEN      20

#define ECHO_REPLY4   0
#define ECHO_REQUEST4 8
#define ECHO_REQUEST  128
#define ECHO_REPLY    129

/* The programs read at most this much from the inner IP header on. */
#define INNER_MOST (IPV6_HLEN + TCP_HLEN)

struct ip6_header {
	struct ip6_start start;
	struct addr src, dst;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct ip6_header) == IPV6_HLEN, "an IPv6 header");

struct inner {
	struct once_flow flow;
	__u32 longest;		 /* bytes of the longest packet that it becomes, from the IP header on */
	__u8 macs[2 * ETH_ALEN]; /* destination, source */
	__be16 type;
	__u32 gso_size;
	__u8 proto, ecn, hops;
	bool for_kernel; /* segments of anything but TCP, or a list of packets */
};
_Static_assert(offsetof(struct inner, macs) % 4 == 0, "words on the stack are aligned");

/* read_segments comes before all other reading: the verifier accepts only few forms of access to the context. */
static __always_inline void read_segments(struct __sk_buff *skb, struct inner *p)
{
	p->gso_size = skb->gso_size;
	p->for_kernel = is_for_kernel(skb);
}

/* is_encapsulated tells whether a tunnel device of the kernel has made the packet. Nothing else sets this field: a
 * datagram in which a container has written tunnel headers does not have it. */
static __always_inline bool is_encapsulated(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return kernel->inner_protocol;
}

static __always_inline __u64 mac_of(const void *mac)
{
	return *(__u32 *)mac | (__u64) * (__u16 *)(mac + 4) << 32;
}

/* source_of reads the second one of two MACs. Only so both of its reads are aligned. */
static __always_inline __u64 source_of(const void *macs)
{
	return *(__u16 *)(macs + ETH_ALEN) | (__u64) * (__u32 *)(macs + ETH_ALEN + 2) << 16;
}

static __always_inline bool is_echo(__u8 proto, __u8 type)
{
	return proto == PROTO_ICMP4 ? type == ECHO_REQUEST4 || type == ECHO_REPLY4
				    : type == ECHO_REQUEST || type == ECHO_REPLY;
}

static __always_inline enum once_cause read_transport(const void *ip, const void *l4, const void *end, bool out,
						      struct inner *p)
{
	const __be16 *ports = l4;
	const __u8 *tcp = l4;
	__u8 flags;

	if (l4 + TRANSPORT_MIN > end)
		return CAUSE_PACKET;
	p->flow.local_port = ports[out ? 0 : 1];
	p->flow.remote_port = ports[out ? 1 : 0];
	if (p->proto == NEXTHDR_UDP)
		return p->gso_size ? CAUSE_SEGMENTS : CAUSE_HIT;
	if (p->proto == (p->type == bpf_htons(ETH_P_IP) ? PROTO_ICMP4 : NEXTHDR_ICMP)) {
		p->flow.local_port = p->flow.remote_port = ports[2]; /* identifier */
		return is_echo(p->proto, *(__u8 *)l4) ? CAUSE_HIT : CAUSE_PACKET;
	}
	if (p->proto != NEXTHDR_TCP || l4 + TCP_HLEN > end)
		return CAUSE_PACKET;
	flags = tcp[TCP_FLAGS] & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK);
	if (flags == (TCP_SYN | TCP_ACK))
		return CAUSE_SYN_ACK;
	if (flags == (TCP_FIN | TCP_ACK))
		return CAUSE_FIN;
	if (flags != TCP_ACK)
		return flags ? CAUSE_TCP_FLAGS : CAUSE_PACKET;
	if (p->for_kernel)
		return CAUSE_SEGMENTS;
	if (p->gso_size)
		p->longest = l4 - ip + (tcp[TCP_OFFSET] >> 4) * 4 + p->gso_size;
	return CAUSE_HIT;
}

static __always_inline bool header4_sums_up(const struct ip4_header *h)
{
	const __u32 *word = (const void *)h;
	__u32 sum = word[0];

	for (int i = 1; i < 5; i++)
		sum = csum_add(sum, word[i]);
	return csum_fold(sum) == 0xffff;
}

static __always_inline bool read_inner4(const struct ip4_header *h, bool out, struct inner *p)
{
	/* Options, fragments, and BIG TCP, which has no length. */
	if (h->version_length != 0x45 || h->fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET) ||
	    bpf_ntohs(h->length) != p->longest || !header4_sums_up(h))
		return false;
	p->flow.local = ip4_mapped(out ? h->src : h->dst);
	p->flow.remote = ip4_mapped(out ? h->dst : h->src);
	p->proto = h->proto;
	p->ecn = h->tos & ECN_MASK;
	p->hops = h->ttl;
	return true;
}

static __always_inline bool read_inner6(const struct ip6_header *h, bool out, struct inner *p)
{
	const __u8 *start = (const void *)h;

	if (start[0] >> 4 != 6 || IPV6_HLEN + bpf_ntohs(h->start.payload_len) != p->longest)
		return false;
	p->flow.local = out ? WIDE(struct addr, h, src) : WIDE(struct addr, h, dst);
	p->flow.remote = out ? WIDE(struct addr, h, dst) : WIDE(struct addr, h, src);
	/* They must not pass for the IPv4 addresses that they contain. */
	if (is_ip4_mapped(&p->flow.local) || is_ip4_mapped(&p->flow.remote))
		return false;
	p->proto = h->start.nexthdr;
	p->ecn = start[1] >> ECN_SHIFT6 & ECN_MASK;
	p->hops = h->start.hop_limit;
	return true;
}

/* read_inner reads the frame at an offset of a packet. */
static __always_inline enum once_cause read_inner(struct __sk_buff *skb, __u32 at, bool out, struct inner *p)
{
	void *data = CTX_POINTER(skb, data) + at, *end = CTX_POINTER(skb, data_end);
	void *ip = data + ETH_HLEN, *l4;
	enum once_cause cause;

	if (ip + sizeof(struct ip4_header) > end)
		return CAUSE_PACKET;
	__builtin_memcpy(p->macs, data, sizeof(p->macs));
	p->type = ((struct ethhdr *)data)->h_proto;
	p->longest = skb->len - at - ETH_HLEN;
	if (p->macs[0] & 1) /* multicast */
		return CAUSE_PACKET;
	if (p->type == bpf_htons(ETH_P_IP)) {
		l4 = ip + sizeof(struct ip4_header);
		if (!read_inner4(ip, out, p))
			return CAUSE_PACKET;
	} else if (p->type == bpf_htons(ETH_P_IPV6)) {
		l4 = ip + sizeof(struct ip6_header);
		if (l4 > end || !read_inner6(ip, out, p))
			return CAUSE_PACKET;
	} else {
		return CAUSE_PACKET;
	}
	p->flow.vni_proto = tunnel_vni << 8 | p->proto;
	cause = read_transport(ip, l4, end, out, p);
	/* The overlay sends the ICMP error. */
	return (cause == CAUSE_HIT || cause == CAUSE_SYN_ACK) && p->hops <= 1 ? CAUSE_HOPS : cause;
}

/* hop4 counts down the TTL, as a router does. In IPv4 a checksum over the whole packet
 * (CHECKSUM_COMPLETE) stays valid, because the header has its own. */
static __always_inline void hop4(struct ip4_header *h)
{
	__u32 check = h->check + bpf_htons(0x0100);

	h->ttl--;
	h->check = check + (check >= 0xffff);
}

/* tunnelled reads the headers of a packet of the overlay that this node sends or receives; CAUSES says that it is none,
 * or one with headers that the cache does not know. */
static __always_inline enum once_cause tunnelled(struct __sk_buff *skb, bool out, struct tunnel *t, struct inner *p)
{
	struct addr own = {.hi = tunnel_address.hi, .lo = tunnel_address.lo};
	bool ip4 = is_ip4_mapped(&own);
	void *data, *end;

	if (skb->vlan_present || skb->protocol != (ip4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6)))
		return CAUSES;
	readable(skb, sizeof(struct outer6) + ETH_HLEN + INNER_MOST);
	data = CTX_POINTER(skb, data);
	end = CTX_POINTER(skb, data_end);
	if (data + (ip4 ? sizeof(struct outer4) : sizeof(struct outer6)) > end)
		return CAUSES;
	if (ip4 ? read4(data, skb->len, bpf_htons(tunnel_port), 0, t)
		: read6(data, skb->len, bpf_htons(tunnel_port), 0, t))
		return CAUSES;
	if (t->vni != tunnel_vni || !same_addr(out ? &t->src : &t->dst, &own))
		return CAUSES;
	return ip4 ? read_inner(skb, sizeof(struct outer4), out, p) : read_inner(skb, sizeof(struct outer6), out, p);
}
