/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Drop counters, which are exact, and drop events, which are rate limited. Every drop in the packet path ends here, so
 * that none is silent. */
#pragma once
#include "common/device.h"
#include "common/trace.h"

enum hook {
	HOOK_CONTAINER = 1,
	HOOK_UPLINK_IN = 2,
	HOOK_UPLINK_OUT = 3,
	HOOK_NODE = 4,
	HOOK_EDGE_IN = 5,
	HOOK_EDGE_OUT = 6,
	HOOK_TUNNEL = 7,
	HOOK_GATEWAY = 8,
	HOOK_SWITCH = 9
};

struct drop_event {
	__u64 time;  /* CLOCK_MONOTONIC, ns */
	__u64 count; /* drops since the last event of this reason and CPU */
	__u64 lost;  /* drops of this reason and CPU that found the ring buffer full, since load */
	struct addr src, dst;
	__u32 reason;
	__u32 hook;
	__u32 ifindex;
	__u32 length;
	__be16 sport, dport;
	__u8 proto;
	__u8 version; /* IP version: 6, 4, or 0 without addresses */
	__u8 zero[2];
	__u32 rule; /* policy rule that decided, or 0 */
	__u32 zeros;
};
_Static_assert(sizeof(struct drop_event) == 88, "no implicit padding");
/* bpf2go generates Go types from BTF, which keeps only types that something refers to. */
const struct drop_event *unused_drop_event __attribute__((unused));

struct drop_state {
	__u64 packets; /* exact; first in every layout, because later builds continue the count */
	__u64 pace;    /* when the next event is due, at one event per EVENT_INTERVAL */
	__u64 pending; /* drops since the last event */
	__u64 lost;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32); /* enum reason */
	__type(value, struct drop_state);
	__uint(max_entries, 256); /* room for reasons of later versions: the map survives an upgrade */
} pil_drops_v1 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} pil_events_v2 SEC(".maps");

/* Each reason and CPU may report EVENT_BURST drops one by one. After that it reports one event in 10 ms, with the
 * number of packets that it stands for. */
#define EVENT_INTERVAL 10000000ULL
#define EVENT_BURST    32

/* describe fills in the addresses and ports of a packet, as far as its headers have them. */
static __always_inline void describe(struct __sk_buff *skb, struct drop_event *event, __u32 at)
{
	struct eth_ip6 header = {};
	struct eth_ip4 *h4 = (void *)&header;
	__u32 l4 = 0;

	if (load_headers(skb, &header) && header.eth.h_proto == bpf_htons(ETH_P_IPV6)) {
		event->version = 6;
		event->src = header.src;
		event->dst = header.dst;
		event->proto = header.nexthdr;
		l4 = at + IPV6_HLEN;
	} else if (has_ethernet(skb) && !bpf_skb_load_bytes(skb, 0, h4, sizeof(*h4)) &&
		   h4->eth.h_proto == bpf_htons(ETH_P_IP) && h4->version_length >> 4 == 4) {
		event->version = 4;
		event->src = ip4_mapped(h4->src);
		event->dst = ip4_mapped(h4->dst);
		event->proto = h4->proto;
		if (!(h4->fragment & bpf_htons(IP4_FRAGMENT_OFFSET)))
			l4 = at + (h4->version_length & 15) * 4;
	}
	if (l4 && (event->proto == NEXTHDR_TCP || event->proto == NEXTHDR_UDP))
		bpf_skb_load_bytes(skb, l4, &event->sport, 2 * sizeof(event->sport));
}

__slowpath int drop_by(struct __sk_buff *skb, __u32 reason, __u32 hook, __u32 rule)
{
	struct drop_state *state = bpf_map_lookup_elem(&pil_drops_v1, &reason);
	__u64 now = bpf_ktime_get_ns();
	struct drop_event *event;
	__u32 at = ip_offset(skb);

	trace_drop(skb, reason, rule);
	if (!state)
		return TC_ACT_SHOT;
	state->packets++;
	state->pending++;
	if (state->pace < now)
		state->pace = now;
	if (state->pace - now > EVENT_BURST * EVENT_INTERVAL)
		return TC_ACT_SHOT;

	event = bpf_ringbuf_reserve(&pil_events_v2, sizeof(*event), 0);
	if (!event) {
		state->lost++;
		return TC_ACT_SHOT;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time = now;
	event->count = state->pending;
	event->lost = state->lost;
	event->reason = reason;
	event->hook = hook;
	event->rule = rule;
	event->ifindex = hook == HOOK_CONTAINER ? device_of(skb) : skb->ifindex;
	event->length = skb->len - at;
	describe(skb, event, at);
	bpf_ringbuf_submit(event, 0);
	state->pace += EVENT_INTERVAL;
	state->pending = 0;
	return TC_ACT_SHOT;
}

static __always_inline int drop(struct __sk_buff *skb, __u32 reason, __u32 hook)
{
	return drop_by(skb, reason, hook, 0);
}
