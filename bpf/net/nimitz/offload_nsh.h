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

/* When a frontend has last answered a probe. */
struct probe_key {
	__u64 frontend; /* the /64 */
	__u32 offload;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct probe_key);
	__type(value, __u64);	   /* CLOCK_MONOTONIC, ns */
	__uint(max_entries, 1024); /* a node is the backend of few offloads */
} nim_probes_v1 SEC(".maps");

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

/* nsh_send puts the message before a packet and sends it. The outer checksum is 0 (RFC 6935): the members of the
 * offload, its VNI and its epoch are compared, and the packet has its own checksum. */
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
	if (!d || !e || e->offload != j->offload || !has_policies(j->vni))
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);
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
	j.has_pre = 1;
	d->carried.pre = s->msg.pre;
	d->carried.vni = vni;
	d->carried.app = bpf_ntohl(s->msg.apps) >> 16;
	if (s->msg.kind == OFFLOAD_PASS)
		d->carried.pre.version = 0; /* which accepts only later fragments */
	if (tunnel_pull(skb, &s->outer))
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);
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
		__u64 now = bpf_ktime_get_ns();

		bpf_map_update_elem(&nim_probes_v1, &key, &now, BPF_ANY);
		return TC_ACT_SHOT; /* consumed */
	}
	if (result) /* segments of UDP, which only the kernel's device can pull */
		return drop(skb, REASON_NSH_SEGMENTS, HOOK_TUNNEL);
	vni = o->vni;
	return offload_resume(skb, s, vni);
}
