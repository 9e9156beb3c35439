/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A cache over any VXLAN network of IPv6 (the idea of ONCache, NSDI '25). A flow's packets pass the network's own
 * devices until it has let one through in each direction; what it did with those is done from then on by one program
 * a node: where they leave the container, and where they come in by the uplink. Nothing here drops a packet: what
 * the cache does not know, or had better not judge, takes the network's own way. */
#include "common/context.h"
#include "common/proto.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ECHO_REQUEST 128
#define ECHO_REPLY   129

/* Byte of an IPv6 header with the end of its traffic class, whose last bits tell of congestion (RFC 3168). */
#define ECN_BYTE      1
#define ECN_MASK      0x30

#define VXLAN_HAS_VNI 0x08000000

/* Marks of packets on the network's own way, to be learnt from where it ends. Crossing into or out of a container
 * takes them off, so nobody else can set one. */
#define LEARN_OUT 0x6f6e6301
#define LEARN_IN  0x6f6e6302

/* The overlay: this node's end of the tunnel. */
volatile const struct in6_addr tunnel_address;
volatile const __u32 tunnel_vni;
volatile const __u16 tunnel_port;

/* The kernel's struct is its VXLAN module's own, so programs cannot count on it. */
struct vxlan {
	__be32 flags, vni;
};

/* What a packet carries in the tunnel before its own IPv6 header, as lengths. */
struct outer {
	struct ethhdr eth;
	__u8 ip[sizeof(struct ipv6hdr)];
	__u8 udp[sizeof(struct udphdr)];
	__u8 vxlan[sizeof(struct vxlan)];
	struct ethhdr inner;
};
_Static_assert(sizeof(struct outer) == 84, "Ethernet, IPv6, UDP, VXLAN, Ethernet");

#define OUTER_IP    offsetof(struct outer, ip)
#define OUTER_UDP   offsetof(struct outer, udp)
#define OUTER_VXLAN offsetof(struct outer, vxlan)

/* A container has an Ethernet header of its own, whose place the outer one takes. */
#define ROOM (sizeof(struct outer) - ETH_HLEN)

/* How to a container elsewhere; the key is its address. */
struct egress {
	__u64 headers[10]; /* the outer ones as the network wrote them */
	__u32 last_header;
	__u32 uplink;
};
_Static_assert(sizeof(struct egress) == 88, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct in6_addr);
	__type(value, struct egress);
	__uint(max_entries, 1); /* set at load */
} once_egress SEC(".maps");

/* How to a container here; the key is its address. */
struct ingress {
	__u32 device; /* the node's side of its veth */
	__u8 macs[2 * ETH_ALEN];
} __attribute__((aligned(8)));
_Static_assert(sizeof(struct ingress) == 16, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct in6_addr);
	__type(value, struct ingress);
	__uint(max_entries, 1); /* set at load */
} once_ingress SEC(".maps");

/* A connection, whichever way a packet of it goes. */
struct once_flow {
	struct in6_addr local, remote;
	__be16 local_port, remote_port; /* of ICMPv6 echoes both are the identifier */
	__u32 proto;
};
_Static_assert(sizeof(struct once_flow) == 40, "no implicit padding");

/* What the network has let through. A connection counts as established when both are set, which is what
 * connection tracking calls by that name. */
struct verdict {
	__u32 out;
	__u32 device; /* of the container that it let the packets in to: its own alone go out */
};
_Static_assert(sizeof(struct verdict) == 8, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct once_flow);
	__type(value, struct verdict);
	__uint(max_entries, 1); /* set at load */
} once_filter SEC(".maps");

static __always_inline bool same_address(const struct in6_addr *a, volatile const struct in6_addr *b)
{
	for (int i = 0; i < 4; i++)
		if (a->in6_u.u6_addr32[i] != b->in6_u.u6_addr32[i])
			return false;
	return true;
}

/* readable makes as much of a packet readable in place as there is of it, up to need bytes. */
static __always_inline void readable(struct __sk_buff *skb, __u32 need)
{
	__u32 there = CTX_POINTER(skb, data_end) - CTX_POINTER(skb, data);

	if (there < need && there < skb->len)
		bpf_skb_pull_data(skb, skb->len < need ? skb->len : need);
}

/* The most that the programs read of a packet from its IPv6 header on. */
#define INNER_MOST (sizeof(struct ipv6hdr) + TCP_FLAGS + 1)

enum kind {
	OTHER, /* for the network alone */
	FIRST, /* asks for a connection */
	NEXT,
};

static __always_inline enum kind ports_of(const struct ipv6hdr *ip, const void *end, __be16 *source, __be16 *target)
{
	const __u8 *l4 = (const void *)(ip + 1);
	__u8 flags;

	if ((const void *)l4 + 8 > end)
		return OTHER;
	*source = *(__be16 *)l4;
	*target = *(__be16 *)(l4 + 2);
	switch (ip->nexthdr) {
	case IPPROTO_UDP:
		return NEXT;
	case IPPROTO_TCP:
		if ((const void *)l4 + TCP_FLAGS + 1 > end)
			return OTHER;
		flags = l4[TCP_FLAGS] & (TCP_SYN | TCP_ACK);
		return flags == TCP_SYN ? FIRST : NEXT;
	case NEXTHDR_ICMP:
		if (l4[0] != ECHO_REQUEST && l4[0] != ECHO_REPLY)
			return OTHER;
		*source = *target = *(__be16 *)(l4 + 4);
		return NEXT;
	}
	return OTHER; /* fragments too, and what has options */
}

static __always_inline enum kind outward(const struct ipv6hdr *ip, const void *end, struct once_flow *f)
{
	f->local = ip->saddr;
	f->remote = ip->daddr;
	f->proto = ip->nexthdr;
	return ports_of(ip, end, &f->local_port, &f->remote_port);
}

static __always_inline enum kind inward(const struct ipv6hdr *ip, const void *end, struct once_flow *f)
{
	f->local = ip->daddr;
	f->remote = ip->saddr;
	f->proto = ip->nexthdr;
	return ports_of(ip, end, &f->remote_port, &f->local_port);
}

/* established finds what is known of a flow that may pass by the cache. Who asks for a connection begins a new one,
 * which the network has to judge, whatever it said of the last with these ports. */
static __always_inline struct verdict *established(const struct once_flow *f, enum kind kind)
{
	struct verdict *v = bpf_map_lookup_elem(&once_filter, f);

	if (v && kind == FIRST) {
		bpf_map_delete_elem(&once_filter, f);
		return NULL;
	}
	return v && v->out && v->device ? v : NULL;
}

/* learn sends a packet by the network's own way. Where a flow lacks anything, both of its directions do so: a
 * network that tracks connections has to see both. */
static __always_inline int learn(struct __sk_buff *skb, __u32 mark)
{
	skb->mark = mark;
	return TCX_NEXT;
}

static __always_inline int relearn(struct __sk_buff *skb, const struct once_flow *f, __u32 mark)
{
	bpf_map_delete_elem(&once_filter, f);
	return learn(skb, mark);
}

static __always_inline int encapsulate(struct __sk_buff *skb, const struct egress *e, __u8 ecn)
{
	__u32 hash = bpf_get_hash_recalc(skb);
	struct ipv6hdr *ip;
	struct udphdr *udp;
	__u64 *to;
	void *data;

	/* As the kernel's tunnels do, so that devices take segments apart behind us. */
	if (bpf_skb_adjust_room(skb, ROOM, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					(__u64)ETH_HLEN << BPF_ADJ_ROOM_ENCAP_L2_SHIFT | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return learn(skb, LEARN_OUT);
	data = CTX_POINTER(skb, data);
	if (data + sizeof(struct outer) > CTX_POINTER(skb, data_end))
		return TCX_DROP; /* cannot be: there is room now */
	to = data;
	for (int i = 0; i < 10; i++)
		to[i] = e->headers[i];
	*(__u32 *)(data + sizeof(e->headers)) = e->last_header;
	ip = data + OUTER_IP;
	udp = data + OUTER_UDP;
	ip->payload_len = udp->len = bpf_htons(skb->len - OUTER_UDP);
	((__u8 *)ip)[ECN_BYTE] = (((__u8 *)ip)[ECN_BYTE] & ~ECN_MASK) | ecn;
	udp->source = bpf_htons(0xc000 | ((hash ^ hash >> 16) & 0x3fff)); /* RFC 7348 §5 */
	skb->tstamp = 0;
	return bpf_redirect(e->uplink, 0);
}

/* On what a container sends, at the node's side of its veth. */
SEC("tc")
int once_out(struct __sk_buff *skb)
{
	struct once_flow f = {};
	struct verdict *v;
	struct ipv6hdr *ip;
	struct egress *e;
	enum kind kind;
	void *data, *end;
	__u8 ecn;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return TCX_NEXT;
	readable(skb, ETH_HLEN + INNER_MOST);
	data = CTX_POINTER(skb, data);
	end = CTX_POINTER(skb, data_end);
	ip = data + ETH_HLEN;
	if ((void *)(ip + 1) > end)
		return TCX_NEXT;
	kind = outward(ip, end, &f);
	/* The network knows what to say where a hop limit runs out or a length is too much for a header. */
	if (kind == OTHER || ip->hop_limit <= 2 || skb->len > 0xffff - ROOM)
		return TCX_NEXT;
	ecn = ((__u8 *)ip)[ECN_BYTE] & ECN_MASK;
	v = established(&f, kind);
	if (!v || v->device != skb->ifindex)
		return learn(skb, LEARN_OUT);
	e = bpf_map_lookup_elem(&once_egress, &f.remote);
	if (!e)
		return relearn(skb, &f, LEARN_OUT);
	return encapsulate(skb, e, ecn);
}

/* tunnelled is the IPv6 header inside of a packet of the overlay, NULL of any other. */
static __always_inline struct ipv6hdr *tunnelled(struct __sk_buff *skb, bool out, void **end)
{
	struct vxlan *vxlan;
	struct ipv6hdr *ip;
	struct udphdr *udp;
	void *data;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present ||
	    skb->len < sizeof(struct outer) + sizeof(struct ipv6hdr))
		return NULL;
	readable(skb, sizeof(struct outer) + INNER_MOST);
	data = CTX_POINTER(skb, data);
	*end = CTX_POINTER(skb, data_end);
	ip = data + OUTER_IP;
	udp = data + OUTER_UDP;
	vxlan = data + OUTER_VXLAN;
	if (data + sizeof(struct outer) + sizeof(struct ipv6hdr) > *end || ip->nexthdr != IPPROTO_UDP ||
	    udp->dest != bpf_htons(tunnel_port) || !same_address(out ? &ip->saddr : &ip->daddr, &tunnel_address) ||
	    vxlan->flags != bpf_htonl(VXLAN_HAS_VNI) || vxlan->vni != bpf_htonl(tunnel_vni << 8) ||
	    ((struct outer *)data)->inner.h_proto != bpf_htons(ETH_P_IPV6))
		return NULL;
	return data + sizeof(struct outer);
}

static __always_inline int decapsulate(struct __sk_buff *skb, const struct ingress *c)
{
	void *data;

	if (bpf_skb_adjust_room(skb, -(__s32)ROOM, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
		return learn(skb, LEARN_IN);
	data = CTX_POINTER(skb, data);
	if (data + ETH_HLEN > CTX_POINTER(skb, data_end))
		return TCX_DROP; /* cannot be: the outer Ethernet header stays */
	__builtin_memcpy(data, c->macs, sizeof(c->macs));
	skb->tstamp = 0;
	return bpf_redirect_peer(c->device, 0);
}

/* On what comes in by the uplink. */
SEC("tc")
int once_in(struct __sk_buff *skb)
{
	struct ipv6hdr *outer, *ip;
	struct once_flow f = {};
	struct ingress *c;
	struct verdict *v;
	enum kind kind;
	void *end;

	if (skb->pkt_type != PACKET_HOST)
		return TCX_NEXT;
	ip = tunnelled(skb, false, &end);
	if (!ip)
		return TCX_NEXT;
	outer = (void *)ip - sizeof(struct outer) + OUTER_IP;
	kind = inward(ip, end, &f);
	/* A router that was congested marks the outer header; the network knows what to make of that (RFC 6040). */
	if (kind == OTHER || ip->hop_limit <= 1 || (((__u8 *)outer)[ECN_BYTE] & ECN_MASK) == ECN_MASK)
		return TCX_NEXT;
	v = established(&f, kind);
	if (!v)
		return learn(skb, LEARN_IN);
	c = bpf_map_lookup_elem(&once_ingress, &f.local);
	if (!c || c->device != v->device)
		return relearn(skb, &f, LEARN_IN);
	return decapsulate(skb, c);
}

/* forget_packet clears what of outer headers is of the packet alone. */
static __always_inline void forget_packet(struct ipv6hdr *ip, struct udphdr *udp)
{
	((__u8 *)ip)[ECN_BYTE] &= ~ECN_MASK;
	ip->payload_len = udp->len = udp->source = 0;
}

/* differ compares entries: most often nothing has changed, and a write costs more. */
static __always_inline bool differ(const void *a, const void *b, int size)
{
	const __u64 *x = a, *y = b;

	for (int i = 0; i < size / sizeof(*x); i++)
		if (x[i] != y[i])
			return true;
	return false;
}

/* On what leaves by the uplink: the network has let it out. */
SEC("tc")
int once_learn_out(struct __sk_buff *skb)
{
	struct verdict new = {.out = 1}, *v;
	struct egress e = {.uplink = skb->ifindex}, *known;
	struct once_flow f = {};
	struct udphdr *udp;
	struct ipv6hdr *ip;
	void *end;

	if (skb->mark != LEARN_OUT)
		return TCX_NEXT;
	ip = tunnelled(skb, true, &end);
	if (!ip || outward(ip, end, &f) == OTHER)
		return TCX_NEXT;
	/* Headers are used again as they are, so they may not have a sum over what follows. */
	udp = (void *)ip - sizeof(struct outer) + OUTER_UDP;
	if (udp->check || bpf_skb_load_bytes(skb, 0, e.headers, sizeof(struct outer)))
		return TCX_NEXT;
	forget_packet((void *)e.headers + OUTER_IP, (void *)e.headers + OUTER_UDP);
	known = bpf_map_lookup_elem(&once_egress, &f.remote);
	if (!known || differ(known, &e, sizeof(e)))
		bpf_map_update_elem(&once_egress, &f.remote, &e, BPF_ANY);
	v = bpf_map_lookup_elem(&once_filter, &f);
	if (v)
		v->out = 1;
	else
		bpf_map_update_elem(&once_filter, &f, &new, BPF_NOEXIST);
	return TCX_NEXT;
}

/* On what the node gives a container, at its side of the veth: the network has let it in. */
SEC("tc")
int once_learn_in(struct __sk_buff *skb)
{
	struct verdict new = {.device = skb->ifindex}, *v;
	struct ingress c = {.device = skb->ifindex}, *known;
	struct once_flow f = {};
	struct ipv6hdr *ip;
	void *data, *end;

	if (skb->mark != LEARN_IN || skb->protocol != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	readable(skb, ETH_HLEN + INNER_MOST);
	data = CTX_POINTER(skb, data);
	end = CTX_POINTER(skb, data_end);
	ip = data + ETH_HLEN;
	if ((void *)(ip + 1) > end || inward(ip, end, &f) == OTHER)
		return TCX_NEXT;
	__builtin_memcpy(c.macs, data, sizeof(c.macs));
	known = bpf_map_lookup_elem(&once_ingress, &f.local);
	if (!known || differ(known, &c, sizeof(c)))
		bpf_map_update_elem(&once_ingress, &f.local, &c, BPF_ANY);
	v = bpf_map_lookup_elem(&once_filter, &f);
	if (v)
		v->device = skb->ifindex;
	else
		bpf_map_update_elem(&once_filter, &f, &new, BPF_NOEXIST);
	return TCX_NEXT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
