/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets between containers and hosts outside of the cluster. container.h and uplink.h tail-call these programs. */
#pragma once
#include "common/icmp_source.h"
#include "hooks/uplink_class.h"
#include "net/netpila/exposed.h"
#include "net/netpila/identify.h"

/* egress_forward applies policy, keeps a new flow, and sends the packet as its flow says. */
static __always_inline int egress_forward(struct __sk_buff *skb, const struct packet *p, struct flow *f, bool is_new,
					  enum flow_egress egress, struct addr *next_hop, __u32 dir, enum hook hook)
{
	struct eth_ip6 *h;

	if (egress_enforce(skb, p, f, dir, hook))
		return TC_ACT_SHOT;
	if (is_new && f->egress)
		keep_outside_flow(f);
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, hook);
	return forward_allowed(skb, h, p, f, egress, next_hop, hook);
}

/* to_egress_gateway sends a container's packet in the tunnel to a gateway of its rule: that of its session, or for a
 * new session one that answers probes. */
static __always_inline int to_egress_gateway(struct __sk_buff *skb, const struct packet *p, struct flow *f,
					     const struct access_rule *rule)
{
	__u64 node = choose_gateway(skb, rule), other;
	__u32 tag = gateway_tag(node), avoid = 0;
	struct flow *hop;
	int why, verdict;

	if (!is_translatable(p))
		return drop(skb, REASON_GATEWAY_PROTOCOL, HOOK_CONTAINER);
	other = rule->gateways[0] == node ? rule->gateways[1] : rule->gateways[0];
	if (other && is_silent(other) && !is_silent(node))
		avoid = gateway_tag(other);
	if (gateway_enforce(skb, p, f, &tag, avoid))
		return TC_ACT_SHOT;
	if (tag == gateway_tag(rule->gateways[0]))
		node = rule->gateways[0];
	else if (rule->gateways[1] && tag == gateway_tag(rule->gateways[1]))
		node = rule->gateways[1];
	hop = begin_tunnel(skb, p, f, node, &verdict);
	if (!hop)
		return verdict;
	if (node == own_node) {
		bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);
	}
	why = ip6ip6_push(skb, node, EGRESS_TUNNEL_HOST);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	return send_by(skb, hop);
}

/* egress_begin has the stages of a miss: identity, rule, route. It returns the reason if the packet does not go on. */
static __noinline int egress_begin(struct __sk_buff *skb, const struct packet *p, const struct flow_key *key,
				   struct flow *f, struct egress_way *way)
{
	struct egress_src *own;
	struct access_rule *rule;
	struct eth_ip6 *h;
	struct addr dst;
	struct miss m;
	__u32 endpoint;
	int why;

	if (!p || !key || !f || !way)
		return REASON_MALFORMED;
	dst = key->dst;
	why = identify(key, &m);
	if (why)
		return why;
	begin_outside(f, key, &m.from->plain, &dst, m.from->plain.lo);
	rule = access_rule_of(m.from->tenant_id, &dst);
	if (!rule)
		return REASON_DST_NOT_PRIVATE; /* the tenant has no way out */
	if ((rule->action != ACCESS_OUTSIDE && rule->action != ACCESS_GATEWAY) || is_protected(&dst))
		return REASON_EGRESS_DENIED;
	way->rule = *rule;
	endpoint = m.from->endpoint;
	f->policy_ep[TX] = endpoint;
	if (rule->action == ACCESS_GATEWAY) {
		f->translate = same_addr(&f->src, &f->key.src) ? 0 : TRANSLATE;
		f->checksum = m.from->checksum;
		return 0;
	}
	own = bpf_map_lookup_elem(&pil_esources_v1, &endpoint);
	if (!own)
		return REASON_NO_EGRESS_ADDRESS;
	f->src = own->address;
	f->checksum = own->checksum;
	why = find_next_hop(skb, f, wire_length(skb, p), &way->next_hop);
	h = eth_ip6_of(skb);
	/* a router checks the hop limit first */
	return why == REASON_TOO_BIG && h && h->hop_limit <= 1 ? REASON_HOP_LIMIT : why;
}

/* egress_refuse drops a container's packet, and sends an error about it where a router would. */
static __always_inline int egress_refuse(struct __sk_buff *skb, const struct packet *p, const struct flow *f, int why)
{
	if (why == REASON_EGRESS_DENIED || why == REASON_HOP_LIMIT || why == REASON_TOO_BIG)
		return icmp_error_send(skb, p, f, why);
	return drop(skb, why, HOOK_CONTAINER);
}

static __always_inline int egress_from_container(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = device_of(skb)};
	enum flow_egress egress = EGRESS_UPLINK;
	struct gateway_scratch *d = gateway_scratch();
	struct addr *hop = NULL;
	struct packet p = {};
	bool is_new = false;
	struct flow *f;
	int why;

	why = read_from_container(skb, &key, &p);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	if (is_exposed_answer(skb, &p, &key)) {
		bpf_tail_call(skb, &pil_services_v1, EXPOSED_OUT);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);
	}
	f = outside_flow(&key);
	if (!d)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	if (!f) {
		f = &d->flow;
		is_new = true;
	}
	if (is_new || f->expires <= bpf_jiffies64()) {
		why = egress_begin(skb, &p, &key, f, &d->way);
		if (why)
			return egress_refuse(skb, &p, f, why);
		if (d->way.rule.action == ACCESS_GATEWAY)
			return to_egress_gateway(skb, &p, f, &d->way.rule);
		egress = EGRESS_NEIGHBOUR;
		if (f->egress == EGRESS_UPLINK)
			hop = &d->way.next_hop;
	}
	asm volatile("" : "+r"(hop)); /* the verifier must see the check on the pointer, not on what it follows from */
	return egress_forward(skb, &p, f, is_new, egress, hop, TX, HOOK_CONTAINER);
}

/* egress_arrived finds the container of a packet from outside. It returns 0 or a reason. */
static __noinline int egress_arrived(const struct flow_key *key, struct flow *f)
{
	struct addr src, inside;
	struct access_rule *rule;
	struct egress_dst *to;

	if (!key || !f)
		return REASON_MALFORMED;
	src = key->src;
	to = key->dst.hi == own_egress ? bpf_map_lookup_elem(&pil_elocals_v1, &key->dst.lo) : NULL;
	if (!to)
		return REASON_NO_ENDPOINT;
	inside.hi = own_node;
	inside.lo = to->plain;
	rule = access_rule_of(tenant_id(&inside), &src);
	if (!rule || rule->action != ACCESS_OUTSIDE || is_protected(&src))
		return REASON_NO_SESSION;
	begin_outside(f, key, &src, &to->address, to->plain);
	f->policy_ep[RX] = to->endpoint;
	f->checksum = to->checksum;
	send_to(f, to->ifindex);
	f->egress = EGRESS_LOCAL;
	return 0;
}

/* show_router writes the source of a router's ICMPv6 error again, after the error was checked as one of the peer: what
 * is outside of the cluster is no secret. */
static __always_inline int show_router(struct __sk_buff *skb, const struct packet *p, struct addr *peer,
				       struct addr *router)
{
	return fix_checksum(skb, p, csum_diff_addr(peer, router)) ||
	       bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), router, sizeof(*router), 0);
}

static __always_inline int egress_from_fabric(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = skb->ifindex};
	struct gateway_scratch *d = gateway_scratch();
	struct addr router = {};
	struct packet p = {};
	bool is_new = false;
	struct eth_ip6 *h;
	struct flow *f;
	int why, verdict;

	h = eth_ip6_of(skb);
	if (!h || !d)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	router = key.src = *src_of(h);
	key.dst = *dst_of(h);
	if (is_egress_tunnel(&key.dst) || bpf_map_lookup_elem(&pil_gwnat_v1, &key.dst)) {
		bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);
	}
	if (is_exposed_tunnel(&key.dst)) {
		bpf_tail_call(skb, &pil_services_v1, EXPOSED_TUNNEL);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);
	}
	why = parse(skb, h, &p);
	if (!why && is_error(&p))
		why = icmp_err_set_peer_src(skb, &p, &key.src, own_node);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	f = outside_flow(&key);
	if (!f) {
		f = &d->flow;
		is_new = true;
		why = egress_arrived(&key, f);
	}
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	f->expires = bpf_jiffies64() + NEXT_HOP_LIFE; /* of its slot: a flow without packets gives it up */
	verdict = egress_forward(skb, &p, f, is_new, EGRESS_LOCAL, NULL, RX, HOOK_UPLINK_IN);
	if (verdict != TC_ACT_SHOT && is_error(&p) && show_router(skb, &p, &key.src, &router))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	return verdict;
}
