/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* ARP (RFC 826) and neighbour discovery (RFC 4861) of network evpn, which no program forwards. A question about an
 * address that the tables know is answered here (RFC 7432 §10). A container's other questions inside the tenant's
 * subnets are replicated (replicate.h), and answers come back to it. Each message that leaves is written anew, from
 * fields that have been checked. */
#pragma once
#include "net/evpn/replicate.h"
#include "net/netpila/tables.h"
#include "net/nimitz/icmp.h"
#include "net/nimitz/router.h"

#define SEGMENT_BIT	 0x800000 /* in the VNI of a tenant's Ethernet segment, beside the tenant's VNI */

#define ARP_REQUEST	 1
#define ARP_REPLY	 2
#define ND_SOLICITATION	 135
#define ND_ADVERTISEMENT 136
#define ND_SOLICITED	 0x40
#define ND_OVERRIDE	 0x20
#define ND_SOURCE	 1 /* kinds of options: link-layer address of the sender, and of the target */
#define ND_TARGET	 2
#define ND_HOP_LIMIT	 255

struct eth_arp {
	struct ethhdr eth;
	__be16 hardware, protocol;
	__u8 hardware_len, protocol_len;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN];
	__be32 sender;
	__u8 target_mac[ETH_ALEN];
	__be32 target;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct eth_arp) == ETH_HLEN + 28, "Ethernet and ARP");

struct eth_nd {
	struct eth_ip6 ip;
	__u8 type, code;
	__u16 checksum;
	__u8 flags, zero[3];
	struct addr target;
	__u8 option, option_words, mac[ETH_ALEN];
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct eth_nd) == ETH_HLEN + IPV6_HLEN + 32, "Ethernet, IPv6, ICMPv6 and one option");

#define ND_WITHOUT_OPTION (sizeof(struct eth_nd) - 8)

/* A question about the target, or an answer to it. */
struct neighbour_msg {
	struct addr sender, target; /* of an answer: whom it is about, and who has asked */
	__u64 from, to;		    /* MACs, and two zeros behind them; to: of messages to write */
	__u32 family;
	__u32 answer; /* 1: ARP reply or neighbour advertisement */
};

static __always_inline bool may_be_neighbour(struct __sk_buff *skb)
{
	struct eth_ip6 *h;

	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return true;
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return false;
	h = eth_ip6_of(skb);
	return h && h->nexthdr == NEXTHDR_ICMP;
}

static __always_inline bool is_unicast_mac(__u64 mac)
{
	return mac && !(*(__u8 *)&mac & 1);
}

static __always_inline bool read_arp(struct __sk_buff *skb, struct neighbour_msg *n)
{
	struct eth_arp f;

	if (bpf_skb_load_bytes(skb, 0, &f, sizeof(f)) || f.eth.h_proto != bpf_htons(ETH_P_ARP) ||
	    f.hardware != bpf_htons(ARPHRD_ETHER) || f.protocol != bpf_htons(ETH_P_IP) || f.hardware_len != ETH_ALEN ||
	    f.protocol_len != sizeof(f.sender) ||
	    (f.operation != bpf_htons(ARP_REQUEST) && f.operation != bpf_htons(ARP_REPLY)))
		return false;
	n->family = FAMILY_4;
	n->answer = f.operation == bpf_htons(ARP_REPLY);
	n->sender = ip4_mapped(f.sender);
	n->target = ip4_mapped(f.target);
	n->from = mac_word(f.sender_mac);
	return is_unicast_mac(n->from);
}

static __always_inline bool read_nd(struct __sk_buff *skb, struct neighbour_msg *n)
{
	struct eth_nd f;

	if (bpf_skb_load_bytes(skb, 0, &f, ND_WITHOUT_OPTION) || f.ip.eth.h_proto != bpf_htons(ETH_P_IPV6) ||
	    f.ip.priority_version >> 4 != 6 || f.ip.nexthdr != NEXTHDR_ICMP || f.ip.hop_limit != ND_HOP_LIMIT ||
	    bpf_ntohs(f.ip.payload_len) < ND_WITHOUT_OPTION - sizeof(f.ip) || f.code ||
	    (f.type != ND_SOLICITATION && f.type != ND_ADVERTISEMENT))
		return false;
	n->family = FAMILY_6;
	n->answer = f.type == ND_ADVERTISEMENT;
	n->sender = n->answer ? f.target : f.ip.src;
	n->target = n->answer ? f.ip.dst : f.target;
	n->from = mac_word(f.ip.eth.h_source);
	return is_unicast_mac(n->from);
}

/* read_neighbour reads a question or an answer; false if a frame is neither. A device would fill a pending checksum in
 * where the sender says, so such frames are none either. */
static __noinline bool read_neighbour(struct __sk_buff *skb, struct neighbour_msg *n)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	if (skb->vlan_present || BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_PARTIAL)
		return false;
	return skb->protocol == bpf_htons(ETH_P_ARP) ? read_arp(skb, n) : read_nd(skb, n);
}

static __always_inline bool is_unspecified(const struct neighbour_msg *n, const struct addr *a)
{
	return n->family == FAMILY_4 ? !ip4_unmapped(a) : !a->hi && !a->lo;
}

static __always_inline int write_arp(struct __sk_buff *skb, const struct neighbour_msg *n)
{
	struct eth_arp f = {
		.hardware = bpf_htons(ARPHRD_ETHER),
		.protocol = bpf_htons(ETH_P_IP),
		.hardware_len = ETH_ALEN,
		.protocol_len = sizeof(f.sender),
		.operation = bpf_htons(n->answer ? ARP_REPLY : ARP_REQUEST),
		.sender = ip4_unmapped(&n->sender),
		.target = ip4_unmapped(&n->target),
	};

	f.eth.h_proto = bpf_htons(ETH_P_ARP);
	__builtin_memcpy(f.eth.h_source, &n->from, ETH_ALEN);
	__builtin_memcpy(f.sender_mac, &n->from, ETH_ALEN);
	__builtin_memset(f.eth.h_dest, 0xff, ETH_ALEN);
	if (n->answer) {
		__builtin_memcpy(f.eth.h_dest, &n->to, ETH_ALEN);
		__builtin_memcpy(f.target_mac, &n->to, ETH_ALEN);
	}
	return bpf_skb_change_tail(skb, sizeof(f), 0) || bpf_skb_store_bytes(skb, 0, &f, sizeof(f), 0);
}

/* set_receivers sets the destination of a question, the multicast group of its target (RFC 4291 §2.7.1), or of an
 * answer to a host that has no address yet, all nodes. */
static __always_inline void set_receivers(struct eth_nd *f, const struct neighbour_msg *n)
{
	__u8 *a = (__u8 *)f + offsetof(struct eth_nd, ip.dst), *mac = f->ip.eth.h_dest;

	f->ip.dst.hi = bpf_cpu_to_be64(0xff02000000000000);
	f->ip.dst.lo = bpf_cpu_to_be64(1);
	if (!n->answer) {
		f->ip.dst.lo = bpf_cpu_to_be64(0x1ff000000) | (n->target.lo & bpf_cpu_to_be64(0xffffff));
	}
	mac[0] = mac[1] = 0x33; /* RFC 2464 §7 */
	__builtin_memcpy(mac + 2, a + 12, 4);
}

static __always_inline int write_nd(struct __sk_buff *skb, const struct neighbour_msg *n)
{
	struct eth_nd f = {};
	__u32 sum;

	f.ip.eth.h_proto = bpf_htons(ETH_P_IPV6);
	f.ip.priority_version = 6 << 4;
	f.ip.payload_len = bpf_htons(sizeof(f) - sizeof(f.ip));
	f.ip.nexthdr = NEXTHDR_ICMP;
	f.ip.hop_limit = ND_HOP_LIMIT;
	f.ip.src = n->sender;
	f.type = n->answer ? ND_ADVERTISEMENT : ND_SOLICITATION;
	f.target = n->answer ? n->sender : n->target;
	f.option = n->answer ? ND_TARGET : ND_SOURCE;
	f.option_words = 1;
	__builtin_memcpy(f.ip.eth.h_source, &n->from, ETH_ALEN);
	__builtin_memcpy(f.mac, &n->from, ETH_ALEN);
	if (n->answer && !is_unspecified(n, &n->target)) {
		f.flags = ND_SOLICITED | ND_OVERRIDE;
		f.ip.dst = n->target;
		__builtin_memcpy(f.ip.eth.h_dest, &n->to, ETH_ALEN);
	} else {
		f.flags = n->answer ? ND_OVERRIDE : 0;
		set_receivers(&f, n);
	}
	sum = f.ip.payload_len + bpf_htons(NEXTHDR_ICMP); /* pseudo header; the addresses follow */
	sum = bpf_csum_diff(NULL, 0, (__be32 *)src_of(&f.ip), 2 * sizeof(struct addr), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&f.type, sizeof(f) - sizeof(f.ip), sum);
	f.checksum = ~csum_fold(sum);
	/* The sum that a network card may have computed begins behind the Ethernet header. */
	return bpf_skb_change_tail(skb, sizeof(f), 0) || bpf_skb_store_bytes(skb, 0, &f, ETH_HLEN, 0) ||
	       bpf_skb_store_bytes(skb, ETH_HLEN, (void *)&f + ETH_HLEN, sizeof(f) - ETH_HLEN, BPF_F_RECOMPUTE_CSUM);
}

/* write_neighbour replaces a frame of the same family. */
static __noinline int write_neighbour(struct __sk_buff *skb, const struct neighbour_msg *n)
{
	return n->family == FAMILY_4 ? write_arp(skb, n) : write_nd(skb, n);
}

/* answer_with turns a question into the answer with a MAC. */
static __always_inline int answer_with(struct __sk_buff *skb, struct neighbour_msg *n, __u64 mac)
{
	struct addr asker = n->sender;

	n->sender = n->target;
	n->target = asker;
	n->to = n->from;
	n->from = mac;
	n->answer = 1;
	return write_neighbour(skb, n);
}

static __always_inline struct route *route_of(const struct neighbour_msg *n, __u32 vni, const struct addr *to)
{
	struct scoped_prefix key = {.bits = 32 + 128, .scope = scope_of(n->family, vni), .address = *to};

	return bpf_map_lookup_elem(&nim_forward_v1, &key);
}

static __always_inline bool is_gateway(const struct neighbour_msg *n)
{
	return n->family == FAMILY_4 ? ip4_unmapped(&n->target) == GATEWAY_4 : same_addr(&n->target, &gateway_6);
}

/* asks_as_container reports whether a container's message is a question with an address of the tenant. Containers need
 * not look for duplicates of their addresses, and get no questions. */
static __always_inline bool asks_as_container(const struct neighbour_msg *n)
{
	bool link_local = n->family == FAMILY_6 && n->sender.hi == gateway_6.hi;

	return !n->answer && !link_local && !is_unspecified(n, &n->sender);
}

/* neighbour_from_container answers a container's question. A target in the tenant's segment has its own MAC; packets to
 * all others are for the node's router, as those to the gateway. The MAC in the question is not used. */
static __slowpath int neighbour_from_container(struct __sk_buff *skb, struct neighbour_msg *n)
{
	struct sender_key key = {.source = n->sender, .scope = scope_of(n->family, 0)};
	__u32 device = device_of(skb), vni;
	struct route *r = NULL;
	struct dev_ep *own;
	struct sender *s;
	__u64 mac;

	own = bpf_map_lookup_elem(&pil_ports_v1, &device);
	if (!own)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);
	key.port = own->endpoint;
	s = bpf_map_lookup_elem(&nim_senders_v1, &key);
	if (!s)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);
	vni = s->vni;
	mac = mac_word(gateway_mac);
	if (!is_gateway(n)) {
		r = route_of(n, vni, &n->target);
		if (!r || same_addr(&n->sender, &n->target))
			return drop(skb, REASON_NOT_REPLICATED, HOOK_CONTAINER);
		if (r->ifindex)
			mac = mac_to(r);
	}
	n->from = 0;
	mac_of(device, (__u8 *)&n->from);
	if (r && r->port == PORT_NONE) {
		int why = replicate_allowed(vni);

		if (why)
			return drop(skb, why, HOOK_CONTAINER);
		return write_neighbour(skb, n) ? drop(skb, REASON_MALFORMED, HOOK_CONTAINER)
					       : replicate(skb, vni, SEGMENT_BIT | vni);
	}
	if (answer_with(skb, n, mac))
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	return return_to_sender(skb, device);
}

/* deliver_answer delivers the answer to a container's question, if its target has no other place. */
static __always_inline int deliver_answer(struct __sk_buff *skb, struct neighbour_msg *n, __be32 from, __u32 vni,
					  const struct route *to)
{
	struct route *r = route_of(n, vni, &n->sender);
	__u64 asked = 0;

	if (bpf_skb_load_bytes(skb, 0, &asked, ETH_ALEN))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	if (asked != mac_to(to) || !r)
		return drop(skb, REASON_NOT_REPLICATED, HOOK_TUNNEL);
	if (r->port != PORT_NONE && !(r->port == PORT_VXLAN && r->ifindex && vtep4_of(r) == from))
		return drop(skb, REASON_FOREIGN_UNKNOWN, HOOK_TUNNEL);
	n->to = mac_to(to);
	if (write_neighbour(skb, n))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	bpf_skb_change_type(skb, PACKET_HOST);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, to->ifindex, on_way_in(skb, skb->ifindex), false);
}

/* neighbour_from_tunnel answers questions of hosts of the tenant's segment about containers of this node. Nothing from
 * a tunnel goes to another node: the sender has asked it too. */
static __slowpath int neighbour_from_tunnel(struct __sk_buff *skb, struct neighbour_msg *n, __be32 from, __u32 wire)
{
	__u32 vni = wire & ~SEGMENT_BIT;
	struct route *r;

	if (!from || wire == vni)
		return drop(skb, REASON_NOT_REPLICATED, HOOK_TUNNEL);
	if (!replicates_to(vni, from))
		return drop(skb, REASON_FOREIGN_UNKNOWN, HOOK_TUNNEL);
	r = route_of(n, vni, &n->target);
	if (!r || r->port >= FIRST_DEVICE || r->port == PORT_NONE)
		return drop(skb, REASON_NOT_REPLICATED, HOOK_TUNNEL);
	if (n->answer)
		return deliver_answer(skb, n, from, vni, r);
	if (answer_with(skb, n, mac_to(r)))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	return send_frame(skb, from, wire);
}
