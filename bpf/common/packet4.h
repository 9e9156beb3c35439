/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses IPv4 headers, as packet.h does for IPv6. Network nimitz, policy and icmp_error.h use it. */
#pragma once
#include "common/packet.h"

static __always_inline struct eth_ip4 *eth_ip4_of(struct __sk_buff *skb)
{
	void *data = CTX_POINTER(skb, data), *end = CTX_POINTER(skb, data_end);

	if (data + sizeof(struct eth_ip4) > end) {
		if (bpf_skb_pull_data(skb, sizeof(struct eth_ip4)))
			return NULL;
		data = CTX_POINTER(skb, data);
		end = CTX_POINTER(skb, data_end);
		if (data + sizeof(struct eth_ip4) > end)
			return NULL;
	}
	return data;
}

static __always_inline bool is_error4(const struct packet *p)
{
	if (p->proto != PROTO_ICMP4 || !p->l4)
		return false;
	return p->icmp_type == 3 || p->icmp_type == 4 || p->icmp_type == 11 || p->icmp_type == 12;
}

static __always_inline int check_icmp4(struct __sk_buff *skb, struct packet *p)
{
	if (p->l4 + ICMPV6_HLEN > p->end || bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1))
		return REASON_MALFORMED;
	switch (p->icmp_type) {
	case 5: /* redirect */
	case 9: /* router advertisement */
		return REASON_ND_FORBIDDEN;
	}
	return 0;
}

/* parse4 also rejects IPv4 options: source routes could bypass the checks, and no common sender needs options. */
static __always_inline int parse4(struct __sk_buff *skb, const struct eth_ip4 *h, struct packet *p)
{
	int why;

	if (h->version_length >> 4 != 4 || (h->version_length & 15) < 5)
		return REASON_MALFORMED;
	if ((h->version_length & 15) > 5)
		return REASON_ROUTING_HEADER;
	p->end = ETH_HLEN + bpf_ntohs(h->length);
	if (!h->length && skb->gso_segs) /* BIG TCP, as in IPv6 */
		p->end = skb->len;
	if (p->end > skb->len || p->end < sizeof(*h))
		return REASON_MALFORMED;
	p->proto = h->proto;
	p->ip4 = 1;
	if (h->fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET)) {
		p->parts |= HAS_FRAGMENT;
		p->fragment = fragment4(p->proto, h->id);
	}
	if (!(h->fragment & bpf_htons(IP4_FRAGMENT_OFFSET))) {
		p->l4 = sizeof(*h);
		why = p->proto == PROTO_ICMP4	 ? check_icmp4(skb, p)
		      : p->proto == NEXTHDR_ICMP ? 0
						 : check_transport(skb, p);
		if (why)
			return why;
	}
	return check_pending(skb, p);
}

/* find_transport4 finds the transport header behind an IPv4 header that an ICMP error quotes. Unlike parse4 it accepts
 * options and checks nothing: the quoted packet passed the checks when it was sent. */
static __always_inline int find_transport4(struct __sk_buff *skb, __u32 at, struct packet *q)
{
	__be16 id;
	__u8 h[12];

	if (bpf_skb_load_bytes(skb, at, h, sizeof(h)))
		return -1;
	q->l4 = (h[6] << 8 | h[7]) & IP4_FRAGMENT_OFFSET ? 0 : at + (h[0] & 15) * 4;
	q->proto = h[9];
	__builtin_memcpy(&id, h + 4, sizeof(id));
	q->fragment = fragment4(q->proto, id);
	return 0;
}
