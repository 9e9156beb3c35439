/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reads and removes the outer headers of a tunnel's packet.
 *
 * bpf_skb_adjust_room leaves SKB_GSO_UDP_TUNNEL and skb->encapsulation set. TCP does not look at them. But a socket
 * that receives UDP_SEGMENT data has the kernel segment it as a tunnel, and all of it is lost without a counter. So
 * tunnel_parse leaves such packets to the kernel's device (TUNNEL_KERNEL). A node without such a device turns
 * tx-udp-segmentation off where the packets leave the sending node; then each datagram comes alone. */
#pragma once
#include "tunnel/headers.h"
#include <bpf/bpf_core_read.h>

#define CHECKSUM_UNNECESSARY 1 /* a device has verified it */

void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym;

/* is_for_kernel: segments of anything but TCP, and those that the kernel keeps as a list, each with outer headers of
 * its own. */
static __always_inline bool is_for_kernel(struct __sk_buff *skb)
{
	struct skb_shared_info *shared;
	struct sk_buff *kernel;

	if (!skb->gso_size)
		return false;
	kernel = bpf_cast_to_kern_ctx(skb);
	shared = bpf_rdonly_cast(kernel->head + kernel->end, bpf_core_type_id_kernel(struct skb_shared_info));
	return !(shared->gso_type & (SKB_GSO_TCPV4 | SKB_GSO_TCPV6)) || shared->gso_type & SKB_GSO_FRAGLIST;
}

/* tunnel_parse_inner reads the beginning of what lies at an offset behind the outer headers. */
static __always_inline int tunnel_parse_inner(struct __sk_buff *skb, __u32 at, struct tunnel *t)
{
	bool ethernet = t->next == NEXT_ETHERNET;
	__be16 type = t->next == NEXT_IP4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	__u8 ip[2];

	if (ethernet) {
		if (bpf_skb_load_bytes(skb, at + 2 * ETH_ALEN, &type, sizeof(type)))
			return TUNNEL_MALFORMED;
		at += ETH_HLEN;
	}
	t->inner = at;
	/* The packet's protocol would stay that of the outer header. */
	if (type != bpf_htons(ETH_P_IP) && type != bpf_htons(ETH_P_IPV6))
		return TUNNEL_KERNEL;
	t->inner_ip4 = type == bpf_htons(ETH_P_IP);
	if (at + (t->inner_ip4 ? 20 : IPV6_HLEN) > skb->len || bpf_skb_load_bytes(skb, at, ip, sizeof(ip)) ||
	    ip[0] >> 4 != (t->inner_ip4 ? 4 : 6))
		return TUNNEL_MALFORMED;
	t->inner_tos = t->inner_ip4 ? ip[1] : ip[0] << 4 | ip[1] >> 4;
	if (ecn_decap(t->tos & ECN_MASK, t->inner_tos & ECN_MASK) == ECN_DROP)
		return TUNNEL_CONGESTED;
	return is_for_kernel(skb) ? TUNNEL_KERNEL : TUNNEL_OK;
}

/* tunnel_parse reads and checks the headers of a packet to a UDP port; accept has the flags of VXLAN (TUNNEL_GROUP,
 * TUNNEL_GPE, TUNNEL_NSH) that are valid there. It changes nothing. The caller compares addresses, VNI and path. */
static __always_inline int tunnel_parse(struct __sk_buff *skb, __be16 port, __u8 accept, struct tunnel *t)
{
	void *data, *end;
	struct nsh n;
	__u32 at;
	int why;

	readable(skb, sizeof(struct outer6));
	data = CTX_POINTER(skb, data);
	end = CTX_POINTER(skb, data_end);
	if (skb->vlan_present || data + sizeof(struct outer4) > end ||
	    skb->protocol != ((struct outer4 *)data)->ethertype)
		return TUNNEL_OTHER;
	t->nsh = 0;
	t->group = 0;
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		at = sizeof(struct outer6);
		if (data + sizeof(struct outer6) > end)
			return TUNNEL_OTHER;
		why = read6(data, skb->len, port, accept, t);
		/* They must not pass for the IPv4 addresses that they contain. */
		if (!why && (is_ip4_mapped(&t->src) || is_ip4_mapped(&t->dst)))
			why = TUNNEL_MALFORMED;
	} else if (skb->protocol == bpf_htons(ETH_P_IP)) {
		at = sizeof(struct outer4);
		why = read4(data, skb->len, port, accept, t);
	} else {
		return TUNNEL_OTHER;
	}
	if (why)
		return why;
	if (t->next == NEXT_NSH) {
		if (bpf_skb_load_bytes(skb, at, &n, sizeof(n)))
			return TUNNEL_BAD_NSH;
		why = read_nsh(&n, skb->len - at, t);
		if (why)
			return why;
		at += t->nsh;
	}
	return tunnel_parse_inner(skb, at, t);
}

/* tunnel_shrink removes bytes behind the Ethernet header, up to an inner IP header. A device that has verified n
 * checksums has then verified n - 1: a sum of 0 in the outer header counts as one. */
static __always_inline int tunnel_shrink(struct __sk_buff *skb, __u32 bytes, bool ip4)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET;

	flags |= ip4 ? BPF_F_ADJ_ROOM_DECAP_L3_IPV4 : BPF_F_ADJ_ROOM_DECAP_L3_IPV6;
	if (bpf_skb_adjust_room(skb, -(__s32)bytes, BPF_ADJ_ROOM_MAC, flags))
		return TUNNEL_FAILED;
	if (BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_UNNECESSARY)
		bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	return TUNNEL_OK;
}

/* set_ecn changes the ECN field of the IP header at an offset. A checksum over the whole packet (CHECKSUM_COMPLETE)
 * stays valid: in IPv4 the changes of the field and of the header checksum cancel out. */
static __always_inline int set_ecn(struct __sk_buff *skb, __u32 at, bool ip4, enum ecn ecn)
{
	__u8 was[2], is[2];
	__u16 old, new;

	if (bpf_skb_load_bytes(skb, at, was, sizeof(was)))
		return -1;
	is[0] = was[0];
	if (!ip4) {
		is[1] = (was[1] & ~(ECN_MASK << ECN_SHIFT6)) | ecn << ECN_SHIFT6;
		return bpf_skb_store_bytes(skb, at, is, sizeof(is), BPF_F_RECOMPUTE_CSUM);
	}
	is[1] = (was[1] & ~ECN_MASK) | ecn;
	__builtin_memcpy(&old, was, sizeof(old));
	__builtin_memcpy(&new, is, sizeof(new));
	if (bpf_l3_csum_replace(skb, at + offsetof(struct outer4, check) - offsetof(struct outer4, version_length), old,
				new, sizeof(old)))
		return -1;
	return bpf_skb_store_bytes(skb, at, is, sizeof(is), 0);
}

/* tunnel_pull removes the headers that tunnel_parse has found. The frame gets the inner MACs; behind headers without
 * inner Ethernet it keeps the outer ones. After TUNNEL_FAILED the packet must be dropped. */
static __always_inline int tunnel_pull(struct __sk_buff *skb, const struct tunnel *t)
{
	__u8 outer = t->tos & ECN_MASK, inner = t->inner_tos & ECN_MASK;
	enum ecn ecn = ecn_decap(outer, inner);
	__u8 macs[2 * ETH_ALEN];
	__be16 type;

	if (ecn != inner && set_ecn(skb, t->inner, t->inner_ip4, ecn))
		return TUNNEL_FAILED;
	if (t->next == NEXT_ETHERNET && bpf_skb_load_bytes(skb, t->inner - ETH_HLEN, macs, sizeof(macs)))
		return TUNNEL_FAILED;
	if (tunnel_shrink(skb, t->inner - ETH_HLEN, t->inner_ip4))
		return TUNNEL_FAILED;
	type = t->inner_ip4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	if (t->next == NEXT_ETHERNET && bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return TUNNEL_FAILED;
	return bpf_skb_store_bytes(skb, 2 * ETH_ALEN, &type, sizeof(type), 0) ? TUNNEL_FAILED : TUNNEL_OK;
}
