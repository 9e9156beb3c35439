/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of sessions: buckets of a few, each session in one of two, so that the table fills almost to the last
 * place before any pair of buckets is full. A place whose time is over is free: nobody has to clean up, and no agent
 * has to live. A full pair gives away what is half open longest, and nothing else. */
#pragma once
#include "session.h"

/* An endpoint's side of a conversation, by canonical addresses: those of nodes and the fabric, or of the overlay. */
struct session_key {
	struct addr local, remote;
	__be16 local_port, remote_port; /* of ICMP's echoes both are the identifier */
	__u32 endpoint;
	__u32 tenant; /* id or VNI */
	__u8 proto;
	__u8 zero[3];
};

struct session {
	struct session_key key;
	struct session_state state;
	__u64 until; /* CLOCK_MONOTONIC, ns */
};
_Static_assert(sizeof(struct session_key) == 48 && sizeof(struct session) == 64, "no implicit padding");

#define BUCKET_PLACES 7

struct session_bucket {
	struct bpf_spin_lock lock;
	__u32 tags[BUCKET_PLACES];
	__u64 zero[4];
	struct session places[BUCKET_PLACES];
};
_Static_assert(sizeof(struct session_bucket) == 512, "what is looked at first is one line of the data cache");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct session_bucket);
	__uint(max_entries, 1); /* a power of 2, set at load */
} pil_sessions_v1 SEC(".maps");

CONSTANT __u32 session_buckets = 1;

/* What became of sessions, since ever. */
struct session_counts {
	__u64 begun;
	__u64 evicted; /* half open, for another's sake */
	__u64 refused; /* for want of room */
	__u64 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct session_counts);
	__uint(max_entries, 1);
} pil_session_counts_v1 SEC(".maps");

static __always_inline bool same_session(const struct session_key *a, const struct session_key *b)
{
	const __u64 *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3] && x[4] == y[4] && x[5] == y[5];
}

static __always_inline __u64 session_hash(const struct session_key *k)
{
	const __u64 *w = (const void *)k;
	__u64 h = (w[1] ^ w[2]) * 0x9e3779b97f4a7c15ULL;

	h ^= h >> 29;
	h = (h ^ w[0] ^ w[3]) * 0xc2b2ae3d27d4eb4fULL;
	h ^= h >> 32;
	h = (h ^ w[4] ^ (w[5] << 17 | w[5] >> 47)) * 0x9e3779b97f4a7c15ULL;
	return h ^ h >> 32;
}

/* Both buckets of a session, and what stands for it there; never 0. */
struct position {
	__u32 first, second, tag;
};

static __always_inline struct position position_of(const struct session_key *key)
{
	__u64 h = session_hash(key);
	struct position p = {.tag = (__u32)(h >> 32) | 1};

	p.first = (__u32)h & (session_buckets - 1);
	p.second = (p.first ^ (p.tag * 0x85ebca6b >> 3 | 1)) & (session_buckets - 1);
	return p;
}

/* Whether a place may be given to a new session. */
enum worth {
	WORTH_NOTHING, /* free, or its time is over */
	WORTH_LITTLE,  /* half open, or just ended */
	WORTH_KEEPING,
};

static __always_inline enum worth worth_of(__u32 tag, const struct session *s, __u64 now)
{
	if (!tag || s->until <= now)
		return WORTH_NOTHING;
	return s->state.seen & ESTABLISHED && !is_over(&s->state) ? WORTH_KEEPING : WORTH_LITTLE;
}

/* A packet at the table, and what it comes to. */
struct turn {
	struct session_key key;
	struct position position;
	struct moment moment;
	struct outcome outcome;
	__u64 now;   /* CLOCK_MONOTONIC, ns */
	__u32 place; /* found in a bucket. What is read from here the verifier has no idea of: else it would walk all
			that follows once for each place */
	__u32 zero;
};

/* visit looks for a session in a bucket and has action decide with what is there. */
static __noinline bool visit(struct session_bucket *b, struct turn *t, const struct pre_actions *pre)
{
	__u32 at;

	t->place = BUCKET_PLACES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_PLACES; i++)
		if (b->tags[i] == t->position.tag && b->places[i].until > t->now &&
		    same_session(&b->places[i].key, &t->key))
			t->place = i;
	at = t->place;
	if (at < BUCKET_PLACES) {
		struct session *s = &b->places[at];

		t->outcome = action(&t->moment, pre, &s->state);
		if (t->outcome.state.version) {
			s->state = t->outcome.state;
			s->until = t->now + life(&s->state) * 1000000000ULL;
		}
	}
	bpf_spin_unlock(&b->lock);
	return at < BUCKET_PLACES;
}

/* place puts a new session into a bucket, in a place worth no more than most. */
static __noinline bool place(struct session_bucket *b, struct turn *t, enum worth most)
{
	__u64 oldest = ~0ULL;
	__u32 chosen;

	t->place = BUCKET_PLACES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_PLACES; i++) {
		enum worth worth = worth_of(b->tags[i], &b->places[i], t->now);

		if (worth == WORTH_NOTHING) {
			t->place = i;
			break;
		}
		if (worth <= most && b->places[i].until < oldest) {
			oldest = b->places[i].until;
			t->place = i;
		}
	}
	chosen = t->place;
	if (chosen < BUCKET_PLACES) {
		struct session *s = &b->places[chosen];

		b->tags[chosen] = t->position.tag;
		s->key = t->key;
		s->state = t->outcome.state;
		s->until = t->now + life(&s->state) * 1000000000ULL;
	}
	bpf_spin_unlock(&b->lock);
	return chosen < BUCKET_PLACES;
}

/* step has action decide with what is known of the session, and remembers what becomes of it. It reports whether there
 * was room for that. */
static __always_inline bool step(struct turn *t, const struct pre_actions *pre)
{
	struct session_bucket *first = bpf_map_lookup_elem(&pil_sessions_v1, &t->position.first),
			      *second = bpf_map_lookup_elem(&pil_sessions_v1, &t->position.second);
	struct session_state none = {};
	struct session_counts *counts;
	__u32 zero = 0;

	counts = bpf_map_lookup_elem(&pil_session_counts_v1, &zero);
	if (!first || !second || !counts)
		return false;
	if (visit(first, t, pre) || visit(second, t, pre))
		return true;
	t->outcome = action(&t->moment, pre, &none);
	if (!t->outcome.state.version)
		return true;
	if (place(first, t, WORTH_NOTHING) || place(second, t, WORTH_NOTHING)) {
		counts->begun++;
		return true;
	}
	if (place(first, t, WORTH_LITTLE) || place(second, t, WORTH_LITTLE)) {
		counts->begun++;
		counts->evicted++;
		return true;
	}
	counts->refused++;
	return false;
}
