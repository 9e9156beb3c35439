/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The caches of packets from and to hosts outside of the cluster are set-associative, and tenants share each set: any
 * container may send to any number of such hosts. */
#pragma once
#include "common/address.h"
#include <bpf/bpf_helpers.h>

#define WAYS 4

struct ways {
	__u32 owners[WAYS]; /* tenant ids or the like; 0: the way is free */
	__u32 owner;	    /* of the new entry */
};

/* way_to_take returns the way of a set for a new entry: a free one, else one of the owner that has the most, but its
 * own unless another has at least two more. So owners of many entries do not take ways from each other in turn. */
__noinline __u32 way_to_take(const struct ways *w)
{
	__u32 first = bpf_get_prandom_u32(), most = 0, way = 0;

	if (!w)
		return 0;
#pragma unroll
	for (int i = WAYS - 1; i >= 0; i--) { /* the first of free ones */
		__u32 rank = (first + i) % WAYS;

		if (w->owners[i] == w->owner)
			rank += 3 * WAYS;
		for (int j = 0; j < WAYS; j++)
			rank += w->owners[i] == w->owners[j] ? 2 * WAYS : 0;
		if (!w->owners[i])
			rank = 1 << 16;
		if (rank < most)
			continue;
		most = rank;
		way = i;
	}
	return way % WAYS;
}
