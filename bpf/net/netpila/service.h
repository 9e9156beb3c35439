/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The choice of a backend for a flow to a service, and its two sessions on the client's node: by the address of the
 * service the session has the number of the backend, by that of the backend the number of the frontend. Both have the
 * addresses as the client sees them. service_stages.h and service_answers.h have the programs. */
#pragma once
#include "net/netpila/gateway_nat.h"
#include "net/netpila/service_table.h"

/* A flow as its client sees it. */
struct svc_flow {
	struct addr client, peer; /* peer: the service or the backend */
	__be16 client_port, peer_port;
	__u32 endpoint, tenant; /* of the client */
	__u8 proto;
	__u8 flags; /* of TCP */
	__u8 dir;
	__u8 zero;
};

/* What a verdict for answers has, too: the frontend and the client's device. It is valid as long as the flow cache. */
struct svc_answer {
	struct svc_end front;
	__u32 device;
	__u32 zero;
};

/* Data that is too large for the stack. Programs run with softirqs off, so a CPU's copy is never shared. */
struct svc_work {
	struct flow_key key;
	struct svc_flow flow;	    /* as the client sees it */
	struct svc_flow translated; /* another session of it */
	struct svc_key service_key;
	struct svc service;
	struct svc_backend backend;
	struct svc_end client, alias, front, back; /* ends of packets before and after the translation */
	struct svc_answer answer;
	bool confirmed; /* both ends have confirmed the session of the service */
	struct addr next_hop;
	struct flow refused; /* for errors about packets that have no flow */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct svc_work);
	__uint(max_entries, 1);
} pil_svcwork SEC(".maps");

static __always_inline struct svc_work *svc_work(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pil_svcwork, &zero);
}

static __always_inline struct pol_scratch *svc_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pil_pol_scratch, &zero);
}

/* opens_connection reports whether a packet is the first of a TCP connection. */
static __always_inline bool opens_connection(const struct svc_flow *f)
{
	return f->proto == NEXTHDR_TCP && is_first_segment(f->flags);
}

static __always_inline void svc_session_key(struct pol_scratch *d, const struct svc_flow *f)
{
	struct session_key *key = &d->ct.key;

	key->local = f->client;
	key->remote = f->peer;
	key->local_port = f->client_port;
	key->remote_port = f->peer_port;
	key->endpoint = f->endpoint;
	key->tenant = f->tenant;
	key->proto = f->proto;
	key->dir = key->zero[0] = 0;
	key->session_kind = SESSION_SERVICE;
	d->ct.pkt = (struct pkt_info){.dir = f->dir, .proto = f->proto, .flags = f->flags, .outside = 1};
	d->ct.slot = ct_slot_of(key);
	d->ct.now = bpf_ktime_get_coarse_ns();
	accept_both(&d->pre);
}

/* svc_session updates the session of a flow, or makes one with a translation. A session whose translation is avoid gets
 * nat, unless it is an established TCP connection. It returns the translation, with SVC_NEW if the flow has just got
 * it; 0: there is no session, and none may be made; SVC_FULL: there is no room for one. Only clients open sessions. */
#define SVC_NEW	 (1ULL << 32)
#define SVC_FULL (1ULL << 33)

__noinline __u64 svc_session(const struct svc_flow *f, __u32 nat, __u32 avoid)
{
	struct pol_scratch *d = svc_scratch();
	struct ct_result *o;

	if (!d || !f)
		return 0;
	svc_session_key(d, f);
	d->pre.verdicts[RX] = DENY;
	d->pre.nats[TX] = nat;
	d->pre.nats[RX] = avoid;
	o = &d->ct.result;
	if (!ct_lookup(&d->ct, &d->pre)) {
		if (!nat)
			return 0;
		if (!ct_create(&d->ct, &d->pre))
			return SVC_FULL;
	}
	if (!o->state.version)
		return 0;
	if ((o->changed && o->state.seen == SEEN_INITIATOR) || (avoid && o->state.nat != avoid))
		return o->state.nat | SVC_NEW;
	return o->state.nat;
}

/* svc_refusal returns the reason to drop a packet if svc_session has returned no translation, or 0. */
static __always_inline int svc_refusal(__u64 nat)
{
	if ((__u32)nat)
		return 0;
	return nat & SVC_FULL ? REASON_SESSION_LIMIT : REASON_NO_SESSION;
}

/* svc_peek returns the translation of a session, which it does not change, or 0. */
static __noinline __u32 svc_peek(const struct svc_flow *f)
{
	struct pol_scratch *d = svc_scratch();

	if (!d || !f)
		return 0;
	svc_session_key(d, f);
	if (!ct_read_bucket(&d->ct, d->ct.slot.first) && !ct_read_bucket(&d->ct, d->ct.slot.second))
		return 0;
	return d->ct.result.state.nat;
}

/* svc_fragment keeps the translation of a first fragment for the later ones, which have no ports, or returns that of a
 * later fragment (nat 0). */
__noinline __u32 svc_fragment(const struct svc_flow *f, __u32 id, __u32 nat)
{
	struct pol_scratch *d = svc_scratch();

	if (!d || !f)
		return 0;
	svc_session_key(d, f);
	set_fragment(d, id, f->dir & 1);
	d->pre.nats[TX] = d->pre.nats[RX] = nat;
	if (!ct_lookup(&d->ct, &d->pre) && (!nat || !ct_create(&d->ct, &d->pre)))
		return 0;
	return d->ct.result.state.nat;
}

/* svc_cached returns the verdict in the cache that has the translation of an established flow, or NULL. There the ends
 * are swapped, so that no packet finds the verdict of a policy in place of that of a service, or the other way round.
 */
static __always_inline struct verdict *svc_cached(const struct svc_flow *f)
{
	__u32 ports = (__u32)f->client_port | (__u32)f->peer_port << 16;
	struct verdict *v = verdict_slot(&f->peer, &f->client, ports);

	if (f->proto == NEXTHDR_TCP && f->flags & (TCP_SYN | TCP_FIN | TCP_RST))
		return NULL;
	if (v && v->until > bpf_jiffies64() && v->key.session_kind == SESSION_SERVICE &&
	    same_addr(&v->key.local, &f->peer) && same_addr(&v->key.remote, &f->client) && ports_of(&v->key) == ports &&
	    v->key.proto == f->proto)
		return v;
	return NULL;
}

static __always_inline struct svc_answer *answer_of(struct verdict *v)
{
	_Static_assert(sizeof(struct svc_answer) <= sizeof(v->rest), "it fits into a verdict");
	return (void *)v->rest;
}

/* svc_cached_answer returns what the verdict cache has for an answer of an established flow, or NULL. */
static __always_inline struct svc_answer *svc_cached_answer(const struct svc_flow *f)
{
	struct verdict *v = svc_cached(f);

	return v && v->generation == generation() ? answer_of(v) : NULL;
}

/* svc_forget removes the session that svc_session has just updated from the verdict cache of this CPU. */
static __always_inline void svc_forget(void)
{
	struct pol_scratch *d = svc_scratch();
	struct session_key *key;
	struct verdict *v;

	if (!d)
		return;
	key = &d->ct.key;
	v = verdict_slot(&key->remote, &key->local, ports_of(key));
	if (v && v->key.session_kind == SESSION_SERVICE && same_addr(&v->key.local, &key->remote) &&
	    same_addr(&v->key.remote, &key->local) && ports_of(&v->key) == ports_of(key))
		v->until = 0;
}

/* svc_cache puts the session that svc_session has just updated into the verdict cache, if both ends have confirmed it;
 * else it removes what the cache has of a connection before it. It returns whether both have. a is for answers, else
 * NULL. */
static __always_inline bool svc_cache(const struct svc_answer *a)
{
	struct pol_scratch *d = svc_scratch();
	struct session_state *s;
	struct verdict *v;

	if (!d)
		return false;
	s = &d->ct.result.state;
	if (!(s->seen & ESTABLISHED) || is_closed(s)) {
		svc_forget();
		return false;
	}
	v = verdict_slot(&d->ct.key.remote, &d->ct.key.local, ports_of(&d->ct.key));
	if (!v)
		return false;
	v->until = 0;
	v->generation = a ? generation() : 0;
	v->apps = 0;
	v->nat = s->nat;
	v->key = d->ct.key;
	v->key.local = d->ct.key.remote;
	v->key.remote = d->ct.key.local;
	if (a)
		*answer_of(v) = *a;
	v->until = bpf_jiffies64() + VERDICT_TTL;
	return true;
}

static __always_inline struct svc_backend *svc_backend_of(__u32 number)
{
	return bpf_map_lookup_elem(&pil_svcbacks_v1, &number);
}

/* svc_member_of returns a random backend of a service, or 0. The agent may replace the set at the same time, so a
 * second lookup finds the new one. */
static __always_inline __u32 svc_member_of(const struct svc_key *key, struct svc *s)
{
	for (int i = 0; i < 2; i++) {
		struct svc_member at = {};
		struct svc *now;
		__u32 *backend;

		if (!s->count)
			return 0;
		at.set = s->set;
		at.index = bpf_get_prandom_u32() % s->count;
		backend = bpf_map_lookup_elem(&pil_svcsets_v1, &at);
		if (backend)
			return *backend;
		now = bpf_map_lookup_elem(&pil_svc_v1, key);
		if (!now)
			return 0;
		*s = *now;
	}
	return 0;
}

/* svc_by_affinity returns the backend that a client of a service has last got, if it still gets new flows; else 0. */
static __always_inline __u32 svc_by_affinity(const struct svc *s, const struct addr *client)
{
	struct svc_client key = {.client = *client, .frontend = s->frontend};
	struct svc_affinity *last = bpf_map_lookup_elem(&pil_svcclients_v1, &key);
	struct svc_backend *b;

	if (!last || last->until < bpf_ktime_get_coarse_ns())
		return 0;
	b = svc_backend_of(last->backend);
	return b && !b->draining && b->frontend == s->frontend ? last->backend : 0;
}

static __always_inline void svc_keep_affinity(const struct svc *s, const struct addr *client, __u32 backend)
{
	struct svc_client key = {.client = *client, .frontend = s->frontend};
	struct svc_affinity now = {.until = bpf_ktime_get_coarse_ns() + s->affinity * 1000000000ULL,
				   .backend = backend};

	bpf_map_update_elem(&pil_svcclients_v1, &key, &now, BPF_ANY);
}

/* svc_choose returns a backend for a new flow of a client, or 0. s->frontend is 0 if there is no such service. */
static __noinline __u32 svc_choose(const struct svc_key *key, const struct addr *client, struct svc *s)
{
	struct svc *found;
	__u32 backend;

	if (!key || !client || !s)
		return 0;
	*s = (struct svc){};
	found = bpf_map_lookup_elem(&pil_svc_v1, key);
	if (!found)
		return 0;
	*s = *found;
	backend = s->affinity ? svc_by_affinity(s, client) : 0;
	return backend ? backend : svc_member_of(key, s);
}

/* svc_count counts a new flow, or a packet without a backend. */
static __always_inline void svc_count(__u32 frontend, bool refused)
{
	struct svc_frontend *f = bpf_map_lookup_elem(&pil_svcfronts_v1, &frontend);

	if (f)
		__sync_fetch_and_add(refused ? &f->refused : &f->flows, 1);
}
