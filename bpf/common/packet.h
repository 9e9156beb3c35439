/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses Ethernet and IPv6 headers up to the transport header. Every program starts here. It drops packets whose
 * headers could bypass later checks: routing headers, home-address options, tiny fragments, wrong lengths, neighbour
 * discovery. */
#pragma once
#include "common/address.h"
#include "common/context.h"
#include "common/csum.h"
#include "common/proto.h"
#include "common/reason.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Rarely used code goes behind the common path, so that most packets touch few lines of the instruction cache. The
 * programs spend most of their time waiting for instructions. */
#define likely(x)  __builtin_expect(!!(x), 1)
#define __slowpath __noinline __attribute__((cold, unused, section(".text")))

/* RFC 8200 has six kinds of extension header, and real packets hardly ever repeat one. */
#define MAX_HEADERS 8
#define MAX_OPTIONS 16

/* The link between a node and a container has only two ends. The constant MAC of the node's end does not reveal where a
 * packet came from. container_mac is that of the node's own stack, of the gateway, and of containers that older builds
 * attached; other containers have a MAC of their own (mac_of in device.h). */
static const __u8 gateway_mac[ETH_ALEN] = {0x02, 0x70, 0x69, 0x6c, 0x00, 0x01};
static const __u8 container_mac[ETH_ALEN] = {0x02, 0x70, 0x69, 0x6c, 0x00, 0x02};

struct eth_ip6 {
	struct ethhdr eth;
	__u8 priority_version; /* the version is the upper 4 bits */
	__u8 flow[3];
	__be16 payload_len;
	__u8 nexthdr;
	__u8 hop_limit;
	struct addr src, dst;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct eth_ip6) == ETH_HLEN + 40, "Ethernet and IPv6 headers");

struct eth_ip4 {
	struct ethhdr eth;
	__u8 version_length, tos;
	__be16 length, id, fragment;
	__u8 ttl, proto;
	__sum16 check;
	__be32 src, dst;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct eth_ip4) == ETH_HLEN + 20, "Ethernet and IPv4 headers");

/* Addresses in a frame are not aligned to 8 bytes. The kernel supports unaligned loads and so may programs. Loads of
 * two bytes, as the compiler would emit them, were half of the instructions of the fast path. */
static __always_inline struct addr *src_of(struct eth_ip6 *h)
{
	return (void *)h + offsetof(struct eth_ip6, src);
}

static __always_inline struct addr *dst_of(struct eth_ip6 *h)
{
	return (void *)h + offsetof(struct eth_ip6, dst);
}

struct packet {
	__u32 l4;      /* offset of the transport header; 0 in a later fragment */
	__u32 end;     /* offset of the first byte behind the IP packet */
	__u32 pending; /* offset from which a device still has to compute a checksum; 0 if none */
	__u8 proto;
	__u8 icmp_type; /* if proto is ICMPv6, or ICMP in IPv4 */
	__u8 ip4;	/* 1: the packet is IPv4 */
	__u8 parts;	/* has_part */
	__u32 fragment; /* of a packet that HAS_FRAGMENT: its identification, which may be 0 */
};

/* Parts of a packet besides its transport header. */
enum has_part {
	HAS_FRAGMENT = 1 << 0, /* also of IPv4: the packet is a fragment */
	HAS_HOP_OPTIONS = 1 << 1,
};

/* fragment4 maps an IPv4 identification to the 32 bits that IPv6 uses. IPv4 has one number space per protocol (RFC
 * 791). */
static __always_inline __u32 fragment4(__u8 proto, __be16 id)
{
	return 1u << 31 | proto << 16 | id;
}

static __always_inline bool has_ethernet(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return kernel->dev->type == ARPHRD_ETHER;
}

/* ip_offset returns the offset of the IP header. With Ethernet it ignores the offsets in the skb, because a packet
 * socket can set them; the offset is then always 14. On a tunnel device without Ethernet it is 0. */
static __always_inline __u32 ip_offset(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return has_ethernet(skb) ? ETH_HLEN : (__u16)(kernel->network_header - kernel->mac_header);
}

/* load_headers reads the headers from the packet itself, because a packet socket can set any protocol in the skb.
 * Without Ethernet it reads only the IP header. */
static __always_inline bool load_headers(struct __sk_buff *skb, struct eth_ip6 *f)
{
	if (has_ethernet(skb))
		return !bpf_skb_load_bytes(skb, 0, f, sizeof(*f));
	f->eth.h_proto = bpf_htons(ETH_P_IPV6);
	return !bpf_skb_load_bytes(skb, ip_offset(skb), &f->priority_version, IPV6_HLEN) &&
	       f->priority_version >> 4 == 6;
}

/* eth_ip6_of makes Ethernet and IPv6 headers readable and writable in place. Call it again after any helper that may
 * move the packet. */
static __always_inline struct eth_ip6 *eth_ip6_of(struct __sk_buff *skb)
{
	void *data = CTX_POINTER(skb, data), *end = CTX_POINTER(skb, data_end);

	if (data + sizeof(struct eth_ip6) > end) {
		if (bpf_skb_pull_data(skb, sizeof(struct eth_ip6)))
			return NULL;
		data = CTX_POINTER(skb, data);
		end = CTX_POINTER(skb, data_end);
		if (data + sizeof(struct eth_ip6) > end)
			return NULL;
	}
	return data;
}

/* VLAN id 0 is a priority tag (802.1Q): Linux treats the frame as untagged. */
static __always_inline bool in_vlan(struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_VID;
}

static __always_inline bool is_tag(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

/* hides_in_tag reports whether a priority tag precedes IPv6 or another tag. Linux removes such tags after our programs,
 * here or on the receiving node, so they could hide IPv6 from the checks. VLAN id and inner protocol are where the IPv6
 * header would begin. */
static __always_inline bool hides_in_tag(const struct eth_ip6 *f)
{
	const __be16 *tag = (const __be16 *)&f->priority_version;
	__be16 number = tag[0] & bpf_htons(VLAN_VID), inner = tag[1];

	return is_tag(f->eth.h_proto) && !number && (inner == bpf_htons(ETH_P_IPV6) || is_tag(inner));
}

/* check_icmp rejects neighbour discovery and multicast listener reports. Containers need neither, because their links
 * are configured statically. Forwarded packets would let a container change the configuration of others. */
static __always_inline int check_icmp(__u8 type)
{
	switch (type) {
	case 130:
	case 131:
	case 132:
	case 143:
		return REASON_MLD_IGNORED;
	case 133:
	case 135:
		return REASON_ND_IGNORED;
	case 134:
	case 136:
	case 137:
		return REASON_ND_FORBIDDEN;
	}
	return 0;
}

/* A packet with the beginning of a transport header must have the whole header. Tiny first fragments could bypass
 * checks of ports. */
static __always_inline int check_transport(struct __sk_buff *skb, struct packet *p)
{
	__u32 need = p->proto == NEXTHDR_TCP ? 20 : p->proto == NEXTHDR_DCCP ? 12 : p->proto == NEXTHDR_SCTP ? 12 : 8;

	switch (p->proto) {
	case NEXTHDR_TCP:
	case NEXTHDR_UDP:
	case NEXTHDR_UDPLITE:
	case NEXTHDR_SCTP:
	case NEXTHDR_DCCP:
		return p->l4 + need > p->end ? REASON_MALFORMED : 0;
	case NEXTHDR_ICMP:
		if (p->l4 + need > p->end || bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1))
			return REASON_MALFORMED;
		return check_icmp(p->icmp_type);
	}
	return 0;
}

/* check_options rejects home-address options, with which the receiver would replace the source address that we have
 * checked.
 *
 * Functions with loops are not static, because the verifier then checks each only once for all callers: 6,000
 * instructions a program instead of 171,000, and 0.25 s less at each start. */
__slowpath int check_options(struct __sk_buff *skb, __u32 at, __u32 end)
{
	for (int i = 0; i < MAX_OPTIONS; i++) {
		__u8 option[2] = {};

		if (at >= end)
			return 0;
		if (bpf_skb_load_bytes(skb, at, option, 1))
			return REASON_MALFORMED;
		if (option[0] == OPTION_HOME_ADDRESS)
			return REASON_ROUTING_HEADER;
		if (option[0] == OPTION_PAD1) {
			at++;
			continue;
		}
		if (bpf_skb_load_bytes(skb, at, option, 2))
			return REASON_MALFORMED;
		at += 2 + option[1];
	}
	return at >= end ? 0 : REASON_MALFORMED;
}

/* find_transport follows the extension headers. p->proto and p->l4 are kind and offset of the first one. find_transport
 * replaces them by those of the transport header. */
__slowpath int find_transport(struct __sk_buff *skb, struct packet *p)
{
	__u8 header[8];
	__u32 at, length;
	__u8 kind;

	if (!p)
		return REASON_MALFORMED;
	at = p->l4;
	kind = p->proto;
	for (int i = 0; i < MAX_HEADERS; i++) {
		if (kind == NEXTHDR_ROUTING)
			return REASON_ROUTING_HEADER;
		if (kind != NEXTHDR_HOP && kind != NEXTHDR_DEST && kind != NEXTHDR_FRAGMENT && kind != NEXTHDR_AUTH) {
			p->l4 = at;
			p->proto = kind;
			return 0;
		}
		if (at + sizeof(header) > p->end || bpf_skb_load_bytes(skb, at, header, sizeof(header)))
			return REASON_MALFORMED;
		if (kind == NEXTHDR_HOP)
			p->parts |= HAS_HOP_OPTIONS;
		if (kind == NEXTHDR_FRAGMENT) {
			length = 8;
			p->parts |= HAS_FRAGMENT;
			__builtin_memcpy(&p->fragment, header + 4, sizeof(p->fragment));
			if (((header[2] << 8 | header[3]) & 0xfff8) != 0) {
				p->l4 = 0; /* the transport header is in the first fragment */
				p->proto = header[0];
				return 0;
			}
		} else {
			length = kind == NEXTHDR_AUTH ? (header[1] + 2) * 4 : (header[1] + 1) * 8;
		}
		if (at + length > p->end)
			return REASON_MALFORMED;
		if (kind == NEXTHDR_DEST) {
			int why = check_options(skb, at + 2, at + length);

			if (why)
				return why;
		}
		kind = header[0];
		at += length;
	}
	return REASON_MALFORMED;
}

/* is_big_tcp reports whether the only extension header is that of BIG TCP, which the kernel removes before the packet
 * leaves the node. It checks what ipv6_has_hopopt_jumbo of the kernel does: else a socket with PACKET_VNET_HDR could
 * send other options that way. */
__slowpath int is_big_tcp(struct __sk_buff *skb)
{
	__u32 header;

	return skb->len > ETH_HLEN + LEGACY_MAX_SIZE &&
	       !bpf_skb_load_bytes(skb, sizeof(struct eth_ip6), &header, sizeof(header)) &&
	       header == bpf_htonl(JUMBO_HEADER);
}

static __always_inline bool is_error(const struct packet *p)
{
	return p->proto == NEXTHDR_ICMP && p->l4 && p->icmp_type <= ICMPV6_ERROR_MAX;
}

/* A device that fills in a checksum writes it after our checks, at an offset that the sender chose: a raw socket could
 * overwrite the addresses. We accept only the transport's own checksum field, or, in a tunnel, that of an inner header.
 */
static __always_inline int check_pending(struct __sk_buff *skb, struct packet *p)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);
	__u32 field = p->proto == NEXTHDR_SCTP ? 8 : l4_csum_offset(p->proto);

	if (BPF_CORE_READ_BITFIELD(kernel, ip_summed) != CHECKSUM_PARTIAL)
		return 0;
	p->pending = kernel->csum_start - kernel->mac_header; /* both are offsets from the head of the buffer */
	if (p->l4 && p->pending == p->l4 && kernel->csum_offset == field)
		return 0;
	if (p->l4 && p->pending >= p->l4 + TRANSPORT_MIN && p->pending < skb->len)
		return 0;
	return REASON_MALFORMED;
}

static __always_inline int parse_headers(struct __sk_buff *skb, const struct eth_ip6 *f, struct packet *p)
{
	__u32 payload = bpf_ntohs(f->payload_len);
	int why;

	if (f->priority_version >> 4 != 6)
		return REASON_MALFORMED;
	/* BIG TCP sets the length field to 0. Only the kernel makes packets with segments. */
	p->end = sizeof(*f) + payload;
	if (!payload && skb->gso_segs)
		p->end = skb->len;
	if (p->end > skb->len)
		return REASON_MALFORMED;
	p->l4 = sizeof(*f);
	p->proto = f->nexthdr;
	if (p->proto == NEXTHDR_TCP || p->proto == NEXTHDR_UDP)
		return check_transport(skb, p);
	why = find_transport(skb, p);
	if (!why && p->l4)
		why = check_transport(skb, p);
	/* Routers may handle such options in software (RFC 9673 §5), so a container could overload the fabric's. */
	if (!why && p->parts & HAS_HOP_OPTIONS && !is_big_tcp(skb))
		why = REASON_HOP_OPTIONS;
	return why;
}

static __always_inline int parse(struct __sk_buff *skb, const struct eth_ip6 *f, struct packet *p)
{
	int why = parse_headers(skb, f, p);

	return why ? why : check_pending(skb, p);
}

/* tcp_flags returns the flags of a TCP segment; of other packets 0. */
static __always_inline __u8 tcp_flags(struct __sk_buff *skb, const struct packet *p)
{
	__u8 flags = 0;

	if (p->proto == NEXTHDR_TCP)
		bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &flags, sizeof(flags));
	return flags;
}
