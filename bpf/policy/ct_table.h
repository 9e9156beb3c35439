/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The session table. Each session is in the emptier of two buckets, so that the table fills almost completely before
 * any pair of buckets is full. Expired entries count as free: no agent has to clean up. If a pair is full, its oldest
 * half-open or closed session is evicted, never an established one. policy.h calls ct_update. */
#pragma once
#include "policy/ct.h"

/* One endpoint's side of a session, by canonical addresses: those of the fabric, or those of the overlay. */
struct session_key {
	struct addr local, remote;
	__be16 local_port, remote_port; /* for ICMP echo both are the identifier */
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

#define BUCKET_ENTRIES 7

struct session_bucket {
	struct bpf_spin_lock lock;
	__u32 tags[BUCKET_ENTRIES];
	__u64 zero[4];
	struct session entries[BUCKET_ENTRIES];
};
_Static_assert(sizeof(struct session_bucket) == 512, "what is looked at first is one line of the data cache");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct session_bucket);
	__uint(max_entries, 1); /* a power of 2, set at load */
} pil_sessions_v1 SEC(".maps");

CONSTANT __u32 session_buckets = 1;
CONSTANT __u32 session_seed = 0; /* secret, so that no sender can choose the bucket of a session */

/* Until when a tenant's connections may be older than the table: its first policies have just been applied, or the
 * table is new. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);	/* tenant id or VNI */
	__type(value, __u64);	/* CLOCK_MONOTONIC, ns */
	__uint(max_entries, 1); /* set at load */
} pol_adoptions_v1 SEC(".maps");

/* Session entries in use, for the quota: key N is endpoint N, key 0 (no endpoint) the sum of all. An expired entry
 * counts until it is reused or ct_expire_bucket frees it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1); /* set at load */
} pil_session_users_v1 SEC(".maps");

static __always_inline __u32 quota_owner(const struct session_key *k)
{
	return k->endpoint;
}

static __always_inline void charge_quota(__u32 owner, __s64 entries)
{
	__s64 *n = bpf_map_lookup_elem(&pil_session_users_v1, &owner);

	if (n)
		__sync_fetch_and_add(n, entries);
}

/* over_quota reports whether the endpoint already holds as many session entries as are free. So one endpoint gets at
 * most half of the table, two get a third each, and there is always room for an endpoint with few. */
static __always_inline bool over_quota(__u32 owner)
{
	__u32 zero = 0;
	__s64 *own = bpf_map_lookup_elem(&pil_session_users_v1, &owner),
	      *all = bpf_map_lookup_elem(&pil_session_users_v1, &zero);

	return !own || !all || *own >= (__s64)session_buckets * BUCKET_ENTRIES - *all;
}

/* Counters since load. */
struct session_counts {
	__u64 created;
	__u64 evicted; /* half open or closed, to make room */
	__u64 refused; /* no room */
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

/* The two buckets of a session, and its tag there, never 0. */
struct ct_slot {
	__u32 first, second, tag;
};

static __always_inline struct ct_slot ct_slot_of(const struct session_key *key)
{
	__u64 h = session_hash(key);
	struct ct_slot p = {.tag = (__u32)(h >> 32) | 1};

	p.first = (__u32)h & (session_buckets - 1);
	p.second = (p.first ^ (p.tag * 0x85ebca6b >> 3 | 1)) & (session_buckets - 1);
	return p;
}

/* Whether a new session may take the entry. */
enum evict_class {
	EVICT_FREE,  /* free or expired */
	EVICT_CHEAP, /* half open or closed */
	EVICT_NEVER,
};

static __always_inline enum evict_class evict_class_of(__u32 tag, const struct session *s, __u64 now)
{
	if (!tag || s->until <= now)
		return EVICT_FREE;
	return s->state.seen & ESTABLISHED && !is_closed(&s->state) ? EVICT_NEVER : EVICT_CHEAP;
}

/* A packet at the table: input and result. */
struct ct_ctx {
	struct session_key key;
	struct ct_slot slot;
	struct pkt_info pkt;
	struct ct_result result;
	__u64 now;   /* CLOCK_MONOTONIC, ns */
	__u32 entry; /* index found in a bucket. A value from memory is unknown to the verifier, which would else check
			all the code that follows once per index */
	__u32 used[2]; /* entries in use in both buckets */
	__u32 owner;
	__u32 over_quota;
	__u32 evicted_eps[BUCKET_ENTRIES]; /* endpoints whose entries were taken; 0: none */
};

/* ct_lookup_bucket looks for the session in a bucket, calls action with its state, and stores the new state. It returns
 * whether the bucket has the session.
 *
 * Functions here are not static, because the verifier then checks each only once. */
__noinline int ct_lookup_bucket(struct ct_ctx *t, const struct pre_actions *pre, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u32 at, used = 0;

	if (!b || !t || !pre)
		return false;
	t->entry = BUCKET_ENTRIES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		used += b->tags[i] != 0;
		if (b->tags[i] == t->slot.tag && b->entries[i].until > t->now &&
		    same_session(&b->entries[i].key, &t->key))
			t->entry = i;
	}
	at = t->entry;
	if (at < BUCKET_ENTRIES) {
		struct session *s = &b->entries[at];

		t->result = action(&t->pkt, pre, &s->state);
		if (t->result.state.version) {
			s->state = t->result.state;
			s->until = t->now + ct_timeout(&s->state) * 1000000000ULL;
		}
	}
	bpf_spin_unlock(&b->lock);
	t->used[bucket != t->slot.first] = used;
	return at < BUCKET_ENTRIES;
}

/* ct_insert puts a new session into a bucket: into an entry of at most max_class, or, over quota, into one of the same
 * endpoint. It returns false if there is none. */
__noinline int ct_insert(struct ct_ctx *t, __u32 bucket, __u32 max_class)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u64 oldest = ~0ULL;
	__u32 chosen;

	if (!b || !t)
		return false;
	t->entry = BUCKET_ENTRIES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		enum evict_class class = evict_class_of(b->tags[i], &b->entries[i], t->now);

		if (t->over_quota && (!b->tags[i] || quota_owner(&b->entries[i].key) != t->owner))
			continue;
		if (class == EVICT_FREE) {
			t->entry = i;
			break;
		}
		if (class <= max_class && b->entries[i].until < oldest) {
			oldest = b->entries[i].until;
			t->entry = i;
		}
	}
	chosen = t->entry;
	if (chosen < BUCKET_ENTRIES) {
		struct session *s = &b->entries[chosen];

		t->evicted_eps[0] = b->tags[chosen] ? quota_owner(&s->key) : 0;
		b->tags[chosen] = t->slot.tag;
		s->key = t->key;
		s->state = t->result.state;
		s->until = t->now + ct_timeout(&s->state) * 1000000000ULL;
	}
	bpf_spin_unlock(&b->lock);
	if (chosen >= BUCKET_ENTRIES)
		return false;
	charge_quota(t->evicted_eps[0], t->evicted_eps[0] ? -1 : 1);
	charge_quota(t->owner, 1);
	return true;
}

/* ct_expire_bucket frees the expired entries of a bucket. */
__noinline int ct_expire_bucket(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);

	if (!b || !t)
		return 0;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		t->evicted_eps[i] = 0;
		if (!b->tags[i] || b->entries[i].until > t->now)
			continue;
		t->evicted_eps[i] = quota_owner(&b->entries[i].key);
		b->tags[i] = 0;
	}
	bpf_spin_unlock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		if (!t->evicted_eps[i])
			continue;
		charge_quota(t->evicted_eps[i], -1);
		charge_quota(0, -1);
	}
	return 0;
}

/* over_quota_after_expiry reports whether the endpoint is over its quota after expired entries have been freed in both
 * of the session's buckets and in a random one, which packets may not have visited for long. */
static __always_inline bool over_quota_after_expiry(struct ct_ctx *t)
{
	if (!over_quota(t->owner))
		return false;
	ct_expire_bucket(t, t->slot.first);
	ct_expire_bucket(t, t->slot.second);
	ct_expire_bucket(t, bpf_get_prandom_u32() & (session_buckets - 1));
	return over_quota(t->owner);
}

/* may_pick_up reports whether an unknown connection may be older than the table. */
static __always_inline bool may_pick_up(const struct ct_ctx *t)
{
	__u32 tenant = t->key.tenant;
	__u64 *until;

	if (!is_midstream(&t->pkt))
		return false;
	until = bpf_map_lookup_elem(&pol_adoptions_v1, &tenant);
	return until && *until > t->now;
}

/* ct_create calls action without state and inserts the session that results. It returns false if there is no room. */
__noinline int ct_create(struct ct_ctx *t, const struct pre_actions *pre)
{
	struct session_state none = {};
	struct session_counts *counts;
	__u32 zero = 0;

	counts = bpf_map_lookup_elem(&pil_session_counts_v1, &zero);
	if (!counts || !t || !pre)
		return false;
	t->pkt.pickup = may_pick_up(t);
	t->result = action(&t->pkt, pre, &none);
	if (!t->result.state.version)
		return true;
	if (t->used[1] < t->used[0]) {
		__u32 first = t->slot.first;

		t->slot.first = t->slot.second;
		t->slot.second = first;
	}
	t->owner = quota_owner(&t->key);
	t->over_quota = over_quota_after_expiry(t);
	if (ct_insert(t, t->slot.first, EVICT_FREE) || ct_insert(t, t->slot.second, EVICT_FREE)) {
		counts->created++;
		return true;
	}
	if (ct_insert(t, t->slot.first, EVICT_CHEAP) || ct_insert(t, t->slot.second, EVICT_CHEAP)) {
		counts->created++;
		counts->evicted++;
		return true;
	}
	counts->refused++;
	return false;
}

/* ct_update finds or creates the session of a packet, with the decision in t->result. It returns false if there is no
 * room. */
static __always_inline bool ct_update(struct ct_ctx *t, const struct pre_actions *pre)
{
	return ct_lookup_bucket(t, pre, t->slot.first) || ct_lookup_bucket(t, pre, t->slot.second) || ct_create(t, pre);
}
