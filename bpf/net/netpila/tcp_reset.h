/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Turns a TCP packet into the reset that ends its connection (RFC 9293 §3.10.7.1). */
#pragma once
#include "common/icmp_error.h"

#define TCP_RESET_HLEN 20

struct tcp_reset {
	struct eth_ip6 frame;
	__be16 source, dest;
	__be32 seq, ack;
	__u8 offset, flags;
	__be16 window;
	__u16 checksum;
	__be16 urgent;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct tcp_reset) == ETH_HLEN + IPV6_HLEN + TCP_RESET_HLEN, "Ethernet, IPv6 and TCP headers");

/* tcp_reset_write turns a packet into the reset of its sender's connection. The caller sets the MACs in r. It returns
 * 0, or -1 if no reset answers the packet. */
static __noinline int tcp_reset_write(struct __sk_buff *skb, const struct packet *p, struct tcp_reset *r)
{
	struct addr src, dst;
	__u8 offset, flags;
	__be32 numbers[2]; /* sequence and acknowledgement */
	__be16 ports[2];

	if (!p || !r || bpf_skb_load_bytes(skb, p->l4, ports, sizeof(ports)) ||
	    bpf_skb_load_bytes(skb, p->l4 + 4, numbers, sizeof(numbers)) ||
	    bpf_skb_load_bytes(skb, p->l4 + TCP_OFFSET, &offset, sizeof(offset)) ||
	    bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &flags, sizeof(flags)) || flags & TCP_RST ||
	    bpf_skb_load_bytes(skb, offsetof(struct eth_ip6, src), &src, sizeof(src)) ||
	    bpf_skb_load_bytes(skb, offsetof(struct eth_ip6, dst), &dst, sizeof(dst)))
		return -1;
	if (flags & TCP_ACK) {
		r->flags = TCP_RST;
		r->seq = numbers[1];
	} else {
		r->flags = TCP_RST | TCP_ACK;
		r->ack = bpf_htonl(bpf_ntohl(numbers[0]) + p->end - p->l4 - (offset >> 4 << 2) + !!(flags & TCP_SYN) +
				   !!(flags & TCP_FIN));
	}
	if (bpf_skb_change_tail(skb, sizeof(*r), 0))
		return -1;
	r->frame.eth.h_proto = bpf_htons(ETH_P_IPV6);
	r->frame.priority_version = 6 << 4;
	r->frame.payload_len = bpf_htons(TCP_RESET_HLEN);
	r->frame.nexthdr = NEXTHDR_TCP;
	r->frame.hop_limit = ICMP_ERROR_HOPS;
	r->frame.src = dst;
	r->frame.dst = src;
	r->source = ports[1];
	r->dest = ports[0];
	r->offset = TCP_RESET_HLEN / 4 << 4;
	r->checksum =
		~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)src_of(&r->frame), 2 * sizeof(struct addr) + TCP_RESET_HLEN,
					 bpf_htons(TCP_RESET_HLEN) + bpf_htons(NEXTHDR_TCP)));
	return bpf_skb_store_bytes(skb, 0, r, sizeof(*r), 0) ? -1 : 0;
}

/* tcp_reset drops a container's packet and resets its connection. A socket that is sending misses an ICMPv6 error at
 * this moment, but not a reset. */
static __noinline int tcp_reset(struct __sk_buff *skb, const struct packet *p, __u32 device, __u32 reason)
{
	struct tcp_reset r = {};

	drop(skb, reason, HOOK_CONTAINER);
	if (!icmp_error_allowed(device))
		return TC_ACT_SHOT;
	mac_of(device, r.frame.eth.h_dest);
	__builtin_memcpy(r.frame.eth.h_source, gateway_mac, ETH_ALEN);
	return tcp_reset_write(skb, p, &r) ? TC_ACT_SHOT : return_to_sender(skb, device);
}
