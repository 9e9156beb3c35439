/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Updates the transport checksum of a packet whose addresses change. The forwarding code of both networks calls it. */
#pragma once
#include "common/packet.h"

/* is_sum_pending: a device fills in the checksum field later. Until then it holds the sum of the pseudo header. So does
 * the outer field of a tunnel packet to be segmented. In any other tunnel packet the field is complete. */
static __always_inline bool is_sum_pending(struct __sk_buff *skb, const struct packet *p)
{
	return p->pending && (p->pending == p->l4 || skb->gso_size);
}

/* corrected_csum returns the new value of a checksum field that held sum before the addresses changed. */
static __always_inline __u16 corrected_csum(struct __sk_buff *skb, const struct packet *p, __u16 sum, __u32 difference)
{
	/* UDP without a checksum, as tunnels may send it (RFC 6935), stays without one, also before segmentation */
	if (p->proto == NEXTHDR_UDP && !sum)
		return 0;
	if (is_sum_pending(skb, p)) /* the sum, not its complement */
		return csum_fold(csum_add(difference, sum));
	sum = ~csum_fold(csum_add(difference, (__u16)~sum));
	return p->proto == NEXTHDR_UDP && !sum ? 0xffff : sum;
}

/* fix_checksum updates the transport checksum after the addresses have changed. The skb's checksum over the whole
 * packet (CHECKSUM_COMPLETE) stays valid, because the changes of addresses and field cancel out. bpf_l4_csum_replace
 * keeps it valid for IPv6 only since Linux 6.16, and is slower. */
static __always_inline int fix_checksum(struct __sk_buff *skb, const struct packet *p, __u32 difference)
{
	__u32 offset = l4_csum_offset(p->proto);
	void *l4 = CTX_POINTER(skb, data) + sizeof(struct eth_ip6);
	__u16 *field = l4 + (p->proto == NEXTHDR_TCP ? 16 : 6);
	__u16 sum = 0; /* initialised: this stack slot may have held a dynptr */

	if (p->l4 == sizeof(struct eth_ip6) && (p->proto == NEXTHDR_TCP || p->proto == NEXTHDR_UDP) &&
	    (void *)(field + 1) <= CTX_POINTER(skb, data_end)) {
		*field = corrected_csum(skb, p, *field, difference);
		return 0;
	}
	if (bpf_skb_load_bytes(skb, p->l4 + offset, &sum, sizeof(sum)))
		return -1;
	sum = corrected_csum(skb, p, sum, difference);
	return bpf_skb_store_bytes(skb, p->l4 + offset, &sum, sizeof(sum), 0);
}
