/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Between the fabric and this node: what is for a container here is delivered or dropped, never passed on;
 * everything else is the node's own business. */
#pragma once
#include "hooks/container.h"
#include "hooks/host_if.h"
#include "hooks/macvlan_backstop.h"
#include "net/nimitz/gateway.h"

/* icmp_err_set_peer_src gives an error of the fabric (too big, time exceeded, unreachable) the peer's address as
 * source: the one the container sent to and the error quotes. From there on it is the peer's own error,
 * with every check that implies, and the container does not learn which router it was. */
static __always_inline int icmp_err_set_peer_src(struct __sk_buff *skb, const struct packet *p, struct addr *source)
{
	struct addr peer = {};

	if (bpf_skb_load_bytes(skb, p->l4 + QUOTED_ADDRESSES + sizeof(peer), &peer, sizeof(peer)))
		return REASON_ICMP_QUOTE;
	/* What this node's containers say to each other never was on the fabric. */
	if (peer.hi == own_node)
		return REASON_ICMP_QUOTE;
	if (fix_checksum(skb, p, csum_diff_addr(source, &peer)) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &peer, sizeof(peer), 0))
		return REASON_MALFORMED;
	*source = peer;
	return 0;
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
	if (!to || !in_base(&source) || !has_id(to, from_id))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_UPLINK_IN);
	if (app_id(&source) >= FIRST_RESERVED_APP)
		return drop(skb, REASON_APP_RESERVED, HOOK_UPLINK_IN);
	if (!to->clear) {
		why = crypt(from_id, &source, ENCRYPT);
		if (why)
			return drop(skb, why, HOOK_UPLINK_IN);
	}

	f->egress = 0; /* the slot holds nothing until all of it is written */
	f->key = *key;
	f->src = source;
	f->dst = local->address;
	f->translate = !to->clear;
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
			return pass(skb); /* on its way to a container, as one of our programs has decided */
		if (for_macvlan(skb))
			return drop(skb, REASON_MAC_OUTSIDE, HOOK_UPLINK_IN);
	}
	if (in_vlan(skb) || skb->pkt_type == PACKET_OTHERHOST)
		return TCX_NEXT;
	h = eth_ip6_of(skb);
	if (!h)
		return TCX_NEXT;
	if (hides_in_tag(h))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	/* Our own /64 is behind us; from the fabric it is a forgery, whomever it is for. */
	if (src_of(h)->hi == own_node)
		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);
	key.src = *src_of(h);
	key.dst = *dst_of(h);
	if (key.dst.hi != own_node || !tenant_id(&key.dst)) {
		why = check_private(&key.src, &key.dst);
		/* Containers speak to containers; between those of other nodes this one may be a router. */
		if (!why && claims_tenant(&key.src) && !claims_tenant(&key.dst))
			why = REASON_TENANT_TO_NODE;
		if (!why && is_gateway_addr(&key.dst))
			return to_gateway(skb);
		/* What the tunnel's device has of the uplink, and not of a process of this node. */
		if (!why && !macvlan && key.dst.hi == own_node && key.dst.lo == VTEP_HOST)
			skb->mark = tunnel_mark;
		return why ? drop(skb, why, HOOK_UPLINK_IN) : TCX_NEXT;
	}
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (is_error(&p) && !claims_tenant(&key.src)) {
		why = icmp_err_set_peer_src(skb, &p, &key.src);
		if (why)
			return drop(skb, why, HOOK_UPLINK_IN);
	}
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* it is beside the frame, and of the uplink alone */
	h = eth_ip6_of(skb);
	f = flow_slot(&key);
	if (!h || !f)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	if (likely(flow_matches(f, &key)))
		return forward(skb, h, &p, f, EGRESS_LOCAL, NULL, HOOK_UPLINK_IN);
	return from_fabric_slow(skb, h, &p, &key, f);
}

/* A container's packet that comes by a second time, from the neighbour table, or from a netkit: judged, and still its
 * own, or led by a route of the node where the node chose the next hop. */
static __always_inline bool is_accepted(struct __sk_buff *skb)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct ep_dst *own;
	struct addr src;
	__u64 cookie;

	if (!h || src_of(h)->hi != own_node)
		return false;
	src = *src_of(h);
	own = bpf_map_lookup_elem(&pil_locals_v1, &src.lo);
	cookie = namespace_of(skb);
	return own && (own->ifindex == (ON_UPLINK | cookie) || cookie == node_cookie);
}

/* Our packets carry the mark, and they came in through a device, which nothing that starts on the node can claim. Or
 * they carry the one that nobody knows who may not change all of this. A container behind a macvlan may set any mark,
 * and have devices of its own that its packets come in by: there it takes more. */
static __always_inline bool is_ours(struct __sk_buff *skb)
{
	if (macvlan)
		return skb->mark == accept_mark && is_accepted(skb);
	return skb->mark == accept_mark || (skb->mark == packet_mark && skb->ingress_ifindex);
}

/* The host's own stack must not speak as a container, nor tell the fabric what only containers see. */
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
	h = eth_ip6_of(skb);
	if (!h)
		return TCX_NEXT;
	if (hides_in_tag(h))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_OUT);
	/* The frame's own word: a packet socket may say that it sends IPv4. */
	if (h->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;
	src = *src_of(h);
	dst = *dst_of(h);
	nexthdr = h->nexthdr;
	why = check_outward(&src, &dst);
	if (!why && (was_made_here(skb) || !is_known_tunnel(skb)) && is_tunnel(skb, &src, &dst, nexthdr))
		why = REASON_TUNNEL_FORGED;
	return why ? drop(skb, why, HOOK_UPLINK_OUT) : TCX_NEXT;
}
