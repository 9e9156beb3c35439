/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets from the fabric by way of an egress gateway: at the gateway, and its answers at the container's node.
 * egress_stages.h and uplink_class.h tail-call the program. */
#pragma once
#include "net/netpila/egress_stages.h"
#include "net/netpila/gateway_nat.h"

/* gateway_out translates a packet of a container, which came in the tunnel from the container's node, or of a container
 * of this node. */
static __noinline int gateway_out(struct __sk_buff *skb, const struct addr *own, __u32 hook)
{
	struct gateway_scratch *d = gateway_scratch();
	struct packet p = {};
	void *connections;
	struct eth_ip6 *h;
	struct flow *hop;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !d || !own)
		return drop(skb, REASON_MALFORMED, hook);
	d->out.local = *src_of(h);
	d->out.remote = d->back.remote = *dst_of(h);
	d->back.local = *own;
	connections = bpf_map_lookup_elem(&pil_gwnat_v1, &d->back.local);
	if (!connections)
		return drop(skb, REASON_GATEWAY_DENIED, hook);
	why = parse(skb, h, &p);
	if (!why && !is_translatable(&p))
		why = REASON_GATEWAY_PROTOCOL;
	if (!why)
		why = read_nat_ports(skb, &p, false, &d->out);
	if (why)
		return drop(skb, why, hook);
	d->back.remote_port = d->out.remote_port;
	d->back.proto = d->out.proto;
	__builtin_memset(d->back.zero, 0, sizeof(d->back.zero));
	why = find_connection(connections, d);
	if (!why && hook == HOOK_UPLINK_IN)
		why = clamp_to_tunnel(skb, &p, d->out.local.hi);
	if (why)
		return drop(skb, why, hook);
	hop = cached_hop(skb, own, &d->out.remote, hook == HOOK_CONTAINER ? device_of(skb) : skb->ifindex, 0);
	h = eth_ip6_of(skb);
	if (!hop || !h)
		return drop(skb, REASON_NO_ROUTE, hook);
	why = hook == HOOK_UPLINK_IN ? dec_hop_limit(skb, h, &p, hop) : 0;
	if (!why)
		why = nat_write(skb, &p, false, &d->out, &d->entry);
	if (why)
		return drop(skb, why, hook);
	return send_by(skb, hop);
}

/* send_back sends a packet, whose MACs are those of the one that it answers, out by the uplink of that one. */
static __always_inline int send_back(struct __sk_buff *skb)
{
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb);
	skb->mark = macvlan ? accept_mark : packet_mark;
	return macvlan ? bpf_redirect_neigh(uplinks[0], NULL, 0, 0) : bpf_redirect(skb->ifindex, 0);
}

/* error_outside drops a packet of a host outside and sends the ICMPv6 error about it: Packet Too Big with an MTU, else
 * that the port is unreachable. about has the rate limit. */
static __noinline int error_outside(struct __sk_buff *skb, const struct packet *p, __u32 mtu, __u32 about, __u32 reason)
{
	struct gateway_scratch *d = gateway_scratch();
	struct icmp6_error *a;
	struct eth_ip6 *h;

	drop(skb, reason, HOOK_UPLINK_IN);
	h = eth_ip6_of(skb);
	if (!d || !h || !p || !icmp_error_wanted(skb, p) || !outside_error_allowed(about))
		return TC_ACT_SHOT;
	a = &d->error;
	__builtin_memset(a, 0, sizeof(*a));
	__builtin_memcpy(a->frame.eth.h_dest, h->eth.h_source, ETH_ALEN);
	__builtin_memcpy(a->frame.eth.h_source, h->eth.h_dest, ETH_ALEN);
	a->frame.src = *dst_of(h);
	a->frame.dst = *src_of(h);
	a->type = mtu ? ICMPV6_TOO_BIG : ICMPV6_UNREACHABLE;
	a->code = mtu ? 0 : ICMPV6_PORT;
	a->mtu = bpf_htonl(mtu);
	return icmp_error_write(skb, a) ? TC_ACT_SHOT : send_back(skb);
}

/* read_nat_quote reads the connection of the packet that an error from outside quotes. */
static __noinline int read_nat_quote(struct __sk_buff *skb, const struct packet *p, struct nat_key *key)
{
	struct addr quoted[2];
	struct pol_scratch *d;
	__be16 ports[2] = {};
	__u32 zero = 0;
	int proto;

	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d || !p || !key || bpf_skb_load_bytes(skb, p->l4 + QUOTED_ADDRESSES, quoted, sizeof(quoted)) ||
	    !same_addr(&quoted[0], &key->local))
		return REASON_ICMP_QUOTE;
	d->quotes_fragment = 0;
	proto = read_quoted_ports(skb, p, d, ports);
	if (proto < 0 || d->quotes_fragment)
		return REASON_ICMP_QUOTE;
	key->remote = quoted[1];
	key->local_port = ports[1];
	key->remote_port = proto == NEXTHDR_ICMP ? 0 : ports[0];
	key->proto = proto;
	key->zero[0] = key->zero[1] = key->zero[2] = 0;
	return 0;
}

/* nat_write_error translates an error from outside: its quote, its destination, and its source, which becomes the host
 * that the quoted packet was sent to, so that the container's node finds the rule of the connection. */
static __noinline int nat_write_error(struct __sk_buff *skb, const struct packet *p, struct gateway_scratch *d)
{
	struct addr from, gateway, to, peer;
	struct packet q = {};
	__u32 difference, at;
	struct eth_ip6 *h;

	h = eth_ip6_of(skb);
	if (!h || !p || !d)
		return REASON_MALFORMED;
	q.l4 = p->l4 + ICMPV6_HLEN + IPV6_HLEN;
	q.end = p->end;
	if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)))
		return REASON_MALFORMED;
	if (find_transport(skb, &q) || !q.l4)
		return REASON_ICMP_QUOTE;
	h = eth_ip6_of(skb);
	if (!h)
		return REASON_MALFORMED;
	from = *src_of(h);
	gateway = d->back.local;
	peer = d->back.remote;
	to = d->entry.address;
	difference = csum_diff_addr(&gateway, &to);
	difference = csum_add(csum_add(difference, difference), csum_diff_addr(&from, &peer));
	difference = csum_add(difference, csum_add((__u16)~d->back.local_port, d->entry.port));
	at = q.l4 + (q.proto == NEXTHDR_ICMP ? 4 : 0);
	if (fix_checksum(skb, p, difference) ||
	    bpf_skb_store_bytes(skb, p->l4 + QUOTED_ADDRESSES, &to, sizeof(to), 0) ||
	    bpf_skb_store_bytes(skb, at, &d->entry.port, sizeof(d->entry.port), 0) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &peer, sizeof(peer), 0) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, dst), &to, sizeof(to), 0))
		return REASON_MALFORMED;
	return 0;
}

/* nat_write_back writes the container into a packet from outside, or into an error and its quote. It returns 0 or a
 * reason. */
static __always_inline int nat_write_back(struct __sk_buff *skb, const struct packet *p, struct gateway_scratch *d)
{
	return is_error(p) ? nat_write_error(skb, p, d) : nat_write(skb, p, true, &d->back, &d->entry);
}

/* tunnel_to_container translates a packet from outside and sends it in the tunnel to the container's node. host is the
 * low half of both ends of the tunnel. */
static __always_inline int tunnel_to_container(struct __sk_buff *skb, const struct packet *p, struct gateway_scratch *d,
					       __u32 path, __u64 host)
{
	struct eth_ip6 *h;
	struct flow *hop;
	int why;

	hop = tunnel_hop(skb, d->entry.address.hi, skb->ifindex, path);
	h = eth_ip6_of(skb);
	if (!hop || !h)
		return drop(skb, REASON_NO_ROUTE, HOOK_UPLINK_IN);
	if (h->hop_limit <= 1)
		return drop(skb, REASON_HOP_LIMIT, HOOK_UPLINK_IN);
	if (skb->len - ETH_HLEN > hop->mtu - TUNNEL_HLEN && wire_length(skb, p) > hop->mtu - TUNNEL_HLEN)
		return error_outside(skb, p, hop->mtu - TUNNEL_HLEN, tenant_id(&d->entry.address), REASON_TOO_BIG);
	h->hop_limit--;
	why = nat_write_back(skb, p, d);
	if (!why)
		why = ip6ip6_push(skb, d->entry.address.hi, host);
	return why ? drop(skb, why, HOOK_UPLINK_IN) : send_by(skb, hop);
}

/* gateway_back translates a packet from a host outside and sends it in the tunnel to the container's node. */
static __noinline int gateway_back(struct __sk_buff *skb, void *connections)
{
	struct gateway_scratch *d = gateway_scratch();
	struct nat_entry *to;
	struct packet p = {};
	struct eth_ip6 *h;
	__u32 path;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !d || !connections)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	path = path_of(h);
	d->back.local = *dst_of(h);
	d->back.remote = *src_of(h);
	why = parse(skb, h, &p);
	if (!why && is_error(&p))
		why = read_nat_quote(skb, &p, &d->back);
	else if (!why)
		why = is_translatable(&p) ? read_nat_ports(skb, &p, true, &d->back) : REASON_GATEWAY_PROTOCOL;
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	to = bpf_map_lookup_elem(connections, &d->back);
	if (!to)
		return drop(skb, REASON_NO_SESSION, HOOK_UPLINK_IN);
	d->entry = *to;
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	if (d->entry.address.hi == own_node) {
		why = nat_write_back(skb, &p, d);
		if (why)
			return drop(skb, why, HOOK_UPLINK_IN);
		bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);
	}
	return tunnel_to_container(skb, &p, d, path, EGRESS_TUNNEL_HOST);
}

/* gateway_answered delivers an answer, which came in the tunnel from a gateway or from this one, to its container. */
static __noinline int gateway_answered(struct __sk_buff *skb, const struct flow_key *key, __u64 gateway)
{
	struct gateway_scratch *d = gateway_scratch();
	struct packet p = {};
	struct ep_dst *to;
	struct eth_ip6 *h;
	struct flow *f;
	struct access_rule *rule;
	struct addr src;
	int why;

	h = eth_ip6_of(skb);
	if (!h || !key)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_UPLINK_IN);
	src = key->src;
	rule = access_rule_of(tenant_id(&key->dst), &src);
	if (!rule || !has_gateway(rule, gateway) || is_protected(&src))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	to = bpf_map_lookup_elem(&pil_locals_v1, &key->dst.lo);
	if (!to || !d)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	f = &d->flow;
	begin_outside(f, key, &key->src, &to->address, key->dst.lo);
	f->translate = same_addr(&to->address, &key->dst) ? 0 : TRANSLATE;
	f->policy_ep[RX] = to->endpoint;
	f->checksum = to->checksum;
	send_to(f, to->ifindex);
	return egress_forward(skb, &p, f, false, EGRESS_LOCAL, NULL, RX, HOOK_UPLINK_IN);
}

/* probe_arrived answers a probe, or notes an answer. */
static __noinline int probe_arrived(struct __sk_buff *skb)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct gateway_probe probe;
	__u8 mac[ETH_ALEN];
	struct addr from;
	__u64 now;

	if (!h || bpf_skb_load_bytes(skb, sizeof(struct eth_ip6), &probe, sizeof(probe)) ||
	    probe.magic != GATEWAY_PROBE_MAGIC || (probe.kind != GATEWAY_PROBE && probe.kind != GATEWAY_ALIVE))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	from = *src_of(h);
	if (probe.kind == GATEWAY_ALIVE) {
		now = bpf_ktime_get_ns();
		bpf_map_update_elem(&pil_gwanswers, &from.hi, &now, BPF_ANY);
		return TC_ACT_SHOT; /* consumed */
	}
	__builtin_memcpy(mac, h->eth.h_dest, ETH_ALEN);
	__builtin_memcpy(h->eth.h_dest, h->eth.h_source, ETH_ALEN);
	__builtin_memcpy(h->eth.h_source, mac, ETH_ALEN);
	*src_of(h) = *dst_of(h);
	*dst_of(h) = from;
	h->hop_limit = TUNNEL_HOPS;
	probe.kind = GATEWAY_ALIVE;
	if (bpf_skb_store_bytes(skb, sizeof(struct eth_ip6), &probe, sizeof(probe), BPF_F_RECOMPUTE_CSUM))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	return send_back(skb);
}

/* The start of an ICMPv6 error, up to the source in its quote. */
struct error_quote {
	__u8 type;
	__u8 rest[13];
	__u8 nexthdr, hop_limit;
	struct addr src;
};
_Static_assert(sizeof(struct error_quote) == ICMPV6_HLEN + 24, "no implicit padding");

/* quotes_probe reports whether a packet is an ICMPv6 error about a probe of this node. */
static __always_inline bool quotes_probe(struct __sk_buff *skb, const struct eth_ip6 *h)
{
	struct error_quote e;

	return h->nexthdr == NEXTHDR_ICMP && !bpf_skb_load_bytes(skb, sizeof(*h), &e, sizeof(e)) &&
	       e.type <= ICMPV6_ERROR_MAX && e.nexthdr == PROTO_NONE && e.src.hi == own_node &&
	       e.src.lo == EGRESS_TUNNEL_HOST;
}

/* from_egress_tunnel handles a packet in the tunnel between a node and a gateway. It trusts the outer source: the
 * fabric lets each node send from its own /64 only (uRPF). A fabric that does not would let any host pose as a gateway
 * or as a container's node. */
static __always_inline int from_egress_tunnel(struct __sk_buff *skb, struct eth_ip6 *outer)
{
	struct flow_key key = {.generation = generation(), .device = skb->ifindex};
	__u64 node = src_of(outer)->hi;
	struct access_rule *rule;
	struct addr ends[2], *own;
	bool to_outside;
	__u32 tenant = 0;

	if (outer->nexthdr == PROTO_NONE && is_egress_tunnel(src_of(outer)))
		return probe_arrived(skb);
	if (quotes_probe(skb, outer))
		return TC_ACT_SHOT; /* consumed: that the answer is missing says the same */
	if (outer->nexthdr != PROTO_IPV6 || !is_egress_tunnel(src_of(outer)) ||
	    bpf_skb_load_bytes(skb, sizeof(struct eth_ip6) + 8, ends, sizeof(ends)))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	to_outside = ends[0].hi == node && claims_app(&ends[0]);
	if (!to_outside && !(ends[1].hi == own_node && tenant_id(&ends[1])))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	if (to_outside) {
		tenant = tenant_id(&ends[0]);
		rule = access_rule_of(tenant, &ends[1]);
		if (!rule || !has_gateway(rule, own_node) || is_protected(&ends[1]))
			return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	}
	if (skb->vlan_present)
		bpf_skb_vlan_pop(skb); /* the tag is outside of the frame and belongs to the uplink */
	if (ip6ip6_pull(skb))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	if (to_outside) {
		own = bpf_map_lookup_elem(&pil_gwtenants_v1, &tenant);
		return own ? gateway_out(skb, own, HOOK_UPLINK_IN) : drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);
	}
	key.src = ends[0];
	key.dst = ends[1];
	return gateway_answered(skb, &key, node);
}

/* at_egress_gateway is the program of packets from the fabric to this node's tunnel address or to an address of a
 * gateway, and of packets from and to containers of this node, if it is their gateway. No packet from the fabric has
 * one of these containers as its source or destination here. */
static __always_inline int at_egress_gateway(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = skb->ifindex};
	struct eth_ip6 *h = eth_ip6_of(skb);
	void *connections;
	struct addr *own;
	__u32 tenant;

	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	key.src = *src_of(h);
	key.dst = *dst_of(h);
	if (key.src.hi == own_node && claims_app(&key.src)) {
		tenant = tenant_id(&key.src);
		own = bpf_map_lookup_elem(&pil_gwtenants_v1, &tenant);
		return own ? gateway_out(skb, own, HOOK_CONTAINER) : drop(skb, REASON_GATEWAY_DENIED, HOOK_CONTAINER);
	}
	if (key.dst.hi == own_node && claims_app(&key.dst))
		return gateway_answered(skb, &key, own_node);
	if (key.dst.hi == own_node && key.dst.lo == EGRESS_TUNNEL_HOST)
		return from_egress_tunnel(skb, h);
	connections = bpf_map_lookup_elem(&pil_gwnat_v1, &key.dst);
	if (!connections)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);
	return gateway_back(skb, connections);
}
