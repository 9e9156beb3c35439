/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The stage of policy and sessions: whether a packet may pass, for an endpoint whose tenant has policies. No other
 * packet comes here. */
#pragma once
#include "event.h"
#include "flow.h"
#include "rules.h"
#include "sessions.h"

/* What rules said of a session, and until when its packets need nothing more: direct-mapped, each CPU's own, like flows
 * (flow.h), and apart from them. Each packet of a session that is established is one line of the data cache. */
#define VERDICT_SLOTS 4096

struct verdict {
	struct session_key key;
	__u32 generation; /* of the rules */
	__u32 apps;	  /* of both ends, where no address says them */
	__u64 until;	  /* jiffies; 0: each packet is looked at */
	struct pre_actions pre;
	__u8 rest[44];
};
_Static_assert(sizeof(struct verdict) == 128, "two lines of the data cache, of which most packets need the first");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE); /* begins with a page, so that no slot straddles lines */
	__type(key, __u32);
	__type(value, struct verdict);
	__uint(max_entries, VERDICT_SLOTS); /* times the CPUs, set at load */
} pil_verdicts SEC(".maps");

/* How long an established session passes unseen, in jiffies: 0.1 to 1 s, of which its life is many. */
#define UNSEEN	  100

#define TCP_FLAGS 13 /* offset in its header */

static __always_inline struct verdict *verdict_slot(const struct addr *local, const struct addr *remote, __u32 ports)
{
	__u64 h = (local->lo ^ remote->hi) * 0x9e3779b97f4a7c15ULL;
	__u32 slot;

	h = (h ^ remote->lo ^ ports) * 0xc2b2ae3d27d4eb4fULL;
	slot = bpf_get_smp_processor_id() * VERDICT_SLOTS + (h >> 52);
	_Static_assert(VERDICT_SLOTS == 1 << 12, "the slot is the top 12 bits");
	return bpf_map_lookup_elem(&pil_verdicts, &slot);
}

/* Later fragments do not say what session they are of: they go where the first one went. */
#define FRAGMENT_LIFE 30000000000ULL /* ns; a receiver waits 60 s for the rest (RFC 8200 §4.5), and any sender less */

struct fragment_key {
	struct addr local, remote;
	__u32 id;
	__u32 endpoint;
	__u32 way;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct fragment_key);
	__type(value, __u64); /* until when, CLOCK_MONOTONIC, ns */
	__uint(max_entries, 8192);
} pil_fragments_v1 SEC(".maps");

/* Both ends of a packet by canonical addresses, as the endpoint at one end of its flow sees them: of what came from the
 * fabric those it came with, of others those it goes with. */
static __always_inline const struct addr *end_of_flow(const struct flow *f, bool source, __u32 hook)
{
	if (hook == HOOK_UPLINK_IN)
		return source ? &f->key.src : &f->key.dst;
	return source ? &f->src : &f->dst;
}

/* How an end of a packet is judged. */
enum judging {
	BY_ADDRESSES, /* by the end's own rules: both apps stand in the addresses */
	BY_APPS,      /* by the rules of both ends */
	ELSEWHERE,    /* nothing is judged here, and what is seen is remembered for what comes back */
};
#define APPS_ELSEWHERE 0xffffffff

/* What is too large for the stack. Programs run with softirqs off, so a CPU's is never shared. */
struct desk {
	struct turn turn;
	struct ends ends;
	struct fragment_key fragment;
	__u32 quotes_later; /* 1: an error about a later fragment, which fragment tells */
	__u32 judging;
	__u32 apps; /* of BY_APPS: the endpoint's in the upper half, its peer's in the lower */
	struct pre_actions pre;
	struct ends other; /* as the peer sees it, and what its rules say */
	struct pre_actions others;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct desk);
	__uint(max_entries, 1);
} pil_desk SEC(".maps");

static __always_inline bool is_echo(__u8 proto, __u8 type)
{
	return proto == NEXTHDR_ICMP ? type == 128 || type == 129 : type == 8 || type == 0;
}

/* read_ports tells what a session is known by beside its addresses: source, then destination. */
static __always_inline int read_ports(struct __sk_buff *skb, __u8 proto, __u32 l4, __be16 *ports)
{
	__u8 type = 0;

	switch (proto) {
	case NEXTHDR_TCP:
	case NEXTHDR_UDP:
	case NEXTHDR_UDPLITE:
	case NEXTHDR_SCTP:
	case NEXTHDR_DCCP:
		return bpf_skb_load_bytes(skb, l4, ports, 2 * sizeof(*ports));
	case NEXTHDR_ICMP:
	case PROTO_ICMP4:
		if (bpf_skb_load_bytes(skb, l4, &type, sizeof(type)))
			return -1;
		if (!is_echo(proto, type))
			return 0;
		if (bpf_skb_load_bytes(skb, l4 + 4, ports, sizeof(*ports)))
			return -1;
		ports[1] = ports[0];
	}
	return 0;
}

/* find_transport4 finds it behind a header of IPv4 that somebody quotes. */
static __always_inline int find_transport4(struct __sk_buff *skb, __u32 at, struct packet *q)
{
	__be16 id;
	__u8 h[12];

	if (bpf_skb_load_bytes(skb, at, h, sizeof(h)))
		return -1;
	q->l4 = (h[6] << 8 | h[7]) & IP4_FRAGMENT_OFFSET ? 0 : at + (h[0] & 15) * 4;
	q->proto = h[9];
	__builtin_memcpy(&id, h + 4, sizeof(id));
	q->fragment = fragment4(q->proto, id);
	return 0;
}

/* read_quoted does so of the packet that an error is about, which went the other way. Its addresses are the error's
 * own: that is checked elsewhere. Of a later fragment only its packet can be told. */
static __noinline int read_quoted(struct __sk_buff *skb, const struct packet *p, struct desk *d, __be16 *ports)
{
	struct packet q = {.l4 = p->l4 + ICMPV6_HLEN + IPV6_HLEN, .end = p->end};
	__be16 sent[2] = {};

	if (p->ip4) {
		if (find_transport4(skb, p->l4 + ICMPV6_HLEN, &q))
			return -1;
	} else if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)) ||
		   find_transport(skb, &q)) {
		return -1;
	}
	if (!q.l4) {
		d->quotes_later = 1;
		d->fragment.id = q.fragment;
		d->fragment.way = RX - d->fragment.way;
		return q.proto;
	}
	if (q.l4 + TRANSPORT_MIN > q.end || read_ports(skb, q.proto, q.l4, sent))
		return -1;
	ports[0] = sent[1];
	ports[1] = sent[0];
	return q.proto;
}

/* consult_peer adds what the rules of the other end say: what one begins, they have begin there. */
static __always_inline void consult_peer(struct desk *d)
{
	d->other.local = d->ends.remote;
	d->other.remote = d->ends.local;
	d->other.tenant = d->ends.tenant;
	d->other.local_app = d->ends.remote_app;
	d->other.remote_app = d->ends.local_app;
	d->other.local_port = d->ends.remote_port;
	d->other.remote_port = d->ends.local_port;
	d->other.proto = d->ends.proto;
	consult_rules(&d->other, &d->others);
	for (int way = TX; way <= RX; way++) {
		if (d->pre.verdicts[way] != ACCEPT)
			continue;
		if (!d->pre.audits[way])
			d->pre.audits[way] = d->others.audits[RX - way];
		if (d->others.verdicts[RX - way] == ACCEPT)
			continue;
		d->pre.verdicts[way] = DENY;
		d->pre.rules[way] = d->others.rules[RX - way];
	}
}

/* ask_rules finds the pre-actions of a session. It is a function for the sake of the stack. */
static __noinline void ask_rules(struct desk *d)
{
	struct session_key *key = &d->turn.key;
	struct ends *e = &d->ends;

	e->local = key->local;
	e->remote = key->remote;
	e->tenant = key->tenant;
	e->local_port = key->local_port;
	e->remote_port = key->remote_port;
	e->proto = key->proto;
	if (d->judging == BY_ADDRESSES) {
		e->local_app = app_of(&e->local, app_id(&e->local));
		e->remote_app = app_of(&e->remote, app_id(&e->remote));
		consult_rules(e, &d->pre);
		return;
	}
	e->local_app = d->apps >> 16;
	e->remote_app = d->apps & 0xffff;
	consult_rules(e, &d->pre);
	if (e->remote_app != APP_OUTSIDE && e->remote_app < FIRST_RESERVED_APP)
		consult_peer(d);
}

/* find_pre_actions asks the rules, or remembers what they said. */
static __always_inline void find_pre_actions(struct verdict *v, struct desk *d, __u32 generation)
{
	bool known = v->generation == generation && same_session(&v->key, &d->turn.key);

	if (known && v->apps == d->apps) {
		d->pre = v->pre;
		return;
	}
	if (d->judging == ELSEWHERE) {
		__builtin_memset(&d->pre, 0, sizeof(d->pre));
		d->pre.verdicts[TX] = d->pre.verdicts[RX] = ACCEPT;
		if (known)
			return; /* what rules said of the packets that come back stays */
	} else {
		ask_rules(d);
	}
	v->until = 0;
	v->generation = generation;
	v->apps = d->apps;
	v->pre = d->pre;
	v->key = d->turn.key;
}

static __always_inline void remember_fragment(struct fragment_key *f)
{
	__u64 until = bpf_ktime_get_coarse_ns() + FRAGMENT_LIFE;

	bpf_map_update_elem(&pil_fragments_v1, f, &until, BPF_ANY);
}

static __always_inline bool knows_fragment(const struct fragment_key *f)
{
	__u64 *until = bpf_map_lookup_elem(&pil_fragments_v1, f);

	return until && *until > bpf_ktime_get_coarse_ns();
}

static __always_inline void count_rule(__be32 rule)
{
	__u32 number = bpf_ntohl(rule);
	__u64 *packets = bpf_map_lookup_elem(&pol_hits_v1, &number);

	if (packets)
		++*packets;
}

/* decide is for a packet that the cache does not let pass. It says why it is dropped, by what rule, or 0. */
__noinline int decide(struct verdict *v, struct desk *d, __be32 *rule)
{
	struct outcome *o;
	__be32 audit;

	if (!v || !d || !rule)
		return REASON_SESSION_LIMIT;
	o = &d->turn.outcome;
	v->until = 0;
	d->turn.now = bpf_ktime_get_coarse_ns();
	if (!step(&d->turn, &d->pre))
		return REASON_SESSION_LIMIT;
	*rule = d->pre.rules[o->way & 1];
	if (o->verdict != ACCEPT) {
		count_rule(*rule);
		return REASON_POLICY_DENIED;
	}
	audit = d->pre.audits[o->way & 1];
	if (audit)
		count_rule(audit);
	else if (o->state.seen & ESTABLISHED && !is_over(&o->state) && v->apps == d->apps)
		v->until = bpf_jiffies64() + UNSEEN;
	return 0;
}

/* pair is both ports as a session has them, the endpoint's first. */
static __always_inline __u32 pair(__u32 ports, __u32 way)
{
	return way == TX ? ports : ports << 16 | ports >> 16;
}

static __always_inline __u32 ports_of(const struct session_key *k)
{
	return *(const __u32 *)&k->local_port;
}

/* is_settled is the fast path: a packet in the middle of a session that is established, and was a moment ago. Its
 * transport header is at a constant place. */
static __always_inline bool is_settled(struct __sk_buff *skb, const struct packet *p, __u32 at,
				       const struct addr *local, const struct addr *remote, __u32 endpoint, __u32 apps,
				       __u32 way)
{
	__u8 *l4 = CTX_POINTER(skb, data) + at, *end = CTX_POINTER(skb, data_end);
	struct verdict *v;
	__u32 ports;

	if (p->l4 != at || p->fragment || (p->proto != NEXTHDR_TCP && p->proto != NEXTHDR_UDP) ||
	    l4 + sizeof(ports) > end)
		return false;
	if (p->proto == NEXTHDR_TCP && (l4 + TCP_FLAGS + 1 > end || l4[TCP_FLAGS] & (TCP_SYN | TCP_FIN | TCP_RST)))
		return false;
	ports = pair(*(__u32 *)l4, way);
	v = verdict_slot(local, remote, ports);
	return v && v->until > bpf_jiffies64() && v->generation == policy_generation() &&
	       same_addr(&v->key.local, local) && same_addr(&v->key.remote, remote) && ports_of(&v->key) == ports &&
	       v->key.endpoint == endpoint && v->key.proto == p->proto && (v->apps == apps || apps == APPS_ELSEWHERE);
}

/* find_session tells which session a packet is of, and what of it counts for that. It says why there is none, or 0. */
static __noinline int find_session(struct __sk_buff *skb, const struct packet *p, struct desk *d)
{
	struct session_key *key = &d->turn.key;
	struct moment *m = &d->turn.moment;
	__be16 ports[2] = {};

	m->proto = p->proto;
	m->flags = m->error = m->adopt = 0;
	if (p->ip4 ? is_error4(p) : is_error(p)) {
		int quoted = read_quoted(skb, p, d, ports);

		if (quoted < 0)
			return REASON_ICMP_QUOTE;
		m->proto = quoted;
		m->error = 1;
	} else if (read_ports(skb, p->proto, p->l4, ports)) {
		return REASON_MALFORMED;
	}
	if (m->proto == NEXTHDR_TCP && !m->error)
		bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &m->flags, sizeof(m->flags));
	key->proto = m->proto;
	key->local_port = m->way == TX ? ports[0] : ports[1];
	key->remote_port = m->way == TX ? ports[1] : ports[0];
	d->turn.position = position_of(key);
	return 0;
}

/* examine is for all other packets. It says why one is dropped, and by what rule, or 0. */
static __always_inline int examine(struct __sk_buff *skb, const struct packet *p, struct desk *d, __be32 *rule)
{
	const struct session_key *key = &d->turn.key;
	__u32 generation = policy_generation();
	struct verdict *v;
	int why;

	d->fragment.local = key->local;
	d->fragment.remote = key->remote;
	d->fragment.id = p->fragment;
	d->fragment.endpoint = key->endpoint;
	d->fragment.way = d->turn.moment.way;
	d->fragment.zero = 0;
	d->quotes_later = 0;
	why = p->l4 ? find_session(skb, p, d) : 0;
	if (why)
		return why;
	if (!p->l4 || d->quotes_later)
		return d->judging == ELSEWHERE || knows_fragment(&d->fragment) ? 0 : REASON_FRAGMENT_UNKNOWN;
	v = verdict_slot(&key->local, &key->remote, ports_of(key));
	if (!v)
		return REASON_SESSION_LIMIT;
	find_pre_actions(v, d, generation);
	return decide(v, d, rule);
}

/* judge_packet lets a packet pass (0), or drops it and says so. */
static __always_inline int judge_packet(struct __sk_buff *skb, const struct packet *p, struct desk *d, __u32 hook)
{
	__be32 rule = 0;
	int why = examine(skb, p, d, &rule);

	if (why)
		return drop_by(skb, why, hook, bpf_ntohl(rule));
	if (p->fragment && !d->quotes_later)
		remember_fragment(&d->fragment);
	return 0;
}

/* police does so for an endpoint that is told by addresses. */
__noinline int police(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 way, __u32 hook)
{
	const struct addr *local, *remote;
	struct session_key *key;
	struct desk *d;
	__u32 zero = 0;

	if (!p || !f)
		return TC_ACT_SHOT;
	local = end_of_flow(f, way == TX, hook);
	remote = end_of_flow(f, way != TX, hook);
	if (is_settled(skb, p, sizeof(struct frame), local, remote, f->policed[way & 1], 0, way))
		return 0;
	d = bpf_map_lookup_elem(&pil_desk, &zero);
	if (!d)
		return TC_ACT_SHOT;
	key = &d->turn.key;
	key->local = *local;
	key->remote = *remote;
	key->endpoint = f->policed[way & 1];
	key->tenant = tenant_id(&key->local);
	key->zero[0] = key->zero[1] = key->zero[2] = 0;
	d->turn.moment.way = way;
	d->judging = BY_ADDRESSES;
	d->apps = 0;
	return judge_packet(skb, p, d, hook);
}
