/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Policy and sessions of network nimitz, whose addresses contain no app. The sender's app is in the tunnel header; only
 * the receiver's node knows the receiver's app. So a packet between containers is checked where it leaves the tunnel,
 * by the rules of both ends. The node where it enters the tunnel only keeps the session, to recognise the replies,
 * which it checks itself. A peer outside of the region has neither rules nor app: packets to it are checked at their
 * sender, and nodes in transit need no state. If the tenant's rules are offloaded, frontends look them up
 * (offload.h). */
#pragma once
#include "net/nimitz/offload.h"
#include "policy/policy.h"

static __noinline struct sender *lookup_receiver(const struct pkt_ctx *j, __u32 port)
{
	struct sender_key key = {.source = j->dst, .port = port, .scope = scope_of(j->family, 0)};

	return bpf_map_lookup_elem(&nim_senders_v1, &key);
}

/* nimitz_policy_end checks the end of a packet that is in the scratch memory. It returns 0 or drops the packet. */
static __noinline int nimitz_policy_end(struct __sk_buff *skb, const struct packet *p, struct pol_scratch *d,
					__u32 hook)
{
	const struct session_key *k = &d->ct.key;
	__u32 dir = d->ct.pkt.dir;
	struct verdict *v;

	if (d->mode >= ENFORCE_ASK)
		return policy_check(skb, p, d, hook, false);
	v = p->ip4 ? policy_fast_hit(skb, p, sizeof(struct eth_ip4), &k->local, &k->remote, k->endpoint, d->apps, dir,
				     false)
		   : policy_fast_hit(skb, p, sizeof(struct eth_ip6), &k->local, &k->remote, k->endpoint, d->apps, dir,
				     false);
	/* What a frontend said decides nothing where the rules are here. */
	if (v && (over_ipv4 || !v->from_packet || d->mode == ENFORCE_REMOTE)) {
		trace_policy_hit(skb, k->endpoint, dir);
		return 0;
	}
	return policy_check(skb, p, d, hook, false);
}

/* set_session writes an end of a packet into the scratch memory. */
static __always_inline void set_session(struct pol_scratch *d, const struct addr *local, const struct addr *remote,
					__u32 endpoint, __u32 vni)
{
	struct session_key *key = &d->ct.key;

	key->local = *local;
	key->remote = *remote;
	key->endpoint = endpoint;
	key->tenant = vni;
	key->dir = key->zero[0] = key->zero[1] = 0;
}

/* rules_at returns where the rules of a tenant are looked up for an endpoint with an app: here, or by a frontend. What
 * a frontend says about another tenant means nothing. If it does not know the endpoint's app yet, its answer is for
 * other rules, and this node drops the packet if it has none either. */
static __always_inline __u32 rules_at(const struct nimitz_node *node, const struct pkt_ctx *j,
				      const struct pol_scratch *d, __u32 vni, __u32 app)
{
	if (over_ipv4)
		return ENFORCE_BY_APP;
	if (j->has_pre && d->carried.vni == vni && d->carried.app == app)
		return ENFORCE_CARRIED;
	return lookup_backend(node, vni) ? ENFORCE_ASK : ENFORCE_BY_APP;
}

/* ask hands a packet on, about which a frontend has to be asked. One that a frontend has sent is dropped: it was asked
 * about an app that the endpoint no longer has. */
static __always_inline int ask(struct __sk_buff *skb, const struct nimitz_node *node, struct pkt_ctx *j, __u32 vni)
{
	struct backend *b = lookup_backend(node, vni);

	if (j->has_pre || !b)
		return drop(skb, REASON_NSH_STALE, j->hook);
	j->offload = b->offload;
	j->next = NEXT_ASK;
	return TC_ACT_SHOT;
}

/* nimitz_policy applies the policies of the sender and of the receiver, if they are on this node. It returns 0 or drops
 * the packet. from and vni are the source and the VNI before NAT. */
static __always_inline int nimitz_policy(struct __sk_buff *skb, const struct packet *p, struct pkt_ctx *j,
					 const struct addr *from, __u32 vni, const struct route *r,
					 const struct nimitz_node *node)
{
	int verdict;
	__u32 zero = 0, identity = j->identity & GBP_IDENTITY;
	struct pol_scratch *d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);

	if (!d)
		return TC_ACT_SHOT;
	if (j->from < FIRST_DEVICE && has_policies(vni)) {
		bool leaves = r->port == PORT_GATEWAY || r->outside;

		set_session(d, from, &j->dst, j->from, vni);
		d->ct.pkt.dir = TX;
		d->mode = leaves ? rules_at(node, j, d, vni, identity) : ENFORCE_REMOTE;
		d->apps = leaves ? identity << 16 | APP_OUTSIDE : APPS_REMOTE;
		verdict = nimitz_policy_end(skb, p, d, j->hook);
		if (verdict)
			return verdict == POLICY_ASK ? ask(skb, node, j, vni) : TC_ACT_SHOT;
	}
	if (r->port < FIRST_DEVICE && has_policies(j->vni)) {
		struct sender *receiver = lookup_receiver(j, r->port);
		/* an app of another tenant means nothing here */
		__u32 app = vni == j->vni ? identity : APP_OUTSIDE;

		if (!receiver) /* the endpoint is just being added or removed */
			return drop(skb, REASON_NO_ENDPOINT, j->hook);
		set_session(d, &j->dst, from, r->port, j->vni);
		d->ct.pkt.dir = RX;
		d->mode = rules_at(node, j, d, j->vni, receiver->identity & GBP_IDENTITY);
		d->apps = (receiver->identity & GBP_IDENTITY) << 16 | app;
		verdict = nimitz_policy_end(skb, p, d, j->hook);
		if (verdict)
			return verdict == POLICY_ASK ? ask(skb, node, j, j->vni) : TC_ACT_SHOT;
	}
	return 0;
}
