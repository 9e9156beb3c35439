/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Load sharing: the messages between frontends and backends, and the programs that send and receive them. They are NSH
 * (RFC 8300, MD type 2) over VXLAN-GPE. The service path is the offload's id; the service index says to which of the
 * two roles the message goes.
 *
 *   from a sender:   sender -> VXLAN -> frontend: offload_front -> PRE -> backend: offload_resume
 *   at the backend:  offload_ask -> ASK -> frontend: offload_answer, in place -> ANSWER -> backend: offload_resume */
#pragma once
#include "net/nimitz/stages.h"

/* Messages that this node has sent. The agent makes the entries. */
struct sent_messages {
	__u64 of[8]; /* enum offload_kind */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* id of the offload */
	__type(value, struct sent_messages);
	__uint(max_entries, 1); /* set at load */
} nim_sent_v2 SEC(".maps");

/* When a frontend has last answered a probe; 0: never. The agent makes the entries, one for each frontend that the
 * backend accepts messages of. */
struct probe_key {
	__u64 frontend; /* the /64 */
	__u32 offload;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct probe_key);
	__type(value, __u64);	/* CLOCK_MONOTONIC, ns */
	__uint(max_entries, 1); /* set at load */
} nim_probes_v2 SEC(".maps");

static __always_inline void count_sent(const struct offload_scratch *s)
{
	struct sent_messages *sent = bpf_map_lookup_elem(&nim_sent_v2, &s->j.offload);

	if (sent)
		sent->of[s->msg.kind & 7]++;
}

/* nsh_xmit sends a message that is complete, from this node to another one. length is that of the packet behind the
 * outer Ethernet header, or 1 if it has segments. */
static __always_inline int nsh_xmit(struct __sk_buff *skb, struct offload_scratch *s, __u64 to, __u32 length)
{
	int why;

	s->f.src.hi = own_node;
	s->f.src.lo = s->f.dst.lo = VTEP_HOST;
	s->f.dst.hi = to;
	s->f.key.path = 0;
	why = find_next_hop(skb, &s->f, length, &s->next_hop);
	if (why)
		return drop(skb, why, HOOK_TUNNEL);
	count_sent(s);
	skb->mark = accept_mark;
	skb->tstamp = 0;
	return bpf_redirect_neigh(s->f.ifindex, NULL, 0, 0);
}

/* nsh_send puts the message before a packet and sends it. The outer checksum is 0 (RFC 6935): addresses, VNI, epoch and
 * the app of the container are compared, and the packet has its own checksum. Pre-actions and the session in the
 * message have only the checksums of the links. */
static __always_inline int nsh_send(struct __sk_buff *skb, struct offload_scratch *s, const struct offload *o, __u64 to,
				    __u32 index)
{
	struct tunnel *t = &s->outer;
	__u32 length;

	s->msg.class = bpf_htons(NSH_CLASS);
	s->msg.type = NSH_TYPE;
	s->msg.length = sizeof(s->msg) - 4;
	s->msg.version = OFFLOAD_VERSION;
	s->msg.epoch = bpf_htonl(o->epoch);
	s->msg.relayed = bpf_htons(s->j.relayed);
	t->src.hi = own_node;
	t->src.lo = t->dst.lo = VTEP_HOST;
	t->dst.hi = to;
	t->vni = o->vni;
	t->group = 0;
	t->path = bpf_htonl(s->j.offload << 8 | index);
	t->dport = bpf_htons(UDP_VXLAN_GPE);
	t->flags = TUNNEL_GPE | TUNNEL_NSH;
	t->tos = 0;
	t->ttl = TUNNEL_HOPS;
	t->next = NEXT_ETHERNET;
	t->md = NSH_MD2;
	t->nsh_ttl = NSH_SIX_BITS;
	length = wire_length(skb, &s->p) + sizeof(struct outer6) + NSH_BYTES;
	if (tunnel_push(skb, t, &s->msg, sizeof(s->msg)))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	return nsh_xmit(skb, s, to, length);
}

/* offload_pass_on sends a packet to the backend as it is, which asks about it: its container has just started there, or
 * has just moved there. A packet of this node's own container has passed check_egress. */
static __noinline int offload_pass_on(struct __sk_buff *skb, struct offload_scratch *s, const struct offload *o)
{
	struct addr vtep = {.lo = VTEP_HOST};
	struct nimitz_node *node;
	__u32 zero = 0;
	int why = 0;

	node = bpf_map_lookup_elem(&nim_node_v1, &zero);
	if (!s || !o || !node)
		return TC_ACT_SHOT;
	vtep.hi = o->backend;
	if (s->j.from == PORT_VXLAN)
		why = may_relay(&s->j) ? check_egress(skb, &s->j, node->vxlan) : REASON_NO_ROUTE;
	return why ? drop(skb, why, HOOK_TUNNEL) : tunnel_xmit(skb, &s->j, &vtep, node->vxlan);
}

/* is_plain reports whether a packet is TCP or UDP and no fragment: the backend does not parse it again. */
static __always_inline bool is_plain(const struct packet *p)
{
	return (p->proto == NEXTHDR_TCP || p->proto == NEXTHDR_UDP) && !(p->parts & HAS_FRAGMENT);
}

/* offload_front sends a packet, whose backend's frontend this node is, with its pre-actions to the backend. */
static __always_inline int offload_front(struct __sk_buff *skb, struct offload_scratch *s, const struct offload *o)
{
	struct pkt_ctx *j = &s->j;
	struct scoped_addr key = {.address = j->dst, .scope = scope_of(j->family, j->vni)};
	struct fronted *e = bpf_map_lookup_elem(&nim_fronted_v1, &key);
	__u32 zero = 0, generation = policy_generation();
	struct pol_scratch *d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	struct verdict *v;

	/* Without rules this node may not answer: the backend accepts what it says. */
	if (!d || !has_policies(j->vni))
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);
	if (!e || e->offload != j->offload)
		return offload_pass_on(skb, s, o);
	set_session(d, &j->dst, &j->src, 0, j->vni);
	d->ct.pkt.dir = RX;
	d->mode = ENFORCE_BY_APP;
	d->apps = e->app << 16 | (j->identity & GBP_IDENTITY);
	d->quotes_fragment = 0;
	__builtin_memset(&s->msg, 0, sizeof(s->msg)); /* it may have another tenant's session */
	s->msg.kind = OFFLOAD_PASS;
	if (s->p.l4) {
		int why = ct_parse(skb, &s->p, d);

		if (why)
			return drop(skb, why, HOOK_TUNNEL);
		if (!d->quotes_fragment)
			s->msg.kind = OFFLOAD_PRE;
	}
	if (s->msg.kind == OFFLOAD_PRE) {
		v = verdict_slot(&d->ct.key.local, &d->ct.key.remote, ports_of(&d->ct.key));
		if (!v)
			return TC_ACT_SHOT;
		get_pre_actions(v, d, generation);
		s->msg.pre = d->pre;
		if (is_plain(&s->p)) {
			write_session(&s->msg, &d->ct.key);
			s->msg.flags = d->ct.pkt.flags;
		}
	}
	s->msg.apps = bpf_htonl(d->apps);
	s->msg.from = bpf_htonl(PORT_VXLAN);
	return nsh_send(skb, s, o, o->backend, INDEX_TO_BACKEND);
}

/* offload_ask sends a packet of the backend, with the question about it, to a frontend. */
static __always_inline int offload_ask(struct __sk_buff *skb, struct offload_scratch *s, const struct offload *o)
{
	__u64 to = frontend_of(skb, o);

	return to ? nsh_send(skb, s, o, to, INDEX_TO_FRONTEND) : drop(skb, REASON_NO_FRONTEND, s->j.hook);
}

/* offload_out is the program of packets that the stages hand over. */
static __always_inline int offload_out(struct __sk_buff *skb)
{
	struct offload_scratch *s = offload_scratch();
	const struct offload *o;

	if (!s)
		return TC_ACT_SHOT;
	o = lookup_offload(s->j.offload);
	if (!o)
		return drop(skb, REASON_NSH_UNKNOWN, s->j.hook);
	return s->j.next == NEXT_FRONT ? offload_front(skb, s, o) : offload_ask(skb, s, o);
}

/* offload_answer looks up the rules for a backend's packet and sends it back as it is. */
static __always_inline int offload_answer(struct __sk_buff *skb, struct offload_scratch *s, const struct offload *o)
{
	__u32 zero = 0, generation = policy_generation();
	struct offload_msg *m = &s->msg;
	struct addr both[2];
	struct pol_scratch *d;
	struct verdict *v;
	__be16 sum = 0;
	__be32 path;

	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d || !has_policies(o->vni))
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);
	if (m->kind == OFFLOAD_PROBE) {
		m->kind = OFFLOAD_ALIVE;
	} else if (m->proto == NEXTHDR_FRAGMENT) {
		m->kind = OFFLOAD_PASS; /* by now the backend may know its first fragment */
	} else {
		set_session(d, &m->local, &m->remote, 0, o->vni);
		d->ct.key.proto = m->proto;
		d->ct.key.local_port = m->local_port;
		d->ct.key.remote_port = m->remote_port;
		d->mode = ENFORCE_BY_APP;
		d->apps = bpf_ntohl(m->apps);
		v = verdict_slot(&m->local, &m->remote, ports_of(&d->ct.key));
		if (!v)
			return TC_ACT_SHOT;
		get_pre_actions(v, d, generation);
		m->pre = d->pre;
		m->kind = OFFLOAD_ANSWER;
	}
	both[0] = s->outer.dst;
	both[1] = s->outer.src;
	path = (s->outer.path & bpf_htonl(~0xffu)) | bpf_htonl(INDEX_TO_BACKEND);
	if (bpf_skb_store_bytes(skb, offsetof(struct outer6, src), both, sizeof(both), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, offsetof(struct outer6, udp.check), &sum, sizeof(sum), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, MSG_AT - sizeof(path), &path, sizeof(path), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, MSG_AT, m, sizeof(*m), BPF_F_RECOMPUTE_CSUM))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	return nsh_xmit(skb, s, both[1].hi, skb->gso_size ? 1 : skb->len - ETH_HLEN);
}

/* offload_policy decides about a packet to an endpoint by the pre-actions that came with it. The caller has written the
 * session and the parts that the decision needs. A cached verdict counts if it is of the same pre-actions. It returns 0
 * or drops the packet. */
static __noinline int offload_policy(struct __sk_buff *skb, struct pol_scratch *d)
{
	struct session_key *key = &d->ct.key;
	struct verdict *v = verdict_slot(&key->local, &key->remote, ports_of(key));
	__be32 rule = 0;
	bool known;
	int why;

	if (!v)
		return drop(skb, REASON_SESSION_LIMIT, HOOK_TUNNEL);
	key->zero[0] = 1; /* as in a slot that is from_packet */
	known = v->until > bpf_jiffies64() && v->generation == policy_generation() && same_session(&v->key, key) &&
		same_pre(&v->pre, &d->carried.pre);
	key->zero[0] = 0;
	if (known && !(d->ct.pkt.flags & (TCP_SYN | TCP_FIN | TCP_RST))) {
		trace_policy_hit(skb, key->endpoint, RX);
		return 0;
	}
	d->ct.slot = ct_slot_of(key);
	why = carried_verdict(v, d, &rule);
	trace_policy(skb, key->endpoint, RX, why, bpf_ntohl(rule));
	return why ? drop_by(skb, why, HOOK_TUNNEL, bpf_ntohl(rule)) : 0;
}

/* offload_deliver decides about a packet from a sender and delivers it by what the frontend has read in it. It returns
 * TCX_NEXT, with the packet unchanged, if the packet has to pass all stages. */
static __noinline int offload_deliver(struct __sk_buff *skb, struct offload_scratch *s, struct pol_scratch *d)
{
	const struct offload_msg *m = &s->msg;
	struct pkt_ctx *j = &s->j;
	struct sender *receiver;
	struct route *r;

	j->dst = m->local;
	j->vni = d->carried.vni;
	j->family = s->outer.inner_ip4 ? FAMILY_4 : FAMILY_6;
	r = find_route(j);
	if (!r || r->port >= FIRST_DEVICE || r->port == PORT_NONE)
		return TCX_NEXT;
	receiver = lookup_receiver(j, r->port);
	if (!receiver || (receiver->identity & GBP_IDENTITY) != d->carried.app)
		return TCX_NEXT;
	set_session(d, &m->local, &m->remote, r->port, j->vni);
	d->ct.key.proto = m->proto;
	d->ct.key.local_port = m->local_port;
	d->ct.key.remote_port = m->remote_port;
	d->ct.pkt = (struct pkt_info){.dir = RX, .proto = m->proto, .flags = m->flags};
	d->apps = bpf_ntohl(m->apps);
	if (offload_policy(skb, d))
		return TC_ACT_SHOT;
	trace_pipeline(skb, j->vni);
	if (set_both_macs(skb, mac_to(r)))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, r->ifindex, on_way_in(skb, skb->ifindex), false);
}

/* offload_resume goes on with a packet for which a frontend has looked up the rules, at the stage where it left the
 * backend or, from a sender, as if it came out of the tunnel. */
static __always_inline int offload_resume(struct __sk_buff *skb, struct offload_scratch *s, __u32 vni)
{
	struct pkt_ctx j = {.hook = HOOK_TUNNEL, .vni = vni};
	struct packet p = {};
	struct pol_scratch *d;
	__u32 zero = 0;
	int why;

	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d)
		return TC_ACT_SHOT;
	j.from = bpf_ntohl(s->msg.from);
	j.identity = bpf_ntohl(s->msg.apps) & GBP_IDENTITY;
	j.relayed = bpf_ntohs(s->msg.relayed);
	j.has_pre = 1;
	d->carried.pre = s->msg.pre;
	d->carried.vni = vni;
	d->carried.app = bpf_ntohl(s->msg.apps) >> 16;
	if (s->msg.kind == OFFLOAD_PASS)
		d->carried.pre.version = 0; /* which accepts only later fragments */
	s->outer.next = 0;		    /* the MACs are overwritten */
	if (tunnel_pull(skb, &s->outer))
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);
	if (s->msg.kind == OFFLOAD_PRE && s->msg.proto) {
		int sent = offload_deliver(skb, s, d);

		if (sent != TCX_NEXT)
			return sent;
	}
	why = parse_any(skb, &j, &p);
	if (why)
		return drop(skb, why, HOOK_TUNNEL);
	if (j.from == PORT_GATEWAY) {
		j.vni = GATEWAY_VNI;
		j.identity = 0;
		if (is_any_error(&p, j.family))
			icmp_err_set_src(skb, &p, &j);
	} else if (j.from < FIRST_DEVICE) {
		why = lookup_sender(&j);
		if (why || j.vni != vni)
			return drop(skb, REASON_NSH_FORGED, HOOK_TUNNEL);
	} else if (j.from != PORT_VXLAN) {
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);
	}
	why = nimitz_forward(skb, &p, &j);
	return finish(skb, &j, why); /* it is not handed on again: has_pre */
}

static __always_inline bool is_frontend(const struct offload *o, __u64 node)
{
	for (int i = 0; i < MAX_ACCEPTED; i++)
		if (i < o->accepted && o->from[i] == node)
			return true;
	return false;
}

/* check_msg returns the reason why a message is not accepted. classify has compared the destination. */
static __always_inline int check_msg(const struct offload_scratch *s, const struct offload *o, __u32 index)
{
	const struct offload_msg *m = &s->msg;
	bool to_frontend = m->kind == OFFLOAD_ASK || m->kind == OFFLOAD_PROBE;

	if (m->class != bpf_htons(NSH_CLASS) || m->type != NSH_TYPE || m->length != sizeof(*m) - 4 ||
	    m->version != OFFLOAD_VERSION || !m->kind || m->kind >= OFFLOAD_KINDS ||
	    index != (to_frontend ? INDEX_TO_FRONTEND : INDEX_TO_BACKEND))
		return REASON_NSH_MALFORMED;
	if (s->outer.src.lo != VTEP_HOST || s->outer.vni != o->vni)
		return REASON_NSH_FORGED;
	if (to_frontend ? !o->fronts || s->outer.src.hi != o->backend
			: o->backend != own_node || !is_frontend(o, s->outer.src.hi))
		return REASON_NSH_FORGED;
	return bpf_ntohl(m->epoch) == o->epoch ? 0 : REASON_NSH_STALE;
}

/* offload_in is the uplink's program for tunnel packets on nodes that take part in offloads. VXLAN goes on to the
 * kernel's device. */
static __always_inline int offload_in(struct __sk_buff *skb)
{
	struct offload_scratch *s = offload_scratch();
	const struct offload *o;
	struct tunnel *t;
	__u32 path, vni;
	int result, why;

	if (!s)
		return TC_ACT_SHOT;
	if (skb->vlan_present) /* a priority tag, which is outside of the frame */
		bpf_skb_vlan_pop(skb);
	t = &s->outer;
	result = tunnel_parse(skb, bpf_htons(UDP_VXLAN_GPE), TUNNEL_GPE | TUNNEL_NSH, t);
	if (result == TUNNEL_OTHER || result == TUNNEL_OPTIONS)
		return TCX_NEXT;
	/* An NSH of MD type 1 is shorter, and without an NSH the length is 0. */
	if ((result && result != TUNNEL_KERNEL) || t->nsh != NSH_BYTES ||
	    bpf_skb_load_bytes(skb, MSG_AT, &s->msg, sizeof(s->msg)))
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);
	path = bpf_ntohl(t->path);
	s->j.offload = path >> 8;
	o = lookup_offload(s->j.offload);
	if (!o)
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);
	why = check_msg(s, o, path & 0xff);
	if (why)
		return drop(skb, why, HOOK_TUNNEL);
	if (s->msg.kind == OFFLOAD_ASK || s->msg.kind == OFFLOAD_PROBE)
		return offload_answer(skb, s, o);
	if (s->msg.kind == OFFLOAD_ALIVE) {
		struct probe_key key = {.frontend = t->src.hi, .offload = s->j.offload};
		__u64 *at = bpf_map_lookup_elem(&nim_probes_v2, &key);

		if (at)
			*at = bpf_ktime_get_ns();
		return TC_ACT_SHOT; /* consumed */
	}
	if (result) /* segments of UDP, which only the kernel's device can pull */
		return drop(skb, REASON_NSH_SEGMENTS, HOOK_TUNNEL);
	vni = o->vni;
	return offload_resume(skb, s, vni);
}
