/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Policies and sessions of the second network, whose addresses say no app. What its sender is, a packet says in the
 * tunnel; what its receiver is, that one's node alone knows. So a packet between containers is judged where it leaves
 * the tunnel, by the rules of both ends, and where it enters it the session is remembered: what comes back is judged
 * here, as what answers it. Who is outside has no rules and no app, so what goes there is judged where it begins, and
 * nodes that only carry it have nothing to know. */
#pragma once
#include "nimitz_nat.h"
#include "police.h"

static __noinline struct sender *receiver_of(const struct journey *j, __u32 port)
{
	struct sender_key key = {.source = j->dst, .port = port, .scope = scope_of(j->family, 0)};

	return bpf_map_lookup_elem(&nim_senders_v1, &key);
}

/* police_end lets a packet pass the end that is on the desk (0), or drops it and says so. */
static __noinline int police_end(struct __sk_buff *skb, const struct packet *p, struct desk *d, __u32 hook)
{
	const struct session_key *k = &d->turn.key;
	__u32 way = d->turn.moment.way;

	if (p->ip4 ? is_settled(skb, p, sizeof(struct frame4), &k->local, &k->remote, k->endpoint, d->apps, way)
		   : is_settled(skb, p, sizeof(struct frame), &k->local, &k->remote, k->endpoint, d->apps, way))
		return 0;
	return judge_packet(skb, p, d, hook);
}

/* lay_out puts an end of a packet onto the desk. */
static __always_inline void lay_out(struct desk *d, const struct addr *local, const struct addr *remote, __u32 endpoint,
				    __u32 vni)
{
	struct session_key *key = &d->turn.key;

	key->local = *local;
	key->remote = *remote;
	key->endpoint = endpoint;
	key->tenant = vni;
	key->zero[0] = key->zero[1] = key->zero[2] = 0;
}

/* police_journey lets a packet pass those of its ends that are here (0). Its source and VNI are those before NAT, by
 * which rules know an end. */
static __always_inline int police_journey(struct __sk_buff *skb, const struct packet *p, const struct journey *j,
					  const struct addr *from, __u32 vni, const struct route *r)
{
	__u32 zero = 0, identity = j->identity & GBP_IDENTITY;
	struct desk *d = bpf_map_lookup_elem(&pil_desk, &zero);

	if (!d)
		return TC_ACT_SHOT;
	if (j->from < FIRST_DEVICE && has_policies(vni)) {
		bool leaves = r->port == PORT_GATEWAY || r->outside;

		lay_out(d, from, &j->dst, j->from, vni);
		d->turn.moment.way = TX;
		d->judging = leaves ? BY_APPS : ELSEWHERE;
		d->apps = leaves ? identity << 16 | APP_OUTSIDE : APPS_ELSEWHERE;
		if (police_end(skb, p, d, j->hook))
			return TC_ACT_SHOT;
	}
	if (r->port < FIRST_DEVICE && has_policies(j->vni)) {
		struct sender *receiver = receiver_of(j, r->port);
		/* Another tenant's app says nothing here. */
		__u32 app = vni == j->vni ? identity : APP_OUTSIDE;

		if (!receiver) /* it is just coming or going */
			return drop(skb, REASON_NO_ENDPOINT, j->hook);
		lay_out(d, &j->dst, from, r->port, j->vni);
		d->turn.moment.way = RX;
		d->judging = BY_APPS;
		d->apps = (receiver->identity & GBP_IDENTITY) << 16 | app;
		if (police_end(skb, p, d, j->hook))
			return TC_ACT_SHOT;
	}
	return 0;
}
