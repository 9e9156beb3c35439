/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Applies policy to endpoints of NETPILA, whose addresses contain tenant and app. forward calls policy_enforce for each
 * local end. */
#pragma once
#include "net/netpila/flow.h"
#include "policy/policy.h"

/* Returns one end of a packet by its canonical address, as the local endpoint sees it: the received address if the
 * packet came from the fabric, else the address that it is sent with. */
static __always_inline const struct addr *flow_end(const struct flow *f, bool source, __u32 hook)
{
	if (hook == HOOK_UPLINK_IN)
		return source ? &f->key.src : &f->key.dst;
	return source ? &f->src : &f->dst;
}

/* policy_enforce returns 0 if the packet may pass for the endpoint at one end of its flow, else it drops the packet. */
__noinline int policy_enforce(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 dir,
			      __u32 hook)
{
	const struct addr *local, *remote;
	struct session_key *key;
	struct pol_scratch *d;
	__u32 zero = 0;

	if (!p || !f)
		return TC_ACT_SHOT;
	local = flow_end(f, dir == TX, hook);
	remote = flow_end(f, dir != TX, hook);
	if (policy_fast_hit(skb, p, sizeof(struct eth_ip6), local, remote, f->policy_ep[dir & 1], 0, dir)) {
		trace_policy_hit(skb, f->policy_ep[dir & 1], dir);
		return 0;
	}
	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!d)
		return TC_ACT_SHOT;
	key = &d->ct.key;
	key->local = *local;
	key->remote = *remote;
	key->endpoint = f->policy_ep[dir & 1];
	key->tenant = tenant_id(&key->local);
	key->dir = key->zero[0] = key->zero[1] = 0;
	d->ct.pkt.dir = dir;
	d->mode = ENFORCE_BY_ADDR;
	d->apps = 0;
	return policy_check(skb, p, d, hook);
}
