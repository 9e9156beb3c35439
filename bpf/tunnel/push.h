/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Puts outer headers before a frame. The kernel segments the result as it does its own tunnels' packets: TCP and
 * UDP_SEGMENT keep the size of their segments, and everything between the outer UDP header and the inner frame, also an
 * NSH, is in each segment. So the container's MTU must leave room for the headers.
 *
 * A BPF program cannot set SKB_GSO_UDP_TUNNEL_CSUM, so packets to be segmented have no outer checksum. */
#pragma once
#include "tunnel/checksum.h"

struct frame_start {
	struct ethhdr eth;
	__u8 ip[2]; /* version, DSCP and ECN */
};
_Static_assert(sizeof(struct frame_start) == 16, "multiple of 4, for checksums");

/* tunnel_grow makes room for outer headers, nsh bytes of NSH and, if ethernet, an inner Ethernet header. The room lies
 * behind the frame's Ethernet header, which becomes the outer one. It fails if a program has pulled the packet from a
 * tunnel before: the packet still counts as encapsulated. */
static __always_inline int tunnel_grow(struct __sk_buff *skb, bool ip4, __u32 nsh, bool ethernet)
{
	__u32 room = (ip4 ? sizeof(struct outer4) : sizeof(struct outer6)) + nsh - (ethernet ? 0 : ETH_HLEN);
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L4_UDP;

	flags |= ip4 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
	/* Where the inner MAC header begins is what segmentation needs; the headers before it may have any length. */
	if (ethernet)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L2_ETH | (__u64)ETH_HLEN << BPF_ADJ_ROOM_ENCAP_L2_SHIFT;
	return bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, flags);
}

static __always_inline __u8 frame_tos(const struct frame_start *f, bool ip4)
{
	return ip4 ? f->ip[1] : f->ip[0] << 4 | f->ip[1] >> 4;
}

/* frame_sum adds up what lies behind the VXLAN header, before it is there. */
static __always_inline bool frame_sum(struct __sk_buff *skb, const struct tunnel *t, const struct frame_start *f,
				      bool ip4, __u32 *sum)
{
	struct frame_start only = *f;

	if (ip4 ? !inner4_sum(skb, sum) : !inner6_sum(skb, sum))
		return false;
	only.ip[0] = only.ip[1] = 0;
	if (t->next == NEXT_ETHERNET)
		*sum = bpf_csum_diff(NULL, 0, (__be32 *)&only, sizeof(only), *sum);
	return true;
}

static __always_inline bool valid_push(const struct tunnel *t, __be16 inner, __u32 context)
{
	bool ip4 = inner == bpf_htons(ETH_P_IP);

	if (!ip4 && inner != bpf_htons(ETH_P_IPV6))
		return false;
	if (!(t->flags & TUNNEL_GPE) && (t->flags & TUNNEL_NSH || t->next != NEXT_ETHERNET))
		return false;
	if (t->flags & TUNNEL_NSH && t->md == NSH_MD1 && sizeof(struct nsh) + context != NSH_MD1_LENGTH)
		return false;
	return t->next == NEXT_ETHERNET || t->next == (ip4 ? NEXT_IP4 : NEXT_IP6);
}

/* write_outer writes the headers up to VXLAN; sum is that of what follows. */
static __always_inline int write_outer(struct __sk_buff *skb, const struct tunnel *t, __be16 sport, bool ip4, __u32 sum)
{
	void *data = CTX_POINTER(skb, data), *end = CTX_POINTER(skb, data_end);
	struct udp_vxlan *udp;

	if (ip4) {
		if (data + sizeof(struct outer4) > end)
			return TUNNEL_FAILED;
		emit4(data, t, skb->len, sport);
		udp = data + offsetof(struct outer4, udp);
	} else {
		if (data + sizeof(struct outer6) > end)
			return TUNNEL_FAILED;
		emit6(data, t, skb->len, sport);
		udp = data + offsetof(struct outer6, udp);
	}
	if (t->flags & TUNNEL_CSUM)
		udp->check = udp_checksum(udp, t, sum);
	return TUNNEL_OK;
}

/* tunnel_push puts the headers that t describes before a frame of IPv4 or IPv6. With an NSH, size bytes at context
 * follow its service path (a multiple of 4, at most 244, constant or bounded). It changes t->tos.
 *
 * The outer MACs are zero: the caller sets them, or bpf_redirect_neigh does. After
 * TUNNEL_FAILED the packet must be dropped; after any other error it is unchanged.
 *
 * TUNNEL_KERNEL: not IP, a checksum that only the kernel can compute, or room that it does not give. */
static __always_inline int tunnel_push(struct __sk_buff *skb, struct tunnel *t, const void *context, __u32 size)
{
	__u32 hash = bpf_get_hash_recalc(skb), sum = 0, nsh = t->flags & TUNNEL_NSH ? sizeof(struct nsh) + size : 0, at;
	bool to4 = is_ip4_mapped(&t->dst), ip4, ethernet = t->next == NEXT_ETHERNET;
	struct frame_start f;
	struct nsh n;
	__u8 tos;
	int why;

	if (bpf_skb_load_bytes(skb, 0, &f, sizeof(f)) || skb->vlan_present || skb->protocol != f.eth.h_proto ||
	    !valid_push(t, f.eth.h_proto, size))
		return TUNNEL_KERNEL;
	ip4 = f.eth.h_proto == bpf_htons(ETH_P_IP);
	if (skb->len + sizeof(struct outer6) + nsh > 0xffff)
		return TUNNEL_TOO_LONG;
	tos = frame_tos(&f, ip4);
	t->tos = ((t->flags & TUNNEL_COPY_DSCP ? tos : t->tos) & ~ECN_MASK) | (tos & ECN_MASK);
	if (t->flags & TUNNEL_CSUM && (skb->gso_size || !frame_sum(skb, t, &f, ip4, &sum)))
		return TUNNEL_KERNEL;
	if (nsh) {
		emit_nsh(&n, t, size);
		sum = csum_add(csum_add(sum, n.base), n.path);
		if (t->flags & TUNNEL_CSUM && size)
			sum = bpf_csum_diff(NULL, 0, (__be32 *)context, size, sum);
	}
	if (tunnel_grow(skb, to4, nsh, ethernet))
		return TUNNEL_KERNEL;
	why = write_outer(skb, t, tunnel_sport(hash), to4, sum);
	at = to4 ? sizeof(struct outer4) : sizeof(struct outer6);
	if (!why && nsh &&
	    (bpf_skb_store_bytes(skb, at, &n, sizeof(n), 0) ||
	     (size && bpf_skb_store_bytes(skb, at + sizeof(n), context, size, 0))))
		why = TUNNEL_FAILED;
	if (!why && ethernet && bpf_skb_store_bytes(skb, at + nsh, &f.eth, sizeof(f.eth), 0))
		why = TUNNEL_FAILED;
	return why;
}
