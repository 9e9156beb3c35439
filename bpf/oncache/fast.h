/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The fast path: does with a packet what the overlay's devices do. */
#pragma once
#include "oncache/inner.h"
#include "tunnel/push.h"

/* outer_ecn is what the kernel's tunnels write (RFC 3168). */
static __always_inline __u8 outer_ecn(__u8 inner)
{
	return inner == ECN_CE ? ECN_ECT0 : inner;
}

/* hop counts down TTL or hop limit of the header at ip, in a packet whose checksum is not over the whole packet. */
static __always_inline bool hop(void *ip, const void *end, __be16 type)
{
	if (!routed)
		return true;
	if (ip + sizeof(struct ip4_header) > end)
		return false;
	if (type == bpf_htons(ETH_P_IP))
		hop4(ip);
	else
		((struct ip6_start *)ip)->hop_limit--;
	return true;
}

/* is_to tells whether outer headers lead to a VTEP. The map may give an entry's memory to another key while a program
 * reads it. */
static __always_inline bool is_to(const void *outer, const struct addr *vtep, bool ip4)
{
	const struct outer4 *h4 = outer;
	const struct outer6 *h6 = outer;

	return ip4 ? WIDE(__be32, h4, dst) == ip4_unmapped(vtep) : same_addr(&WIDE(struct addr, h6, dst), vtep);
}

/* write_headers writes the outer headers and the inner Ethernet header. The kernel counts the IPv4 id up from segment
 * to segment. */
static __always_inline bool write_headers(struct __sk_buff *skb, const struct once_egress *e, struct once_vtep *v,
					  const struct inner *p, __be16 sport, __u32 segments, bool ip4)
{
	__u32 size = ip4 ? sizeof(struct outer4) : sizeof(struct outer6);
	void *data = CTX_POINTER(skb, data), *end = CTX_POINTER(skb, data_end);
	struct udp_vxlan *udp = data + size - sizeof(*udp);
	struct outer4 *h = data;

	if (data + size + ETH_HLEN > end)
		return false;
	for (int i = 0; i < size / 8; i++)
		((__u64 *)data)[i] = v->headers[i];
	if (ip4) {
		*(__u16 *)(data + 48) = v->headers[6];
		h->id = bpf_htons(__sync_fetch_and_add(&v->id, segments));
		fit4(data, skb->len, outer_ecn(p->ecn), sport);
	} else {
		*(__u32 *)(data + 64) = v->headers[8];
		*(__u16 *)(data + 68) = v->headers[8] >> 32;
		fit6(data, skb->len, outer_ecn(p->ecn), sport);
	}
	if (!is_to(data, &e->vtep, ip4))
		return false;
	WIDE(__be32, udp, vni) = bpf_htonl(tunnel_vni << 8);
	__builtin_memcpy(data + size, routed ? e->macs : p->macs, sizeof(e->macs));
	*(__be16 *)(data + size + sizeof(e->macs)) = p->type;
	return hop(data + size + ETH_HLEN, end, p->type);
}

/* push puts headers before a container's frame. */
static __always_inline enum once_cause push(struct __sk_buff *skb, const struct once_egress *e, struct once_vtep *v,
					    const struct inner *p, int *verdict)
{
	__be16 sport = tunnel_sport(bpf_get_hash_recalc(skb));
	__u32 segments = skb->gso_segs; /* tunnel_grow resets it */
	bool ip4 = is_ip4_mapped(&e->vtep);

	/* Unknown, for example from a virtual machine: at most. */
	if (!segments)
		segments = p->gso_size ? skb->len / p->gso_size + 1 : 1;
	if (tunnel_grow(skb, ip4, 0, true))
		return CAUSE_FAILED;
	if (ip4 ? !write_headers(skb, e, v, p, sport, segments, true)
		: !write_headers(skb, e, v, p, sport, segments, false)) {
		*verdict = TCX_DROP; /* the headers of another VTEP, hardly ever; there is room */
		return CAUSE_FAILED;
	}
	skb->tstamp = 0;
	mark(skb, 0);
	*verdict = bpf_redirect(v->uplink, 0);
	return CAUSE_HIT;
}

static __always_inline bool deliver(struct __sk_buff *skb, const struct once_ingress *c, const struct inner *p)
{
	void *data = CTX_POINTER(skb, data), *end = CTX_POINTER(skb, data_end);
	struct ip6_start *h = data + ETH_HLEN;
	__u8 nexthdr_hops[2];

	if (data + ETH_HLEN + sizeof(struct ip4_header) > end)
		return false;
	__builtin_memcpy(data, routed ? c->macs : p->macs, sizeof(c->macs));
	*(__be16 *)(data + 2 * ETH_ALEN) = p->type;
	if (!routed)
		return true;
	if (p->type == bpf_htons(ETH_P_IP)) {
		hop4(data + ETH_HLEN);
		return true;
	}
	nexthdr_hops[0] = h->nexthdr;
	nexthdr_hops[1] = h->hop_limit - 1;
	return !bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ip6_start, nexthdr), nexthdr_hops,
				    sizeof(nexthdr_hops), BPF_F_RECOMPUTE_CSUM);
}

/* pull removes the headers of a packet to a container. */
static __always_inline enum once_cause pull(struct __sk_buff *skb, const struct once_ingress *c, const struct inner *p,
					    int *verdict)
{
	__u32 room = skb->protocol == bpf_htons(ETH_P_IP) ? sizeof(struct outer4) : sizeof(struct outer6);

	if (tunnel_shrink(skb, room, p->type == bpf_htons(ETH_P_IP)))
		return CAUSE_FAILED;
	if (!deliver(skb, c, p)) {
		*verdict = TCX_DROP; /* cannot happen: the headers are there */
		return CAUSE_FAILED;
	}
	skb->tstamp = 0;
	skb->mark = 0; /* as a packet that enters a container has; kernels before 6.15 would keep it */
	*verdict = bpf_redirect_peer(c->device, 0);
	return CAUSE_HIT;
}
