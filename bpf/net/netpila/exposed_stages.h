/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets of exposed ports (exposed.h). uplink_class.h and egress_stages.h tail-call these programs. On the way to a
 * container: exposed_in at the ingress node, then exposed_tunnel at the node of the backend. On the way back:
 * exposed_out there, then exposed_tunnel at the ingress node. If both are one node, there is no tunnel. */
#pragma once
#include "net/netpila/exposed_nat.h"
#include "net/netpila/gateway_stages.h"
#include "net/netpila/service_stages.h"

/* is_client reports whether an address may be that of a client outside of the cluster. Link-local and multicast
 * addresses and those of this node, among others, are protected: a forged source must not make a way to them. */
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
		if (!found)
			why = REASON_NO_SERVICE;
		else
			w->service = *found;
	}
	if (why && kind == EXPOSED_NODE)
		return TCX_NEXT; /* for a process of the node */
	if (!is_client(&d->back.remote) && (!why || why == REASON_NO_SERVICE))
		why = is_of_node(skb, &d->back) ? EXPOSED_TO_NODE : REASON_EXPOSED_SOURCE;
	if (!why)
		why = exposed_connection(skb, &p, d, w);
	if (why == EXPOSED_TO_NODE)
		return TCX_NEXT;
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
		why = nat_write_back(skb, &p, d);
		return why ? drop(skb, why, HOOK_UPLINK_IN) : to_tunnel_program(skb, HOOK_UPLINK_IN);
	}
	why = is_error(&p) ? 0 : clamp_to_tunnel(skb, &p, d->entry.address.hi);
	return why ? drop(skb, why, HOOK_UPLINK_IN) : tunnel_to_container(skb, &p, d, path, EXPOSED_TUNNEL_HOST);
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
	note_packet(known, tcp_flags(skb, &p));
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
	struct flow *f, *hop;
	struct miss m;
	__u64 node;
	__u32 tag = 0;
	int why, verdict;

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
	hop = begin_tunnel(skb, &p, f, node, &verdict);
	if (!hop)
		return verdict;
	if (node == own_node)
		return to_tunnel_program(skb, HOOK_CONTAINER);
	why = ip6ip6_push(skb, node, EXPOSED_TUNNEL_HOST);
	return why ? drop(skb, why, HOOK_CONTAINER) : send_by(skb, hop);
}
