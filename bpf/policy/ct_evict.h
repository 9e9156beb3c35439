/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which session a new one may evict if both of its buckets are full: first by tenant, then by endpoint, so that a user
 * with few sessions finds an entry whatever others do. ct_session.h calls ct_make_room. */
#pragma once
#include "policy/ct_table.h"

/* may_evict reports whether a new session may evict another one. A session of another tenant has to be of one with more
 * than twice as many entries, and an established one of the own tenant of an endpoint with more than twice as many. So
 * users of similar size never take from each other. A half-open or closed one of the own tenant only has to be of no
 * smaller endpoint, so a flood of them evicts its own. */
static __always_inline bool may_evict(const struct ct_ctx *t, const struct ct_victim *v)
{
	if (v->class == EVICT_FREE)
		return true;
	if (v->distance == EVICT_FOREIGN)
		return v->usage.tenant > 2 * t->usage.tenant;
	return v->class == EVICT_CHEAP ? v->usage.endpoint >= t->usage.endpoint
				       : v->usage.endpoint > 2 * t->usage.endpoint;
}

/* is_better_victim compares entries to evict: the cheapest class first; half-open and closed sessions of the own
 * endpoint or tenant before those of others, which a flood of them would evict else; then those of the largest tenant,
 * in it of the largest endpoint, and of its sessions the one that is idle for longest. */
static __always_inline bool is_better_victim(const struct ct_victim *a, const struct ct_victim *b)
{
	if (a->class != b->class)
		return a->class < b->class;
	if (a->class == EVICT_CHEAP && a->distance != b->distance)
		return a->distance < b->distance;
	if (a->usage.tenant != b->usage.tenant)
		return a->usage.tenant > b->usage.tenant;
	if (a->usage.endpoint != b->usage.endpoint)
		return a->usage.endpoint > b->usage.endpoint;
	return a->updated < b->updated;
}

static __always_inline __u32 evict_distance(const struct ct_owner *o, const struct session_key *new)
{
	if (o->tenant != new->tenant)
		return EVICT_FOREIGN;
	return o->endpoint == new->endpoint ? EVICT_OWN : EVICT_SIBLING;
}

/* ct_consider makes the candidate the victim if it is a better one. */
__noinline int ct_consider(struct ct_ctx *t)
{
	if (!t)
		return 0;
	if (t->candidate.distance == EVICT_OWN)
		t->candidate.usage = t->usage;
	else
		usage_of(&t->candidate.owner, &t->candidate.usage);
	if (may_evict(t, &t->candidate) && is_better_victim(&t->candidate, &t->victim))
		t->victim = t->candidate;
	return 0;
}

/* ct_find_victim looks in a full bucket for a better entry to evict than t->victim. It takes no lock, because programs
 * may not look up usage under one; ct_evict checks again. */
__noinline int ct_find_victim(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);

	if (!b || !t)
		return 0;
	t->candidate.bucket = bucket;
	for (int i = 0; i < BUCKET_ENTRIES; i++) {
		const struct session *s = &b->entries[i];

		t->candidate.class = evict_class_of(b->tags[i], s, t->now);
		if (t->candidate.class > t->victim.class)
			continue;
		t->candidate.entry = i;
		t->candidate.tag = b->tags[i];
		t->candidate.owner = owner_of(&s->key);
		t->candidate.distance = evict_distance(&t->candidate.owner, &t->key);
		t->candidate.until = s->until;
		t->candidate.updated = s->until - ct_timeout(&s->state) * 1000000000ULL;
		ct_consider(t);
	}
	return 0;
}

/* ct_evict replaces the victim with the new session. It returns false if there is no victim, or another CPU has changed
 * the entry meanwhile. */
__noinline int ct_evict(struct ct_ctx *t)
{
	const volatile __s64 *recount = last_recount();
	struct session_bucket *b;
	__u32 entry, bucket;
	bool same;

	if (!t || !recount || t->victim.class == EVICT_NONE)
		return false;
	bucket = t->victim.bucket;
	entry = t->victim.entry;
	b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	if (!b || entry >= BUCKET_ENTRIES)
		return false;
	bpf_spin_lock(&b->lock);
	same = b->tags[entry] == t->victim.tag && b->entries[entry].until == t->victim.until;
	if (same)
		ct_write(t, b, entry, recount);
	bpf_spin_unlock(&b->lock);
	if (same)
		ct_count_written(t);
	return same;
}

/* ct_make_room evicts a session from one of the two buckets of a new one, which are full. If another CPU changes the
 * entry meanwhile, it tries once more. */
static __always_inline bool ct_make_room(struct ct_ctx *t)
{
	struct ct_owner owner = owner_of(&t->key);

	usage_of(&owner, &t->usage);
	for (int i = 0; i < 2; i++) {
		t->victim.class = EVICT_NONE;
		ct_find_victim(t, t->slot.first);
		ct_find_victim(t, t->slot.second);
		if (ct_evict(t))
			return true;
		if (t->victim.class == EVICT_NONE)
			return false;
	}
	return false;
}
