/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What tracing adds to the programs. Only trace*.bpf.c define TRACING. In other objects these functions are empty, and
 * cost nothing. */
#pragma once
#include "common/device.h"

#ifndef TRACING

static __always_inline void trace_drop(struct __sk_buff *skb, __u32 reason, __u32 rule)
{
}

static __always_inline void trace_policy(struct __sk_buff *skb, __u32 endpoint, __u32 dir, __u32 reason, __u32 rule)
{
}

static __always_inline void trace_policy_hit(struct __sk_buff *skb, __u32 endpoint, __u32 dir)
{
}

static __always_inline void trace_pipeline(struct __sk_buff *skb, __u32 vni)
{
}

#else

enum trace_point {
	POINT_ENTER = 1,
	POINT_LEAVE = 2,
	POINT_DROP = 3,
	POINT_POLICY = 4,
	POINT_PIPELINE = 5
};

enum cache_result {
	CACHE_UNUSED = 0,
	CACHE_HIT = 1,
	CACHE_MISS = 2
};

struct packet_event {
	__u64 time;   /* CLOCK_MONOTONIC, ns */
	__u64 packet; /* the same number for one packet at all hooks */
	__u64 lost;   /* events of this CPU that found the ring buffer full */
	struct addr src, dst;
	__u32 point;
	__u32 hook; /* enum hook */
	__u32 ifindex;
	__u32 length; /* from the IP header on */
	__u32 cache;
	__s32 verdict; /* of a program that is left */
	__u32 target;  /* number of the device that it sends to */
	__u32 reason;
	__u32 rule;
	__u32 dir;
	__u32 endpoint;
	__u32 vni;
	__be16 sport, dport;
	__u8 proto;
	__u8 version; /* 4 or 6 */
	__u8 zero[2];
};
_Static_assert(sizeof(struct packet_event) == 112, "no implicit padding");
const struct packet_event *unused_packet_event __attribute__((unused)); /* keeps the type in BTF */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} pil_trace SEC(".maps");

/* The packet that the program of this CPU has. Programs run with softirqs off, so they never nest. */
struct trace_state {
	struct addr src, dst; /* as the program received them */
	struct eth_ip6 frame; /* scratch memory, because the stack is nearly full */
	__be16 ports[2];
	__u32 path;
	__u32 hook;    /* 0: the program has no packet that is traced */
	__u32 ifindex; /* of the hook */
	__u8 proto;
	__u8 version; /* 0: neither IPv4 nor IPv6 */
	__u8 zero[6];
	__u64 lost;
	__u64 packet;			 /* the traced packet, if hook is not 0 */
	__u32 point, reason, rule, what; /* of trace_report: its stack is the last of the longest chain of calls */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct trace_state);
	__uint(max_entries, 1);
} pil_traced SEC(".maps");

static __always_inline struct trace_state *trace_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pil_traced, &zero);
}

/* trace_state_of returns the state if the packet is traced. A program that made a tail call to one without tracing has
 * left the state of its packet behind. */
static __always_inline struct trace_state *trace_state_of(struct __sk_buff *skb)
{
	struct trace_state *s = trace_state();

	return s && s->hook && s->packet == (__u64)bpf_cast_to_kern_ctx(skb) ? s : NULL;
}

/* trace_read reads the headers of a packet into the state. */
static __always_inline void trace_read(struct __sk_buff *skb, struct trace_state *s)
{
	struct eth_ip4 *h4 = (void *)&s->frame;
	__u32 l4 = 0;

	s->version = 0;
	s->ports[0] = s->ports[1] = 0;
	if (bpf_skb_load_bytes(skb, 0, &s->frame, sizeof(*h4)))
		return;
	if (s->frame.eth.h_proto == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, 0, &s->frame, sizeof(s->frame)))
			return;
		l4 = sizeof(s->frame);
		/* In the tunnel of an egress gateway the packet of the container counts. */
		if (s->frame.nexthdr == PROTO_IPV6) {
			if (bpf_skb_load_bytes(skb, l4, &s->frame.priority_version, IPV6_HLEN))
				return;
			l4 += IPV6_HLEN;
		}
		s->version = 6;
		s->src = s->frame.src;
		s->dst = s->frame.dst;
		s->proto = s->frame.nexthdr;
	} else if (s->frame.eth.h_proto == bpf_htons(ETH_P_IP)) {
		s->version = 4;
		s->src = ip4_mapped(h4->src);
		s->dst = ip4_mapped(h4->dst);
		s->proto = h4->proto;
		if (!(h4->fragment & bpf_htons(IP4_FRAGMENT_OFFSET)))
			l4 = ETH_HLEN + (h4->version_length & 15) * 4;
	}
	if (l4 && (s->proto == NEXTHDR_TCP || s->proto == NEXTHDR_UDP || s->proto == NEXTHDR_SCTP))
		bpf_skb_load_bytes(skb, l4, s->ports, sizeof(s->ports));
}

/* new_event returns an event without its point. */
static __always_inline struct packet_event *new_event(struct __sk_buff *skb, struct trace_state *s)
{
	struct packet_event *e = bpf_ringbuf_reserve(&pil_trace, sizeof(*e), 0);

	if (!e) {
		s->lost++;
		return NULL;
	}
	trace_read(skb, s);
	__builtin_memset(e, 0, sizeof(*e));
	e->time = bpf_ktime_get_ns();
	e->packet = s->packet;
	e->lost = s->lost;
	e->hook = s->hook;
	e->ifindex = s->ifindex;
	e->length = skb->len - ETH_HLEN;
	e->src = s->src;
	e->dst = s->dst;
	e->sport = s->ports[0];
	e->dport = s->ports[1];
	e->proto = s->proto;
	e->version = s->version;
	return e;
}

/* trace_report reports a packet inside a program. what is the VNI at POINT_PIPELINE, and at POINT_POLICY the endpoint,
 * shifted by 2, the cache hit and the direction. */
__noinline int trace_report(struct __sk_buff *skb, __u32 point, __u32 reason, __u32 rule, __u32 what)
{
	struct trace_state *s = trace_state_of(skb);
	struct packet_event *e;

	if (!s)
		return 0;
	s->point = point;
	s->reason = reason;
	s->rule = rule;
	s->what = what;
	e = new_event(skb, s);
	if (!e)
		return 0;
	e->point = s->point;
	e->reason = s->reason;
	e->rule = s->rule;
	if (e->point == POINT_PIPELINE)
		e->vni = s->what;
	if (e->point == POINT_POLICY) {
		e->endpoint = s->what >> 2;
		e->cache = s->what & 2 ? CACHE_HIT : CACHE_MISS;
		e->dir = s->what & 1;
	}
	bpf_ringbuf_submit(e, 0);
	return 0;
}

static __always_inline void trace_drop(struct __sk_buff *skb, __u32 reason, __u32 rule)
{
	trace_report(skb, POINT_DROP, reason, rule, 0);
}

static __always_inline void trace_policy(struct __sk_buff *skb, __u32 endpoint, __u32 dir, __u32 reason, __u32 rule)
{
	trace_report(skb, POINT_POLICY, reason, rule, endpoint << 2 | (dir & 1));
}

static __always_inline void trace_policy_hit(struct __sk_buff *skb, __u32 endpoint, __u32 dir)
{
	trace_report(skb, POINT_POLICY, 0, 0, endpoint << 2 | 2 | (dir & 1));
}

static __always_inline void trace_pipeline(struct __sk_buff *skb, __u32 vni)
{
	trace_report(skb, POINT_PIPELINE, 0, 0, vni);
}

#endif
