/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network ila: the stages of a packet from a container and of one from the fabric. Containers have addresses that say
 * nothing about where they are; a table has the locator of each (draft-herbert-intarea-ila-01). Both addresses of a
 * packet are translated, the source too: so strict uRPF accepts it, routers' ICMP errors arrive, and the receiver can
 * compare the sender's locator with its mapping. The flow cache is NETPILA's. */
#pragma once
#include "common/icmp_source.h"
#include "net/ila/forward.h"
#include "net/ila/miss.h"
#include "net/netpila/next_hop.h"

/* ila_begin starts a flow. policy_ep and the end of the route are the caller's. */
static __always_inline void ila_begin(struct flow *f, const struct flow_key *key, const struct addr *src,
				      const struct addr *dst, __u32 apps)
{
	f->egress = 0; /* invalidates the slot until all fields are written */
	f->key = *key;
	f->src = *src;
	f->dst = *dst;
	f->extra = apps;
	f->policy_ep[TX] = f->policy_ep[RX] = 0;
}

/* Stage route, to a container of this node. */
static __always_inline void ila_route_here(struct flow *f, const struct ila_local *to, bool policed)
{
	f->policy_ep[RX] = policed ? to->endpoint : 0;
	send_to(f, to->ifindex);
	f->egress = EGRESS_LOCAL;
}

/* The stages of a miss: identity of the sender, mapping of the destination, route. */
static __always_inline int ila_from_container_slow(struct __sk_buff *skb, const struct packet *p,
						   const struct flow_key *key, struct flow *f)
{
	struct addr next_hop = {}, src, dst, *hop = NULL;
	struct ila_local *from, *to;
	struct ila_peer *peer;
	__u64 id;
	bool policed;
	int why;

	id = key->src.lo;
	from = bpf_map_lookup_elem(&ila_locals_v2, &id);
	if (key->src.hi != sir_prefix || !from || from->ifindex != key->device)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);
	id = key->dst.lo;
	if (key->dst.hi != sir_prefix)
		return drop(skb, REASON_DST_NOT_PRIVATE, HOOK_CONTAINER);
	if (identifier_vnid(id) != identifier_vnid(key->src.lo))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_CONTAINER);
	policed = has_policies(identifier_vnid(id));
	to = bpf_map_lookup_elem(&ila_locals_v2, &id);
	if (to) {
		ila_begin(f, key, &key->src, &key->dst, from->app << 16 | (to->app & 0xffff));
		f->policy_ep[TX] = policed ? from->endpoint : 0;
		ila_route_here(f, to, policed);
		return ila_forward(skb, p, f, EGRESS_LOCAL, NULL, HOOK_CONTAINER);
	}
	peer = bpf_map_lookup_elem(&ila_peers_v1, &id);
	if (!peer)
		return drop_miss(skb, id, HOOK_CONTAINER);
	mark_used(peer);
	src = source_stays ? key->src : to_wire(key->src.lo, own_locator);
	dst = to_wire(id, peer->locator);
	ila_begin(f, key, &src, &dst, from->app << 16 | (peer->app & 0xffff));
	f->policy_ep[TX] = policed ? from->endpoint : 0;
	why = find_next_hop(skb, f, wire_length(skb, p), &next_hop);
	if (why == REASON_TOO_BIG) {
		struct eth_ip6 *h = eth_ip6_of(skb);

		/* a router checks the hop limit first */
		return ila_error_send(skb, p, f, h && h->hop_limit <= 1 ? REASON_HOP_LIMIT : why);
	}
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	if (f->egress == EGRESS_UPLINK)
		hop = &next_hop;
	asm volatile("" : "+r"(hop)); /* the verifier must see the check on the pointer, not on what it follows from */
	return ila_forward(skb, p, f, EGRESS_NEIGHBOUR, hop, HOOK_CONTAINER);
}

static __always_inline int ila_from_container(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = ila_generation(), .device = device_of(skb)};
	struct packet p = {};
	struct flow *f;
	int why;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return drop(skb, REASON_NOT_IP6, HOOK_CONTAINER);
	why = read_from_container(skb, &key, &p);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	f = flow_slot(&key);
	if (!f)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	if (likely(flow_matches(f, &key))) {
		if (f->egress == EGRESS_LOCAL)
			return ila_forward(skb, &p, f, EGRESS_LOCAL, NULL, HOOK_CONTAINER);
		if (likely(f->expires > bpf_jiffies64()))
			return ila_forward(skb, &p, f, EGRESS_UPLINK, NULL, HOOK_CONTAINER);
	}
	return ila_from_container_slow(skb, &p, &key, f);
}

/* ila_check_locator accepts packets from where the sender's mapping says that the sender is, or was until just now. It
 * also accepts those of any sender from the node where the receiver was until just now: that node has checked the
 * sender's locator and forwards what was sent to it (ila_forward_moved). */
static __always_inline bool ila_check_locator(const struct ila_peer *peer, const struct ila_local *local, __u64 locator)
{
	return peer->locator == locator || (peer->former == locator && bpf_ktime_get_ns() < peer->until) ||
	       (local->former == locator && bpf_ktime_get_ns() < local->until);
}

/* ila_forward_moved forwards a packet from the fabric to a container that has moved from here to another node. Its
 * sender's node does not have the new mapping yet. Other nodes accept packets from this node's locator only, so this is
 * the source. A forwarded packet is not forwarded again, because its locator is not that of its sender: no packet can
 * circle. The caller has checked that both ends are of one tenant. The receiver's node applies its policies. ICMP
 * errors leave with the quoted addresses that the container has sent, because the new node does not know how the packet
 * was on the fabric. */
static __noinline int ila_forward_moved(struct __sk_buff *skb, const struct packet *p, const struct flow_key *key,
					struct flow *f)
{
	__u64 from = sender_of(&key->src), to = from_wire(&key->dst);
	struct addr next_hop = {}, src, dst, *hop = NULL;
	struct ila_peer *peer, *moved;
	int why;

	moved = bpf_map_lookup_elem(&ila_peers_v1, &to);
	if (!moved || moved->former != own_locator || bpf_ktime_get_ns() >= moved->until)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	peer = bpf_map_lookup_elem(&ila_peers_v1, &from);
	if (!peer)
		return drop_miss(skb, from, HOOK_UPLINK_IN);
	mark_used(peer);
	if (!source_stays && peer->locator != key->src.hi)
		return drop(skb, REASON_LOCATOR_MISMATCH, HOOK_UPLINK_IN);
	src = sir_address(from);
	dst = sir_address(to);
	ila_begin(f, key, &src, &dst, 0);
	why = is_error(p) ? ila_check_quote(skb, p, f, HOOK_UPLINK_IN) : 0;
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	f->src = source_stays ? key->src : to_wire(from, own_locator);
	f->dst = to_wire(to, moved->locator);
	why = find_next_hop(skb, f, wire_length(skb, p), &next_hop);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (f->egress == EGRESS_UPLINK)
		hop = &next_hop;
	asm volatile("" : "+r"(hop)); /* see ila_from_container_slow */
	/* The next packet is checked anew. */
	f->egress = 0;
	return ila_send(skb, p, f, EGRESS_NEIGHBOUR, hop, HOOK_UPLINK_IN);
}

/* The stages of a packet from the fabric: identity of the receiver and of the sender, route. */
static __always_inline int ila_from_fabric_slow(struct __sk_buff *skb, const struct packet *p,
						const struct flow_key *key, struct flow *f)
{
	__u64 from = sender_of(&key->src), to = from_wire(&key->dst);
	struct addr src = sir_address(from), dst = sir_address(to);
	struct ila_local *local;
	struct ila_peer *peer;

	local = bpf_map_lookup_elem(&ila_locals_v2, &to);
	if (!local && identifier_vnid(from) == identifier_vnid(to))
		return ila_forward_moved(skb, p, key, f);
	if (!local)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	if (identifier_vnid(from) != identifier_vnid(to))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_UPLINK_IN);
	peer = bpf_map_lookup_elem(&ila_peers_v1, &from);
	if (!peer)
		return drop_miss(skb, from, HOOK_UPLINK_IN);
	mark_used(peer);
	if (!source_stays && !ila_check_locator(peer, local, key->src.hi))
		return drop(skb, REASON_LOCATOR_MISMATCH, HOOK_UPLINK_IN);
	ila_begin(f, key, &src, &dst, peer->app << 16 | (local->app & 0xffff));
	ila_route_here(f, local, has_policies(identifier_vnid(to)));
	if (!source_stays && peer->locator != key->src.hi)
		f->egress = 0; /* no packet may be accepted by the flow after the former locator's time */
	return ila_forward(skb, p, f, EGRESS_LOCAL, NULL, HOOK_UPLINK_IN);
}

/* Packets to this node's locator; the uplink's program makes a tail call to this one. It has checked tags and the
 * sources that only this node may use. */
static __always_inline int ila_from_fabric(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = ila_generation(), .device = skb->ifindex};
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct packet p = {};
	struct flow *f;
	int why;

	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	key.src = *src_of(h);
	key.dst = *dst_of(h);
	if (key.src.hi == own_locator)
		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);
	why = parse(skb, h, &p);
	if (!why && is_error(&p) && !claims_tenant(&key.src))
		why = icmp_err_set_peer_src(skb, &p, &key.src, own_locator);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	f = flow_slot(&key);
	if (!f)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	if (likely(flow_matches(f, &key)))
		return ila_forward(skb, &p, f, EGRESS_LOCAL, NULL, HOOK_UPLINK_IN);
	return ila_from_fabric_slow(skb, &p, &key, f);
}
