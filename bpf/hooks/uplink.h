/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The uplink connects this node to the fabric. The ingress program delivers packets for a container of this node or
 * drops them; it never forwards them. The egress program lets packets pass that our programs have accepted, and checks
 * those of the node's own stack. All other traffic of the node passes. */
#pragma once
#include "common/icmp_source.h"
#include "hooks/container.h"
#include "net/netpila/egress.h"
#include "hooks/host_if.h"
#include "hooks/macvlan_backstop.h"
#include "hooks/uplink_class.h"
#include "net/netpila/alias.h"

/* is_allowed_node reports whether a source is the address of a node that the tenant's containers reach. */
static __always_inline bool is_allowed_node(const struct addr *source, __u32 tenant)
{
	return is_node_address(source) && may_reach_node(tenant, source->hi);
}

static __always_inline int from_fabric_slow(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
					    const struct flow_key *key, struct flow *f)
{
	__u32 from_id = tenant_id(&key->src), to_id = tenant_id(&key->dst);
	struct addr source = key->src;
	struct tenant *to;
	struct ep_dst *local;
	int why;

	if (app_id(&key->dst) >= FIRST_RESERVED_APP)
		return drop(skb, REASON_APP_RESERVED, HOOK_UPLINK_IN);
	local = bpf_map_lookup_elem(&pil_locals_v1, &key->dst.lo);
	if (!local)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	to = bpf_map_lookup_elem(&pil_tenants_v2, &to_id);
	if (!to || !in_base(&source) || !(from_id ? has_id(to, from_id) : is_allowed_node(&source, to_id)))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_UPLINK_IN);
	if (app_id(&source) >= FIRST_RESERVED_APP)
		return drop(skb, REASON_APP_RESERVED, HOOK_UPLINK_IN);
	if (!to->clear) {
		why = from_id ? crypt(from_id, &source, ENCRYPT) : node_alias(to_id, &source);
		if (why)
			return drop(skb, why, HOOK_UPLINK_IN);
	}

	f->egress = 0; /* invalidates the slot until all fields are written */
	f->key = *key;
	f->src = source;
	f->dst = local->address;
	f->translate = to->clear ? 0 : TRANSLATE;
	if (to->services && is_backend(&key->src))
		f->translate |= MAY_ANSWER;
	f->policy_ep[TX] = 0;
	f->policy_ep[RX] = has_policies(to_id) ? local->endpoint : 0;
	f->checksum = csum_add(local->checksum, csum_diff_addr(&f->key.src, &f->src));
	send_to(f, local->ifindex);
	f->egress = EGRESS_LOCAL;
	return forward(skb, h, p, f, EGRESS_LOCAL, NULL, HOOK_UPLINK_IN);
}

static __always_inline int from_fabric(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = skb->ifindex};
	struct packet p = {};
	struct eth_ip6 *h;
	struct flow *f;
	int why;

	if (macvlan) {
		if (skb->mark == packet_mark)
			return pass(skb); /* one of our programs has accepted it for a container */
		if (for_macvlan(skb))
			return drop(skb, REASON_MAC_OUTSIDE, HOOK_UPLINK_IN);
	}
	if (in_vlan(skb) || skb->pkt_type == PACKET_OTHERHOST)
		return TCX_NEXT;
	if (uplink_vtep4 && skb->protocol == bpf_htons(ETH_P_IP))
		return from_fabric4(skb);
	h = eth_ip6_of(skb);
	if (!h)
		return TCX_NEXT;
	if (hides_in_tag(h))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	/* Our own /64 is behind this node. A packet from the fabric with a source in it is spoofed. */
	if (src_of(h)->hi == own_node)
		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);
	key.src = *src_of(h);
	key.dst = *dst_of(h);
	if (key.dst.hi != own_node || !tenant_id(&key.dst)) {
		why = key.src.hi == own_egress ? REASON_OWN_SOURCE : check_private(&key.src, &key.dst);
		/* Containers send only to containers, and those whose tenant may to nodes, which their own node has
		 * checked. Packets between others pass, because this node may be a router between them. */
		if (!why && claims_tenant(&key.src) && !claims_tenant(&key.dst) &&
		    !(claims_app(&key.src) && is_node_address(&key.dst)))
			why = REASON_TENANT_TO_NODE;
		return why ? drop(skb, why, HOOK_UPLINK_IN) : classify(skb, &key.dst);
	}
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (is_error(&p) && !claims_tenant(&key.src)) {
		why = icmp_err_set_peer_src(skb, &p, &key.src, own_node);
		if (why)
			return drop(skb, why, HOOK_UPLINK_IN);
	}
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	h = eth_ip6_of(skb);
	f = flow_slot(&key);
	if (!h || !f)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	if (likely(flow_matches(f, &key)))
		return forward(skb, h, &p, f, EGRESS_LOCAL, NULL, HOOK_UPLINK_IN);
	return from_fabric_slow(skb, h, &p, &key, f);
}

/* is_accepted reports whether a packet with accept_mark is a container's. One of our programs has seen it already; it
 * comes from the neighbour table or a netkit. Its namespace must be that of the source's container, or the node's if
 * the node routed it. */
static __always_inline bool is_accepted(struct __sk_buff *skb)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct ep_dst *own;
	struct addr src;
	__u64 cookie;

	if (!h)
		return false;
	src = *src_of(h);
	cookie = namespace_of(skb);
	if (is_egress(&src) && (src.hi == own_egress || src.hi == own_node)) {
		struct egress_dst *its = bpf_map_lookup_elem(&pil_elocals_v1, &src.lo);

		return cookie == node_cookie || (its && its->ifindex == (ON_UPLINK | cookie));
	}
	if (src.hi != own_node || src.lo == NODE_HOST)
		return cookie == node_cookie && (is_gateway_source(&src) || is_exposed_address(&src));
	own = bpf_map_lookup_elem(&pil_locals_v1, &src.lo);
	return own && (own->ifindex == (ON_UPLINK | cookie) || cookie == node_cookie);
}

/* is_ours reports whether our programs have already accepted a packet: it has the secret accept_mark, or it has
 * packet_mark and entered by a device, which no process of the node can fake. The container of a macvlan can do both,
 * so with macvlans only accept_mark counts, and only with is_accepted. */
static __always_inline bool is_ours(struct __sk_buff *skb)
{
	if (macvlan)
		return skb->mark == accept_mark && is_accepted(skb);
	return skb->mark == accept_mark || (skb->mark == packet_mark && skb->ingress_ifindex);
}

/* Egress: the node's own stack must not send with the source of a container, nor show private addresses to the fabric.
 */
static __always_inline int to_fabric(struct __sk_buff *skb)
{
	struct addr src, dst;
	struct eth_ip6 *h;
	__u8 nexthdr;
	int why;

	if (is_ours(skb))
		return pass(skb);
	if (macvlan && !from_node_netns(skb))
		return from_container(skb);
	if (vtep4_mask && !is_own_tunnel(skb) && is_tunnel4(skb))
		return drop(skb, REASON_TUNNEL_FORGED, HOOK_UPLINK_OUT);
	h = eth_ip6_of(skb);
	if (!h)
		return TCX_NEXT;
	if (hides_in_tag(h))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_OUT);
	/* The header counts: a packet socket can claim that it sends IPv4. */
	if (h->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	src = *src_of(h);
	dst = *dst_of(h);
	nexthdr = h->nexthdr;
	why = check_outward(&src, &dst);
	if (!why && (is_gateway_source(&src) || is_exposed_source(&src)))
		why = REASON_HOST_CLAIMS_TENANT;
	if (!why && !is_own_tunnel(skb) && is_tunnel(skb, &src, &dst, nexthdr))
		why = REASON_TUNNEL_FORGED;
	return why ? drop(skb, why, HOOK_UPLINK_OUT) : TCX_NEXT;
}
