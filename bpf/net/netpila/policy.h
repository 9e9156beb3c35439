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
	struct policy_end end = {.dir = dir};

	if (!p || !f)
		return TC_ACT_SHOT;
	end.local = flow_end(f, dir == TX, hook);
	end.remote = flow_end(f, dir != TX, hook);
	end.endpoint = f->policy_ep[dir & 1];
	end.tenant = tenant_id(end.local);
	return enforce_end(skb, p, &end, ENFORCE_BY_ADDR, hook);
}

/* egress_end returns the container's end of a packet from or to a host outside. Its session has the container's
 * plaintext address, which says tenant and app, and not the one that the host outside sees. */
static __always_inline struct policy_end egress_end(const struct flow *f, struct addr *inside, __u32 dir, __u32 hook)
{
	struct policy_end end = {.dir = dir, .local = inside};

	inside->hi = own_node;
	inside->lo = f->extra;
	end.remote = flow_end(f, dir != TX, hook);
	end.endpoint = f->policy_ep[dir & 1];
	end.tenant = tenant_id(inside);
	return end;
}

__noinline int egress_enforce(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 dir,
			      __u32 hook)
{
	struct policy_end end;
	struct addr inside;

	if (!p || !f)
		return TC_ACT_SHOT;
	end = egress_end(f, &inside, dir, hook);
	return enforce_end(skb, p, &end, ENFORCE_OUTSIDE, hook);
}

/* Verdicts of exposed ports in the cache, apart from those of the container's own connections. */
#define APPS_EXPOSED 1

/* exposed_enforce is egress_enforce for a packet of a connection to an exposed port. nat is the tag of the ingress node
 * that a packet to the container came by, and of an answer that of the session. */
__noinline int exposed_enforce(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 *nat,
			       __u32 dir)
{
	enum hook hook = dir == TX ? HOOK_CONTAINER : HOOK_UPLINK_IN;
	struct policy_end end;
	struct addr inside;

	if (!p || !f || !nat)
		return TC_ACT_SHOT;
	end = egress_end(f, &inside, dir, hook);
	end.nat = nat;
	end.apps = APPS_EXPOSED;
	return enforce_end(skb, p, &end, ENFORCE_EXPOSED, hook);
}

/* gateway_enforce is egress_enforce for a container's packet by a gateway. nat is the gateway for a new session, and
 * then that of the packet's session. Only established TCP sessions keep the gateway avoid. */
__noinline int gateway_enforce(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 *nat,
			       __u32 avoid)
{
	struct policy_end end;
	struct addr inside;

	if (!p || !f || !nat)
		return TC_ACT_SHOT;
	end = egress_end(f, &inside, TX, HOOK_CONTAINER);
	end.nat = nat;
	end.avoid = avoid;
	return enforce_end(skb, p, &end, ENFORCE_OUTSIDE, HOOK_CONTAINER);
}
