/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets of containers to services; service_answers.h has the answers. container.h tail-calls the program, so packets
 * between containers pay nothing. All of it happens on the client's node: what leaves it is a packet to the
 * backend. */
#pragma once
#include "hooks/container.h"
#include "net/netpila/service_sock.h"
#include "net/netpila/tcp_reset.h"

/* read_service_flow reads the flow of a packet of a client; with answer, that of a packet to a client. It returns 0 or
 * a reason. Of a later fragment the ports are 0. */
static __always_inline int read_service_flow(struct __sk_buff *skb, const struct packet *p, const struct flow_key *key,
					     bool answer, struct svc_flow *f)
{
	__u8 *l4 = CTX_POINTER(skb, data) + sizeof(struct eth_ip6);
	__be16 ports[2] = {};

	__builtin_memset(f, 0, sizeof(*f));
	f->client = answer ? key->dst : key->src;
	f->peer = answer ? key->src : key->dst;
	f->proto = p->proto;
	f->dir = answer ? RX : TX;
	if (!p->l4)
		return 0;
	if (p->l4 == sizeof(struct eth_ip6) && (void *)(l4 + TCP_FLAGS + 1) <= CTX_POINTER(skb, data_end)) {
		__builtin_memcpy(ports, l4, sizeof(ports));
		f->flags = p->proto == NEXTHDR_TCP ? l4[TCP_FLAGS] : 0;
	} else {
		if (bpf_skb_load_bytes(skb, p->l4, ports, sizeof(ports)))
			return REASON_MALFORMED;
		f->flags = tcp_flags(skb, p);
	}
	f->client_port = answer ? ports[1] : ports[0];
	f->peer_port = answer ? ports[0] : ports[1];
	return 0;
}

static __always_inline void set_end(struct svc_end *e, const struct addr *address, __be16 port)
{
	e->address = *address;
	e->port = port;
}

/* write_end replaces an end of a packet: its source, or its destination. It returns 0 or a reason. */
__noinline int write_end(struct __sk_buff *skb, const struct packet *p, bool source, const struct svc_end *was,
			 const struct svc_end *is)
{
	struct nat_key old = {};
	struct nat_entry new = {};
	struct addr a;

	if (!p || !was || !is)
		return REASON_MALFORMED;
	if (!p->l4) {
		a = is->address;
		return bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src) + (source ? 0 : sizeof(a)), &a, sizeof(a),
					   BPF_F_RECOMPUTE_CSUM)
			       ? REASON_MALFORMED
			       : 0;
	}
	old.local = was->address;
	old.local_port = was->port;
	new.address = is->address;
	new.port = is->port;
	return nat_write(skb, p, !source, &old, &new);
}

/* usable_backend returns a backend of the service of a packet; NULL if it is gone. A new connection does not go to one
 * that drains. */
static __always_inline struct svc_backend *usable_backend(const struct svc_work *w, __u32 number)
{
	struct svc_backend *b = svc_backend_of(number);

	if (b && b->frontend != w->service.frontend)
		return NULL;
	return b && b->draining && opens_connection(&w->flow) ? NULL : b;
}

/* end_session closes the session of a TCP connection, so that its port is free for a new one. */
static __noinline void end_session(struct svc_work *w)
{
	w->translated = w->flow;
	w->translated.flags = TCP_RST;
	svc_session(&w->translated, 0, 0);
}

/* fragment_backend finds the backend of a later fragment, which the first one has chosen. It returns 0 or the reason.
 */
static __always_inline int fragment_backend(struct svc_work *w, const struct packet *p)
{
	struct svc_backend *b = svc_backend_of(svc_fragment(&w->flow, p->fragment, 0));
	struct svc_frontend *front = b ? bpf_map_lookup_elem(&pil_svcfronts_v1, &b->frontend) : NULL;

	if (!front || !same_addr(&front->key.address, &w->flow.peer))
		return REASON_FRAGMENT_UNKNOWN;
	w->backend = *b;
	return 0;
}

/* service_backend finds the backend of a packet to a service: that of its session, or for a new one a random one. It
 * returns 0 or the reason. */
static __noinline int service_backend(struct svc_work *w, const struct packet *p)
{
	struct svc_backend *b;
	__u32 candidate;
	__u64 nat;

	if (!p->l4)
		return fragment_backend(w, p);
	__builtin_memset(&w->service_key, 0, sizeof(w->service_key));
	w->service_key.address = w->flow.peer;
	w->service_key.port = w->flow.peer_port;
	w->service_key.proto = w->flow.proto;
	candidate = svc_choose(&w->service_key, &w->flow.client, &w->service);
	/* Without a candidate, a packet makes and changes no session unless its backend still takes it. */
	nat = candidate ? svc_session(&w->flow, candidate, 0) : svc_peek(&w->flow);
	if (candidate && svc_refusal(nat))
		return svc_refusal(nat);
	b = usable_backend(w, nat);
	if (!candidate && b)
		svc_session(&w->flow, nat, 0);
	if (nat && !b) {
		__u32 gone = w->flow.proto == NEXTHDR_TCP ? 0 : nat;

		if (!gone)
			end_session(w);
		if (!gone && !opens_connection(&w->flow))
			candidate = 0;
		nat = candidate ? svc_session(&w->flow, candidate, gone) : 0;
		b = usable_backend(w, nat);
	}
	if (!b) {
		svc_count(w->service.frontend, true);
		return w->service.frontend ? REASON_NO_BACKEND : REASON_NO_SERVICE;
	}
	w->backend = *b;
	if (nat & SVC_NEW) {
		svc_count(b->frontend, false);
		if (w->service.affinity)
			svc_keep_affinity(&w->service, &w->flow.client, nat);
	}
	w->confirmed = svc_cache(NULL);
	if (p->parts & HAS_FRAGMENT)
		svc_fragment(&w->flow, p->fragment, nat);
	return 0;
}

/* keep_answers makes or updates the session by which the answers of a backend are recognised. It returns 0 or a reason.
 */
static __noinline int keep_answers(struct svc_work *w, const struct addr *peer)
{
	__u32 number;
	__u64 nat;

	w->translated = w->flow;
	w->translated.peer = *peer;
	keep_service_pair(&w->flow.client, peer, w->flow.proto);
	w->translated.peer_port = w->backend.port;
	nat = svc_session(&w->translated, w->backend.frontend, 0);
	if (svc_refusal(nat))
		return svc_refusal(nat);
	set_end(&w->answer.front, &w->flow.peer, w->flow.peer_port);
	w->answer.device = w->key.device;
	if ((__u32)nat == w->backend.frontend) {
		/* While answers come from the cache, they do not confirm the session of the service. Those to an alias
		 * are packets to a service, which would take the number in the verdict for that of a backend. */
		if (w->confirmed && !is_hairpin_alias(peer))
			svc_cache(&w->answer);
		return 0;
	}
	/* The session is of another service with the same backend, which may be gone. */
	if (w->flow.proto == NEXTHDR_TCP) {
		number = nat;
		if (bpf_map_lookup_elem(&pil_svcfronts_v1, &number) || !opens_connection(&w->flow))
			return REASON_NO_BACKEND; /* the client uses this port for both: answers would be ambiguous
						   */
		w->translated.flags = TCP_RST;
		svc_session(&w->translated, 0, 0);
		w->translated.flags = w->flow.flags;
		nat = 0;
	}
	nat = svc_session(&w->translated, w->backend.frontend, nat);
	svc_forget(); /* answers are of this service from now on */
	return svc_refusal(nat);
}

/* to_itself delivers a packet of a container to the container itself. */
static __always_inline int to_itself(struct __sk_buff *skb, __u32 device)
{
	struct eth_ip6 *h = eth_ip6_of(skb);

	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	mac_of(device, h->eth.h_dest);
	__builtin_memcpy(h->eth.h_source, gateway_mac, ETH_ALEN);
	bpf_skb_change_type(skb, PACKET_HOST);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, device, on_way_in(skb, device), false);
}

/* hairpin translates a packet to a container that is its own backend. The source becomes an alias, so that the answer
 * comes back here. */
static __noinline int hairpin(struct __sk_buff *skb, const struct packet *p, struct svc_work *w)
{
	struct svc_flow *f = &w->flow;
	int why;

	set_end(&w->client, &f->client, f->client_port);
	set_end(&w->front, &f->peer, f->peer_port);
	set_end(&w->back, &w->backend.seen, w->backend.port);
	set_end(&w->alias, &f->peer, f->client_port);
	w->alias.address.lo = 0;
	why = p->l4 ? keep_answers(w, &w->alias.address) : 0;
	if (!why)
		why = write_end(skb, p, false, &w->front, &w->back);
	return why ? why : write_end(skb, p, true, &w->client, &w->alias);
}

/* hairpin_answer turns a container's answer to its alias into one of the service. */
static __noinline int hairpin_answer(struct __sk_buff *skb, const struct packet *p, struct svc_work *w)
{
	struct svc_flow *f = &w->flow, *t = &w->translated;
	struct svc_frontend *front;
	__u32 number;
	int why;

	/* The container is both ends: its answer comes from the port of the backend and goes to that of the client. */
	*t = *f;
	t->client_port = f->peer_port;
	t->peer_port = f->client_port;
	t->dir = RX;
	number = p->l4 ? svc_session(t, 0, 0) : svc_fragment(t, p->fragment, 0);
	front = bpf_map_lookup_elem(&pil_svcfronts_v1, &number);
	if (!front)
		return REASON_NO_SESSION;
	if (p->l4 && p->parts & HAS_FRAGMENT)
		svc_fragment(t, p->fragment, number);
	set_end(&w->back, &f->client, f->client_port);
	set_end(&w->alias, &f->peer, f->peer_port);
	set_end(&w->client, &f->client, f->peer_port);
	set_end(&w->front, &front->key.address, front->key.port);
	t->peer = w->front.address;
	t->peer_port = w->front.port;
	if (p->l4)
		svc_session(t, 0, 0);
	why = write_end(skb, p, true, &w->back, &w->front);
	return why ? why : write_end(skb, p, false, &w->alias, &w->client);
}

/* service_refuse drops a packet to a service and sends the client an error about it. */
static __always_inline int service_refuse(struct __sk_buff *skb, const struct packet *p, struct svc_work *w,
					  const struct addr *plain, int why)
{
	struct flow *f = &w->refused;

	if (!p->l4 || (why != REASON_NO_BACKEND && why != REASON_NO_SERVICE))
		return drop(skb, why, HOOK_CONTAINER);
	if (w->flow.proto == NEXTHDR_TCP)
		return tcp_reset(skb, p, w->key.device, why);
	f->key = w->key;
	f->src = *plain;
	return icmp_error_send(skb, p, f, why);
}

/* service_route fills the slot of a flow to a backend as from_container_slow does. It returns 0 or a reason. */
static __noinline int service_route(struct __sk_buff *skb, const struct packet *p, struct svc_work *w, struct flow *f)
{
	struct miss m;
	int why;

	why = identify(&w->key, &m);
	if (why)
		return why;
	begin_flow(f, &w->key, &m, &w->backend.plain);
	return w->backend.plain.hi == own_node ? route_here(f, &m) : route_away(skb, p, f, &m, &w->next_hop);
}

/* service_slow translates a packet that the cache of verdicts does not have. It returns 0 or a reason. To the container
 * itself, it sets itself. */
static __noinline int service_slow(struct __sk_buff *skb, const struct packet *p, struct svc_work *w, struct miss *m,
				   bool *itself)
{
	int why;

	w->flow.endpoint = m->from->endpoint;
	w->flow.tenant = m->from->tenant_id;
	if (!m->own->services || services_number(&w->flow.peer) != m->own->services)
		return REASON_NO_SERVICE;
	if (is_hairpin_alias(&w->flow.peer)) {
		*itself = true;
		return hairpin_answer(skb, p, w);
	}
	why = service_backend(w, p);
	if (why)
		return why;
	if (same_addr(&w->backend.seen, &w->flow.client)) {
		*itself = true;
		return hairpin(skb, p, w);
	}
	return p->l4 ? keep_answers(w, &w->backend.seen) : 0;
}

/* service_forward sends a packet to the backend in w, by the flow of packets that the client sends to it itself. */
static __always_inline int service_forward(struct __sk_buff *skb, const struct packet *p, struct svc_work *w)
{
	enum flow_egress egress = EGRESS_LOCAL;
	struct addr *hop = NULL;
	struct eth_ip6 *h;
	struct flow *f;
	int why;

	set_end(&w->front, &w->flow.peer, w->flow.peer_port);
	set_end(&w->back, &w->backend.seen, w->backend.port);
	w->key.dst = w->backend.seen;
	f = flow_slot(&w->key);
	if (!f)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	if (flow_matches(f, &w->key) && (f->egress == EGRESS_LOCAL || f->expires > bpf_jiffies64())) {
		if (f->egress != EGRESS_LOCAL)
			egress = EGRESS_UPLINK;
	} else {
		why = service_route(skb, p, w, f);
		if (why && why != REASON_TOO_BIG)
			return drop(skb, why, HOOK_CONTAINER);
		if (why || f->egress != EGRESS_LOCAL)
			egress = EGRESS_NEIGHBOUR;
		if (!why && f->egress == EGRESS_UPLINK)
			hop = &w->next_hop;
	}
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	/* An error quotes the packet as the client has sent it. */
	if (leaves_node(egress) && h->hop_limit <= 1)
		return icmp_error_send(skb, p, f, REASON_HOP_LIMIT);
	if (leaves_node(egress) && skb->len - ETH_HLEN > f->mtu && wire_length(skb, p) > f->mtu)
		return icmp_error_send(skb, p, f, REASON_TOO_BIG);
	why = write_end(skb, p, false, &w->front, &w->back);
	h = eth_ip6_of(skb);
	if (why || !h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	asm volatile("" : "+r"(hop)); /* the verifier must see the check on the pointer, not on what it follows from */
	return forward(skb, h, p, f, egress, hop, HOOK_CONTAINER);
}

/* service_out translates a container's packet to a service, and sends it as one to the backend. */
static __always_inline int service_out(struct __sk_buff *skb)
{
	struct svc_work *w = svc_work();
	struct svc_backend *b = NULL;
	struct verdict *v = NULL;
	struct packet p = {};
	bool itself = false;
	struct miss m = {};
	int why;

	if (!w)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	w->key.generation = generation();
	w->key.device = device_of(skb);
	w->key.zero = 0;
	why = read_from_container(skb, &w->key, &p);
	if (!why && p.proto != NEXTHDR_TCP && p.proto != NEXTHDR_UDP)
		why = REASON_SERVICE_PROTOCOL;
	if (!why)
		why = read_service_flow(skb, &p, &w->key, false, &w->flow);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	if (p.l4 && !(p.parts & HAS_FRAGMENT))
		v = svc_cached(&w->flow);
	if (v)
		b = svc_backend_of(v->nat);
	if (b && !same_addr(&b->seen, &w->flow.client)) {
		w->backend = *b;
		return service_forward(skb, &p, w);
	}
	why = identify(&w->key, &m);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	why = service_slow(skb, &p, w, &m, &itself);
	if (why)
		return service_refuse(skb, &p, w, &m.from->plain, why);
	return itself ? to_itself(skb, w->key.device) : service_forward(skb, &p, w);
}
