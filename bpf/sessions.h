/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The table of sessions: buckets of a few, each session in that of two which has fewer, so that the table fills almost
 * to the last place before any pair of buckets is full. A place whose time is over is free: nobody has to clean up, and
 * no agent has to live. A full pair gives away what is half open longest, and nothing else. */
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
CONSTANT __u32 session_seed = 0; /* so that nobody can choose whose bucket he fills */

/* Until when a tenant's connections may be older than what is remembered of them: its first policies have just come, or
 * the table is new. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);	/* tenant */
	__type(value, __u64);	/* CLOCK_MONOTONIC, ns */
	__uint(max_entries, 1); /* set at load */
} pol_adoptions_v1 SEC(".maps");

/* How many places each endpoint has, by its number, and first their sum: no endpoint is 0. A place is counted for who
 * had it last until somebody takes it or sweeps it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1); /* set at load */
} pil_session_users_v1 SEC(".maps");

static __always_inline __u32 user_of(const struct session_key *k)
{
	return k->endpoint;
}

static __always_inline void count_user(__u32 user, __s64 places)
{
	__s64 *n = bpf_map_lookup_elem(&pil_session_users_v1, &user);

	if (n)
		__sync_fetch_and_add(n, places);
}

/* is_crowded tells of a user that has as many places as are free: it gets no more of those. So one alone gets half of
 * the table, two a third each, and something is always left for who has little. */
static __always_inline bool is_crowded(__u32 user)
{
	__u32 zero = 0;
	__s64 *own = bpf_map_lookup_elem(&pil_session_users_v1, &user),
	      *all = bpf_map_lookup_elem(&pil_session_users_v1, &zero);

	return !own || !all || *own >= (__s64)session_buckets * BUCKET_PLACES - *all;
}

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
	__u64 h = (w[1] ^ w[2] ^ session_seed) * 0x9e3779b97f4a7c15ULL;

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
	__u64 now;	/* CLOCK_MONOTONIC, ns */
	__u32 place;	/* found in a bucket. What is read from here the verifier has no idea of: else it would walk all
			   that follows once for each place */
	__u32 taken[2]; /* places in both buckets */
	__u32 user;
	__u32 crowded;
	__u32 losers[BUCKET_PLACES]; /* users whose places were taken; 0: nobody's */
};

/* visit looks for a session in a bucket and has action decide with what is there.
 *
 * Functions here are not static: the verifier then walks each once. */
__noinline int visit(struct turn *t, const struct pre_actions *pre, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u32 at, taken = 0;

	if (!b || !t || !pre)
		return false;
	t->place = BUCKET_PLACES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_PLACES; i++) {
		taken += b->tags[i] != 0;
		if (b->tags[i] == t->position.tag && b->places[i].until > t->now &&
		    same_session(&b->places[i].key, &t->key))
			t->place = i;
	}
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
	t->taken[bucket != t->position.first] = taken;
	return at < BUCKET_PLACES;
}

/* place puts a new session into a bucket, in a place worth no more than most; a crowded user's in one that it has. */
__noinline int place(struct turn *t, __u32 bucket, __u32 most)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u64 oldest = ~0ULL;
	__u32 chosen;

	if (!b || !t)
		return false;
	t->place = BUCKET_PLACES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_PLACES; i++) {
		enum worth worth = worth_of(b->tags[i], &b->places[i], t->now);

		if (t->crowded && (!b->tags[i] || user_of(&b->places[i].key) != t->user))
			continue;
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

		t->losers[0] = b->tags[chosen] ? user_of(&s->key) : 0;
		b->tags[chosen] = t->position.tag;
		s->key = t->key;
		s->state = t->outcome.state;
		s->until = t->now + life(&s->state) * 1000000000ULL;
	}
	bpf_spin_unlock(&b->lock);
	if (chosen >= BUCKET_PLACES)
		return false;
	count_user(t->losers[0], t->losers[0] ? -1 : 1);
	count_user(t->user, 1);
	return true;
}

/* sweep has places whose time is over be nobody's. */
__noinline int sweep(struct turn *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);

	if (!b || !t)
		return 0;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_PLACES; i++) {
		t->losers[i] = 0;
		if (!b->tags[i] || b->places[i].until > t->now)
			continue;
		t->losers[i] = user_of(&b->places[i].key);
		b->tags[i] = 0;
	}
	bpf_spin_unlock(&b->lock);
	for (int i = 0; i < BUCKET_PLACES; i++) {
		if (!t->losers[i])
			continue;
		count_user(t->losers[i], -1);
		count_user(0, -1);
	}
	return 0;
}

/* is_full tells of a user that it has its share, when what is over no longer counts where it is looked for; nobody may
 * have come by there for long, nor in a bucket that is nowhere near. */
static __always_inline bool is_full(struct turn *t)
{
	if (!is_crowded(t->user))
		return false;
	sweep(t, t->position.first);
	sweep(t, t->position.second);
	sweep(t, bpf_get_prandom_u32() & (session_buckets - 1));
	return is_crowded(t->user);
}

/* may_adopt tells of a connection that it may be older than what is remembered. */
static __always_inline bool may_adopt(const struct turn *t)
{
	__u32 tenant = t->key.tenant;
	__u64 *until;

	if (!is_midst(&t->moment))
		return false;
	until = bpf_map_lookup_elem(&pol_adoptions_v1, &tenant);
	return until && *until > t->now;
}

/* begin_session has action decide about what is known of nobody, and remembers what becomes of it. */
__noinline int begin_session(struct turn *t, const struct pre_actions *pre)
{
	struct session_state none = {};
	struct session_counts *counts;
	__u32 zero = 0;

	counts = bpf_map_lookup_elem(&pil_session_counts_v1, &zero);
	if (!counts || !t || !pre)
		return false;
	t->moment.adopt = may_adopt(t);
	t->outcome = action(&t->moment, pre, &none);
	if (!t->outcome.state.version)
		return true;
	if (t->taken[1] < t->taken[0]) {
		__u32 first = t->position.first;

		t->position.first = t->position.second;
		t->position.second = first;
	}
	t->user = user_of(&t->key);
	t->crowded = is_full(t);
	if (place(t, t->position.first, WORTH_NOTHING) || place(t, t->position.second, WORTH_NOTHING)) {
		counts->begun++;
		return true;
	}
	if (place(t, t->position.first, WORTH_LITTLE) || place(t, t->position.second, WORTH_LITTLE)) {
		counts->begun++;
		counts->evicted++;
		return true;
	}
	counts->refused++;
	return false;
}

/* step has action decide with what is known of the session, and remembers what becomes of it. It reports whether there
 * was room for that. */
static __always_inline bool step(struct turn *t, const struct pre_actions *pre)
{
	return visit(t, pre, t->position.first) || visit(t, pre, t->position.second) || begin_session(t, pre);
}
