/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Exposed ports of services: addresses and ports at which hosts outside reach containers of a tenant. The node that a
 * connection comes in by, its ingress node, chooses the backend and translates the destination. The packet goes to the
 * backend's node in a tunnel, with the source that the client has, and the answer comes back in a tunnel to the ingress
 * node. exposed_stages.h has the programs. */
#pragma once
#include "net/netpila/gateway_nat.h"
#include "net/netpila/exposed_table.h"

/* Ports of this node's containers that are backends of exposed ports, by the address that the container sees. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct svc_key);
	__type(value, __u32);	/* 1 */
	__uint(max_entries, 1); /* set at load */
} pil_extargets_v1 SEC(".maps");

/* The table of Maglev of an exposed port (Eisenbud et al., NSDI 2016, §3.4), in parts: with the same backends, all
 * nodes choose the same one for a connection. struct svc has the number of slots as its count. */
#define MAGLEV_PART 256

struct maglev_part {
	__u32 backends[MAGLEV_PART]; /* numbers */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct svc_member); /* set and number of the part */
	__type(value, struct maglev_part);
	__uint(max_entries, 1); /* set at load */
} pil_maglev_v1 SEC(".maps");

/* Connections to exposed ports at their ingress node, by the tenant's number for services, so that no tenant evicts
 * those of another. Each has an entry for packets of the client (local: the exposed address, translated to the backend)
 * and one for answers (local: the backend). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 4096);
	__array(values, struct nat_connections);
} pil_exconns_v1 SEC(".maps");

/* Low half of the address at which a node receives packets of exposed ports, by tunnel; index 2. */
#define EXPOSED_TUNNEL_HOST (bpf_cpu_to_be64((__u64)EGRESS_APP << 24 | 2))

static __always_inline bool is_exposed_tunnel(const struct addr *a)
{
	return a->lo == EXPOSED_TUNNEL_HOST && in_base(a);
}

/* node_of_tag is the inverse of gateway_tag. */
static __always_inline __u64 node_of_tag(__u32 tag)
{
	return bpf_cpu_to_be64((bpf_be64_to_cpu(own_node) & ~0xffffffffULL) | tag);
}

/* exposed_target reports whether a port of a container is a backend of an exposed port. */
static __always_inline bool exposed_target(const struct addr *seen, __be16 port, __u8 proto)
{
	struct svc_key key = {.address = *seen, .port = port, .proto = proto};

	return bpf_map_lookup_elem(&pil_extargets_v1, &key);
}

/* has_exposed_session reports whether a packet of a container belongs to a connection that a host outside has opened to
 * an exposed port. */
static __noinline bool has_exposed_session(struct __sk_buff *skb, const struct packet *p, const struct ep_src *from,
					   const struct addr *remote)
{
	__be16 ports[2] = {};
	struct pol_scratch *d;
	struct session_key *key;
	__u32 zero = 0;

	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d || !from || !remote || bpf_skb_load_bytes(skb, p->l4, ports, sizeof(ports)))
		return false;
	key = &d->ct.key;
	__builtin_memset(key, 0, sizeof(*key));
	key->local = from->plain;
	key->remote = *remote;
	key->local_port = ports[0];
	key->remote_port = ports[1];
	key->endpoint = from->endpoint;
	key->tenant = from->tenant_id;
	key->proto = p->proto;
	key->session_kind = SESSION_EXPOSED;
	d->ct.slot = ct_slot_of(key);
	d->ct.now = bpf_ktime_get_coarse_ns();
	return ct_read_bucket(&d->ct, d->ct.slot.first) || ct_read_bucket(&d->ct, d->ct.slot.second);
}

/* is_exposed_answer reports whether a packet from a container to a host outside answers a connection to an exposed
 * port. All others are the container's own. */
__noinline int is_exposed_answer(struct __sk_buff *skb, const struct packet *p, const struct flow_key *key)
{
	struct ep_src *from;
	struct addr seen;
	__be16 port = 0;

	if (!p || !key || (p->proto != NEXTHDR_TCP && p->proto != NEXTHDR_UDP) || !p->l4 || p->parts & HAS_FRAGMENT ||
	    bpf_skb_load_bytes(skb, p->l4, &port, sizeof(port)))
		return false;
	seen = key->src;
	if (!exposed_target(&seen, port, p->proto) || is_first_segment(tcp_flags(skb, p)))
		return false;
	from = bpf_map_lookup_elem(&pil_sources_v2, &seen);
	return from && from->ifindex == key->device && has_exposed_session(skb, p, from, &key->dst);
}
