/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Where a program with tracing begins and ends. The objects with such programs (trace*.bpf.c) define trace_address and
 * trace_cache. They share the maps here and in common/trace.h, so that a packet which goes from a program of one to a
 * program of the other stays one packet. */
#pragma once
#include "common/event.h"

/* trace_address returns an address as a filter has it. */
static __always_inline struct addr trace_address(const struct addr *a);

/* trace_cache says whether the flow cache has the packet, as the program will find. */
static __always_inline __u32 trace_cache(struct __sk_buff *skb, struct trace_state *s);

/* Devices of the containers whose packets are traced. Those of other containers reach a program here too, by
 * pil_networks_v1, and can have the same addresses, also if their tenant is another one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* number of the device */
	__type(value, __u8);
	__uint(max_entries, 1); /* set at load */
} pil_trace_from SEC(".maps");

/* A packet is traced from the first hook on where its addresses are among these. They are those of all stages, with
 * IPv4 as IPv4-mapped IPv6. trace_address makes addresses comparable that no filter can have. */
#define FILTER_ADDRS 4

struct packet_filter {
	struct addr src[FILTER_ADDRS], dst[FILTER_ADDRS]; /* 0: none */
	__u32 vni;					  /* of packets from the tunnel; 0: any */
	__be16 port;					  /* of the destination; 0: any */
	__u8 proto;
	__u8 zero;
};

volatile const struct packet_filter filter = {};

static __always_inline bool matches(const struct trace_state *s)
{
	struct addr from = trace_address(&s->src), to = trace_address(&s->dst);
	bool src = false, dst = false;

	if (!s->version || s->proto != filter.proto || (filter.port && s->ports[1] != filter.port))
		return false;
	for (int i = 0; i < FILTER_ADDRS; i++) {
		src |= from.hi == filter.src[i].hi && from.lo == filter.src[i].lo;
		dst |= to.hi == filter.dst[i].hi && to.lo == filter.dst[i].lo;
	}
	return src && dst;
}

/* In the VNI of a tenant's Ethernet segment, beside the tenant's VNI; only in tunnels over IPv4. */
#define TRACE_SEGMENT_BIT 0x800000

/* is_others reports whether a packet from a container is not one of the senders', and whether a packet from the tunnel
 * is another tenant's than the filter's. */
static __always_inline bool is_others(struct __sk_buff *skb, __u32 hook)
{
	struct bpf_tunnel_key key = {};
	__u32 device = device_of(skb);

	if (hook == HOOK_CONTAINER)
		return !bpf_map_lookup_elem(&pil_trace_from, &device);
	if (hook != HOOK_TUNNEL || !filter.vni)
		return false;
	if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		return key.tunnel_id != filter.vni;
	return bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0) || (key.tunnel_id & ~TRACE_SEGMENT_BIT) != filter.vni;
}

/* trace_enter reports the packet if it matches. */
__noinline int trace_enter(struct __sk_buff *skb, __u32 hook)
{
	struct trace_state *s = trace_state();
	struct packet_event *e;

	if (!s)
		return 0;
	s->hook = 0;
	trace_read(skb, s);
	if (!matches(s) || is_others(skb, hook))
		return 0;
	s->hook = hook;
	s->packet = (__u64)bpf_cast_to_kern_ctx(skb);
	s->ifindex = skb->ifindex;
	e = new_event(skb, s);
	if (!e)
		return 0;
	e->point = POINT_ENTER;
	e->cache = trace_cache(skb, s);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

#define TC_ACT_REDIRECT 7

/* trace_target returns the number of the device that a packet goes to: by the last redirect of this program, or by the
 * MAC of a container behind a macvlan. */
static __always_inline __u32 trace_target(const struct trace_state *s, int verdict)
{
	struct bpf_net_context *context = bpf_get_current_task_btf()->bpf_net_context;
	__be32 number;

	if (macvlan && !__builtin_memcmp(s->frame.eth.h_dest, macvlan_mac, sizeof(macvlan_mac))) {
		__builtin_memcpy(&number, s->frame.eth.h_dest + sizeof(macvlan_mac), sizeof(number));
		return ON_UPLINK | bpf_ntohl(number);
	}
	return verdict == TC_ACT_REDIRECT && context ? context->ri.tgt_index : 0;
}

/* trace_leave reports the verdict on a packet. */
__noinline int trace_leave(struct __sk_buff *skb, int verdict)
{
	struct trace_state *s = trace_state_of(skb);
	struct packet_event *e;

	if (!s)
		return verdict;
	e = new_event(skb, s);
	s->hook = 0;
	if (!e)
		return verdict;
	e->point = POINT_LEAVE;
	e->verdict = verdict;
	if (verdict != TC_ACT_SHOT)
		e->target = trace_target(s, verdict);
	bpf_ringbuf_submit(e, 0);
	return verdict;
}
