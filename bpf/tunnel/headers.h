/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* VXLAN headers around a frame or a packet: Ethernet | IPv4 or IPv6 | UDP | VXLAN (RFC 7348). VXLAN may have a group
 * policy id (draft-smith-vxlan-group-policy) or a next protocol (GPE, draft-ietf-nvo3-vxlan-gpe), and with a next
 * protocol an NSH (RFC 8300). The functions here only read and write memory; push.h and pull.h change packets. */
#pragma once
#include "common/addr.h"
#include "common/context.h"
#include "common/csum.h"
#include "common/proto.h"
#include "tunnel/ecn.h"
#include <bpf/bpf_endian.h>

#define UDP_VXLAN_GPE	   4790

#define VXLAN_HAS_VNI	   0x08000000
#define VXLAN_HAS_NEXT	   0x04000000
#define VXLAN_HAS_GROUP	   0x80000000
#define VXLAN_GROUP_MASK   0x0048ffff /* the id and the two flags below */
#define VXLAN_NEXT_MASK	   0xff
#define VXLAN_RESERVED_VNI 0xff /* of the word with the VNI */

/* In struct tunnel's group, where the kernel's mark has them: */
#define GROUP_DONT_LEARN     0x00400000
#define GROUP_POLICY_APPLIED 0x00080000

#define NSH_VERSION_OAM	     0xe0000000 /* version and O bit; both must be 0 */
#define NSH_TTL_SHIFT	     22
#define NSH_LENGTH_SHIFT     16 /* in words */
#define NSH_SIX_BITS	     0x3f
#define NSH_MD_SHIFT	     8
#define NSH_MD_MASK	     0xf
#define NSH_MD1		     1 /* 16 bytes of context */
#define NSH_MD2		     2 /* any number of TLVs */
#define NSH_MD1_LENGTH	     24

#define IP4_DONT_FRAGMENT    0x4000

#define ECN_SHIFT6	     4	/* in the second byte of an IPv6 header */
#define TOS_SHIFT6	     20 /* in the first word of an IPv6 header */

/* Protocols behind VXLAN-GPE; those behind NSH have the same numbers. Without GPE it is always Ethernet. */
enum tunnel_next {
	NEXT_IP4 = 1,
	NEXT_IP6 = 2,
	NEXT_ETHERNET = 3,
	NEXT_NSH = 4,
};

enum tunnel_flags {
	TUNNEL_GROUP = 1 << 0,	   /* a group policy id */
	TUNNEL_GPE = 1 << 1,	   /* a next protocol; excludes TUNNEL_GROUP, which uses the same bits */
	TUNNEL_NSH = 1 << 2,	   /* an NSH; needs TUNNEL_GPE */
	TUNNEL_CSUM = 1 << 3,	   /* a checksum in the outer UDP header */
	TUNNEL_COPY_DSCP = 1 << 4, /* push: the outer DSCP is the inner one (uniform model, RFC 2983) */
};

/* The outer headers of one packet. tunnel_push writes them, tunnel_parse fills them in. */
struct tunnel {
	struct addr src, dst; /* outer; IPv4 addresses as IPv4-mapped ones */
	__u32 vni;	      /* 24 bits */
	__u32 group;	      /* 16 bits and GROUP_… flags */
	__be32 path;	      /* of the NSH: service path id (24 bits) and service index */
	__be16 sport;	      /* UDP; tunnel_push derives it from the inner flow */
	__be16 dport;
	__u16 nsh;   /* parse: bytes of the NSH, 0 without one */
	__u16 inner; /* parse: offset of the inner IP header */
	__u8 flags;
	__u8 tos; /* outer DSCP and ECN; tunnel_push copies ECN from the inner header */
	__u8 ttl;
	__u8 next;	/* NEXT_IP4, NEXT_IP6 or NEXT_ETHERNET: the innermost, behind an NSH */
	__u8 md;	/* NSH metadata type */
	__u8 nsh_ttl;	/* 1 to 63 */
	__u8 inner_tos; /* parse: DSCP and ECN of the inner IP header */
	__u8 inner_ip4; /* parse: 1 if it is IPv4 */
};
_Static_assert(sizeof(struct tunnel) == 64, "no implicit padding but at the end");

enum tunnel_result {
	TUNNEL_OK,
	TUNNEL_OTHER,	  /* no packet of the tunnel: another protocol or port */
	TUNNEL_OPTIONS,	  /* IP fragment, IPv4 options or IPv6 extension headers */
	TUNNEL_MALFORMED, /* lengths, IP version, IPv4 header checksum, IPv4-mapped addresses in IPv6 */
	TUNNEL_BAD_FLAGS, /* no VNI, reserved bits, or flags that the caller does not accept */
	TUNNEL_BAD_NSH,	  /* version, length, metadata type, TTL or next protocol */
	TUNNEL_CONGESTED, /* outer CE, inner not ECN-capable: to be dropped (RFC 6040 §4.2) */
	TUNNEL_KERNEL,	  /* valid, but only the kernel's device can push or pull it; pull.h says why */
	TUNNEL_TOO_LONG,  /* push: the outer length fields cannot hold the length */
	TUNNEL_FAILED,	  /* a BPF helper failed halfway: the packet must be dropped */
};

struct udp_vxlan {
	__be16 sport, dport, len;
	__u16 check;
	__be32 flags, vni;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct udp_vxlan) == 16, "UDP and VXLAN headers");

struct outer4 {
	__u8 macs[2 * ETH_ALEN];
	__be16 ethertype;
	__u8 version_length, tos;
	__be16 length, id, fragment;
	__u8 ttl, proto;
	__u16 check;
	__be32 src, dst;
	struct udp_vxlan udp;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct outer4) == 50, "Ethernet, IPv4, UDP and VXLAN headers");

struct outer6 {
	__u8 macs[2 * ETH_ALEN];
	__be16 ethertype;
	__be32 tos_flow; /* version, traffic class, flow label */
	__be16 payload_len;
	__u8 nexthdr, hop_limit;
	struct addr src, dst;
	struct udp_vxlan udp;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct outer6) == 70, "Ethernet, IPv6, UDP and VXLAN headers");

struct nsh {
	__be32 base, path;
};
_Static_assert(sizeof(struct nsh) == 8, "NSH without context");

/* Fields in a frame are not aligned. The kernel supports unaligned loads and so may programs; the compiler would load
 * two bytes at a time. */
#define WIDE(type, h, field) (*(type *)((void *)(h) + offsetof(typeof(*(h)), field)))

/* tunnel_sport is the UDP source port of a flow: 49152 to 65535 (RFC 7348 §5). */
static __always_inline __be16 tunnel_sport(__u32 hash)
{
	return bpf_htons(0xc000 | ((hash ^ hash >> 16) & 0x3fff));
}

static __always_inline __u32 vxlan_flags(const struct tunnel *t)
{
	__u32 flags = VXLAN_HAS_VNI;

	if (t->flags & TUNNEL_GPE)
		flags |= VXLAN_HAS_NEXT | (t->flags & TUNNEL_NSH ? NEXT_NSH : t->next);
	else if (t->flags & TUNNEL_GROUP)
		flags |= VXLAN_HAS_GROUP | (t->group & VXLAN_GROUP_MASK);
	return flags;
}

/* The UDP checksum stays 0: RFC 768 and 7348 allow that over IPv4. Over IPv6 it is for tunnels whose endpoints agree on
 * it (RFC 6935, 6936); checksum.h computes one. */
static __always_inline void emit_udp(struct udp_vxlan *u, const struct tunnel *t, __u32 length, __be16 sport)
{
	u->sport = sport;
	u->dport = t->dport;
	u->len = bpf_htons(length);
	u->check = 0;
	WIDE(__be32, u, flags) = bpf_htonl(vxlan_flags(t));
	WIDE(__be32, u, vni) = bpf_htonl(t->vni << 8);
}

static __always_inline __u16 ip4_checksum(const struct outer4 *h)
{
	const __u32 *word = (void *)h + offsetof(struct outer4, version_length);
	__u32 sum = word[0];

	for (int i = 1; i < 5; i++)
		sum = csum_add(sum, word[i]);
	return ~csum_fold(sum);
}

/* fit4 and fit6 write what differs between packets with the same outer headers. length is that of the whole frame. */
static __always_inline void fit4(struct outer4 *h, __u32 length, __u8 ecn, __be16 sport)
{
	h->tos = (h->tos & ~ECN_MASK) | ecn;
	h->length = bpf_htons(length - ETH_HLEN);
	h->udp.len = bpf_htons(length - offsetof(struct outer4, udp));
	h->udp.sport = sport;
	h->check = 0;
	h->check = ip4_checksum(h);
}

static __always_inline void fit6(struct outer6 *h, __u32 length, __u8 ecn, __be16 sport)
{
	__u8 *second = (__u8 *)&h->tos_flow + 1;

	*second = (*second & ~(ECN_MASK << ECN_SHIFT6)) | ecn << ECN_SHIFT6;
	h->payload_len = h->udp.len = bpf_htons(length - offsetof(struct outer6, udp));
	h->udp.sport = sport;
}

/* emit4 and emit6 write all headers. The MACs are zero: bpf_redirect_neigh, which may set them later, drops frames with
 * a multicast MAC, as that of the frame may be. With DF set, the IPv4 id may be 0 (RFC 6864); the kernel counts it up
 * when it segments a packet. */
static __always_inline void emit4(struct outer4 *h, const struct tunnel *t, __u32 length, __be16 sport)
{
	__builtin_memset(h->macs, 0, sizeof(h->macs));
	h->ethertype = bpf_htons(ETH_P_IP);
	h->version_length = 0x45;
	h->tos = t->tos;
	h->length = bpf_htons(length - ETH_HLEN);
	h->id = 0;
	h->fragment = bpf_htons(IP4_DONT_FRAGMENT);
	h->ttl = t->ttl;
	h->proto = NEXTHDR_UDP;
	h->check = 0;
	WIDE(__be32, h, src) = ip4_unmapped(&t->src);
	WIDE(__be32, h, dst) = ip4_unmapped(&t->dst);
	h->check = ip4_checksum(h);
	emit_udp(&h->udp, t, length - offsetof(struct outer4, udp), sport);
}

static __always_inline void emit6(struct outer6 *h, const struct tunnel *t, __u32 length, __be16 sport)
{
	__builtin_memset(h->macs, 0, sizeof(h->macs));
	h->ethertype = bpf_htons(ETH_P_IPV6);
	WIDE(__be32, h, tos_flow) = bpf_htonl(6u << 28 | (__u32)t->tos << TOS_SHIFT6);
	h->payload_len = bpf_htons(length - offsetof(struct outer6, udp));
	h->nexthdr = NEXTHDR_UDP;
	h->hop_limit = t->ttl;
	WIDE(struct addr, h, src) = t->src;
	WIDE(struct addr, h, dst) = t->dst;
	emit_udp(&h->udp, t, length - offsetof(struct outer6, udp), sport);
}

/* emit_nsh writes an NSH with context bytes of metadata behind it. */
static __always_inline void emit_nsh(struct nsh *n, const struct tunnel *t, __u32 context)
{
	n->base = bpf_htonl((t->nsh_ttl & NSH_SIX_BITS) << NSH_TTL_SHIFT |
			    (sizeof(*n) + context) / 4 << NSH_LENGTH_SHIFT | (t->md & NSH_MD_MASK) << NSH_MD_SHIFT |
			    t->next);
	n->path = t->path;
}

/* Like the kernel's device, it refuses bits that the caller does not accept: they could change the meaning of what
 * follows. */
static __always_inline int read_vxlan(const struct udp_vxlan *u, __u8 accept, struct tunnel *t)
{
	__u32 flags = bpf_ntohl(WIDE(__be32, u, flags)), vni = bpf_ntohl(WIDE(__be32, u, vni));

	t->vni = vni >> 8;
	t->next = NEXT_ETHERNET;
	if (vni & VXLAN_RESERVED_VNI)
		return TUNNEL_BAD_FLAGS;
	flags ^= VXLAN_HAS_VNI;
	if (accept & TUNNEL_GPE && flags & VXLAN_HAS_NEXT) {
		t->flags |= TUNNEL_GPE;
		t->next = flags & VXLAN_NEXT_MASK;
		flags &= ~(VXLAN_HAS_NEXT | VXLAN_NEXT_MASK);
		if (t->next < NEXT_IP4 || t->next > (accept & TUNNEL_NSH ? NEXT_NSH : NEXT_ETHERNET))
			return TUNNEL_BAD_FLAGS;
	} else if (accept & TUNNEL_GROUP && flags & VXLAN_HAS_GROUP) {
		t->flags |= TUNNEL_GROUP;
		t->group = flags & VXLAN_GROUP_MASK;
		flags &= ~(VXLAN_HAS_GROUP | VXLAN_GROUP_MASK);
	}
	return flags ? TUNNEL_BAD_FLAGS : TUNNEL_OK;
}

static __always_inline int read_udp(const struct udp_vxlan *u, __u8 accept, struct tunnel *t)
{
	t->sport = u->sport;
	t->dport = u->dport;
	t->flags = u->check ? TUNNEL_CSUM : 0;
	return read_vxlan(u, accept, t);
}

static __always_inline bool is_extension(__u8 nexthdr)
{
	return nexthdr == NEXTHDR_FRAGMENT || nexthdr == NEXTHDR_HOP || nexthdr == NEXTHDR_DEST ||
	       nexthdr == NEXTHDR_ROUTING || nexthdr == NEXTHDR_AUTH;
}

/* read4 and read6 read and check outer headers of a frame of length bytes, which must end where its IP packet does. A
 * VXLAN frame is longer than the shortest Ethernet frame, so it has no padding. A UDP checksum is not verified: RFC
 * 7348 §4.1 permits that, and the inner packet has its own. */
static __always_inline int read4(const struct outer4 *h, __u32 length, __be16 port, __u8 accept, struct tunnel *t)
{
	if (h->version_length >> 4 != 4 || (h->version_length & 15) < 5)
		return TUNNEL_MALFORMED;
	if (h->proto != NEXTHDR_UDP)
		return TUNNEL_OTHER;
	if (h->version_length != 0x45 || h->fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET))
		return TUNNEL_OPTIONS;
	if (h->udp.dport != port)
		return TUNNEL_OTHER;
	if (ETH_HLEN + bpf_ntohs(h->length) != length || ip4_checksum(h) ||
	    offsetof(struct outer4, udp) + bpf_ntohs(h->udp.len) != length)
		return TUNNEL_MALFORMED;
	t->src = ip4_mapped(WIDE(__be32, h, src));
	t->dst = ip4_mapped(WIDE(__be32, h, dst));
	t->tos = h->tos;
	t->ttl = h->ttl;
	return read_udp(&h->udp, accept, t);
}

static __always_inline int read6(const struct outer6 *h, __u32 length, __be16 port, __u8 accept, struct tunnel *t)
{
	__u32 first = bpf_ntohl(WIDE(__be32, h, tos_flow));

	if (first >> 28 != 6)
		return TUNNEL_MALFORMED;
	if (h->nexthdr != NEXTHDR_UDP)
		return is_extension(h->nexthdr) ? TUNNEL_OPTIONS : TUNNEL_OTHER;
	if (h->udp.dport != port)
		return TUNNEL_OTHER;
	if (offsetof(struct outer6, udp) + bpf_ntohs(h->payload_len) != length || h->udp.len != h->payload_len)
		return TUNNEL_MALFORMED;
	t->src = WIDE(struct addr, h, src);
	t->dst = WIDE(struct addr, h, dst);
	t->tos = first >> TOS_SHIFT6;
	t->ttl = h->hop_limit;
	return read_udp(&h->udp, accept, t);
}

/* read_nsh reads and checks an NSH of at most room bytes. Unassigned bits are ignored (RFC 8300 §2.2). The caller
 * checks service path and index. */
static __always_inline int read_nsh(const struct nsh *n, __u32 room, struct tunnel *t)
{
	__u32 base = bpf_ntohl(n->base);

	t->flags |= TUNNEL_NSH;
	t->path = n->path;
	t->nsh = (base >> NSH_LENGTH_SHIFT & NSH_SIX_BITS) * 4;
	t->nsh_ttl = base >> NSH_TTL_SHIFT & NSH_SIX_BITS;
	t->md = base >> NSH_MD_SHIFT & NSH_MD_MASK;
	t->next = base;
	if (base & NSH_VERSION_OAM || !t->nsh_ttl || t->nsh > room)
		return TUNNEL_BAD_NSH;
	if (t->md != NSH_MD1 && t->md != NSH_MD2)
		return TUNNEL_BAD_NSH;
	if (t->md == NSH_MD1 ? t->nsh != NSH_MD1_LENGTH : t->nsh < sizeof(*n))
		return TUNNEL_BAD_NSH;
	return t->next < NEXT_IP4 || t->next > NEXT_ETHERNET ? TUNNEL_BAD_NSH : TUNNEL_OK;
}
