/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The transport checksum of a packet whose addresses change. */
#pragma once
#include "common/packet.h"

/* corrected_csum is what a checksum field that held sum must hold after the addresses changed. */
static __always_inline __u16 corrected_csum(struct __sk_buff *skb, const struct packet *p, __u16 sum, __u32 difference)
{
	/* None, as a tunnel may have it (RFC 6935), also for segments that are still to be cut. */
	if (p->proto == NEXTHDR_UDP && !sum)
		return 0;
	/* Before a device fills it in, the field holds the pseudo header's sum and not its complement. So
	 * it does in the outer header of a tunnel's segments; in a tunnel's single packet it is complete. */
	if (p->pending && (p->pending == p->l4 || skb->gso_size))
		return csum_fold(csum_add(difference, sum));
	sum = ~csum_fold(csum_add(difference, (__u16)~sum));
	return p->proto == NEXTHDR_UDP && !sum ? 0xffff : sum;
}

/* The addresses have changed; make the transport checksum right again. A sum over the whole packet
 * (CHECKSUM_COMPLETE) stays: what the addresses add to it, the checksum takes away. bpf_l4_csum_replace
 * knows that of IPv6 only since 6.16, and takes longer. */
static __always_inline int fix_checksum(struct __sk_buff *skb, const struct packet *p, __u32 difference)
{
	__u32 offset = l4_csum_offset(p->proto);
	void *l4 = CTX_POINTER(skb, data) + sizeof(struct eth_ip6);
	__u16 *field = l4 + (p->proto == NEXTHDR_TCP ? 16 : 6);
	__u16 sum = 0; /* set, because its place on the stack may have been a dynptr's */

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
