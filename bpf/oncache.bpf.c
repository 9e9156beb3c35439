/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A cache for any VXLAN network with IPv6 (the idea of ONCache, NSDI '25). The packets of a flow pass the network's own
 * devices until it has let one through in each direction. From then on one program per direction does the same work:
 * where packets leave the container, and where they enter by the uplink. These programs drop nothing: packets on a
 * cache miss, and those that need a decision, pass the network itself. */
#include "common/context.h"
#include "common/proto.h"
#include "tunnel/pull.h"
#include "tunnel/push.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ECHO_REQUEST 128
#define ECHO_REPLY   129

/* Marks of packets on the network's own path, from which its last hook learns. The kernel clears marks when a packet
 * enters or leaves a container, so containers cannot set them. */
#define LEARN_OUT 0x6f6e6301
#define LEARN_IN  0x6f6e6302

/* this node's end of the tunnel */
volatile const struct addr tunnel_address;
volatile const __u32 tunnel_vni;
volatile const __u16 tunnel_port;

/* All headers before the inner IPv6 header. */
struct outer {
	struct outer6 tunnel;
	struct ethhdr inner;
};
_Static_assert(sizeof(struct outer) == 84, "Ethernet, IPv6, UDP, VXLAN, Ethernet");

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

static __always_inline __u8 ecn_of(const struct ipv6hdr *ip)
{
	return ((__u8 *)ip)[1] >> ECN_SHIFT6 & ECN_MASK;
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
	__u64 *to;
	void *data;

	if (tunnel_grow(skb, false, 0, true))
		return learn(skb, LEARN_OUT);
	data = CTX_POINTER(skb, data);
	if (data + sizeof(struct outer) > CTX_POINTER(skb, data_end))
		return TCX_DROP; /* cannot happen: there is room now */
	to = data;
	for (int i = 0; i < 10; i++)
		to[i] = e->headers[i];
	*(__u32 *)(data + sizeof(e->headers)) = e->last_header;
	fit6(data, skb->len, ecn, tunnel_sport(hash));
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
	ecn = ecn_of(ip);
	v = established(&f, kind);
	if (!v || v->device != skb->ifindex)
		return learn(skb, LEARN_OUT);
	e = bpf_map_lookup_elem(&once_egress, &f.remote);
	if (!e)
		return relearn(skb, &f, LEARN_OUT);
	return encapsulate(skb, e, ecn);
}

/* tunnelled returns the inner IPv6 header of a packet of the overlay, NULL for any other packet. */
static __always_inline struct ipv6hdr *tunnelled(struct __sk_buff *skb, bool out, struct tunnel *t, void **end)
{
	struct addr own = {.hi = tunnel_address.hi, .lo = tunnel_address.lo};
	struct outer *h;
	void *data;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return NULL;
	readable(skb, sizeof(struct outer) + INNER_MOST);
	data = CTX_POINTER(skb, data);
	*end = CTX_POINTER(skb, data_end);
	h = data;
	if (data + sizeof(struct outer) + sizeof(struct ipv6hdr) > *end ||
	    read6(&h->tunnel, skb->len, bpf_htons(tunnel_port), 0, t) || t->vni != tunnel_vni ||
	    !same_addr(out ? &t->src : &t->dst, &own) || h->inner.h_proto != bpf_htons(ETH_P_IPV6))
		return NULL;
	return data + sizeof(struct outer);
}

static __always_inline int decapsulate(struct __sk_buff *skb, const struct ingress *c)
{
	void *data;

	if (tunnel_shrink(skb, ROOM, false))
		return learn(skb, LEARN_IN);
	data = CTX_POINTER(skb, data);
	if (data + ETH_HLEN > CTX_POINTER(skb, data_end))
		return TCX_DROP; /* cannot happen: the outer Ethernet header stays */
	__builtin_memcpy(data, c->macs, sizeof(c->macs));
	skb->tstamp = 0;
	return bpf_redirect_peer(c->device, 0);
}

static __always_inline bool changes_ecn(__u8 outer, __u8 inner)
{
	return outer != inner && ecn_decap(outer, inner) != inner;
}

/* Packets that enter by the uplink. */
SEC("tc")
int once_in(struct __sk_buff *skb)
{
	struct once_flow f = {};
	struct ipv6hdr *ip;
	struct ingress *c;
	struct verdict *v;
	struct tunnel t;
	enum kind kind;
	void *end;

	if (skb->pkt_type != PACKET_HOST)
		return TCX_NEXT;
	ip = tunnelled(skb, false, &t, &end);
	if (!ip)
		return TCX_NEXT;
	kind = inward(ip, end, &f);
	/* The network handles what a congested router has marked (RFC 6040), and UDP segments. */
	if (kind == OTHER || ip->hop_limit <= 1 || changes_ecn(t.tos & ECN_MASK, ecn_of(ip)) || is_for_kernel(skb))
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
static __always_inline void forget_packet(struct outer6 *h)
{
	((__u8 *)&h->tos_flow)[1] &= ~(ECN_MASK << ECN_SHIFT6);
	h->payload_len = h->udp.len = h->udp.sport = 0;
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
	struct ipv6hdr *ip;
	struct tunnel t;
	void *end;

	if (skb->mark != LEARN_OUT)
		return TCX_NEXT;
	ip = tunnelled(skb, true, &t, &end);
	if (!ip || outward(ip, end, &f) == OTHER)
		return TCX_NEXT;
	/* The headers are used for other packets, so they must not have a checksum over the payload. */
	if (t.flags & TUNNEL_CSUM || bpf_skb_load_bytes(skb, 0, e.headers, sizeof(struct outer)))
		return TCX_NEXT;
	forget_packet((void *)e.headers);
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
