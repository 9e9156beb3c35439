/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Policy: whether a packet may pass, for an endpoint whose tenant has policies or whose peer is outside of the cluster.
 * The networks call policy_fast_hit and policy_check; no other packet comes here. A miss of the verdict cache
 * (verdict.h) looks up rules (rules.h), updates the session (ct_session.h) and caches the verdict. */
#pragma once
#include "common/event.h"
#include "common/packet4.h"
#include "policy/ct_session.h"
#include "policy/rules.h"
#include "policy/verdict.h"

/* How policy applies to one end of a packet. */
enum enforce_mode {
	ENFORCE_BY_ADDR, /* the end's own rules; the addresses contain both apps */
	ENFORCE_OWN,	 /* the end's own rules; the caller knows both apps */
	ENFORCE_BY_APP,	 /* the rules of both ends */
	ENFORCE_REMOTE,	 /* no rules: another node checks; the session is kept for the replies */
	ENFORCE_ASK,	 /* the rules of both ends, which another node looks up: POLICY_ASK */
	ENFORCE_CARRIED, /* pol_scratch.carried, which another node has looked up */
	ENFORCE_OUTSIDE, /* the end's own rules; the peer is outside of the cluster and opens no sessions */
	ENFORCE_EXPOSED, /* the end's own rules; the peer is outside and has opened the session, to an exposed port */
};

static __always_inline bool is_outside(enum enforce_mode mode)
{
	return mode == ENFORCE_OUTSIDE || mode == ENFORCE_EXPOSED;
}

#define ICMPV6_ECHO_REQUEST 128
#define POLICY_ASK	    -1
#define APPS_REMOTE	    0xffffffff

/* Pre-actions that came with a packet: for which tenant and for which app of the endpoint they were looked up. */
struct carried {
	struct pre_actions pre;
	__u32 vni;
	__u32 app;
};

/* Data that is too large for the stack. Programs run with softirqs off, so a CPU's copy is never shared. */
struct pol_scratch {
	struct ct_ctx ct;
	struct flow_tuple tuple;
	__u32 quotes_fragment; /* 1: the packet is an ICMP error about a later fragment, with this identification: */
	__u32 quoted_fragment;
	__u32 mode;
	__u32 apps; /* for ENFORCE_OWN and ENFORCE_BY_APP: the endpoint's in the upper half, its peer's in the lower */
	struct pre_actions pre;
	struct flow_tuple peer_tuple; /* the tuple as the peer sees it */
	struct pre_actions peer_pre;  /* the pre-actions of the peer's rules */
	struct carried carried;
	__be32 nat;	      /* for ENFORCE_OUTSIDE: translation for a new session */
	__be32 avoid;	      /* translation that only established TCP sessions keep */
	struct verdict fresh; /* for ENFORCE_OUTSIDE: a verdict that the cache does not have */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct pol_scratch);
	__uint(max_entries, 1);
} pil_pol_scratch SEC(".maps");

static __always_inline bool is_echo(__u8 proto, __u8 type)
{
	return proto == NEXTHDR_ICMP ? type == 128 || type == 129 : type == 8 || type == 0;
}

/* read_ports reads the ports that identify a session: source, then destination. */
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

/* read_quoted_ports reads the ports of the packet that an error quotes, swapped, because that packet went the other
 * way. The quoted addresses are checked elsewhere. Of a later fragment it reads the identification. */
static __noinline int read_quoted_ports(struct __sk_buff *skb, const struct packet *p, struct pol_scratch *d,
					__be16 *ports)
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
		d->quotes_fragment = 1;
		d->quoted_fragment = q.fragment;
		return q.proto;
	}
	if (q.l4 + TRANSPORT_MIN > q.end || read_ports(skb, q.proto, q.l4, sent))
		return -1;
	ports[0] = sent[1];
	ports[1] = sent[0];
	return q.proto;
}

/* policy_lookup_peer adds the verdicts of the peer's rules. What one end opens (TX), the other sees as opened by its
 * peer (RX). */
static __always_inline void policy_lookup_peer(struct pol_scratch *d)
{
	d->peer_tuple.local = d->tuple.remote;
	d->peer_tuple.remote = d->tuple.local;
	d->peer_tuple.tenant = d->tuple.tenant;
	d->peer_tuple.local_app = d->tuple.remote_app;
	d->peer_tuple.remote_app = d->tuple.local_app;
	d->peer_tuple.local_port = d->tuple.remote_port;
	d->peer_tuple.remote_port = d->tuple.local_port;
	d->peer_tuple.proto = d->tuple.proto;
	policy_lookup(&d->peer_tuple, &d->peer_pre);
	for (int dir = TX; dir <= RX; dir++) {
		if (d->pre.verdicts[dir] != ACCEPT)
			continue;
		if (!d->pre.audits[dir])
			d->pre.audits[dir] = d->peer_pre.audits[RX - dir];
		if (d->peer_pre.verdicts[RX - dir] == ACCEPT)
			continue;
		d->pre.verdicts[dir] = DENY;
		d->pre.rules[dir] = d->peer_pre.rules[RX - dir];
	}
}

/* policy_lookup_session finds the pre-actions of a session. It is a function of its own to save stack. */
static __noinline void policy_lookup_session(struct pol_scratch *d)
{
	struct session_key *key = &d->ct.key;
	struct flow_tuple *e = &d->tuple;

	e->local = key->local;
	e->remote = key->remote;
	e->tenant = key->tenant;
	e->local_port = key->local_port;
	e->remote_port = key->remote_port;
	e->proto = key->proto;
	if (d->mode == ENFORCE_BY_ADDR || is_outside(d->mode)) {
		e->local_app = current_app(&e->local, app_id(&e->local));
		/* Only an address of the cluster contains an app. A node is outside of the tenant, too. */
		e->remote_app = claims_app(&e->remote) ? current_app(&e->remote, app_id(&e->remote)) : APP_OUTSIDE;
		policy_lookup(e, &d->pre);
		if (d->mode == ENFORCE_OUTSIDE) {
			d->pre.verdicts[RX] = DENY;
			d->pre.rules[RX] = d->pre.audits[RX] = 0;
		}
		if (d->mode == ENFORCE_EXPOSED) {
			d->pre.verdicts[TX] = DENY;
			d->pre.rules[TX] = d->pre.audits[TX] = 0;
		}
		return;
	}
	e->local_app = d->apps >> 16;
	e->remote_app = d->apps & 0xffff;
	policy_lookup(e, &d->pre);
	if (d->mode == ENFORCE_BY_APP && e->remote_app != APP_OUTSIDE && e->remote_app < FIRST_RESERVED_APP)
		policy_lookup_peer(d);
}

/* accept_both sets the pre-actions for packets that no rule applies to. */
static __always_inline void accept_both(struct pre_actions *pre)
{
	*pre = (struct pre_actions){.version = PRE_ACTIONS_VERSION, .verdicts = {ACCEPT, ACCEPT}};
}

/* get_pre_actions takes the pre-actions from the cache slot, or looks them up and caches them. */
static __always_inline void get_pre_actions(struct verdict *v, struct pol_scratch *d, __u32 generation)
{
	bool known = v->generation == generation && same_session(&v->key, &d->ct.key);

	if (known && v->apps == d->apps) {
		d->pre = v->pre;
		return;
	}
	if (d->mode == ENFORCE_REMOTE) {
		accept_both(&d->pre);
		if (known)
			return; /* the pre-actions of the replies stay in the cache */
	} else {
		policy_lookup_session(d);
	}
	v->until = 0;
	v->generation = generation;
	v->apps = d->apps;
	v->pre = d->pre;
	v->key = d->ct.key;
}

/* Later fragments have no ports. They get the verdict of the first fragment, which leaves an entry in the session
 * table: a key without ports, with the identification. */
static __always_inline void set_fragment(struct pol_scratch *d, __u32 id, __u32 dir)
{
	struct session_key *key = &d->ct.key;

	__builtin_memcpy(&key->local_port, &id, sizeof(id));
	key->proto = NEXTHDR_FRAGMENT;
	key->dir = dir;
	d->ct.pkt = (struct pkt_info){.dir = dir, .proto = NEXTHDR_FRAGMENT};
	d->ct.slot = ct_slot_of(key);
	d->ct.now = bpf_ktime_get_coarse_ns();
	accept_both(&d->pre);
}

__noinline int fragment_add(struct pol_scratch *d, __u32 id)
{
	if (!d)
		return 0;
	set_fragment(d, id, d->ct.pkt.dir);
	return ct_update(&d->ct, &d->pre); /* without room later fragments are dropped, with a reason */
}

__noinline int fragment_known(struct pol_scratch *d, __u32 id, __u32 dir)
{
	if (!d)
		return false;
	set_fragment(d, id, dir);
	return ct_lookup(&d->ct, &d->pre);
}

static __always_inline void count_rule(__be32 rule)
{
	__u32 number = bpf_ntohl(rule);
	__u64 *packets = bpf_map_lookup_elem(&pol_hits_v1, &number);

	if (packets)
		++*packets;
}

/* ct_verdict decides about a packet on a miss of the verdict cache. It returns 0, or the reason of the drop and the
 * rule that denied. The packet is also dropped if the session table has no room: a reply could not be recognised. */
__noinline int ct_verdict(struct verdict *v, struct pol_scratch *d, __be32 *rule)
{
	struct ct_result *o;
	__be32 audit;

	if (!v || !d || !rule)
		return REASON_SESSION_LIMIT;
	o = &d->ct.result;
	v->until = 0;
	d->ct.now = bpf_ktime_get_coarse_ns();
	if (!ct_update(&d->ct, &d->pre))
		return REASON_SESSION_LIMIT;
	*rule = d->pre.rules[o->dir & 1];
	if (o->verdict != ACCEPT) {
		if (d->ct.pkt.outside && o->dir == RX)
			return REASON_NO_SESSION;
		count_rule(*rule);
		return REASON_POLICY_DENIED;
	}
	v->nat = o->state.nat;
	audit = d->pre.audits[o->dir & 1];
	if (audit)
		count_rule(audit);
	else if (o->state.seen & ESTABLISHED && !is_closed(&o->state) && v->apps == d->apps)
		v->until = bpf_jiffies64() + VERDICT_TTL;
	return 0;
}

/* endpoint_ports returns both ports in the order of a session: the endpoint's first. */
static __always_inline __u32 endpoint_ports(__u32 ports, __u32 dir)
{
	return dir == TX ? ports : ports << 16 | ports >> 16;
}

/* policy_fast_hit is the fast path: TCP or UDP, not a fragment, of a session that was established less than VERDICT_TTL
 * ago. The transport header is at a constant offset. */
static __always_inline struct verdict *policy_fast_hit(struct __sk_buff *skb, const struct packet *p, __u32 at,
						       const struct addr *local, const struct addr *remote,
						       __u32 endpoint, __u32 apps, __u32 dir, bool outside)
{
	__u8 *l4 = CTX_POINTER(skb, data) + at, *end = CTX_POINTER(skb, data_end);
	struct verdict *v;
	__u32 ports;

	if (p->l4 != at || p->parts & HAS_FRAGMENT || (p->proto != NEXTHDR_TCP && p->proto != NEXTHDR_UDP) ||
	    l4 + sizeof(ports) > end)
		return NULL;
	if (p->proto == NEXTHDR_TCP && (l4 + TCP_FLAGS + 1 > end || l4[TCP_FLAGS] & (TCP_SYN | TCP_FIN | TCP_RST)))
		return NULL;
	ports = endpoint_ports(*(__u32 *)l4, dir);
	v = outside ? outside_verdict(local, remote, ports) : verdict_slot(local, remote, ports);
	if (v && v->until > bpf_jiffies64() && v->generation == policy_generation() &&
	    same_addr(&v->key.local, local) && same_addr(&v->key.remote, remote) && ports_of(&v->key) == ports &&
	    v->key.endpoint == endpoint && v->key.proto == p->proto && (v->apps == apps || apps == APPS_REMOTE))
		return v;
	return NULL;
}

static __always_inline bool same_pre(const struct pre_actions *a, const struct pre_actions *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3] && x[4] == y[4] && x[5] == y[5] &&
	       x[6] == y[6];
}

/* carried_verdict is ct_verdict for the pre-actions that came with a packet. */
static __always_inline int carried_verdict(struct verdict *v, struct pol_scratch *d, __be32 *rule)
{
	d->pre = d->carried.pre;
	v->generation = policy_generation();
	v->apps = d->apps;
	v->pre = d->pre;
	v->key = d->ct.key;
	v->from_packet = 1;
	return ct_verdict(v, d, rule);
}

/* ct_parse finds the session of a packet and the parts that the decision needs. It returns 0 or the reason of the drop.
 */
static __noinline int ct_parse(struct __sk_buff *skb, const struct packet *p, struct pol_scratch *d)
{
	struct session_key *key = &d->ct.key;
	struct pkt_info *m = &d->ct.pkt;
	__be16 ports[2] = {};

	m->proto = p->proto;
	m->flags = m->error = m->pickup = 0;
	m->outside = d->mode == ENFORCE_OUTSIDE;
	m->ingress = d->mode == ENFORCE_EXPOSED && m->dir == RX;
	if (p->ip4 ? is_error4(p) : is_error(p)) {
		int quoted = read_quoted_ports(skb, p, d, ports);

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
	key->local_port = m->dir == TX ? ports[0] : ports[1];
	key->remote_port = m->dir == TX ? ports[1] : ports[0];
	d->ct.slot = ct_slot_of(key);
	return 0;
}

/* policy_slow decides about all other packets. It returns 0, the reason of the drop and the rule that denied, or
 * POLICY_ASK. */
static __always_inline int policy_slow(struct __sk_buff *skb, const struct packet *p, struct pol_scratch *d,
				       __be32 *rule, bool outside)
{
	const struct session_key *key = &d->ct.key;
	__u32 generation = policy_generation();
	struct verdict *v;
	int why;

	d->quotes_fragment = 0;
	why = p->l4 ? ct_parse(skb, p, d) : 0;
	if (why)
		return why;
	if (!p->l4 || d->quotes_fragment) {
		__u32 dir = d->ct.pkt.dir, id = p->l4 ? d->quoted_fragment : p->fragment;

		if (d->mode == ENFORCE_REMOTE || fragment_known(d, id, p->l4 ? RX - dir : dir))
			return 0;
		/* Its first fragment may be on the way to the other node and back; this one follows it. */
		return d->mode == ENFORCE_ASK ? POLICY_ASK : REASON_FRAGMENT_UNKNOWN;
	}
	if (d->mode == ENFORCE_ASK)
		return POLICY_ASK;
	v = outside ? outside_verdict(&key->local, &key->remote, ports_of(key))
		    : verdict_slot(&key->local, &key->remote, ports_of(key));
	if (!v && outside)
		v = &d->fresh;
	if (!v)
		return REASON_SESSION_LIMIT;
	if (d->mode == ENFORCE_CARRIED)
		return carried_verdict(v, d, rule);
	get_pre_actions(v, d, generation);
	if (outside) {
		/* An echo request opens a session, also with the identifier of the container's own. */
		if (p->proto == NEXTHDR_ICMP && p->icmp_type == ICMPV6_ECHO_REQUEST && d->ct.pkt.dir == RX)
			return REASON_NO_SESSION;
		d->pre.nats[TX] = d->nat;
		d->pre.nats[RX] = d->avoid;
	}
	return ct_verdict(v, d, rule);
}

/* policy_check returns 0 if the packet may pass, or POLICY_ASK; else it drops the packet. outside: is_outside of the
 * mode. */
static __always_inline int policy_check(struct __sk_buff *skb, const struct packet *p, struct pol_scratch *d,
					__u32 hook, bool outside)
{
	__be32 rule = 0;
	int why = policy_slow(skb, p, d, &rule, outside);

	if (why == POLICY_ASK)
		return why;
	trace_policy(skb, d->ct.key.endpoint, d->ct.pkt.dir, why, bpf_ntohl(rule));
	if (why)
		return drop_by(skb, why, hook, bpf_ntohl(rule));
	if (p->parts & HAS_FRAGMENT && p->l4 && !d->quotes_fragment)
		fragment_add(d, p->fragment);
	return 0;
}

/* An end of a packet whose endpoint is on this node: the addresses as the endpoint's session has them. */
struct policy_end {
	const struct addr *local, *remote;
	/* With a peer outside: translation for a new session, and then that of the session; or NULL. Of ENFORCE_EXPOSED
	 * the ingress node: answers go back by the one that the last packet came by. */
	__be32 *nat;
	__be32 avoid; /* translation that only established TCP sessions keep; 0: none */
	__u32 endpoint, tenant, apps, dir;
};

/* enforce_end applies the rules of one end of an IPv6 packet. It returns 0 if the packet may pass, else it drops the
 * packet. */
static __always_inline int enforce_end(struct __sk_buff *skb, const struct packet *p, const struct policy_end *end,
				       enum enforce_mode mode, __u32 hook)
{
	struct session_key *key;
	struct pol_scratch *d;
	struct verdict *v;
	__u32 zero = 0;
	int why;

	v = policy_fast_hit(skb, p, sizeof(struct eth_ip6), end->local, end->remote, end->endpoint, end->apps, end->dir,
			    is_outside(mode));
	if (v && mode == ENFORCE_EXPOSED && end->dir == RX && end->nat && *end->nat != v->nat)
		v = NULL; /* by another ingress node */
	if (v) {
		trace_policy_hit(skb, end->endpoint, end->dir);
		if (end->nat)
			*end->nat = v->nat;
		return 0;
	}
	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d)
		return TC_ACT_SHOT;
	if (is_outside(mode)) {
		d->nat = end->nat ? *end->nat : 0;
		d->avoid = mode == ENFORCE_EXPOSED ? d->nat : end->avoid;
	}
	key = &d->ct.key;
	key->local = *end->local;
	key->remote = *end->remote;
	key->endpoint = end->endpoint;
	key->tenant = end->tenant;
	key->dir = key->zero[0] = 0;
	key->session_kind = mode == ENFORCE_EXPOSED ? SESSION_EXPOSED : 0;
	d->ct.pkt.dir = end->dir;
	d->mode = mode;
	d->apps = end->apps;
	why = policy_check(skb, p, d, hook, is_outside(mode));
	if (!why && is_outside(mode) && d->fresh.until && same_session(&d->fresh.key, &d->ct.key) &&
	    !outside_verdict(&d->ct.key.local, &d->ct.key.remote, ports_of(&d->ct.key)))
		keep_outside_verdict(&d->fresh);
	if (!why && end->nat && d->ct.result.state.version)
		*end->nat = d->ct.result.state.nat;
	return why;
}
