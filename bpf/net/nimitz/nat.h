/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets of network nimitz: parses IPv4 and IPv6 into one context and rewrites addresses. */
#pragma once
#include "common/packet4.h"
#include "common/rewrite.h"
#include "net/nimitz/tables.h"

#define QUOTED_CHECKSUM_4  (ICMPV6_HLEN + 10)
#define QUOTED_ADDRESSES_4 (ICMPV6_HLEN + 12)

/* Programs that go on with a packet when the stages return. */
enum next_program {
	NEXT_NOTHING = 0,
	NEXT_FRONT = 1, /* this node is a frontend of the packet's backend */
	NEXT_ASK = 2,	/* a frontend has to look up the rules */
};

/* A packet on its way through the stages of stages.h. */
struct pkt_ctx {
	struct addr src, dst;		/* after NAT */
	struct addr orig_src, orig_dst; /* as received */
	__u32 family;
	__u32 from; /* port that it came from */
	__u32 vni;
	__u32 identity;
	__u32 hook;
	__u16 translated;  /* 1: src is valid in the underlay */
	__u16 relayed;	   /* flags of the group policy id, see GBP_ONCE */
	__u32 why;	   /* reason of a drop that its sender may get an ICMP error about */
	__u32 mtu;	   /* of the egress device, if the packet is too long for it */
	__u64 remote_edge; /* the /64 of the other region's Edge Switch that sent it, or 0; over IPv4 see evpn_decap */
	__u8 bridged;	   /* 1: in the tunnel it has the VNI of an Ethernet segment, so it was not routed */
	__u8 has_pre;	   /* 1: a frontend has looked up the rules (offload.h) */
	__u8 next;	   /* enum next_program */
	__u8 fronts;	   /* 1: this node is a frontend of the destination */
	__u32 offload;	   /* of the packet's destination, or 0 */
};

/* parse_any parses a frame of either IP version and returns 0 or a reason. */
static __always_inline int parse_any(struct __sk_buff *skb, struct pkt_ctx *j, struct packet *p)
{
	struct eth_ip4 *h4;
	struct eth_ip6 *h;

	if (skb->vlan_present)
		return REASON_NOT_IP6;
	h4 = eth_ip4_of(skb);
	if (!h4)
		return REASON_MALFORMED;
	/* skb->protocol is what the sending socket claims; the header must agree. */
	if (h4->eth.h_proto != skb->protocol)
		return REASON_NOT_IP6;
	if (h4->eth.h_proto == bpf_htons(ETH_P_IP)) {
		j->family = FAMILY_4;
		j->src = j->orig_src = ip4_mapped(h4->src);
		j->dst = j->orig_dst = ip4_mapped(h4->dst);
		return parse4(skb, h4, p);
	}
	if (h4->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return REASON_NOT_IP6;
	h = eth_ip6_of(skb);
	if (!h)
		return REASON_MALFORMED;
	j->family = FAMILY_6;
	j->src = j->orig_src = *src_of(h);
	j->dst = j->orig_dst = *dst_of(h);
	return parse(skb, h, p);
}

static __always_inline bool is_multicast(const struct pkt_ctx *j)
{
	__u8 first = *(__u8 *)&j->dst;

	if (j->family == FAMILY_4)
		return bpf_ntohl(ip4_unmapped(&j->dst)) >> 28 >= 0xe; /* includes the limited broadcast */
	return first == 0xff;
}

/* read_quote reads the addresses that an error quotes, and leaves zeros if the error is too short. */
static __always_inline void read_quote(struct __sk_buff *skb, const struct packet *p, enum family family,
				       struct addr *quoted)
{
	__be32 ip4[2] = {};

	if (family == FAMILY_6) {
		if (p->l4 + QUOTED_ADDRESSES + 2 * sizeof(*quoted) <= p->end)
			bpf_skb_load_bytes(skb, p->l4 + QUOTED_ADDRESSES, quoted, 2 * sizeof(*quoted));
		return;
	}
	if (p->l4 + QUOTED_ADDRESSES_4 + sizeof(ip4) <= p->end)
		bpf_skb_load_bytes(skb, p->l4 + QUOTED_ADDRESSES_4, ip4, sizeof(ip4));
	quoted[0] = ip4_mapped(ip4[0]);
	quoted[1] = ip4_mapped(ip4[1]);
}

static __always_inline bool is_translated(const struct pkt_ctx *j)
{
	return !same_addr(&j->src, &j->orig_src) || !same_addr(&j->dst, &j->orig_dst);
}

static __always_inline bool is_any_error(const struct packet *p, enum family family)
{
	return family == FAMILY_4 ? is_error4(p) : is_error(p);
}

/* An ICMP error quotes a packet that went in the opposite direction. Any other error would let its sender disturb the
 * connections of others. */
static __always_inline bool quote_matches(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j,
					  const struct addr *from)
{
	struct addr quoted[2] = {};

	read_quote(skb, p, j->family, quoted);
	return same_addr(&quoted[0], &j->orig_dst) && same_addr(&quoted[1], from);
}

/* translate_quote writes the addresses into the quote that the receiver of the error knows. The quoted transport
 * checksum stays, because receivers ignore it. */
static __always_inline int translate_quote(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j,
					   struct addr *from)
{
	struct addr orig_dst = j->orig_dst, quoted[2] = {j->dst, j->src};
	__u32 difference = csum_add(csum_diff_addr(&orig_dst, &quoted[0]), csum_diff_addr(from, &quoted[1]));
	__be32 ip4[2] = {ip4_unmapped(&quoted[0]), ip4_unmapped(&quoted[1])};
	__u16 sum = 0;

	if (j->family == FAMILY_6)
		return bpf_skb_store_bytes(skb, p->l4 + QUOTED_ADDRESSES, quoted, sizeof(quoted), 0) ||
		       bpf_l4_csum_replace(skb, p->l4 + 2, 0, difference, 0);
	/* In the error's checksum the quoted header checksum cancels out its addresses. */
	if (bpf_skb_load_bytes(skb, p->l4 + QUOTED_CHECKSUM_4, &sum, sizeof(sum)))
		return -1;
	sum = ~csum_fold(csum_add(difference, (__u16)~sum));
	return bpf_skb_store_bytes(skb, p->l4 + QUOTED_CHECKSUM_4, &sum, sizeof(sum), 0) ||
	       bpf_skb_store_bytes(skb, p->l4 + QUOTED_ADDRESSES_4, ip4, sizeof(ip4), 0);
}

static __always_inline int translate4(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j,
				      __u32 difference)
{
	__u32 at = p->proto == NEXTHDR_ICMP ? 0 : l4_csum_offset(p->proto);
	struct eth_ip4 *h = eth_ip4_of(skb);
	__u16 sum = 0;

	if (!h)
		return -1;
	/* In a checksum over the whole packet the header checksum and the addresses cancel out; the transport checksum
	 * does not. */
	h->check = ~csum_fold(csum_add(difference, (__u16)~h->check));
	h->src = ip4_unmapped(&j->src);
	h->dst = ip4_unmapped(&j->dst);
	if (!p->l4 || !at)
		return 0;
	if (bpf_skb_load_bytes(skb, p->l4 + at, &sum, sizeof(sum)))
		return -1;
	sum = corrected_csum(skb, p, sum, difference);
	return bpf_skb_store_bytes(skb, p->l4 + at, &sum, sizeof(sum), BPF_F_RECOMPUTE_CSUM);
}

static __always_inline int translate6(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j,
				      __u32 difference)
{
	struct addr both[2] = {j->src, j->dst};
	bool cancels = p->l4 && l4_csum_offset(p->proto);

	if (bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), both, sizeof(both),
				cancels ? 0 : BPF_F_RECOMPUTE_CSUM))
		return -1;
	return cancels ? fix_checksum(skb, p, difference) : 0;
}

/* translate writes the addresses that NAT found into a packet. from is the source before NAT; of an ICMP error, the
 * address that it reports about. */
__slowpath int translate(struct __sk_buff *skb, const struct packet *p, struct pkt_ctx *j, struct addr *from)
{
	__u32 difference;

	if (!p || !j || !from)
		return -1;
	if (is_any_error(p, j->family) && translate_quote(skb, p, j, from))
		return -1;
	difference = csum_add(csum_diff_addr(&j->orig_src, &j->src), csum_diff_addr(&j->orig_dst, &j->dst));
	return j->family == FAMILY_4 ? translate4(skb, p, j, difference) : translate6(skb, p, j, difference);
}
