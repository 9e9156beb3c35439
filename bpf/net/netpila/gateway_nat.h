/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The translation of an egress gateway: which port a connection gets, and the writes of address, port and MSS. */
#pragma once
#include "net/netpila/gateway.h"

/* read_nat_ports reads both ports; of an answer, the gateway's is that of the destination. */
static __always_inline int read_nat_ports(struct __sk_buff *skb, const struct packet *p, bool answer,
					  struct nat_key *key)
{
	__be16 ports[2] = {};

	if (read_ports(skb, p->proto, p->l4, ports))
		return REASON_MALFORMED;
	key->local_port = answer ? ports[1] : ports[0];
	key->remote_port = answer ? ports[0] : ports[1];
	if (p->proto == NEXTHDR_ICMP)
		key->remote_port = 0; /* the identifier is only one */
	key->proto = p->proto;
	key->zero[0] = key->zero[1] = key->zero[2] = 0;
	return 0;
}

#define NAT_TRIES      32
#define NAT_FIRST_PORT 1024

/* take_port makes the entry for answers, with a port of the gateway. It fails if another connection has the port. */
static __always_inline bool take_port(void *connections, struct gateway_scratch *d, __be16 port)
{
	struct nat_entry own = {.address = d->out.local, .port = d->out.local_port}, *has;

	d->back.local_port = port;
	if (!bpf_map_update_elem(connections, &d->back, &own, BPF_NOEXIST))
		return true;
	has = bpf_map_lookup_elem(connections, &d->back);
	return has && same_addr(&has->address, &own.address) && has->port == own.port;
}

/* new_connection allocates a port: the wanted one if no other connection to the same host has it, else one at random.
 * It returns 0 or a reason. */
static __noinline int new_connection(void *connections, struct gateway_scratch *d, __be16 wanted)
{
	if (!connections || !d)
		return REASON_GATEWAY_FULL;
	d->entry.address = d->back.local;
	d->entry.seen = d->entry.used = d->entry.backend = 0;
	for (int i = 0; i < NAT_TRIES; i++) {
		__u32 port = bpf_ntohs(wanted);

		if (i || port < NAT_FIRST_PORT)
			port = NAT_FIRST_PORT + bpf_get_prandom_u32() % (0x10000 - NAT_FIRST_PORT);
		if (!take_port(connections, d, bpf_htons(port)))
			continue;
		d->entry.port = d->back.local_port;
		return bpf_map_update_elem(connections, &d->out, &d->entry, BPF_ANY) ? REASON_GATEWAY_FULL : 0;
	}
	return REASON_GATEWAY_FULL;
}

/* find_connection finds or makes the entries of a container's packet. Either of them may have been evicted; the other
 * one then keeps the port. d->entry is the translation. */
static __always_inline int find_connection(void *connections, struct gateway_scratch *d)
{
	struct nat_entry *known = bpf_map_lookup_elem(connections, &d->out);

	if (!known)
		return new_connection(connections, d, d->out.local_port);
	d->entry = *known;
	if (take_port(connections, d, d->entry.port))
		return 0;
	return new_connection(connections, d, d->out.local_port); /* another connection has taken the port */
}

/* write_port writes the port that a gateway translates. It leaves the transport checksum alone: nat_write has updated
 * it before, and a checksum that a device still has to compute will cover the new port. */
static __always_inline int write_port(struct __sk_buff *skb, const struct packet *p, bool answer, __be16 port)
{
	__u32 at = p->proto == NEXTHDR_ICMP ? 4 : answer ? 2 : 0;

	return bpf_skb_store_bytes(skb, p->l4 + at, &port, sizeof(port), 0);
}

/* nat_write writes one end of a packet: address and port. */
static __always_inline int nat_write(struct __sk_buff *skb, const struct packet *p, bool answer,
				     const struct nat_key *was, const struct nat_entry *is)
{
	__u32 difference = csum_diff_addr(&was->local, &is->address);
	struct eth_ip6 *h;

	if (!is_sum_pending(skb, p))
		difference = csum_add(difference, csum_add((__u16)~was->local_port, is->port));
	if (fix_checksum(skb, p, difference))
		return REASON_MALFORMED;
	h = eth_ip6_of(skb);
	if (h && p->l4 == sizeof(*h) && p->proto != NEXTHDR_ICMP &&
	    (void *)(h + 1) + 2 * sizeof(__be16) <= CTX_POINTER(skb, data_end)) {
		__be16 *ports = (void *)(h + 1);

		if (answer) {
			*dst_of(h) = is->address;
			ports[1] = is->port;
			asm volatile(""); /* the verifier refuses an offset that depends on answer */
		} else {
			*src_of(h) = is->address;
			ports[0] = is->port;
		}
		return 0;
	}
	if (write_port(skb, p, answer, is->port))
		return REASON_MALFORMED;
	return bpf_skb_store_bytes(skb, answer ? offsetof(struct eth_ip6, dst) : offsetof(struct eth_ip6, src),
				   &is->address, sizeof(is->address), 0)
		       ? REASON_MALFORMED
		       : 0;
}

#define TCP_HLEN	20
#define TCP_OPTION_END	0
#define TCP_OPTION_NOP	1
#define TCP_OPTION_MSS	2
#define TCP_MSS_LEN	4
#define TCP_MAX_OPTIONS 40 /* bytes */

struct mss_search {
	struct __sk_buff *skb;
	__u32 l4;
	__u32 at, end; /* in the TCP header: offset of the next option, and the header's length */
	__be16 mss;    /* 0: not found */
};

/* find_mss reads an option. It ends the search at the MSS, or at what it cannot read. */
static long find_mss(__u32 i, struct mss_search *s)
{
	__u8 option[TCP_MSS_LEN];

	if (s->at + TCP_MSS_LEN > s->end || bpf_skb_load_bytes(s->skb, s->l4 + s->at, option, sizeof(option)) ||
	    option[0] == TCP_OPTION_END)
		return 1;
	if (option[0] == TCP_OPTION_NOP) {
		s->at++;
		return 0;
	}
	if (option[1] < 2)
		return 1;
	if (option[0] != TCP_OPTION_MSS || option[1] != TCP_MSS_LEN) {
		s->at += option[1];
		return 0;
	}
	__builtin_memcpy(&s->mss, option + 2, sizeof(s->mss));
	return 1;
}

/* clamp_mss lowers the MSS option of a SYN to most (RFC 9293 §3.7.1). It returns 0 or a reason. */
static __noinline int clamp_mss(struct __sk_buff *skb, const struct packet *p, __u32 most)
{
	struct mss_search s = {.skb = skb, .at = TCP_HLEN};
	__be16 is = bpf_htons(most);
	__u8 words = 0;

	if (!p || bpf_skb_load_bytes(skb, p->l4 + TCP_OFFSET, &words, sizeof(words)))
		return 0;
	s.l4 = p->l4;
	s.end = words >> 4 << 2;
	bpf_loop(TCP_MAX_OPTIONS, find_mss, &s, 0);
	if (bpf_ntohs(s.mss) <= most)
		return 0;
	if (bpf_skb_store_bytes(skb, p->l4 + s.at + 2, &is, sizeof(is), 0))
		return REASON_MALFORMED;
	if (p->pending)
		return 0; /* the checksum that a device computes will cover the option */
	if (s.at & 1) {	  /* the words of the checksum have the bytes of the option the other way round */
		s.mss = bpf_ntohs(s.mss);
		is = bpf_ntohs(is);
	}
	return fix_checksum(skb, p, csum_add((__u16)~s.mss, is)) ? REASON_MALFORMED : 0;
}

/* clamp_to_tunnel makes the host outside send segments that fit into the tunnel to a container's node. Some hosts
 * outside get no Packet Too Big, because a firewall drops it. The container gets it from its own node. It returns 0 or
 * a reason. */
static __always_inline int clamp_to_tunnel(struct __sk_buff *skb, const struct packet *p, __u64 node)
{
	struct flow *hop;

	if (!(tcp_flags(skb, p) & TCP_SYN))
		return 0;
	hop = tunnel_hop(skb, node, skb->ifindex, 0);
	return hop ? clamp_mss(skb, p, hop->mtu - TUNNEL_HLEN - IPV6_HLEN - TCP_HLEN) : 0;
}
