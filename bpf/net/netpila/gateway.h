/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Egress gateways: between a container's node and a gateway packets are in an IPv6 tunnel (RFC 2473), so the gateway
 * sees the container's plaintext address. It translates source address and port. Its tables: the tenants that it is a
 * gateway of, and a table of connections per tenant, so that no tenant evicts connections of another. */
#pragma once
#include "net/netpila/egress.h"
#include "net/netpila/gateway_table.h"

#define TUNNEL_HLEN IPV6_HLEN

/* Low half of the address at which a node receives these packets; index 1. The high half is own_node. */
#define EGRESS_TUNNEL_HOST (bpf_cpu_to_be64((__u64)EGRESS_APP << 24 | 1))

static __always_inline bool is_egress_tunnel(const struct addr *a)
{
	return a->lo == EGRESS_TUNNEL_HOST && in_base(a);
}

/* Gateways that do not answer probes. New connections avoid them if the rule has another one. Without an agent, nothing
 * changes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64); /* /64 of the node */
	__type(value, __u8);
	__uint(max_entries, 1024);
} pil_gwsilent_v1 SEC(".maps");

/* When a gateway has last answered a probe (CLOCK_MONOTONIC, ns), by the /64 of its node. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u64);
	__type(value, __u64);
	__uint(max_entries, 1024);
} pil_gwanswers SEC(".maps");

/* A probe of a gateway, and its answer: the payload of a packet between tunnel addresses without an upper layer. The
 * program answers, so a gateway without an agent is alive. */
#define PROTO_NONE 59

enum gateway_probe_kind {
	GATEWAY_PROBE = 1,
	GATEWAY_ALIVE = 2,
};

struct gateway_probe {
	__be32 magic;
	__u8 kind;
	__u8 zero[3];
};
#define GATEWAY_PROBE_MAGIC bpf_htonl(0x50475750) /* "PGWP" */

/* The address of this gateway for a tenant id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct addr);
	__uint(max_entries, 4096);
} pil_gwtenants_v1 SEC(".maps");

/* What egress_begin finds out about a container's packet. */
struct egress_way {
	struct addr next_hop;
	struct access_rule rule;
};

/* Data that is too large for the stack. Programs run with softirqs off, so a CPU's copy is never shared. */
struct gateway_scratch {
	struct flow_key key;
	struct addr next_hop;
	struct nat_key out, back, other;
	struct nat_entry entry, own;
	struct egress_way way;
	struct icmp6_error error;
	__u8 zero[6];
	struct flow flow; /* of a packet that no cache has a flow of */
	struct flow hop;  /* next hop of a packet that no cache has one of */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct gateway_scratch);
	__uint(max_entries, 1);
} pil_gwscratch SEC(".maps");

static __always_inline struct gateway_scratch *gateway_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pil_gwscratch, &zero);
}

/* gateway_tag is what a session keeps of its gateway: the lower half of its /64, in which the nodes of a base prefix
 * differ. */
static __always_inline __u32 gateway_tag(__u64 node)
{
	return bpf_be64_to_cpu(node);
}

static __always_inline bool is_silent(__u64 node)
{
	return bpf_map_lookup_elem(&pil_gwsilent_v1, &node);
}

/* choose_gateway returns the gateway of a new connection. */
static __always_inline __u64 choose_gateway(struct __sk_buff *skb, const struct access_rule *rule)
{
	__u64 first = rule->gateways[0], second = rule->gateways[1];

	if (!second)
		return first;
	if (is_silent(first) != is_silent(second))
		return is_silent(first) ? second : first;
	return bpf_get_hash_recalc(skb) & 1 ? second : first;
}

static __always_inline bool has_gateway(const struct access_rule *rule, __u64 node)
{
	return rule->action == ACCESS_GATEWAY && node && (rule->gateways[0] == node || rule->gateways[1] == node);
}

/* is_translatable: gateways translate ports, and echo identifiers. */
static __always_inline bool is_translatable(const struct packet *p)
{
	if (p->parts & HAS_FRAGMENT || !p->l4)
		return false;
	if (p->proto == NEXTHDR_ICMP)
		return is_echo(NEXTHDR_ICMP, p->icmp_type);
	return p->proto == NEXTHDR_TCP || p->proto == NEXTHDR_UDP;
}

/* The cache of next hops, apart from the flows: a flow and its next hop are in use at the same time. */
#define HOP_SETS 64

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_set);
	__uint(max_entries, HOP_SETS); /* times the number of CPUs, set at load */
} pil_ohops SEC(".maps");

/* hop_owner returns who has the slot of a next hop, as flow_owner reads it: on a container's node the device, on a
 * gateway the address of the tenant. */
static __always_inline __u64 hop_owner(const struct addr *src, __u32 device)
{
	__u64 h = (src->hi ^ src->lo ^ device) * 0x9e3779b97f4a7c15ULL;

	return bpf_cpu_to_be64(h | 1ULL << 40);
}

/* cached_hop finds the next hop of packets from src to dst in the cache of hops, or asks the FIB. The flow is valid for
 * this packet; without its egress, the packet goes by the neighbour table, and the cache keeps nothing. */
static __noinline struct flow *cached_hop(struct __sk_buff *skb, const struct addr *src, const struct addr *dst,
					  __u32 device, __u32 path)
{
	struct gateway_scratch *d = gateway_scratch();
	struct flow *f, *known;
	struct flow_key *key;
	struct flow_set *set;
	__u32 number;

	if (!d)
		return NULL;
	key = &d->key;
	key->src = *src;
	key->dst = *dst;
	key->device = device;
	key->generation = generation();
	key->path = path;
	key->zero = 0;
	_Static_assert(HOP_SETS == 1 << 6, "the set is the top 6 bits");
	number = bpf_get_smp_processor_id() * HOP_SETS + (flow_hash(key) >> 58);
	set = bpf_map_lookup_elem(&pil_ohops, &number);
	if (!set)
		return NULL;
	known = find_way(set, key);
	if (known && known->expires > bpf_jiffies64())
		return known;
	f = &d->hop;
	begin_outside(f, key, src, dst, hop_owner(src, device));
	if (find_next_hop(skb, f, 1, &d->next_hop))
		return NULL;
	/* Without a known neighbour the FIB says the MTU only of a packet that is too long. */
	if (f->egress != EGRESS_UPLINK)
		find_next_hop(skb, f, 0xffff, &d->next_hop);
	else
		*(known ? known : take_way(set, f->extra, key->generation)) = *f;
	return f;
}

/* send_by sends a packet, which is complete, by the next hop of a flow. */
static __always_inline int send_by(struct __sk_buff *skb, struct flow *f)
{
	struct gateway_scratch *d = gateway_scratch();
	struct eth_ip6 *h = eth_ip6_of(skb);

	if (!h || !d)
		return TC_ACT_SHOT;
	if (f->egress == EGRESS_UPLINK) {
		set_macs(h, f);
		return leave_node(skb, f, EGRESS_UPLINK, NULL);
	}
	return leave_node(skb, f, EGRESS_NEIGHBOUR, NULL);
}

/* tunnel_hop finds the next hop of the tunnel to a node. */
static __always_inline struct flow *tunnel_hop(struct __sk_buff *skb, __u64 node, __u32 device, __u32 path)
{
	struct addr src = {.hi = own_node, .lo = EGRESS_TUNNEL_HOST}, dst = {.hi = node, .lo = EGRESS_TUNNEL_HOST};

	return cached_hop(skb, &src, &dst, device, path);
}

/* ip6ip6_push puts the outer header before a packet; host is the low half of both its addresses. Traffic class and flow
 * label are those of the packet. The size of segments stays, because the packet fits into the tunnel. It returns 0 or a
 * reason. */
static __noinline int ip6ip6_push(struct __sk_buff *skb, __u64 node, __u64 host)
{
	struct eth_ip6 *h = eth_ip6_of(skb), o = {};
	__u32 length = skb->len - ETH_HLEN;

	if (!h)
		return REASON_MALFORMED;
	o.priority_version = h->priority_version;
	__builtin_memcpy(o.flow, h->flow, sizeof(o.flow));
	o.payload_len = length > 0xffff ? 0 : bpf_htons(length);
	o.nexthdr = PROTO_IPV6;
	o.hop_limit = TUNNEL_HOPS;
	o.src.hi = own_node;
	o.dst.hi = node;
	o.src.lo = o.dst.lo = host;
	if (bpf_skb_adjust_room(skb, TUNNEL_HLEN, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &o.priority_version, IPV6_HLEN, 0))
		return REASON_MALFORMED;
	return 0;
}

static __always_inline int ip6ip6_pull(struct __sk_buff *skb)
{
	return bpf_skb_adjust_room(skb, -TUNNEL_HLEN, BPF_ADJ_ROOM_MAC,
				   BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_DECAP_L3_IPV6);
}

/* begin_tunnel translates a container's packet that goes by another node, or by this one in that role, and finds its
 * next hop. Without one it returns NULL, and the verdict about the packet, which it has dropped. */
static __always_inline struct flow *begin_tunnel(struct __sk_buff *skb, const struct packet *p, struct flow *f,
						 __u64 node, int *verdict)
{
	struct eth_ip6 *h;
	struct flow *hop;
	int why;

	hop = node == own_node ? cached_hop(skb, &f->src, &f->dst, f->key.device, f->key.path)
			       : tunnel_hop(skb, node, f->key.device, f->key.path);
	if (!hop) {
		*verdict = drop(skb, REASON_NO_ROUTE, HOOK_CONTAINER);
		return NULL;
	}
	f->mtu = node == own_node ? hop->mtu : hop->mtu - TUNNEL_HLEN;
	h = eth_ip6_of(skb);
	if (!h) {
		*verdict = drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
		return NULL;
	}
	why = dec_hop_limit(skb, h, p, f);
	if (why) {
		*verdict = icmp_error_send(skb, p, f, why);
		return NULL;
	}
	if (f->translate && write_addresses(skb, h, p, f)) {
		*verdict = drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
		return NULL;
	}
	return hop;
}
