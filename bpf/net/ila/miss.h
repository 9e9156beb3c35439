/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Cache misses of a node that subscribes to mappings (--ila-mappings pull): a packet whose mapping the node does not
 * have is dropped, and its identifier goes to the agent. Without pull, nothing of this is in the loaded programs. */
#pragma once
#include "common/event.h"
#include "net/ila/address.h"
#include "net/ila/tables.h"

CONSTANT bool mappings_pulled = 0;

/* A tenant's packets of one hook may report MISS_BURST identifiers one by one, and then one in MISS_INTERVAL. So
 * neither one tenant nor a host on the fabric that forges a tenant's senders can fill the ring buffer, or hide misses
 * of the tenant's own containers. */
#define MISS_INTERVAL 5000000ULL
#define MISS_BURST    64

struct ila_miss {
	__u64 identifier;
	__u32 hook; /* enum hook; containers' misses and those of senders on the fabric have limits of their own */
	__u32 zero;
};
_Static_assert(sizeof(struct ila_miss) == 16, "no implicit padding");
const struct ila_miss *unused_ila_miss __attribute__((unused)); /* for bpf2go; see unused_drop_event */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 64 * 1024);
} ila_misses_v1 SEC(".maps");

struct ila_miss_source {
	__u32 vnid;
	__u32 hook; /* enum hook */
};
_Static_assert(sizeof(struct ila_miss_source) == 8, "no implicit padding");

/* When the next event of a source is due, in ns of CLOCK_MONOTONIC. The key has a tenant of this node, because the
 * other end of the packet is a container here. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct ila_miss_source);
	__type(value, __u64);
	__uint(max_entries, 16384);
} ila_pace_v1 SEC(".maps");

/* ila_report_miss sends an identifier to the agent, unless its tenant exceeds the rate. A lost event is no harm: the
 * sender's next packet reports again. */
static __noinline int ila_report_miss(__u64 identifier, __u32 hook)
{
	struct ila_miss_source source = {.vnid = identifier_vnid(identifier), .hook = hook};
	__u64 now = bpf_ktime_get_ns(), *pace = bpf_map_lookup_elem(&ila_pace_v1, &source);
	struct ila_miss *miss;

	if (!pace) {
		bpf_map_update_elem(&ila_pace_v1, &source, &now, BPF_NOEXIST);
		pace = bpf_map_lookup_elem(&ila_pace_v1, &source);
	}
	if (!pace)
		return 0;
	if (*pace < now)
		*pace = now;
	if (*pace - now >= MISS_BURST * MISS_INTERVAL)
		return 0;
	miss = bpf_ringbuf_reserve(&ila_misses_v1, sizeof(*miss), 0);
	if (!miss)
		return 0;
	miss->identifier = identifier;
	miss->hook = hook;
	miss->zero = 0;
	bpf_ringbuf_submit(miss, 0);
	*pace += MISS_INTERVAL;
	return 0;
}

/* drop_miss drops a packet because this node has no mapping of one end: it could not be delivered, or its sender could
 * not be checked. */
static __always_inline int drop_miss(struct __sk_buff *skb, __u64 identifier, enum hook hook)
{
	if (mappings_pulled)
		ila_report_miss(identifier, hook);
	return drop(skb, REASON_NO_MAPPING, hook);
}

/* mark_used notes when a packet last used a mapping, in units of 2^30 ns of CLOCK_MONOTONIC. Packets of a known flow do
 * not, so the agent ends all flows before it looks. */
static __always_inline void mark_used(struct ila_peer *peer)
{
	__u32 now;

	if (!mappings_pulled)
		return;
	now = bpf_ktime_get_ns() >> 30;
	if (peer->used != now)
		peer->used = now;
}
