/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Answers of backends to containers of this node. forward.h tail-calls the program if packets from a backend to its
 * receiver may be answers. */
#pragma once
#include "net/netpila/service_stages.h"

/* service_of_answer finds the service that a packet to a client, which the cache of verdicts does not have, is an
 * answer of. It returns false if it is of none. */
static __noinline bool service_of_answer(struct svc_work *w, const struct packet *p)
{
	struct svc_flow *t = &w->translated;
	struct svc_frontend *front;
	__u32 number = p->l4 ? svc_session(&w->flow, 0, 0) : svc_fragment(&w->flow, p->fragment, 0);

	front = bpf_map_lookup_elem(&pil_svcfronts_v1, &number);
	if (!front)
		return false;
	set_end(&w->answer.front, &front->key.address, front->key.port);
	if (!p->l4)
		return true;
	svc_cache(&w->answer);
	keep_service_pair(&w->flow.client, &w->flow.peer, w->flow.proto);
	/* The session of the service sees that the backend has answered. */
	*t = w->flow;
	t->peer = w->answer.front.address;
	t->peer_port = w->answer.front.port;
	svc_session(t, 0, 0);
	if (p->parts & HAS_FRAGMENT)
		svc_fragment(&w->flow, p->fragment, number);
	return true;
}

/* service_quote makes an ICMPv6 error about a packet to a backend one about a packet to the service, so that the
 * client's socket gets it. It returns 0 or a reason. */
static __noinline int service_quote(struct __sk_buff *skb, const struct packet *p, struct svc_work *w)
{
	struct packet q = {.l4 = p->l4 + ICMPV6_HLEN + IPV6_HLEN, .end = p->end};
	__u32 to = p->l4 + QUOTED_ADDRESSES + sizeof(struct addr), difference, number;
	struct svc_flow *f = &w->flow;
	struct svc_frontend *front;
	__be16 ports[2] = {};

	if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)) || find_transport(skb, &q) ||
	    !q.l4 || (q.proto != NEXTHDR_TCP && q.proto != NEXTHDR_UDP) || q.l4 + sizeof(ports) > q.end ||
	    bpf_skb_load_bytes(skb, q.l4, ports, sizeof(ports)) ||
	    bpf_skb_load_bytes(skb, to, &f->peer, sizeof(f->peer)))
		return 0;
	f->client = w->key.dst;
	f->proto = q.proto;
	f->client_port = ports[0];
	f->peer_port = ports[1];
	number = svc_peek(f);
	front = bpf_map_lookup_elem(&pil_svcfronts_v1, &number);
	if (!front)
		return 0;
	set_end(&w->front, &front->key.address, front->key.port);
	difference = csum_diff_addr(&f->peer, &w->front.address);
	if (same_addr(&w->key.src, &f->peer)) {
		if (fix_checksum(skb, p, difference) ||
		    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &w->front.address, sizeof(struct addr), 0))
			return REASON_MALFORMED;
	}
	if (bpf_skb_store_bytes(skb, to, &w->front.address, sizeof(struct addr), 0) ||
	    bpf_skb_store_bytes(skb, q.l4 + 2, &w->front.port, sizeof(w->front.port), 0))
		return REASON_MALFORMED;
	return translate_quoted_checksum(skb, p, csum_add(difference, csum_add((__u16)~ports[1], w->front.port)));
}

/* service_in gives an answer of a backend the source of the service, and delivers it. A packet of no service stays as
 * it is. Policy has accepted it; addresses and MACs are those that the client sees. */
static __always_inline int service_in(struct __sk_buff *skb)
{
	bool from_uplink = skb->ifindex == skb->ingress_ifindex && is_uplink(skb->ifindex);
	enum hook hook = from_uplink ? HOOK_UPLINK_IN : HOOK_CONTAINER;
	struct svc_work *w = svc_work();
	bool is_service, translated = true;
	struct svc_answer *known = NULL;
	struct ep_src *client;
	__u32 device;
	struct packet p = {};
	struct eth_ip6 *h;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !w)
		return drop(skb, REASON_MALFORMED, hook);
	device = from_uplink ? skb->ifindex : device_of(skb);
	w->key.src = *src_of(h);
	w->key.dst = *dst_of(h);
	why = parse(skb, h, &p);
	is_service = p.proto == NEXTHDR_TCP || p.proto == NEXTHDR_UDP;
	if (!why && is_service)
		why = read_service_flow(skb, &p, &w->key, true, &w->flow);
	if (why)
		return drop(skb, why, hook);
	if (is_service && p.l4 && !(p.parts & HAS_FRAGMENT))
		known = svc_cached_answer(&w->flow);
	if (known) {
		w->answer = *known;
	} else {
		client = bpf_map_lookup_elem(&pil_sources_v2, &w->key.dst);
		if (!client)
			return drop(skb, REASON_NO_ENDPOINT, hook);
		w->flow.endpoint = client->endpoint;
		w->flow.tenant = client->tenant_id;
		w->answer.device = client->ifindex;
		translated = is_service && service_of_answer(w, &p);
	}
	if (translated) {
		set_end(&w->back, &w->key.src, w->flow.peer_port);
		why = write_end(skb, &p, true, &w->back, &w->answer.front);
	} else if (is_error(&p)) {
		why = service_quote(skb, &p, w);
	}
	if (why)
		return drop(skb, why, hook);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, w->answer.device, on_way_in(skb, device), from_uplink);
}
