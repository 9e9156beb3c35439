/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* ICMPv6 errors of routers, for networks whose containers' packets are on the fabric without a tunnel. */
#pragma once
#include "common/rewrite.h"

/* An ICMP error from the fabric (Packet Too Big, Time Exceeded, Unreachable) has a router's source address.
 * icmp_err_set_peer_src replaces it by the peer that the quoted packet was sent to. Then the error is checked like one
 * from the peer, and the container does not learn the router's address. own is the /64 that has this node's containers
 * on the fabric. */
static __always_inline int icmp_err_set_peer_src(struct __sk_buff *skb, const struct packet *p, struct addr *source,
						 __u64 own)
{
	struct addr peer = {};

	if (bpf_skb_load_bytes(skb, p->l4 + QUOTED_ADDRESSES + sizeof(peer), &peer, sizeof(peer)))
		return REASON_ICMP_QUOTE;
	/* Traffic between containers of this node never was on the fabric. */
	if (peer.hi == own)
		return REASON_ICMP_QUOTE;
	if (fix_checksum(skb, p, csum_diff_addr(source, &peer)) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &peer, sizeof(peer), 0))
		return REASON_MALFORMED;
	*source = peer;
	return 0;
}
