/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is remembered of conversations, and what that makes of a packet: action = f(packet, pre-actions, state) (Nezha
 * §2.1, §3.1). Rules say pre-actions, without knowing who began; state says who began, and knows no rule. Both are
 * apart, of fixed form and with a version, because they are to travel in packets (§3.2). */
#pragma once
#include "common/address.h"
#include "common/proto.h"
#include <bpf/bpf_helpers.h>

/* Ways of a packet, as the endpoint sees them. */
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

/* What rules say of a session that the endpoint begins (TX), and of one that its peer does (RX). Numbers of rules are
 * in network byte order. */
struct pre_actions {
	__u8 version;
	__u8 verdicts[2];
	__u8 zero;
	__be32 rules[2];  /* that decided; 0 where none did */
	__be32 audits[2]; /* that would have denied, if it were not in audit */
};
_Static_assert(sizeof(struct pre_actions) == 20, "it travels in packets");

enum seen {
	SEEN_INITIATOR = 1 << 0, /* packets of who began the session */
	SEEN_RESPONDER = 1 << 1, /* and of the other */
	ESTABLISHED = 1 << 2,	 /* both have heard of each other */
	FIN_INITIATOR = 1 << 3,
	FIN_RESPONDER = 1 << 4,
	RESET = 1 << 5,
	PICKED_UP = 1 << 6, /* nobody knows who began it */
};

struct session_state {
	__u8 version; /* 0: there is none */
	__u8 first;   /* way of the packet that began it */
	__u8 seen;
	__u8 proto;
	__u32 zero;
};
_Static_assert(sizeof(struct session_state) == 8, "it travels in packets (Nezha §7.1: most need no more)");

/* As much of a packet as the decision needs. */
struct pkt_info {
	__u8 dir;
	__u8 proto;
	__u8 flags;  /* of TCP */
	__u8 error;  /* 1: it is ICMP's, about a packet of the session */
	__u8 pickup; /* 1: what nobody remembers may be older than the tenant's policies */
	__u8 zero[3];
};

struct ct_result {
	struct session_state state; /* as it is from now on; of version 0 where nothing is to be remembered */
	__u8 verdict;
	__u8 dir; /* whose pre-action decided */
	__u8 changed;
	__u8 zero;
};

static __always_inline bool is_closed(const struct session_state *s)
{
	return s->seen & RESET || (s->seen & FIN_INITIATOR && s->seen & FIN_RESPONDER);
}

/* is_tcp_syn tells of a packet that opens a connection: it is judged for itself, whatever was before. */
static __always_inline bool is_tcp_syn(const struct pkt_info *m)
{
	return m->proto == NEXTHDR_TCP && (m->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* is_midstream tells of a packet that somebody sent who had heard of the other: it begins nothing. */
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
	/* A handshake is whole when who began it answers the answer: one that only says what it wants is half open,
	 * however often it does. */
	if (initiator && m->flags & TCP_ACK && !(m->flags & TCP_SYN) && seen & SEEN_RESPONDER)
		seen |= ESTABLISHED;
	return seen | (initiator ? SEEN_INITIATOR : SEEN_RESPONDER);
}

/* pre_verdict_for is the pre-action for who began. The verifier takes no address that depends on it. */
static __always_inline __u8 pre_verdict_for(const struct pre_actions *pre, __u8 dir)
{
	__u32 tx = pre->verdicts[TX], rx = pre->verdicts[RX];

	asm volatile("" : "+r"(tx), "+r"(rx));
	return dir == TX ? tx : rx;
}

/* action is the one decision about a packet of an endpoint: that of the pre-action for whoever began the session. It
 * reads nothing but what it is given. */
static __always_inline struct ct_result action(const struct pkt_info *m, const struct pre_actions *pre,
					       const struct session_state *state)
{
	bool known = state->version == STATE_VERSION, fresh, picked_up;
	struct ct_result o = {.dir = m->dir};

	/* A new connection between the ports of one that lives is not it, and does not end it either. */
	fresh = !known || (is_tcp_syn(m) && (is_closed(state) || m->dir != state->first || state->seen & PICKED_UP));
	if (!fresh)
		o.dir = state->first;
	o.verdict = pre_verdict_for(pre, o.dir);
	/* Either may have begun what was there before any policy. No connection can be begun by it. */
	picked_up = fresh ? m->pickup && is_midstream(m) : state->seen & PICKED_UP;
	if (picked_up && o.verdict != ACCEPT) {
		o.dir = RX - o.dir;
		o.verdict = pre_verdict_for(pre, o.dir);
	}
	/* An error belongs to the session that it is about, and changes nothing. */
	if (m->error)
		return o;
	if (o.verdict != ACCEPT || (fresh && known && !is_closed(state)))
		return o;
	/* What ends nothing that is known begins nothing either. */
	if (fresh && m->proto == NEXTHDR_TCP && m->flags & (TCP_RST | TCP_FIN))
		return o;
	if (fresh) {
		o.state.first = o.dir;
		o.state.seen = picked_up ? PICKED_UP : 0;
	} else {
		o.state = *state;
	}
	o.state.version = STATE_VERSION;
	o.state.proto = m->proto;
	o.state.seen = update_seen(o.state.seen, m, m->dir == o.state.first);
	o.changed = fresh || o.state.seen != state->seen;
	return o;
}

/* How long a session is remembered after its last packet, in seconds. A connection of TCP at rest as RFC 5382 (REQ-5)
 * asks, datagrams as RFC 4787 (REQ-5); what is half open ages fast (Nezha §7.3). */
#define TIMEOUT_HALF_OPEN 10
#define TIMEOUT_ONE_WAY	  30
#define TIMEOUT_DATAGRAMS 180
#define TIMEOUT_TCP	  7440
#define TIMEOUT_CLOSED	  10

static __always_inline __u32 ct_timeout(const struct session_state *s)
{
	if (is_closed(s))
		return TIMEOUT_CLOSED;
	if (s->proto == NEXTHDR_TCP)
		return s->seen & ESTABLISHED ? TIMEOUT_TCP : TIMEOUT_HALF_OPEN;
	return s->seen & ESTABLISHED ? TIMEOUT_DATAGRAMS : TIMEOUT_ONE_WAY;
}
