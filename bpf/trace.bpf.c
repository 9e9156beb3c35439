/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs that a packet between containers meets, built once more with tracing. For the time of a trace the agent
 * puts them in the place of those of pilaster.bpf.c. They share all maps, so packets are treated alike by both. */
#define TRACING
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "hooks/container.h"
#include "hooks/uplink.h"
#include "net/ila/stages.h"
#include "net/nimitz/ovs_port.h"
#include "net/nimitz/stages.h"

/* Devices of the containers whose packets are traced. Those of other containers reach a program here too, by
 * pil_networks_v1, and can have the same addresses, also if their tenant is another one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* number of the device */
	__type(value, __u8);
	__uint(max_entries, 1); /* set at load */
} pil_trace_from SEC(".maps");

/* A packet is traced from the first hook on where its addresses are among these. They are those of all stages, with
 * IPv4 as IPv4-mapped IPv6. */
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
	bool src = false, dst = false;

	if (!s->version || s->proto != filter.proto || (filter.port && s->ports[1] != filter.port))
		return false;
	for (int i = 0; i < FILTER_ADDRS; i++) {
		src |= s->src.hi == filter.src[i].hi && s->src.lo == filter.src[i].lo;
		dst |= s->dst.hi == filter.dst[i].hi && s->dst.lo == filter.dst[i].lo;
	}
	return src && dst;
}

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
	bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6);
	return key.tunnel_id != filter.vni;
}

/* trace_cache says whether the flow cache has the packet, as the program will find. */
static __always_inline __u32 trace_cache(struct __sk_buff *skb, struct trace_state *s)
{
	struct flow_key key = {.src = s->src, .dst = s->dst};
	struct flow *f;

	if (s->version != 6 || s->hook == HOOK_TUNNEL || s->hook == HOOK_SWITCH ||
	    (s->hook == HOOK_UPLINK_OUT && !macvlan))
		return CACHE_UNUSED;
	key.device = s->hook == HOOK_UPLINK_IN ? skb->ifindex : device_of(skb);
	key.path = s->hook == HOOK_UPLINK_IN ? 0 : path_of(&s->frame);
	key.generation = in_ila(&s->src) ? ila_generation() : generation();
	f = flow_slot(&key);
	return f && flow_matches(f, &key) && (f->egress == EGRESS_LOCAL || f->expires > bpf_jiffies64()) ? CACHE_HIT
													 : CACHE_MISS;
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
	e = new_event(skb, s, POINT_ENTER);
	if (!e)
		return 0;
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
	e = new_event(skb, s, POINT_LEAVE);
	s->hook = 0;
	if (!e)
		return verdict;
	e->verdict = verdict;
	if (verdict != TC_ACT_SHOT)
		e->target = trace_target(s, verdict);
	bpf_ringbuf_submit(e, 0);
	return verdict;
}

SEC("tc")
int pil_container(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, from_container(skb));
}

SEC("tc")
int pil_uplink_in(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_UPLINK_IN);
	return trace_leave(skb, from_fabric(skb));
}

SEC("tc")
int pil_uplink_out(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_UPLINK_OUT);
	return trace_leave(skb, to_fabric(skb));
}

/* After a tail call, pil_container has reported that the packet enters. */
SEC("tc")
int pil_nimitz(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, nimitz_from_container(skb));
}

SEC("tc")
int pil_ila(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, ila_from_container(skb));
}

/* pil_uplink_in has reported that the packet enters, unless it is one without tracing. */
SEC("tc")
int pil_ila_in(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_UPLINK_IN);
	return trace_leave(skb, ila_from_fabric(skb));
}

SEC("tc")
int pil_tunnel_in(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_TUNNEL);
	return trace_leave(skb, nimitz_from_tunnel(skb));
}

SEC("tc")
int pil_tapped(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_SWITCH);
	return trace_leave(skb, ovs_port_egress(skb));
}

char _license[] SEC("license") = "Dual BSD/GPL";
