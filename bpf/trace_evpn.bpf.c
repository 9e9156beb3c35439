/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs of evpn.bpf.c, built once more with tracing: see trace.bpf.c. */
#define TRACING
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define TUNNELS_OVER_IPV4
#include "hooks/traced.h"
#include "hooks/uplink_class.h"
#include "net/evpn/stages.h"

static __always_inline struct addr trace_address(const struct addr *a)
{
	return *a;
}

static __always_inline __u32 trace_cache(struct __sk_buff *skb, struct trace_state *s)
{
	return CACHE_UNUSED;
}

/* After a tail call, pil_container or pil_tunnel_in has reported that the packet enters. */
SEC("tc")
int pil_evpn(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_CONTAINER);
	return trace_leave(skb, evpn_from_container(skb));
}

SEC("tc")
int pil_evpn_in(struct __sk_buff *skb)
{
	if (!trace_state_of(skb))
		trace_enter(skb, HOOK_TUNNEL);
	return trace_leave(skb, evpn_from_tunnel(skb));
}

char _license[] SEC("license") = "Dual BSD/GPL";
