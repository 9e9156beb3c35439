/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The first hook of packets from a container: the first table of NETPILA §6.1 and the drops of §6.2. On a cache hit the
 * program forwards the packet at once (forward.h). On a miss it checks the source, resolves the destination and fills
 * the flow cache. Packets without a NETPILA source go to the program of the endpoint's other network. */
#pragma once
#include "hooks/node.h"
#include "hooks/uplink_class.h"
#include "net/netpila/identify.h"
#include "net/netpila/resolve.h"

/* A switch that reads a container's device itself (Open vSwitch) checks and counts the container's packets, except
 * those with a NETPILA source. Our program checks and counts these. */
static __always_inline bool claims_netpila_src(const struct flow_key *key)
{
	return in_private(&key->src) || in_base(&key->src);
}

/* drop_from_container drops a packet that is invalid in every network: malformed, neighbour discovery or multicast. It
 * counts the drop, unless a switch that reads the same device counts it. */
static __always_inline int drop_from_container(struct __sk_buff *skb, const struct flow_key *key, int why)
{
	bool linkwide = why >= REASON_ND_FORBIDDEN && why <= REASON_MULTICAST;
	struct dev_ep *its = bpf_map_lookup_elem(&pil_ports_v1, &key->device);

	if (its && its->network == NETWORK_OVS && (linkwide || !claims_netpila_src(key)))
		return TC_ACT_SHOT;
	return drop(skb, why, HOOK_CONTAINER);
}

/* to_other_network hands a packet without a NETPILA source to the program of the endpoint's other network. Without such
 * a network the source is not the container's own, so the packet is dropped. */
static __always_inline int to_other_network(struct __sk_buff *skb, const struct flow_key *key, int why)
{
	struct dev_ep *its = bpf_map_lookup_elem(&pil_ports_v1, &key->device);

	if (!its)
		return drop(skb, why, HOOK_CONTAINER);
	if (its->network == NETWORK_OVS)
		return claims_netpila_src(key) ? drop(skb, why, HOOK_CONTAINER) : TC_ACT_SHOT;
	bpf_tail_call(skb, &pil_networks_v1, its->network);
	return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);
}

/* Between the stages: the flow of a packet to dst, a plaintext address of the same tenant. Services and other NAT would
 * change dst before. */
static __always_inline void begin_flow(struct flow *f, const struct flow_key *key, const struct miss *m,
				       const struct addr *dst)
{
	f->egress = 0; /* invalidates the slot until all fields are written */
	f->key = *key;
	f->src = m->from->plain;
	f->dst = *dst;
	f->policy_ep[TX] = has_policies(m->from->tenant_id) ? m->from->endpoint : 0;
	f->policy_ep[RX] = 0;
}

/* Stage route, to a container of this node. All containers of the tenant see the same two addresses, so there is
 * nothing to translate. */
static __always_inline int route_here(struct flow *f, const struct miss *m)
{
	struct ep_dst *to = bpf_map_lookup_elem(&pil_locals_v1, &f->dst.lo);

	if (!to)
		return REASON_NO_ENDPOINT;
	f->translate = m->own->services && is_backend(&f->src) ? MAY_ANSWER : 0;
	if (f->policy_ep[TX])
		f->policy_ep[RX] = to->endpoint;
	send_to(f, to->ifindex);
	f->egress = EGRESS_LOCAL;
	return 0;
}

/* Stage route, to another node. */
static __always_inline int route_away(struct __sk_buff *skb, const struct packet *p, struct flow *f,
				      const struct miss *m, struct addr *next_hop)
{
	f->translate = same_addr(&f->src, &f->key.src) ? 0 : TRANSLATE;
	f->checksum = csum_add(m->from->checksum, csum_diff_addr(&f->key.dst, &f->dst));
	return find_next_hop(skb, f, wire_length(skb, p), next_hop);
}

/* The stages of a miss: identity, destination (resolve), route. forward applies policy and sends. */
static __always_inline int from_container_slow(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
					       const struct flow_key *key, struct flow *f)
{
	struct addr next_hop = {}, wanted = key->dst, *hop = NULL;
	enum flow_egress egress = EGRESS_NEIGHBOUR;
	struct miss m;
	int why;

	if (in_services(&key->dst)) {
		bpf_tail_call(skb, &pil_services_v1, SERVICE_OUT);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);
	}
	why = identify(key, &m);
	if (why == REASON_SRC_NOT_OWN)
		return to_other_network(skb, key, why);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	/* Containers see each other, and nodes, at addresses with these prefixes. */
	if (!in_private(&key->dst) && !in_base(&key->dst)) {
		bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_OUT);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);
	}
	if (same_addr(&key->dst, &m.own->gateway))
		wanted = node_address();
	else
		why = resolve(m.own, &wanted);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	if (wanted.hi == own_node && wanted.lo == NODE_HOST)
		return to_node(skb, h, p, key, f, m.from->tenant_id);

	begin_flow(f, key, &m, &wanted);
	if (wanted.hi == own_node) {
		why = route_here(f, &m);
		egress = EGRESS_LOCAL;
	} else {
		why = route_away(skb, p, f, &m, &next_hop);
		if (why == REASON_TOO_BIG) /* a router checks the hop limit first */
			return icmp_error_send(skb, p, f, h->hop_limit <= 1 ? REASON_HOP_LIMIT : why);
		if (f->egress == EGRESS_UPLINK)
			hop = &next_hop;
	}
	return why ? drop(skb, why, HOOK_CONTAINER) : forward(skb, h, p, f, egress, hop, HOOK_CONTAINER);
}

static __always_inline int from_container(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = device_of(skb)};
	struct packet p = {};
	struct eth_ip6 *h;
	struct flow *f;
	int why;

	/* A VLAN tag would leave with the packet and reach another network. */
	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return to_other_network(skb, &key, REASON_NOT_IP6);
	why = read_from_container(skb, &key, &p);
	if (why)
		return drop_from_container(skb, &key, why);
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);

	f = flow_slot(&key);
	if (!f)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	if (likely(flow_matches(f, &key))) {
		if (f->egress == EGRESS_LOCAL)
			return forward(skb, h, &p, f, EGRESS_LOCAL, NULL, HOOK_CONTAINER);
		if (likely(f->expires > bpf_jiffies64()))
			return forward(skb, h, &p, f, EGRESS_UPLINK, NULL, HOOK_CONTAINER);
	}
	return from_container_slow(skb, h, &p, &key, f);
}
