/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network nimitz: the five stages of NIMITZ (§3.1, fig. 5), decap, register, NAT, forwarding and encap, around a VXLAN
 * device of the kernel. The tunnel key goes to and comes from that device beside the packet. Three hooks enter: a
 * container's, the VXLAN device's and the gateway's. */
#pragma once
#include "net/nimitz/direct.h"
#include "net/nimitz/gateway.h"
#include "net/nimitz/icmp.h"
#include "net/nimitz/policy.h"
#include "net/nimitz/router.h"

/* decap accepts packets that came by the uplink from the tunnel addresses of known nodes. The uplink's program marks
 * packets to this node's VTEP and drops those that claim this node as their source. Other interfaces drop tunnel
 * packets, so no other packet has the mark. */
static __noinline int decap(struct __sk_buff *skb, struct pkt_ctx *j)
{
	struct vxlan_metadata policy = {};
	struct bpf_tunnel_key key = {};
	struct addr from;
	int why;

	/* leaves the key as it is for a tunnel over IPv4 */
	bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6);
	__builtin_memcpy(&from, key.remote_ipv6, sizeof(from));
	why = is_known_tunnel(skb) ? check_peer(&from, j) : REASON_PEER_UNKNOWN;
	if (why)
		return why;
	j->vni = key.tunnel_id;
	if (bpf_skb_get_tunnel_opt(skb, &policy, sizeof(policy)) > 0)
		read_gbp(j, policy.gbp);
	return 0;
}

/* lookup_sender finds VNI and identity of a container's packet by port and source. */
static __always_inline int lookup_sender(struct pkt_ctx *j)
{
	struct sender_key key = {.source = j->src, .port = j->from, .scope = scope_of(j->family, 0)};
	struct sender *s = bpf_map_lookup_elem(&nim_senders_v1, &key);

	if (!s)
		return REASON_SRC_NOT_OWN;
	j->vni = s->vni;
	j->identity = s->identity;
	return 0;
}

/* lookup_remote_sender finds the local VNI of a packet from another region, whose VNIs and identities are not ours. */
static __always_inline int lookup_remote_sender(struct pkt_ctx *j)
{
	struct remote_sender_key key = {
		.bits = 96 + 128, .scope = scope_of(j->family, j->vni), .edge = j->remote_edge, .source = j->src};
	struct remote_sender *f = bpf_map_lookup_elem(&nim_foreign_v1, &key);

	if (!f)
		return REASON_FOREIGN_UNKNOWN;
	j->vni = f->vni;
	j->identity = 0;
	return 0;
}

/* Destination NAT comes first: the address of a service counts as outside, and the result is checked by policy
 * afterwards. */
static __noinline void nat(struct pkt_ctx *j)
{
	struct scoped_addr key = {.address = j->dst, .scope = scope_of(j->family, j->vni)};
	struct translation *t = bpf_map_lookup_elem(&nim_dnat_v1, &key);

	if (t) {
		j->dst = t->address;
		j->vni = t->vni;
	}
	if (j->from != PORT_GATEWAY) {
		struct scoped_prefix to = {.bits = 32 + 128, .scope = scope_of(j->family, j->vni), .address = j->dst};

		if (!bpf_map_lookup_elem(&nim_outside_v1, &to))
			return;
	}
	key.address = j->src;
	key.scope = scope_of(j->family, j->vni);
	t = bpf_map_lookup_elem(&nim_snat_v1, &key);
	if (t) {
		j->src = t->address;
		j->translated = 1;
	}
}

static __always_inline struct route *find_route(const struct pkt_ctx *j)
{
	struct scoped_prefix key = {.bits = 32 + 128, .scope = scope_of(j->family, j->vni), .address = j->dst};
	struct route *r = bpf_map_lookup_elem(&nim_forward_v1, &key);

	if (r)
		return r;
	key.scope = scope_of(j->family, 0);
	return bpf_map_lookup_elem(&nim_forward_v1, &key);
}

/* dec_ttl decrements TTL or hop limit of a packet that goes to another node, as a router does. */
static __always_inline int dec_ttl(struct __sk_buff *skb, const struct pkt_ctx *j)
{
	struct eth_ip4 *h4;
	struct eth_ip6 *h;

	if (j->family == FAMILY_4) {
		h4 = eth_ip4_of(skb);
		if (!h4 || h4->ttl <= 1)
			return REASON_HOP_LIMIT;
		h4->ttl--;
		/* the high byte of a word decreases by one (RFC 1624) */
		h4->check = ~csum_fold(csum_add((__u16)~h4->check, (__u16)~bpf_htons(0x0100)));
		return 0;
	}
	h = eth_ip6_of(skb);
	if (!h || h->hop_limit <= 1)
		return REASON_HOP_LIMIT;
	h->hop_limit--;
	return 0;
}

/* encap sets the tunnel key; the VXLAN device writes the headers. */
static __always_inline int encap(struct __sk_buff *skb, const struct pkt_ctx *j, const struct addr *vtep)
{
	struct bpf_tunnel_key key = {.tunnel_id = j->vni, .tunnel_ttl = TUNNEL_HOPS};
	struct vxlan_metadata policy = {.gbp = gbp_of(j)};
	struct addr own = {.hi = own_node, .lo = VTEP_HOST};

	if (own_vtep4) {
		key.remote_ipv4 = bpf_ntohl(ip4_unmapped(vtep));
		key.local_ipv4 = bpf_ntohl(own_vtep4);
		return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX | BPF_F_DONT_FRAGMENT) ||
		       bpf_skb_set_tunnel_opt(skb, &policy, sizeof(policy));
	}
	__builtin_memcpy(key.remote_ipv6, vtep, sizeof(*vtep));
	__builtin_memcpy(key.local_ipv6, &own, sizeof(own));
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6) ||
	       bpf_skb_set_tunnel_opt(skb, &policy, sizeof(policy));
}

/* check_mtu returns the reason why the tunnel device cannot take a packet. */
static __always_inline int check_mtu(struct __sk_buff *skb, struct pkt_ctx *j, __u32 device)
{
	long fits = bpf_check_mtu(skb, device, &j->mtu, 0, skb->gso_segs ? BPF_MTU_CHK_SEGS : 0);

	if (fits < 0)
		return REASON_NO_ROUTE; /* there is no such device */
	if (fits)
		return REASON_TOO_BIG;
	j->mtu = 0;
	return 0;
}

/* may_leave returns the reason why a packet cannot leave by the tunnel device, and changes nothing. */
static __noinline int may_leave(struct __sk_buff *skb, struct pkt_ctx *j, __u32 device)
{
	__u32 at = j->family == FAMILY_4 ? offsetof(struct eth_ip4, ttl) : offsetof(struct eth_ip6, hop_limit);
	int why = check_mtu(skb, j, device);
	__u8 hops = 0;

	bpf_skb_load_bytes(skb, at, &hops, sizeof(hops));
	return why || hops > 1 ? why : REASON_HOP_LIMIT;
}

/* check_egress returns the reason why a packet cannot leave by the tunnel device, before it changes anything except the
 * hop limit. */
static __always_inline int check_egress(struct __sk_buff *skb, struct pkt_ctx *j, __u32 device)
{
	int why = check_mtu(skb, j, device);

	return why || j->bridged ? why : dec_ttl(skb, j);
}

/* set_route_macs writes the MACs of a packet that leaves by a route. In a tunnel over IPv4, other speakers see them: a
 * routed packet is from this node's router, a bridged one from the container. */
static __always_inline int set_route_macs(struct __sk_buff *skb, const struct pkt_ctx *j, const struct route *r)
{
	__u64 macs[2] = {};

	if (!own_vtep4 || r->port != PORT_VXLAN)
		return set_both_macs(skb, mac_to(r));
	macs[0] = mac_to(r);
	if (j->bridged)
		mac_of(device_of(skb), (__u8 *)&macs[1]);
	else
		macs[1] = router_mac(own_vtep4);
	return bpf_skb_store_bytes(skb, 0, &macs[0], ETH_ALEN, 0) ||
	       bpf_skb_store_bytes(skb, ETH_ALEN, &macs[1], ETH_ALEN, 0);
}

/* check_routed checks the inner frame of a tunnel over IPv4: it is for this node's router, which decrements the hop
 * limit (RFC 9135 §4), or in the Ethernet segment for the container's own MAC. */
static __always_inline int check_routed(struct __sk_buff *skb, const struct pkt_ctx *j, const struct route *r)
{
	__u64 to = 0;

	if (bpf_skb_load_bytes(skb, 0, &to, ETH_ALEN))
		return REASON_MALFORMED;
	if (to != (j->bridged ? mac_to(r) : router_mac(own_vtep4)))
		return REASON_MAC_MISMATCH;
	return j->bridged ? 0 : dec_ttl(skb, j);
}

/* tunnel_xmit sends a packet to the node with a tunnel address. */
static __noinline int tunnel_xmit(struct __sk_buff *skb, const struct pkt_ctx *j, const struct addr *vtep, __u32 device)
{
	if (encap(skb, j, vtep))
		return drop(skb, REASON_MALFORMED, j->hook);
	skb->mark = tunnel_mark; /* without the mark to_fabric drops packets from the tunnel address as spoofed */
	return bpf_redirect(device, 0);
}

/* nimitz_forward runs the stages from NAT on, for packets of every port. */
__noinline int nimitz_forward(struct __sk_buff *skb, const struct packet *p, struct pkt_ctx *j)
{
	struct nimitz_node *node;
	struct addr vtep, from;
	__u32 zero = 0, vni;
	struct route *r;

	if (!p || !j)
		return TC_ACT_SHOT;
	from = j->src;
	vni = j->vni;
	nat(j);
	r = find_route(j);
	node = bpf_map_lookup_elem(&nim_node_v1, &zero);
	if (!r || !node)
		return drop(skb, REASON_NO_ROUTE, j->hook);
	if (r->port == PORT_NONE)
		return drop(skb, REASON_NO_ENDPOINT, j->hook);
	if (!over_ipv4 && r->port == PORT_VXLAN && offload_of(r)) {
		struct offload *o = lookup_offload(offload_of(r));

		j->offload = offload_of(r);
		/* Containers here use this frontend only while the other nodes use frontends. */
		j->fronts = o && o->fronts && !j->has_pre && (j->from == PORT_VXLAN || o->frontends);
	}
	/* Tunnel packets pass only between this region and another one, and to a container that has moved. Packets from
	 * the gateway do not go back. */
	if ((r->port == PORT_VXLAN && j->from == PORT_VXLAN && !j->fronts &&
	     (own_vtep4 || in_base(&r->vtep) == !j->remote_edge) && !(r->ifindex & ROUTE_RELAYS && may_relay(j))) ||
	    (r->port == PORT_GATEWAY && (j->from == PORT_GATEWAY || !node->gateway)))
		return drop(skb, REASON_NO_ROUTE, j->hook);
	/* On the underlay an overlay address is unknown, or belongs to another host. */
	if (r->port == PORT_GATEWAY && !j->translated)
		return drop(skb, REASON_UNTRANSLATED, j->hook);
	if (own_vtep4 && j->from == PORT_VXLAN) {
		j->why = check_routed(skb, j, r);
		if (j->why)
			return TC_ACT_SHOT;
	}
	if (nimitz_policy(skb, p, j, &from, vni, r, node)) {
		/* A packet that comes back from a frontend is too late for an ICMP error: the kernel cannot cut what a
		 * program has taken out of a tunnel. */
		if (!over_ipv4 && j->next == NEXT_ASK && r->port == PORT_VXLAN)
			j->why = may_leave(skb, j, node->vxlan);
		if (j->why)
			j->next = NEXT_NOTHING;
		return TC_ACT_SHOT;
	}
	trace_pipeline(skb, j->vni);
	if (r->port == PORT_VXLAN && !(j->fronts && j->from == PORT_VXLAN)) {
		if (own_vtep4) {
			j->bridged = r->ifindex != 0;
			j->vni = wire_vni(r, j->vni);
			if (r->outside) /* identities mean nothing to other speakers */
				j->identity = 0;
		}
		j->why = check_egress(skb, j, node->vxlan);
		if (j->why)
			return TC_ACT_SHOT;
	}

	if (is_any_error(p, j->family) && !quote_matches(skb, p, j, &from))
		return drop(skb, REASON_ICMP_QUOTE, j->hook);
	if ((is_translated(j) && translate(skb, p, j, &from)) || set_route_macs(skb, j, r))
		return drop(skb, REASON_MALFORMED, j->hook);
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (j->fronts) {
		j->next = NEXT_FRONT;
		return TC_ACT_SHOT;
	}
	if (r->port == PORT_VXLAN) {
		int sent = 0;

		vtep = r->vtep;
		/* A packet that is relayed comes from a frontend, or from a sender that did not use one. */
		if (!over_ipv4 && j->offload && (j->from != PORT_VXLAN || j->remote_edge))
			choose_frontend(skb, j->offload, &vtep);
		if (direct_port && !over_ipv4)
			sent = direct_xmit(skb, j, &vtep, node->vxlan);
		return sent ? sent : tunnel_xmit(skb, j, &vtep, node->vxlan);
	}
	skb->mark = 0;
	skb->tstamp = 0;
	if (r->port == PORT_GATEWAY)
		return bpf_redirect(node->gateway, 0);
	return to_container(skb, r->ifindex, on_way_in(skb, skb->ifindex), false);
}

/* finish counts the drop of a packet that no ICMP error is sent about. */
static __always_inline int finish(struct __sk_buff *skb, const struct pkt_ctx *j, int verdict)
{
	return j->why ? drop(skb, j->why, j->hook) : verdict;
}

/* Packets from a container that have no NETPILA source; container.h makes a tail call to this program. */
static __always_inline int nimitz_from_container(struct __sk_buff *skb)
{
	struct pkt_ctx j = {.hook = HOOK_CONTAINER};
	__u32 device = device_of(skb);
	struct dev_ep *own = bpf_map_lookup_elem(&pil_ports_v1, &device);
	struct packet p = {};
	int why;

	if (!own)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);
	j.from = own->endpoint;
	why = parse_any(skb, &j, &p);
	if (!why && is_multicast(&j))
		why = over_ipv4 ? REASON_NOT_REPLICATED : REASON_MULTICAST;
	if (!why)
		why = lookup_sender(&j);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	why = nimitz_forward(skb, &p, &j);
	if (!over_ipv4 && j.next)
		return nimitz_next(skb, &p, &j);
	return j.why ? nimitz_icmp_error(skb, &p, &j) : why;
}

/* nimitz_decapped runs the stages behind decap, which has returned why. */
static __always_inline int nimitz_decapped(struct __sk_buff *skb, struct pkt_ctx *j, int why)
{
	struct packet p = {};
	__u32 wire = j->vni;

	if (!why)
		why = parse_any(skb, j, &p);
	if (!why && j->remote_edge)
		why = lookup_remote_sender(j);
	if (over_ipv4)
		j->bridged = wire != j->vni;
	if (why)
		return drop(skb, why, HOOK_TUNNEL);
	why = nimitz_forward(skb, &p, j);
	return !over_ipv4 && j->next ? nimitz_next(skb, &p, j) : finish(skb, j, why);
}

/* came_over_ipv4 has the key on a stack of its own: the callers' is nearly full. */
static __noinline int came_over_ipv4(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};

	return !bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0);
}

static __always_inline int nimitz_from_tunnel(struct __sk_buff *skb)
{
	struct pkt_ctx j = {.hook = HOOK_TUNNEL, .from = PORT_VXLAN};

	if (vtep4_mask && came_over_ipv4(skb)) {
		bpf_tail_call(skb, &pil_uplinks_v1, UPLINK_TUNNEL4);
		return drop(skb, REASON_PEER_UNKNOWN, HOOK_TUNNEL); /* no network has tunnels over IPv4 */
	}
	return nimitz_decapped(skb, &j, decap(skb, &j));
}

/* Tunnel packets from the uplink, before the VXLAN device. They have tunnel_mark already. */
static __always_inline int nimitz_from_fabric(struct __sk_buff *skb)
{
	struct pkt_ctx j = {.hook = HOOK_TUNNEL, .from = PORT_VXLAN};
	int why = direct_decap(skb, &j);

	return why == TCX_NEXT ? why : nimitz_decapped(skb, &j, why);
}

/* An ICMP error from outside has a router's source. It is replaced by the destination of the quoted packet, the only
 * address that the container knows. */
static __noinline void icmp_err_set_src(struct __sk_buff *skb, const struct packet *p, struct pkt_ctx *j)
{
	struct addr quoted[2] = {};

	read_quote(skb, p, j->family, quoted);
	j->src = quoted[1];
}

static __always_inline int nimitz_from_gateway(struct __sk_buff *skb)
{
	struct pkt_ctx j = {.hook = HOOK_GATEWAY, .from = PORT_GATEWAY, .vni = GATEWAY_VNI};
	struct packet p = {};
	int why = parse_any(skb, &j, &p);

	if (!why && is_any_error(&p, j.family))
		icmp_err_set_src(skb, &p, &j);
	if (why)
		return drop(skb, why, HOOK_GATEWAY);
	why = nimitz_forward(skb, &p, &j);
	return !over_ipv4 && j.next ? nimitz_next(skb, &p, &j) : finish(skb, &j, why);
}
