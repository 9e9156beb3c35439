/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Connection tracking: the state of a session and the decision action = f(packet, pre-actions, state) (Nezha §2.1,
 * §3.1). Rules give pre-actions without knowing who opened the session; the state knows who did, but no rule. Both are
 * separate, of fixed form and versioned, because they may be sent in packets (§3.2). ct_table.h calls action under the
 * lock of a bucket. */
#pragma once
#include "common/address.h"
#include "common/proto.h"
#include <bpf/bpf_helpers.h>

/* Direction of a packet, as the endpoint sees it. */
enum ct_dir {
	TX = 0,
	RX = 1,
};

enum pre_verdict {
	DENY = 0,
	ACCEPT = 1,
};

#define PRE_ACTIONS_VERSION 1
#define STATE_VERSION	    1

/* The verdicts of the rules for a session that the endpoint opens (TX), and for one that its peer opens (RX). Rule
 * numbers are in network byte order. */
struct pre_actions {
	__u8 version;
	__u8 verdicts[2];
	__u8 zero;
	__be32 rules[2];  /* that decided; 0: none */
	__be32 audits[2]; /* that would deny if it were not in audit mode */
	__be32 nats[2]; /* translation for the session: an egress gateway; 0: none. With a peer outside, RX has one that
			 * only established TCP sessions keep */
};
_Static_assert(sizeof(struct pre_actions) == 28, "it travels in packets");

enum seen {
	SEEN_INITIATOR = 1 << 0, /* packets of the side that opened the session */
	SEEN_RESPONDER = 1 << 1, /* packets of the other side */
	ESTABLISHED = 1 << 2,	 /* each side has received packets of the other */
	FIN_INITIATOR = 1 << 3,
	FIN_RESPONDER = 1 << 4,
	RESET = 1 << 5,
	PICKED_UP = 1 << 6, /* it is unknown which side opened it */
};

struct session_state {
	__u8 version; /* 0: no state */
	__u8 first;   /* direction of the packet that opened it */
	__u8 seen;
	__u8 proto;
	__be32 nat; /* translation that the session uses; 0: none */
};
_Static_assert(sizeof(struct session_state) == 8, "it travels in packets (Nezha §7.1: most need no more)");

/* The parts of a packet that the decision needs. */
struct pkt_info {
	__u8 dir;
	__u8 proto;
	__u8 flags;   /* of TCP */
	__u8 error;   /* 1: an ICMP error about a packet of the session */
	__u8 pickup;  /* 1: an unknown session may be older than the tenant's policies */
	__u8 outside; /* 1: the peer is outside of the cluster and opens no sessions */
	__u8 ingress; /* 1: the peer is outside; answers go back by the node of the translation for what the peer opens
		       */
	__u8 zero;
};

struct ct_result {
	struct session_state state; /* new state; version 0: do not store any */
	__u8 verdict;
	__u8 dir; /* whose pre-action decided */
	__u8 changed;
	__u8 zero;
};

static __always_inline bool is_closed(const struct session_state *s)
{
	return s->seen & RESET || (s->seen & FIN_INITIATOR && s->seen & FIN_RESPONDER);
}

/* is_tcp_syn: the packet opens a connection. It is decided by the rules, whatever state there is. */
static __always_inline bool is_tcp_syn(const struct pkt_info *m)
{
	return m->proto == NEXTHDR_TCP && is_first_segment(m->flags);
}

/* is_midstream: the sender has received packets of the other side, so the packet does not open a connection. */
static __always_inline bool is_midstream(const struct pkt_info *m)
{
	return m->proto == NEXTHDR_TCP && m->flags & TCP_ACK;
}

static __always_inline __u8 update_seen(__u8 seen, const struct pkt_info *m, bool initiator)
{
	if (m->proto != NEXTHDR_TCP) {
		seen |= initiator ? SEEN_INITIATOR : SEEN_RESPONDER;
		return seen & SEEN_RESPONDER ? seen | ESTABLISHED : seen;
	}
	if (m->flags & TCP_RST)
		return seen | RESET;
	if (m->flags & TCP_FIN)
		seen |= initiator ? FIN_INITIATOR : FIN_RESPONDER;
	/* The handshake is complete when the initiator acknowledges the reply. An initiator that only repeats its SYN
	 * stays half open. */
	if (initiator && m->flags & TCP_ACK && !(m->flags & TCP_SYN) && seen & SEEN_RESPONDER)
		seen |= ESTABLISHED;
	return seen | (initiator ? SEEN_INITIATOR : SEEN_RESPONDER);
}

/* pre_verdict_for returns the pre-action for the side that opened the session. The verifier accepts no address that
 * depends on dir. */
static __always_inline __u8 pre_verdict_for(const struct pre_actions *pre, __u8 dir)
{
	__u32 tx = pre->verdicts[TX], rx = pre->verdicts[RX];

	asm volatile("" : "+r"(tx), "+r"(rx));
	return dir == TX ? tx : rx;
}

/* action decides about one packet of an endpoint: the pre-action for the side that opened the session applies. It is a
 * pure function of its arguments. */
static __always_inline struct ct_result action(const struct pkt_info *m, const struct pre_actions *pre,
					       const struct session_state *state)
{
	bool known = state->version == STATE_VERSION, fresh, picked_up;
	struct ct_result o = {.dir = m->dir};

	/* Another build has written them, in a packet or in the table: deny, because their meaning is unknown. */
	if (pre->version != PRE_ACTIONS_VERSION || (state->version && !known))
		return o;
	/* A SYN from the other side, on the ports of a live session, is a new connection. It neither joins nor ends
	 * that session. */
	fresh = !known || (is_tcp_syn(m) && (is_closed(state) || m->dir != state->first || state->seen & PICKED_UP));
	if (!fresh)
		o.dir = state->first;
	o.verdict = pre_verdict_for(pre, o.dir);
	/* Either side may have opened a session that is older than the policies, so the rules of one direction are
	 * enough. A midstream packet cannot open a connection. */
	picked_up = fresh ? m->pickup && is_midstream(m) : state->seen & PICKED_UP;
	if (picked_up && o.verdict != ACCEPT) {
		o.dir = RX - o.dir;
		o.verdict = pre_verdict_for(pre, o.dir);
	}
	/* An ICMP error belongs to the session that it quotes and changes nothing. */
	if (m->error)
		return o;
	if (o.verdict != ACCEPT || (fresh && known && !is_closed(state)))
		return o;
	/* A FIN or RST that matches no session does not create one. */
	if (fresh && m->proto == NEXTHDR_TCP && m->flags & (TCP_RST | TCP_FIN))
		return o;
	if (fresh) {
		o.state.first = o.dir;
		o.state.seen = picked_up ? PICKED_UP : 0;
		o.state.nat = o.dir == TX ? pre->nats[TX] : pre->nats[RX];
	} else {
		o.state = *state;
		if (m->outside && state->nat && state->nat == pre->nats[RX] &&
		    !(m->proto == NEXTHDR_TCP && state->seen & ESTABLISHED))
			o.state.nat = pre->nats[TX]; /* no answer has come by the old one, or the peer does not care */
		if (m->ingress)
			o.state.nat = pre->nats[RX];
	}
	o.state.version = STATE_VERSION;
	o.state.proto = m->proto;
	o.state.seen = update_seen(o.state.seen, m, m->dir == o.state.first);
	o.changed = fresh || o.state.seen != state->seen;
	return o;
}

/* Idle timeouts in seconds. Established TCP: RFC 5382 REQ-5. Datagrams: RFC 4787 REQ-5. Half-open sessions expire fast
 * (Nezha §7.3). */
#define TIMEOUT_HALF_OPEN 10
#define TIMEOUT_ONE_WAY	  30
#define TIMEOUT_DATAGRAMS 180
#define TIMEOUT_TCP	  7440
#define TIMEOUT_CLOSED	  10
#define TIMEOUT_FRAGMENT  30 /* receivers wait 60 s for the rest (RFC 8200 §4.5), senders need less */

static __always_inline __u32 ct_timeout(const struct session_state *s)
{
	if (is_closed(s))
		return TIMEOUT_CLOSED;
	if (s->proto == NEXTHDR_TCP)
		return s->seen & ESTABLISHED ? TIMEOUT_TCP : TIMEOUT_HALF_OPEN;
	if (s->proto == NEXTHDR_FRAGMENT)
		return TIMEOUT_FRAGMENT;
	return s->seen & ESTABLISHED ? TIMEOUT_DATAGRAMS : TIMEOUT_ONE_WAY;
}
