/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A cache for any VXLAN network with IPv6 (the idea of ONCache, NSDI '25). The packets of a flow pass the network's own
 * devices until it has let one through in each direction. From then on one program per direction does the same work:
 * where packets leave the container, and where they enter by the uplink. These programs drop nothing: packets on a
 * cache miss, and those that need a decision, pass the network itself. */
#include "common/context.h"
#include "common/proto.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ECHO_REQUEST 128
#define ECHO_REPLY   129

/* Byte of an IPv6 header with the ECN bits (RFC 3168). */
#define ECN_BYTE      1
#define ECN_MASK      0x30

#define VXLAN_HAS_VNI 0x08000000

/* Marks of packets on the network's own path, from which its last hook learns. The kernel clears marks when a packet
 * enters or leaves a container, so containers cannot set them. */
#define LEARN_OUT 0x6f6e6301
#define LEARN_IN  0x6f6e6302

/* this node's end of the tunnel */
volatile const struct in6_addr tunnel_address;
volatile const __u32 tunnel_vni;
volatile const __u16 tunnel_port;

/* The kernel's struct is private to its VXLAN module, so programs cannot rely on it. */
struct vxlan {
	__be32 flags, vni;
};

/* All headers before the inner IPv6 header. Only their sizes matter, so most are byte arrays. */
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

/* The outer Ethernet header takes the place of the container's own. */
#define ROOM (sizeof(struct outer) - ETH_HLEN)

/* Egress entry: the headers to a container on another node; the key is its address. */
struct egress {
	__u64 headers[10]; /* outer headers as the network wrote them */
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

/* Ingress entry: the way to a container of this node; the key is its address. */
struct ingress {
	__u32 device; /* the node's end of its veth */
	__u8 macs[2 * ETH_ALEN];
} __attribute__((aligned(8)));
_Static_assert(sizeof(struct ingress) == 16, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct in6_addr);
	__type(value, struct ingress);
	__uint(max_entries, 1); /* set at load */
} once_ingress SEC(".maps");

/* A connection; the key is the same in both directions. */
struct once_flow {
	struct in6_addr local, remote;
	__be16 local_port, remote_port; /* for ICMPv6 echo both are the identifier */
	__u32 proto;
};
_Static_assert(sizeof(struct once_flow) == 40, "no implicit padding");

/* The directions that the network has let through. A connection with both is established in the sense of connection
 * tracking. */
struct verdict {
	__u32 out;
	__u32 device; /* device of the container that the network let packets in to; only that one may use the cache */
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

/* The programs read at most this much from the inner IPv6 header on. */
#define INNER_MOST (sizeof(struct ipv6hdr) + TCP_FLAGS + 1)

enum kind {
	OTHER, /* only for the network */
	FIRST, /* opens a connection */
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
	return OTHER; /* also fragments and packets with extension headers */
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

/* established returns the entry of a flow that may use the cache. A SYN opens a new connection, so the network has to
 * decide, whatever it decided for the last one with these ports. */
static __always_inline struct verdict *established(const struct once_flow *f, enum kind kind)
{
	struct verdict *v = bpf_map_lookup_elem(&once_filter, f);

	if (v && kind == FIRST) {
		bpf_map_delete_elem(&once_filter, f);
		return NULL;
	}
	return v && v->out && v->device ? v : NULL;
}

/* learn sends a packet by the network's own path. If one direction of a flow lacks an entry, both go there, because a
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

	/* As the kernel's tunnels do it, so that the device can segment the packet. */
	if (bpf_skb_adjust_room(skb, ROOM, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					(__u64)ETH_HLEN << BPF_ADJ_ROOM_ENCAP_L2_SHIFT | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return learn(skb, LEARN_OUT);
	data = CTX_POINTER(skb, data);
	if (data + sizeof(struct outer) > CTX_POINTER(skb, data_end))
		return TCX_DROP; /* cannot happen: there is room now */
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

/* A container's packets, at the node's end of its veth. */
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
	/* The network sends the ICMP errors for an expired hop limit or a packet that is too long. */
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

/* tunnelled returns the inner IPv6 header of a packet of the overlay, NULL for any other packet. */
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
		return TCX_DROP; /* cannot happen: the outer Ethernet header stays */
	__builtin_memcpy(data, c->macs, sizeof(c->macs));
	skb->tstamp = 0;
	return bpf_redirect_peer(c->device, 0);
}

/* Packets that enter by the uplink. */
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
	/* A congested router marks the outer header; the network handles that (RFC 6040). */
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

/* forget_packet clears the fields of outer headers that differ from packet to packet. */
static __always_inline void forget_packet(struct ipv6hdr *ip, struct udphdr *udp)
{
	((__u8 *)ip)[ECN_BYTE] &= ~ECN_MASK;
	ip->payload_len = udp->len = udp->source = 0;
}

/* differ compares entries: a write costs more, and most often nothing has changed. */
static __always_inline bool differ(const void *a, const void *b, int size)
{
	const __u64 *x = a, *y = b;

	for (int i = 0; i < size / sizeof(*x); i++)
		if (x[i] != y[i])
			return true;
	return false;
}

/* Packets that leave by the uplink: the network has let them out. */
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
	/* The headers are used for other packets, so they must not have a checksum over the payload. */
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

/* Packets to a container, at the node's end of its veth: the network has let them in. */
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
