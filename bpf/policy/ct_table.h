/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The session table: layout, lookup and insertion in a bucket, usage, sweep. Each session is in the emptier of two
 * buckets, so that the table fills almost completely before any pair of buckets is full. Expired entries count as free:
 * no agent has to clean up. ct_evict.h makes room in full buckets; ct_session.h is what policy.h calls. */
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

/* Sessions that are not those of policies have a kind in their key: of services, and of exposed ports. */
#define session_kind	zero[1]
#define SESSION_SERVICE 1
#define SESSION_EXPOSED 2

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
	__s64 counted; /* the recount that has counted its entries */
	__u64 zero[3];
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
 * entry counts until it is reused or ct_sweep_bucket frees it. At each start the agent counts both anew: it sets key 0,
 * which is no endpoint, to the time (CLOCK_MONOTONIC, ns), clears all other counts, and has ct_sweep_bucket count one
 * bucket after the other. A change of a bucket that is not counted yet is not counted either. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1 << 16); /* not by the settings: endpoints may be older than these */
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

	u->tenant = tenant && *tenant > 0 ? *tenant : 0;
	u->endpoint = endpoint && *endpoint > 0 ? *endpoint : 0;
}

static __always_inline const volatile __s64 *last_recount(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pil_session_users_v1, &zero);
}

static __always_inline void add_usage(const struct ct_owner *o, __s64 entries)
{
	__s64 *tenant = bpf_map_lookup_elem(&pil_session_tenants_v1, &o->tenant),
	      *endpoint = bpf_map_lookup_elem(&pil_session_users_v1, &o->endpoint);

	if (!tenant && entries > 0 &&
	    bpf_map_update_elem(&pil_session_tenants_v1, &o->tenant, &entries, BPF_NOEXIST)) /* another CPU was first */
		tenant = bpf_map_lookup_elem(&pil_session_tenants_v1, &o->tenant);
	if (tenant)
		__sync_fetch_and_add(tenant, entries);
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

/* Whose half-open or closed session a new session would evict, next first. */
enum evict_distance {
	EVICT_OWN,     /* of its endpoint */
	EVICT_SIBLING, /* of another endpoint of its tenant */
	EVICT_FOREIGN, /* of another tenant */
};

/* The entry that a new session would evict (is_better_victim). */
struct ct_victim {
	__u32 bucket, entry, tag;
	__u32 class;
	__u32 distance; /* of half-open and closed sessions; else 0 */
	__u32 zero;
	struct ct_owner owner;
	struct ct_usage usage; /* of its owner */
	__u64 until;
	__u64 updated; /* its last packet; CLOCK_MONOTONIC, ns */
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
	struct ct_victim victim, candidate;
	struct ct_owner evicted; /* whose entry was taken; endpoint 0: it was free */
	__u32 counted;		 /* 1: changes of the bucket count */
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

/* ct_read_bucket looks for a session in a bucket and reads its state. */
__noinline int ct_read_bucket(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u32 at, used = 0;

	if (!b || !t)
		return false;
	bpf_spin_lock(&b->lock);
	at = get_state(t, b, &used);
	if (at < BUCKET_ENTRIES)
		t->result.state = b->entries[at].state;
	bpf_spin_unlock(&b->lock);
	return at < BUCKET_ENTRIES;
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
static __always_inline void ct_write(struct ct_ctx *t, struct session_bucket *b, __u32 entry,
				     const volatile __s64 *recount)
{
	struct session *s = &b->entries[entry];

	t->counted = b->counted == *recount;
	t->evicted = b->tags[entry] ? owner_of(&s->key) : (struct ct_owner){};
	b->tags[entry] = t->slot.tag;
	s->key = t->key;
	put_state(t, s);
}

static __always_inline void ct_count_written(struct ct_ctx *t)
{
	struct ct_owner owner = owner_of(&t->key);

	if (!t->counted)
		return;
	if (t->evicted.endpoint)
		add_usage(&t->evicted, -1);
	add_usage(&owner, 1);
}

/* ct_insert puts a new session into a free entry of a bucket. It returns false if there is none. */
__noinline int ct_insert(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	const volatile __s64 *recount = last_recount();
	__u32 chosen;

	if (!b || !t || !recount)
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
		ct_write(t, b, chosen, recount);
	bpf_spin_unlock(&b->lock);
	if (chosen >= BUCKET_ENTRIES)
		return false;
	ct_count_written(t);
	return true;
}

/* A pass over the table that frees expired entries, and all entries of one endpoint, which has been deleted. It counts
 * the entries of buckets that the last recount has not counted yet. The agent runs it, never a packet. */
struct ct_sweep {
	__u64 now;	/* CLOCK_MONOTONIC, ns */
	__u32 endpoint; /* 0: none */
	__u32 zero;
	struct ct_owner changed[BUCKET_ENTRIES]; /* whose entry was freed, or is counted now; endpoint 0: none */
};

__noinline int ct_sweep_bucket(struct ct_sweep *w, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	const volatile __s64 *recount = last_recount();
	bool counted;
	__s64 now;

	if (!b || !w || !recount)
		return 0;
	bpf_spin_lock(&b->lock);
	now = *recount;
	counted = b->counted == now;
	b->counted = now;
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		bool freed = b->tags[i] && (b->entries[i].until <= w->now || b->entries[i].key.endpoint == w->endpoint);

		w->changed[i].endpoint = 0;
		if (b->tags[i] && freed == counted)
			w->changed[i] = owner_of(&b->entries[i].key);
		if (freed)
			b->tags[i] = 0;
	}
	bpf_spin_unlock(&b->lock);
	for (int i = 0; i < BUCKET_ENTRIES; i++)
		if (w->changed[i].endpoint)
			add_usage(&w->changed[i], counted ? -1 : 1);
	return 0;
}
