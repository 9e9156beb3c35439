/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The session table. Each session is in the emptier of two buckets, so that the table fills almost completely before
 * any pair of buckets is full. Expired entries count as free: no agent has to clean up. If a pair is full, a new
 * session may evict another one (may_evict): first by tenant, then by endpoint, so that a user with few sessions finds
 * an entry whatever others do. policy.h calls ct_update. */
#pragma once
#include "policy/ct.h"

/* One endpoint's side of a session, by canonical addresses: those of the fabric, or those of the overlay. */
struct session_key {
	struct addr local, remote;
	__be16 local_port, remote_port; /* for ICMP echo both are the identifier */
	__u32 endpoint;
	__u32 tenant; /* id or VNI */
	__u8 proto;
	__u8 dir; /* of a fragment, which has its identification in place of the ports; else 0 */
	__u8 zero[2];
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

/* Session entries in use by each endpoint (key: its number) and by each tenant (key: tenant id or VNI). An expired
 * entry counts until it is reused or ct_sweep_bucket frees it. The agent counts both anew at each start. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1); /* set at load */
} pil_session_users_v1 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1); /* set at load */
} pil_session_tenants_v1 SEC(".maps");

/* Who has a session. */
struct ct_owner {
	__u32 endpoint, tenant;
};

/* How many entries a tenant and its endpoint use. */
struct ct_usage {
	__s64 tenant, endpoint;
};

static __always_inline struct ct_owner owner_of(const struct session_key *k)
{
	return (struct ct_owner){.endpoint = k->endpoint, .tenant = k->tenant};
}

static __always_inline void usage_of(const struct ct_owner *o, struct ct_usage *u)
{
	__s64 *tenant = bpf_map_lookup_elem(&pil_session_tenants_v1, &o->tenant),
	      *endpoint = bpf_map_lookup_elem(&pil_session_users_v1, &o->endpoint);

	u->tenant = tenant ? *tenant : 0;
	u->endpoint = endpoint ? *endpoint : 0;
}

static __always_inline void add_usage(const struct ct_owner *o, __s64 entries)
{
	__s64 *tenant = bpf_map_lookup_elem(&pil_session_tenants_v1, &o->tenant),
	      *endpoint = bpf_map_lookup_elem(&pil_session_users_v1, &o->endpoint);

	if (tenant)
		__sync_fetch_and_add(tenant, entries);
	else if (entries > 0) /* two CPUs may be first at once; the loser counts one too few until the next start */
		bpf_map_update_elem(&pil_session_tenants_v1, &o->tenant, &entries, BPF_NOEXIST);
	if (endpoint)
		__sync_fetch_and_add(endpoint, entries);
}

/* Counters since load. */
struct session_counts {
	__u64 created;
	__u64 evicted; /* to make room */
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

/* How a new session gets an entry, cheapest first. */
enum evict_class {
	EVICT_FREE,  /* it is free, or the session has expired */
	EVICT_CHEAP, /* it is half open or closed */
	EVICT_ESTABLISHED,
	EVICT_NONE,
};

static __always_inline enum evict_class evict_class_of(__u32 tag, const struct session *s, __u64 now)
{
	if (!tag || s->until <= now)
		return EVICT_FREE;
	return s->state.seen & ESTABLISHED && !is_closed(&s->state) ? EVICT_ESTABLISHED : EVICT_CHEAP;
}

/* The entry that a new session would evict: of the cheapest class; in it, of the user with the most entries; of its
 * sessions the one that expires first. */
struct ct_victim {
	__u32 bucket, entry, tag;
	__u32 class;
	__s64 used; /* entries of its tenant, or, in the tenant of the new session, of its endpoint */
	__u64 until;
};

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
	struct ct_usage usage;
	struct ct_victim victim;
	struct ct_owner evicted; /* whose entry was taken; endpoint 0: it was free */
};

/* get_state finds the session in a locked bucket. It returns its entry, BUCKET_ENTRIES if there is none, and counts the
 * entries in use. */
static __always_inline __u32 get_state(struct ct_ctx *t, const struct session_bucket *b, __u32 *used)
{
	t->entry = BUCKET_ENTRIES;
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		*used += b->tags[i] != 0;
		if (b->tags[i] == t->slot.tag && b->entries[i].until > t->now &&
		    same_session(&b->entries[i].key, &t->key))
			t->entry = i;
	}
	return t->entry;
}

/* put_state stores the new state of a session in its entry of a locked bucket. */
static __always_inline void put_state(const struct ct_ctx *t, struct session *s)
{
	s->state = t->result.state;
	s->until = t->now + ct_timeout(&s->state) * 1000000000ULL;
}

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
	bpf_spin_lock(&b->lock);
	at = get_state(t, b, &used);
	if (at < BUCKET_ENTRIES) {
		t->result = action(&t->pkt, pre, &b->entries[at].state);
		if (t->result.state.version)
			put_state(t, &b->entries[at]);
	}
	bpf_spin_unlock(&b->lock);
	t->used[bucket != t->slot.first] = used;
	return at < BUCKET_ENTRIES;
}

/* ct_write stores a new session in an entry of a locked bucket. */
static __always_inline void ct_write(struct ct_ctx *t, struct session_bucket *b, __u32 entry)
{
	struct session *s = &b->entries[entry];

	t->evicted = b->tags[entry] ? owner_of(&s->key) : (struct ct_owner){};
	b->tags[entry] = t->slot.tag;
	s->key = t->key;
	put_state(t, s);
}

static __always_inline void ct_count_written(struct ct_ctx *t)
{
	struct ct_owner owner = owner_of(&t->key);

	if (t->evicted.endpoint)
		add_usage(&t->evicted, -1);
	add_usage(&owner, 1);
}

/* ct_insert puts a new session into a free entry of a bucket. It returns false if there is none. */
__noinline int ct_insert(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u32 chosen;

	if (!b || !t)
		return false;
	t->entry = BUCKET_ENTRIES;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		if (evict_class_of(b->tags[i], &b->entries[i], t->now) != EVICT_FREE)
			continue;
		t->entry = i;
		break;
	}
	chosen = t->entry;
	if (chosen < BUCKET_ENTRIES)
		ct_write(t, b, chosen);
	bpf_spin_unlock(&b->lock);
	if (chosen >= BUCKET_ENTRIES)
		return false;
	ct_count_written(t);
	return true;
}

/* may_evict reports whether a user with own entries may take an entry of one with other's. A half-open or closed
 * session only has to be of no smaller user, so a flood of them evicts its own first. An established one has to be of a
 * user with more than twice as many: users of similar size never take from each other. */
static __always_inline bool may_evict(enum evict_class class, __s64 own, __s64 other)
{
	return class == EVICT_FREE || (class == EVICT_CHEAP ? other >= own : other > 2 * own);
}

/* ct_find_victim looks in a full bucket for a better entry to evict than t->victim. It takes no lock, because programs
 * may not look up usage under one; ct_evict checks again. */
__noinline int ct_find_victim(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	struct ct_victim *v;

	if (!b || !t)
		return 0;
	v = &t->victim;
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		enum evict_class class = evict_class_of(b->tags[i], &b->entries[i], t->now);
		struct ct_owner owner = owner_of(&b->entries[i].key);
		__u64 until = b->entries[i].until;
		struct ct_usage usage;
		__s64 own, used;

		if (class > v->class)
			continue;
		usage_of(&owner, &usage);
		own = owner.tenant == t->key.tenant ? t->usage.endpoint : t->usage.tenant;
		used = owner.tenant == t->key.tenant ? usage.endpoint : usage.tenant;
		if (!may_evict(class, own, used))
			continue;
		if (class == v->class && (used < v->used || (used == v->used && until >= v->until)))
			continue;
		v->bucket = bucket;
		v->entry = i;
		v->tag = b->tags[i];
		v->class = class;
		v->used = used;
		v->until = until;
	}
	return 0;
}

/* ct_evict replaces the victim with the new session. It returns false if there is no victim, or another CPU has changed
 * the entry meanwhile. */
__noinline int ct_evict(struct ct_ctx *t)
{
	struct session_bucket *b;
	__u32 entry, bucket;
	bool same;

	if (!t || t->victim.class == EVICT_NONE)
		return false;
	bucket = t->victim.bucket;
	entry = t->victim.entry;
	b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	if (!b || entry >= BUCKET_ENTRIES)
		return false;
	bpf_spin_lock(&b->lock);
	same = b->tags[entry] == t->victim.tag && b->entries[entry].until == t->victim.until;
	if (same)
		ct_write(t, b, entry);
	bpf_spin_unlock(&b->lock);
	if (same)
		ct_count_written(t);
	return same;
}

/* ct_make_room evicts a session from one of the two buckets of a new one, which are full. */
static __always_inline bool ct_make_room(struct ct_ctx *t)
{
	struct ct_owner owner = owner_of(&t->key);

	usage_of(&owner, &t->usage);
	t->victim.class = EVICT_NONE;
	ct_find_victim(t, t->slot.first);
	ct_find_victim(t, t->slot.second);
	return ct_evict(t);
}

/* A pass over the table that frees expired entries, and all entries of one endpoint, which has been deleted. The agent
 * runs it, never a packet. */
struct ct_sweep {
	__u64 now;	/* CLOCK_MONOTONIC, ns */
	__u32 endpoint; /* 0: none */
	__u32 zero;
	struct ct_owner freed[BUCKET_ENTRIES]; /* endpoint 0: not freed */
};

__noinline int ct_sweep_bucket(struct ct_sweep *w, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);

	if (!b || !w)
		return 0;
	bpf_spin_lock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		w->freed[i].endpoint = 0;
		if (!b->tags[i] || (b->entries[i].until > w->now && b->entries[i].key.endpoint != w->endpoint))
			continue;
		w->freed[i] = owner_of(&b->entries[i].key);
		b->tags[i] = 0;
	}
	bpf_spin_unlock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++)
		if (w->freed[i].endpoint)
			add_usage(&w->freed[i], -1);
	return 0;
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
	if (ct_insert(t, t->slot.first) || ct_insert(t, t->slot.second)) {
		counts->created++;
		return true;
	}
	if (ct_make_room(t)) {
		counts->created++;
		counts->evicted++;
		return true;
	}
	counts->refused++;
	return false;
}

/* ct_lookup finds the session of a packet, with the decision in t->result. It returns false if there is none. */
static __always_inline bool ct_lookup(struct ct_ctx *t, const struct pre_actions *pre)
{
	return ct_lookup_bucket(t, pre, t->slot.first) || ct_lookup_bucket(t, pre, t->slot.second);
}

/* ct_update finds or creates the session of a packet. It returns false if there is no room. */
static __always_inline bool ct_update(struct ct_ctx *t, const struct pre_actions *pre)
{
	return ct_lookup(t, pre) || ct_create(t, pre);
}
