/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Load sharing (Nezha, SIGCOMM 2025): tables, and the parts of it that the stages call. An offload has a tenant's rules
 * for the containers of one node, its backend, looked up on other nodes, its frontends. Senders use a frontend in place
 * of the backend (choose_frontend). The frontend finds the pre-actions and sends them with the packet to the backend,
 * which alone has the sessions and decides. A packet that reaches the backend on another way is sent to a frontend,
 * which answers with the pre-actions. offload_nsh.h has the programs that do this. */
#pragma once
#include "hooks/uplink_class.h"
#include "net/netpila/resolve.h"
#include "net/nimitz/nat.h"
#include "policy/policy.h"
#include "tunnel/headers.h"

#define MAX_FRONTENDS 8
#define MAX_ACCEPTED  16 /* with draining ones */

struct offload {
	__u64 backend; /* the /64 */
	__u32 vni;
	__u32 epoch;	 /* random, of this activation */
	__u32 frontends; /* used of to: 0 or a power of 2 */
	__u32 accepted;	 /* used of from */
	__u32 fronts;	 /* 1: this node is a frontend */
	__u32 zero;
	__u64 to[MAX_FRONTENDS];
	__u64 from[MAX_ACCEPTED];
};
_Static_assert(sizeof(struct offload) == 224, "no implicit padding");

/* An offload whose backend is this node. */
struct backend {
	__u32 offload;
	__u32 asks; /* 1: this node has no rules, so frontends look them up */
};

/* A container of another node for which this node is a frontend. */
struct fronted {
	__u32 offload;
	__u32 app;
};

#define INDEX_TO_FRONTEND 255
#define INDEX_TO_BACKEND  254

#define NSH_CLASS	  0xfff6 /* experimental (RFC 8300 §9.1.4) */
#define NSH_TYPE	  1
#define OFFLOAD_VERSION	  1

enum offload_kind {
	OFFLOAD_PRE = 1,    /* to the backend: a packet, and what the rules say */
	OFFLOAD_PASS = 2,   /* to the backend: a packet that needs no rules, a later fragment */
	OFFLOAD_ASK = 3,    /* to the frontend: a packet of the backend */
	OFFLOAD_ANSWER = 4, /* the same packet, and what the rules say */
	OFFLOAD_PROBE = 5,  /* to the frontend, without a packet */
	OFFLOAD_ALIVE = 6,  /* the answer to it */
	OFFLOAD_KINDS = 7,
};

/* The context of the NSH: one TLV. All messages have the same length, so that an answer fits where the question was. */
struct offload_msg {
	__be16 class;
	__u8 type;
	__u8 length; /* of what follows */
	__u8 version;
	__u8 kind;
	__u8 proto; /* of the session, as the next ones; in PRE only of TCP and UDP, else 0; unused in PASS */
	__u8 flags; /* of TCP, in PRE */
	struct addr local, remote; /* the backend's container first */
	__be16 local_port, remote_port;
	__be32 epoch;
	__be32 apps; /* of the container in the upper half, of its peer in the lower */
	__be32 from; /* the port at the backend by which the packet came */
	struct pre_actions pre;
	__be16 zeros;
	__be16 relayed; /* of struct pkt_ctx */
};
_Static_assert(sizeof(struct offload_msg) == 88, "no implicit padding, a multiple of 4");

#define NSH_BYTES (sizeof(struct nsh) + sizeof(struct offload_msg))
#define MSG_AT	  (sizeof(struct outer6) + sizeof(struct nsh))

#ifndef TUNNELS_OVER_IPV4
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* id */
	__type(value, struct offload);
	__uint(max_entries, 1); /* set at load */
} nim_offloads_v1 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* VNI */
	__type(value, struct backend);
	__uint(max_entries, 1); /* set at load */
} nim_backends_v1 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct scoped_addr);
	__type(value, struct fronted);
	__uint(max_entries, 1); /* set at load */
} nim_fronted_v1 SEC(".maps");

static __always_inline struct offload *lookup_offload(__u32 id)
{
	return bpf_map_lookup_elem(&nim_offloads_v1, &id);
}

/* lookup_backend returns the offload for which this node has no rules, NULL if there is none. */
static __always_inline struct backend *lookup_backend(const struct nimitz_node *node, __u32 vni)
{
	struct backend *b;

	if (likely(!node->backends))
		return NULL;
	b = bpf_map_lookup_elem(&nim_backends_v1, &vni);
	return b && b->asks ? b : NULL;
}

/* frontend_of returns the /64 of the frontend for a packet: the same for all packets with one hash. An offload without
 * frontends has 0. */
static __always_inline __u64 frontend_of(struct __sk_buff *skb, const struct offload *o)
{
	__u32 n = o->frontends;

	return n ? o->to[bpf_get_hash_recalc(skb) & (n - 1) & (MAX_FRONTENDS - 1)] : 0;
}

/* choose_frontend replaces the tunnel address of a packet's backend by that of a frontend. Without one the packet goes
 * to the backend. */
static __noinline void choose_frontend(struct __sk_buff *skb, __u32 id, struct addr *vtep)
{
	const struct offload *o = lookup_offload(id);
	__u64 to = o ? frontend_of(skb, o) : 0;

	if (to)
		vtep->hi = to;
}

/* What the stages hand over to the programs here, and data that is too large for the stack. Programs run with softirqs
 * off, so a CPU's copy is never shared. The map is pinned, because during an upgrade programs of two builds call each
 * other: another layout needs another name, and another index in pil_uplinks_v1. */
struct offload_scratch {
	struct pkt_ctx j;
	struct packet p;
	struct tunnel outer;
	struct offload_msg msg;
	struct flow f;
	struct addr next_hop;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct offload_scratch);
	__uint(max_entries, 1);
} nim_sharing_v1 SEC(".maps");

static __always_inline struct offload_scratch *offload_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&nim_sharing_v1, &zero);
}

static __always_inline void write_session(struct offload_msg *m, const struct session_key *k)
{
	m->proto = k->proto;
	m->local = k->local;
	m->remote = k->remote;
	m->local_port = k->local_port;
	m->remote_port = k->remote_port;
}

/* write_question copies the session of a packet, which is in the scratch memory of policy, into the message. */
static __always_inline bool write_question(struct offload_msg *m, __u32 from)
{
	struct pol_scratch *d;
	__u32 zero = 0;

	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d)
		return false;
	__builtin_memset(m, 0, sizeof(*m)); /* it may have another tenant's session */
	m->kind = OFFLOAD_ASK;
	write_session(m, &d->ct.key);
	m->apps = bpf_htonl(d->apps);
	m->from = bpf_htonl(from);
	return true;
}

/* nimitz_next hands a packet on whose stages end here: the programs need a stack of their own. */
static __always_inline int nimitz_next(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j)
{
	struct offload_scratch *s = offload_scratch();

	if (!s)
		return TC_ACT_SHOT;
	s->p = *p;
	s->j = *j;
	if (j->next == NEXT_ASK && !write_question(&s->msg, j->from))
		return TC_ACT_SHOT;
	bpf_tail_call(skb, &pil_uplinks_v1, UPLINK_OFFLOAD_OUT);
	return drop(skb, REASON_NO_PROGRAM, j->hook);
}
#else
static __always_inline struct offload *lookup_offload(__u32 id)
{
	return NULL;
}

static __always_inline struct backend *lookup_backend(const struct nimitz_node *node, __u32 vni)
{
	return NULL;
}

static __always_inline void choose_frontend(struct __sk_buff *skb, __u32 id, struct addr *vtep)
{
}

static __always_inline int nimitz_next(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j)
{
	return TC_ACT_SHOT;
}
#endif
