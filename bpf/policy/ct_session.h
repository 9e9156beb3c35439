/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds or creates the session of a packet. policy.h calls ct_update. */
#pragma once
#include "policy/ct_evict.h"

/* may_pick_up reports whether an unknown connection may be older than the table. */
static __always_inline bool may_pick_up(const struct ct_ctx *t)
{
	__u32 tenant = t->key.tenant;
	__u64 *until;

	if (!is_midstream(&t->pkt) || (t->pkt.outside && t->pkt.dir == RX))
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
