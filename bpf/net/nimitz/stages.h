/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The second network: NIMITZ's five stages (§3.1, fig 5), around a VXLAN device of the kernel that takes from us who is
 * to get a packet and tells us whom one is from. */
#pragma once
#include "net/nimitz/gateway.h"
#include "net/nimitz/icmp.h"
#include "net/nimitz/policy.h"

#define TUNNEL_HOPS 64

/* decap takes packets that came by the uplink from the tunnel addresses of nodes, and from nobody else's. The uplink's
 * program marks what is for this node's, but for what claims to be of this node; other interfaces bring none, and the
 * mark stands for them until programs do. */
static __noinline int decap(struct __sk_buff *skb, struct pkt_ctx *j)
{
	struct vxlan_metadata policy = {};
	struct bpf_tunnel_key key = {};
	struct addr from;

	/* Of what came over IPv4 it tells nothing. */
	bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6);
	__builtin_memcpy(&from, key.remote_ipv6, sizeof(from));
	if (!is_known_tunnel(skb) || from.lo != VTEP_HOST || !is_peer(&from))
		return REASON_PEER_UNKNOWN;
	if (!in_base(&from))
		j->remote_edge = from.hi;
	j->vni = key.tunnel_id;
	if (bpf_skb_get_tunnel_opt(skb, &policy, sizeof(policy)) > 0)
		j->identity = policy.gbp & GBP_IDENTITY;
	return 0;
}

/* lookup_sender says whose a container's packet is. */
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

/* lookup_remote_sender does for what came from another region, whose VNIs and identities are not ours. */
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

/* A service's name is outside too: what it becomes is judged after. */
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

/* dec_ttl is for what goes on to another node, as a router does. */
static __always_inline int dec_ttl(struct __sk_buff *skb, const struct pkt_ctx *j)
{
	struct eth_ip4 *h4;
	struct eth_ip6 *h;

	if (j->family == FAMILY_4) {
		h4 = eth_ip4_of(skb);
		if (!h4 || h4->ttl <= 1)
			return REASON_HOP_LIMIT;
		h4->ttl--;
		/* One less in the high byte of a word (RFC 1624). */
		h4->check = ~csum_fold(csum_add((__u16)~h4->check, (__u16)~bpf_htons(0x0100)));
		return 0;
	}
	h = eth_ip6_of(skb);
	if (!h || h->hop_limit <= 1)
		return REASON_HOP_LIMIT;
	h->hop_limit--;
	return 0;
}

/* encap leaves the rest to the VXLAN device: all it has to know is beside the packet. */
static __always_inline int encap(struct __sk_buff *skb, const struct pkt_ctx *j, const struct addr *vtep)
{
	struct bpf_tunnel_key key = {.tunnel_id = j->vni, .tunnel_ttl = TUNNEL_HOPS};
	struct vxlan_metadata policy = {.gbp = j->identity};
	struct addr own = {.hi = own_node, .lo = VTEP_HOST};

	__builtin_memcpy(key.remote_ipv6, vtep, sizeof(*vtep));
	__builtin_memcpy(key.local_ipv6, &own, sizeof(own));
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6) ||
	       bpf_skb_set_tunnel_opt(skb, &policy, sizeof(policy));
}

/* check_egress says why a packet cannot go on by the tunnels' device, before anything of it is changed but its hops. */
static __always_inline int check_egress(struct __sk_buff *skb, struct pkt_ctx *j, __u32 device)
{
	long fits = bpf_check_mtu(skb, device, &j->mtu, 0, skb->gso_segs ? BPF_MTU_CHK_SEGS : 0);

	if (fits < 0)
		return REASON_NO_ROUTE; /* there is no such device */
	if (fits)
		return REASON_TOO_BIG;
	j->mtu = 0;
	return dec_ttl(skb, j);
}

/* tunnel_xmit sends a packet to the node of a tunnel address. */
static __noinline int tunnel_xmit(struct __sk_buff *skb, const struct pkt_ctx *j, const struct addr *vtep, __u32 device)
{
	if (encap(skb, j, vtep))
		return drop(skb, REASON_MALFORMED, j->hook);
	skb->mark = tunnel_mark; /* and whoever sends from the tunnel address without it forges */
	return bpf_redirect(device, 0);
}

/* nimitz_forward is the stages that a packet goes through from whichever port, behind the one where it is found whose
 * it is. */
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
	/* Never back to where it came from, be that this region or others. */
	if ((r->port == PORT_VXLAN && j->from == PORT_VXLAN && in_base(&r->vtep) == !j->remote_edge) ||
	    (r->port == PORT_GATEWAY && (j->from == PORT_GATEWAY || !node->gateway)))
		return drop(skb, REASON_NO_ROUTE, j->hook);
	/* An address of the overlay means nothing there, or somebody else. */
	if (r->port == PORT_GATEWAY && !j->translated)
		return drop(skb, REASON_UNTRANSLATED, j->hook);
	if (nimitz_policy(skb, p, j, &from, vni, r))
		return TC_ACT_SHOT;
	if (r->port == PORT_VXLAN) {
		j->why = check_egress(skb, j, node->vxlan);
		if (j->why)
			return TC_ACT_SHOT;
	}

	if (is_any_error(p, j->family) && !quote_matches(skb, p, j, &from))
		return drop(skb, REASON_ICMP_QUOTE, j->hook);
	if ((is_translated(j) && translate(skb, p, j, &from)) || set_both_macs(skb))
		return drop(skb, REASON_MALFORMED, j->hook);
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (r->port == PORT_VXLAN) {
		vtep = r->vtep;
		return tunnel_xmit(skb, j, &vtep, node->vxlan);
	}
	skb->mark = 0;
	skb->tstamp = 0;
	if (r->port == PORT_GATEWAY)
		return bpf_redirect(node->gateway, 0);
	return to_container(skb, r->ifindex, on_way_in(skb, skb->ifindex), false);
}

/* finish is for packets of which nobody is told. */
static __always_inline int finish(struct __sk_buff *skb, const struct pkt_ctx *j, int verdict)
{
	return j->why ? drop(skb, j->why, j->hook) : verdict;
}

/* From a container, whose hook is netpila's: what that has no source for goes on here. */
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
		why = REASON_MULTICAST;
	if (!why)
		why = lookup_sender(&j);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	why = nimitz_forward(skb, &p, &j);
	return j.why ? nimitz_icmp_error(skb, &p, &j) : why;
}

static __always_inline int nimitz_from_tunnel(struct __sk_buff *skb)
{
	struct pkt_ctx j = {.hook = HOOK_TUNNEL, .from = PORT_VXLAN};
	struct packet p = {};
	int why = decap(skb, &j);

	if (!why)
		why = parse_any(skb, &j, &p);
	if (!why && j.remote_edge)
		why = lookup_remote_sender(&j);
	return why ? drop(skb, why, HOOK_TUNNEL) : finish(skb, &j, nimitz_forward(skb, &p, &j));
}

/* A router's error speaks for whom the packet it quotes was for: the container hears of no other. */
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
	return why ? drop(skb, why, HOOK_GATEWAY) : finish(skb, &j, nimitz_forward(skb, &p, &j));
}
