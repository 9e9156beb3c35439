/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets of exposed ports (exposed.h). uplink_class.h and egress_stages.h tail-call these programs. On the way to a
 * container: exposed_in at the ingress node, then exposed_tunnel at the node of the backend. On the way back:
 * exposed_out there, then exposed_tunnel at the ingress node. If both are one node, there is no tunnel. */
#pragma once
#include "net/netpila/gateway_stages.h"
#include "net/netpila/service_stages.h"

/* is_client reports whether an address may be that of a client outside of the cluster. Protected are, among others,
 * link-local and multicast addresses, and those of this node: a container must not get a way to them by a forged
 * source.
 */
static __always_inline bool is_client(const struct addr *a)
{
	struct addr client = *a;

	return !in_base(a) && !in_private(a) && !in_services(a) && !is_egress(a) && !in_ila(a) &&
	       !is_protected(&client);
}

/* to_tunnel_program goes on at this node: it is also the backend's, or also the ingress node. */
static __always_inline int to_tunnel_program(struct __sk_buff *skb, enum hook hook)
{
	bpf_tail_call(skb, &pil_services_v1, EXPOSED_TUNNEL);
	return drop(skb, REASON_NO_PROGRAM, hook);
}

/* refuse_outside drops a packet of a client, and sends it an error. */
static __noinline int refuse_outside(struct __sk_buff *skb, const struct packet *p, __u32 about, __u32 reason)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct tcp_reset r = {};

	if (!p || !h)
		return TC_ACT_SHOT;
	if (p->proto != NEXTHDR_TCP)
		return error_outside(skb, p, 0, about, reason);
	__builtin_memcpy(r.frame.eth.h_dest, h->eth.h_source, ETH_ALEN);
	__builtin_memcpy(r.frame.eth.h_source, h->eth.h_dest, ETH_ALEN);
	drop(skb, reason, HOOK_UPLINK_IN);
	if (!outside_error_allowed(about) || tcp_reset_write(skb, p, &r))
		return TC_ACT_SHOT;
	return send_back(skb);
}

/* maglev_hash is the same on all nodes. With affinity, only the client's address counts. */
static __always_inline __u64 maglev_hash(const struct nat_key *client, const struct svc *s)
{
	__u64 h = client->remote.hi * 0x9e3779b97f4a7c15ULL;

	h = (h ^ h >> 29 ^ client->remote.lo) * 0xc2b2ae3d27d4eb4fULL;
	if (!s->affinity) {
		h ^= (__u64)client->remote_port << 32 | (__u64)client->local_port << 16 | client->proto;
		h = (h ^ h >> 31 ^ client->local.hi ^ client->local.lo) * 0xc2b2ae3d27d4eb4fULL;
	}
	h = (h ^ h >> 31) * 0x9e3779b97f4a7c15ULL;
	return h ^ h >> 32;
}

/* maglev_backend returns the number of the backend of a connection, or 0. */
static __noinline __u32 maglev_backend(const struct svc *s, __u64 hash)
{
	struct svc_member at = {};
	struct maglev_part *part;
	__u32 slot;

	if (!s || !s->count)
		return 0;
	slot = (__u32)hash % s->count;
	at.set = s->set;
	at.index = slot / MAGLEV_PART;
	part = bpf_map_lookup_elem(&pil_maglev_v1, &at);
	return part ? part->backends[slot % MAGLEV_PART] : 0;
}

/* What the packets of a connection have shown, each entry that of its own direction. */
enum exposed_seen {
	EXPOSED_FIN = 1,
	EXPOSED_RESET = 2,
};

/* Entries have the time in units of 69 s. Their age is right up to five hours, and later seems less. */
#define EXPOSED_UNIT	 36 /* log2, ns */
#define EXPOSED_IDLE_TCP (TIMEOUT_TCP * 1000000000ULL >> EXPOSED_UNIT)
#define EXPOSED_IDLE_UDP (TIMEOUT_DATAGRAMS * 1000000000ULL >> EXPOSED_UNIT)

static __always_inline __u8 exposed_time(void)
{
	return bpf_ktime_get_coarse_ns() >> EXPOSED_UNIT;
}

/* note_packet notes in the entry of a connection that a packet has used it. Programs of other CPUs may write the same.
 */
static __always_inline void note_packet(struct nat_entry *e, const struct packet *p, __u8 flags)
{
	__u8 now = exposed_time(), seen = e->seen;

	if (p->proto == NEXTHDR_TCP)
		seen |= (flags & TCP_FIN ? EXPOSED_FIN : 0) | (flags & TCP_RST ? EXPOSED_RESET : 0);
	if (e->used != now)
		e->used = now;
	if (e->seen != seen)
		e->seen = seen;
}

/* is_over reports whether a connection has ended, or had no packet for longer than its session lives. */
static __always_inline bool is_over(const struct nat_entry *client, const struct nat_entry *backend, __u8 proto)
{
	__u8 now = exposed_time(), a = now - client->used, b = now - backend->used;

	if ((client->seen | backend->seen) & EXPOSED_RESET || (client->seen & backend->seen & EXPOSED_FIN))
		return true;
	return (a < b ? a : b) > (proto == NEXTHDR_TCP ? EXPOSED_IDLE_TCP : EXPOSED_IDLE_UDP) + 1;
}

/* keep_exposed_answers makes the entry for answers of a connection, whose backend is in d->entry, or begins it anew. It
 * returns false if the client has another connection to the same port of the backend, by another exposed port and from
 * the same port of its own. */
static __noinline bool keep_exposed_answers(void *connections, struct gateway_scratch *d, bool anew)
{
	struct nat_entry *has, *other;

	if (!connections || !d)
		return false;
	d->out = d->back;
	d->out.local = d->entry.address;
	d->out.local_port = d->entry.port;
	has = bpf_map_lookup_elem(connections, &d->out);
	if (has && same_addr(&has->address, &d->back.local) && has->port == d->back.local_port &&
	    has->backend == d->entry.backend && !anew)
		return true;
	if (has && (!same_addr(&has->address, &d->back.local) || has->port != d->back.local_port)) {
		d->other = d->back;
		d->other.local = has->address;
		d->other.local_port = has->port;
		other = bpf_map_lookup_elem(connections, &d->other);
		if (other && !is_over(other, has, d->back.proto))
			return false;
		if (other)
			bpf_map_delete_elem(connections, &d->other);
	}
	d->own = d->entry;
	d->own.address = d->back.local;
	d->own.port = d->back.local_port;
	d->own.seen = 0;
	return !bpf_map_update_elem(connections, &d->out, &d->own, BPF_ANY);
}

/* Backends that a new connection tries if the client has the port of one already. */
#define EXPOSED_TRIES 4

/* new_exposed_connection chooses the backend of a connection. It returns 0 or a reason. */
static __noinline int new_exposed_connection(void *connections, struct gateway_scratch *d, const struct svc *s)
{
	struct svc_backend *b;
	__u64 hash;

	if (!connections || !d || !s)
		return REASON_NO_BACKEND;
	hash = maglev_hash(&d->back, s);
	for (int i = 0; i < EXPOSED_TRIES; i++) {
		__u32 number = maglev_backend(s, hash);

		b = svc_backend_of(number);
		if (!b)
			return REASON_NO_BACKEND;
		d->entry.address = b->plain;
		d->entry.port = b->port;
		d->entry.backend = number;
		d->entry.seen = 0;
		d->entry.used = exposed_time();
		if (keep_exposed_answers(connections, d, true)) {
			svc_count(s->frontend, false);
			return bpf_map_update_elem(connections, &d->back, &d->entry, BPF_ANY) ? REASON_GATEWAY_FULL : 0;
		}
		hash = hash * 0x9e3779b97f4a7c15ULL + 1;
	}
	return REASON_GATEWAY_FULL;
}

/* has_node_socket reports whether a packet to a port of the node's own address is for a connection of one of its
 * processes. */
static __noinline bool has_node_socket(struct __sk_buff *skb, const struct nat_key *key)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *socket;
	bool connected;

	if (!key)
		return false;
	__builtin_memcpy(t.ipv6.saddr, &key->remote, sizeof(key->remote));
	__builtin_memcpy(t.ipv6.daddr, &key->local, sizeof(key->local));
	t.ipv6.sport = key->remote_port;
	t.ipv6.dport = key->local_port;
	if (key->proto == NEXTHDR_TCP) {
		socket = bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv6), CURRENT_NETNS, 0);
		if (!socket)
			return false;
		connected = socket->state != BPF_TCP_LISTEN;
	} else {
		socket = bpf_sk_lookup_udp(skb, &t, sizeof(t.ipv6), CURRENT_NETNS, 0);
		if (!socket)
			return false;
		connected = socket->state == BPF_TCP_ESTABLISHED;
	}
	bpf_sk_release(socket);
	return connected;
}

/* EXPOSED_TO_NODE is in place of a reason: a process of the node has the connection. */
#define EXPOSED_TO_NODE (-1)

/* exposed_connection finds the connection of a packet of a client, or makes one. It returns 0, a reason, or
 * EXPOSED_TO_NODE. */
static __noinline int exposed_connection(struct __sk_buff *skb, const struct packet *p, struct gateway_scratch *d,
					 struct svc_work *w)
{
	struct nat_entry *known;
	struct svc_backend *b;
	void *connections;
	__u8 flags = 0;
	__u32 tenant;
	bool opens;
	int why;

	if (!p || !d || !w)
		return REASON_MALFORMED;
	tenant = w->service.exposed;
	connections = bpf_map_lookup_elem(&pil_exconns_v1, &tenant);
	if (!connections)
		return REASON_NO_SERVICE;
	if (p->proto == NEXTHDR_TCP)
		bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &flags, sizeof(flags));
	opens = !is_error(p) && p->proto == NEXTHDR_TCP && (flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
	known = bpf_map_lookup_elem(connections, &d->back);
	if (known) {
		if (opens)
			known->seen = 0;
		if (!is_error(p))
			note_packet(known, p, flags);
		d->entry = *known;
		b = svc_backend_of(d->entry.backend);
		if (b && b->frontend == w->service.frontend && !(opens && b->draining))
			return is_error(p) || keep_exposed_answers(connections, d, opens) ? 0 : REASON_GATEWAY_FULL;
		if (p->proto == NEXTHDR_TCP && !opens)
			return REASON_NO_BACKEND; /* the backend of the connection is gone */
	}
	if (exposed_kind_of(&d->back.local) == EXPOSED_NODE && has_node_socket(skb, &d->back))
		return EXPOSED_TO_NODE;
	if (is_error(p))
		return REASON_NO_SESSION;
	why = new_exposed_connection(connections, d, &w->service);
	if (why == REASON_NO_BACKEND) {
		/* The agent may have replaced the table at the same time. */
		struct svc *now = bpf_map_lookup_elem(&pil_svc_v1, &w->service_key);

		if (now && now->set != w->service.set) {
			w->service = *now;
			why = new_exposed_connection(connections, d, &w->service);
		}
	}
	return why;
}

/* exposed_key reads the exposed port of a packet of a client, or of the packet that an error quotes. */
static __noinline int exposed_key(struct __sk_buff *skb, struct packet *p, struct gateway_scratch *d)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	int why;

	if (!h || !p || !d)
		return REASON_MALFORMED;
	d->back.local = *dst_of(h);
	d->back.remote = *src_of(h);
	why = parse(skb, h, p);
	if (why)
		return why;
	if (is_error(p))
		return read_nat_quote(skb, p, &d->back);
	if (p->proto == NEXTHDR_ICMP || !is_translatable(p))
		return REASON_SERVICE_PROTOCOL;
	return read_nat_ports(skb, p, true, &d->back);
}

/* is_refused: the client gets an error. */
static __always_inline bool is_refused(int why)
{
	return why == REASON_NO_SERVICE || why == REASON_NO_BACKEND || why == REASON_GATEWAY_FULL;
}

/* exposed_in is the program of packets from the fabric to an address with exposed ports. */
static __always_inline int exposed_in(struct __sk_buff *skb)
{
	struct gateway_scratch *d = gateway_scratch();
	struct svc_work *w = svc_work();
	struct packet p = {};
	struct svc *found;
	struct eth_ip6 *h;
	struct flow *hop;
	__u32 kind, path;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !d || !w)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	path = path_of(h);
	kind = exposed_kind_of(dst_of(h));
	why = exposed_key(skb, &p, d);
	if (!why) {
		__builtin_memset(&w->service_key, 0, sizeof(w->service_key));
		w->service_key.address = d->back.local;
		w->service_key.port = d->back.local_port;
		w->service_key.proto = d->back.proto;
		found = bpf_map_lookup_elem(&pil_svc_v1, &w->service_key);
		if (!found || !found->exposed)
			why = REASON_NO_SERVICE;
		else
			w->service = *found;
	}
	if (why && kind == EXPOSED_NODE)
		return TCX_NEXT; /* for a process of the node */
	if (!is_client(&d->back.remote) && (!why || why == REASON_NO_SERVICE))
		why = REASON_EXPOSED_SOURCE;
	if (!why) {
		why = exposed_connection(skb, &p, d, w);
		if (why == EXPOSED_TO_NODE)
			return TCX_NEXT;
	}
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	if (why == REASON_NO_BACKEND || why == REASON_GATEWAY_FULL)
		svc_count(w->service.frontend, true);
	if (is_refused(why) && !is_error(&p))
		return refuse_outside(skb, &p, (d->back.local.hi ^ d->back.local.lo) * 0x9e3779b97f4a7c15ULL >> 32,
				      why);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (d->entry.address.hi == own_node) {
		why = is_error(&p) ? nat_write_error(skb, &p, d) : nat_write(skb, &p, true, &d->back, &d->entry);
		return why ? drop(skb, why, HOOK_UPLINK_IN) : to_tunnel_program(skb, HOOK_UPLINK_IN);
	}
	hop = tunnel_hop(skb, d->entry.address.hi, skb->ifindex, path);
	h = eth_ip6_of(skb);
	if (!hop || !h)
		return drop(skb, REASON_NO_ROUTE, HOOK_UPLINK_IN);
	if (h->hop_limit <= 1)
		return drop(skb, REASON_HOP_LIMIT, HOOK_UPLINK_IN);
	if (skb->len - ETH_HLEN > hop->mtu - TUNNEL_HLEN && wire_length(skb, &p) > hop->mtu - TUNNEL_HLEN)
		return error_outside(skb, &p, hop->mtu - TUNNEL_HLEN, w->service.exposed, REASON_TOO_BIG);
	h->hop_limit--;
	why = is_error(&p) ? 0 : clamp_to_tunnel(skb, &p, d->entry.address.hi);
	if (!why)
		why = is_error(&p) ? nat_write_error(skb, &p, d) : nat_write(skb, &p, true, &d->back, &d->entry);
	if (!why)
		why = ip6ip6_push(skb, d->entry.address.hi, EXPOSED_TUNNEL_HOST);
	return why ? drop(skb, why, HOOK_UPLINK_IN) : send_by(skb, hop);
}

/* exposed_deliver delivers a packet of a client to its backend, a container of this node. */
static __noinline int exposed_deliver(struct __sk_buff *skb, const struct flow_key *key, __u64 ingress)
{
	struct gateway_scratch *d = gateway_scratch();
	__u32 tag = gateway_tag(ingress);
	struct packet p = {};
	struct eth_ip6 *h;
	struct ep_dst *to;
	__be16 ports[2];
	struct flow *f;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !key || !d)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (!is_client(&key->src))
		return drop(skb, REASON_EXPOSED_SOURCE, HOOK_UPLINK_IN);
	to = bpf_map_lookup_elem(&pil_locals_v1, &key->dst.lo);
	if (!to)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	if (!is_error(&p)) {
		if (p.proto == NEXTHDR_ICMP || !is_translatable(&p))
			return drop(skb, REASON_SERVICE_PROTOCOL, HOOK_UPLINK_IN);
		if (bpf_skb_load_bytes(skb, p.l4, ports, sizeof(ports)))
			return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
		if (!exposed_target(&to->address, ports[1], p.proto))
			return drop(skb, REASON_NO_SERVICE, HOOK_UPLINK_IN);
	}
	f = &d->flow;
	begin_outside(f, key, &key->src, &to->address, key->dst.lo);
	f->translate = same_addr(&to->address, &key->dst) ? 0 : TRANSLATE;
	f->policy_ep[RX] = to->endpoint;
	f->checksum = to->checksum;
	send_to(f, to->ifindex);
	if (exposed_enforce(skb, &p, f, &tag, RX))
		return TC_ACT_SHOT;
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	return forward_allowed(skb, h, &p, f, EGRESS_LOCAL, NULL, HOOK_UPLINK_IN);
}

/* still_exposed reports whether the tenant still has the exposed port of a connection, and the port its backend. */
static __noinline bool still_exposed(const struct nat_entry *e, __u8 proto, __u32 tenant)
{
	struct svc_key key = {.proto = proto};
	struct svc_backend *b;
	struct svc *s;

	if (!e)
		return false;
	key.address = e->address;
	key.port = e->port;
	s = bpf_map_lookup_elem(&pil_svc_v1, &key);
	b = svc_backend_of(e->backend);
	return s && b && s->exposed == tenant && b->frontend == s->frontend;
}

/* exposed_answer gives an answer of a backend the exposed address and port as its source, and sends it to the client.
 */
static __noinline int exposed_answer(struct __sk_buff *skb, __u32 hook)
{
	struct gateway_scratch *d = gateway_scratch();
	struct nat_entry *known;
	struct tenant *tenant;
	struct packet p = {};
	void *connections;
	struct eth_ip6 *h;
	struct flow *hop;
	__u32 id, number;
	__u8 flags = 0;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !d)
		return drop(skb, REASON_MALFORMED, hook);
	d->out.local = *src_of(h);
	d->out.remote = *dst_of(h);
	id = tenant_id(&d->out.local);
	tenant = bpf_map_lookup_elem(&pil_tenants_v2, &id);
	number = tenant ? tenant->services : 0;
	connections = bpf_map_lookup_elem(&pil_exconns_v1, &number);
	if (!connections)
		return drop(skb, REASON_NO_SERVICE, hook);
	why = parse(skb, h, &p);
	if (!why && (p.proto == NEXTHDR_ICMP || !is_translatable(&p)))
		why = REASON_SERVICE_PROTOCOL;
	if (!why)
		why = read_nat_ports(skb, &p, false, &d->out);
	if (why)
		return drop(skb, why, hook);
	known = bpf_map_lookup_elem(connections, &d->out);
	if (!known)
		return drop(skb, REASON_NO_SESSION, hook);
	if (p.proto == NEXTHDR_TCP)
		bpf_skb_load_bytes(skb, p.l4 + TCP_FLAGS, &flags, sizeof(flags));
	note_packet(known, &p, flags);
	d->entry = *known;
	if (!still_exposed(&d->entry, p.proto, number))
		return drop(skb, REASON_NO_SERVICE, hook);
	if (hook == HOOK_UPLINK_IN) {
		why = clamp_to_tunnel(skb, &p, d->out.local.hi);
		if (why)
			return drop(skb, why, hook);
	}
	hop = cached_hop(skb, &d->entry.address, &d->out.remote, hook == HOOK_CONTAINER ? device_of(skb) : skb->ifindex,
			 0);
	h = eth_ip6_of(skb);
	if (!hop || !h)
		return drop(skb, REASON_NO_ROUTE, hook);
	why = hook == HOOK_UPLINK_IN ? dec_hop_limit(skb, h, &p, hop) : 0;
	if (!why)
		why = nat_write(skb, &p, false, &d->out, &d->entry);
	return why ? drop(skb, why, hook) : send_by(skb, hop);
}

/* exposed_tunnel is the program of packets from a tunnel, and of those that need none because this node is both ends.
 * It trusts the outer source as from_egress_tunnel does. No packet from the fabric has a container of this node as its
 * source or destination here. */
static __always_inline int exposed_tunnel(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = skb->ifindex};
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct addr ends[2];
	__u64 node;

	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	key.src = *src_of(h);
	key.dst = *dst_of(h);
	if (key.src.hi == own_node && claims_app(&key.src))
		return exposed_answer(skb, HOOK_CONTAINER);
	if (key.dst.hi == own_node && claims_app(&key.dst))
		return exposed_deliver(skb, &key, own_node);
	node = key.src.hi;
	if (h->nexthdr != PROTO_IPV6 || !is_exposed_tunnel(&key.src) ||
	    bpf_skb_load_bytes(skb, sizeof(struct eth_ip6) + 8, ends, sizeof(ends)))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	if (!(ends[0].hi == node && claims_app(&ends[0])) && !(ends[1].hi == own_node && tenant_id(&ends[1])))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	if (ip6ip6_pull(skb))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	key.src = ends[0];
	key.dst = ends[1];
	if (ends[0].hi == node && claims_app(&ends[0]))
		return exposed_answer(skb, HOOK_UPLINK_IN);
	return exposed_deliver(skb, &key, node);
}

/* exposed_out is the program of a container's answer to a client of an exposed port. is_exposed_answer has found its
 * session. */
static __always_inline int exposed_out(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = device_of(skb)};
	struct gateway_scratch *d = gateway_scratch();
	struct packet p = {};
	struct eth_ip6 *h;
	struct flow *f, *hop;
	struct miss m;
	__u64 node;
	__u32 tag = 0;
	int why;

	why = read_from_container(skb, &key, &p);
	if (!why)
		why = identify(&key, &m);
	if (why || !d)
		return drop(skb, why ? why : REASON_MALFORMED, HOOK_CONTAINER);
	f = &d->flow;
	begin_outside(f, &key, &m.from->plain, &key.dst, m.from->plain.lo);
	f->translate = same_addr(&f->src, &f->key.src) ? 0 : TRANSLATE;
	f->checksum = m.from->checksum;
	f->policy_ep[TX] = m.from->endpoint;
	if (exposed_enforce(skb, &p, f, &tag, TX))
		return TC_ACT_SHOT;
	node = node_of_tag(tag);
	hop = node == own_node ? cached_hop(skb, &f->src, &f->dst, key.device, key.path)
			       : tunnel_hop(skb, node, key.device, key.path);
	if (!hop)
		return drop(skb, REASON_NO_ROUTE, HOOK_CONTAINER);
	f->mtu = node == own_node ? hop->mtu : hop->mtu - TUNNEL_HLEN;
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	why = dec_hop_limit(skb, h, &p, f);
	if (why)
		return icmp_error_send(skb, &p, f, why);
	if (f->translate && write_addresses(skb, h, &p, f))
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	if (node == own_node)
		return to_tunnel_program(skb, HOOK_CONTAINER);
	why = ip6ip6_push(skb, node, EXPOSED_TUNNEL_HOST);
	return why ? drop(skb, why, HOOK_CONTAINER) : send_by(skb, hop);
}
