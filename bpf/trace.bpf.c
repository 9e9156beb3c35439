/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs that a packet between containers meets, built once more with tracing. For the time of a trace the agent
 * puts them in the place of those of pilaster.bpf.c. They share all maps, so packets are treated alike by both. */
#define TRACING
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "hooks/container.h"
#include "hooks/node.h"
#include "hooks/traced.h"
#include "hooks/uplink.h"
#include "net/netpila/exposed_stages.h"
#include "net/netpila/service_answers.h"
#include "net/ila/stages.h"
#include "net/nimitz/ovs_port.h"
#include "net/nimitz/stages.h"

/* On the fabric, an address with an identifier begins with a locator. A node does not know that of a sender without a
 * mapping. */
static __always_inline struct addr trace_address(const struct addr *a)
{
	__u64 identifier = from_wire(a);

	return identifier ? sir_address(identifier) : *a;
}

/* is_outside_flow reports whether the cache of flows with hosts outside has the packet. */
static __always_inline bool is_outside_flow(const struct trace_state *s)
{
	if (s->hook == HOOK_UPLINK_IN)
		return is_egress(&s->dst);
	return !in_private(&s->dst) && !in_base(&s->dst) && !in_ila(&s->dst);
}

static __always_inline __u32 trace_cache(struct __sk_buff *skb, struct trace_state *s)
{
	struct flow_key key = {.src = s->src, .dst = s->dst};
	struct flow *f;

	if (s->version != 6 || s->hook == HOOK_TUNNEL || s->hook == HOOK_SWITCH ||
	    (s->hook == HOOK_UPLINK_OUT && !macvlan))
		return CACHE_UNUSED;
	if (s->hook == HOOK_UPLINK_IN || s->hook == HOOK_NODE) {
		key.device = skb->ifindex;
	} else {
		key.device = device_of(skb);
		key.path = path_of(&s->frame);
	}
	key.generation = in_ila(&s->src) ? ila_generation() : generation();
	f = is_outside_flow(s) ? outside_flow(&key) : flow_slot(&key);
	return f && flow_matches(f, &key) && (f->egress == EGRESS_LOCAL || f->expires > bpf_jiffies64()) ? CACHE_HIT
													 : CACHE_MISS;
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

/* pil_container has reported that the packet enters, unless it is one without tracing. */
SEC("tc")
int pil_egress_out(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, egress_from_container(skb));
}

/* Likewise pil_uplink_in. */
SEC("tc")
int pil_egress_in(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_UPLINK_IN);
	return trace_leave(skb, egress_from_fabric(skb));
}

SEC("tc")
int pil_egress_gw(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_UPLINK_IN);
	return trace_leave(skb, at_egress_gateway(skb));
}

SEC("tc")
int pil_service_out(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, service_out(skb));
}

/* The program that hands the packet on has reported that it enters, unless it is one without tracing. */
SEC("tc")
int pil_service_in(struct __sk_buff *skb)
{
	return trace_leave(skb, service_in(skb));
}

SEC("tc")
int pil_exposed_in(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_UPLINK_IN);
	return trace_leave(skb, exposed_in(skb));
}

SEC("tc")
int pil_exposed_tun(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_UPLINK_IN);
	return trace_leave(skb, exposed_tunnel(skb));
}

SEC("tc")
int pil_exposed_out(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, exposed_out(skb));
}

SEC("tc")
int pil_node(struct __sk_buff *skb)
{
	trace_enter(skb, HOOK_NODE);
	return trace_leave(skb, from_node(skb));
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
