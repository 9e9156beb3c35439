/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sessions of a container that moves here from another node. The agent runs this, never a packet. */
#pragma once
#include "policy/ct_evict.h"

/* ct_has reports whether a bucket has a session. */
__noinline int ct_has(struct ct_ctx *t, __u32 bucket)
{
	struct session_bucket *b = bpf_map_lookup_elem(&pil_sessions_v1, &bucket);
	__u32 at, used = 0;

	if (!b || !t)
		return true;
	bpf_spin_lock(&b->lock);
	at = get_state(t, b, &used);
	bpf_spin_unlock(&b->lock);
	return at < BUCKET_ENTRIES;
}

/* ct_keep stores a session in the state that it has on the other node, as if its last packet were now. A session that
 * this node knows is newer and stays. It returns false if there is no room. */
static __always_inline bool ct_keep(struct ct_ctx *t)
{
	t->slot = ct_slot_of(&t->key);
	if (ct_has(t, t->slot.first) || ct_has(t, t->slot.second))
		return true;
	return ct_insert(t, t->slot.first) || ct_insert(t, t->slot.second) || ct_make_room(t);
}
