/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ingress replication (RFC 7432 §12.2, RFC 8365 §9): a node sends a container's question to all VTEPs that other
 * speakers have announced for the tenant's Ethernet segment (type 3), at most MAX_REPLICAS. Nodes of this cluster get
 * none, because the tables know all their containers. Nothing else is replicated. */
#pragma once
#include "common/event.h"
#include "common/tunnel.h"
#include "net/evpn/tables.h"

/* A tenant's containers on this node may ask REPLICATION_BURST questions at once, and then one per
 * REPLICATION_INTERVAL. Tenants that share a slot share its limit. Rarely, a race of two CPUs allows one too many. */
#define REPLICATION_INTERVAL 50000000ULL
#define REPLICATION_BURST    20
#define REPLICATION_SLOTS    1024

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64); /* when the next question is due */
	__uint(max_entries, REPLICATION_SLOTS);
} evpn_pace_v1 SEC(".maps");

/* replicate_allowed returns the reason why a tenant's question is not replicated. */
static __always_inline int replicate_allowed(__u32 vni)
{
	__u32 slot = vni % REPLICATION_SLOTS;
	__u64 *pace = bpf_map_lookup_elem(&evpn_pace_v1, &slot), now = bpf_ktime_get_ns(), due;
	struct replication *to = bpf_map_lookup_elem(&evpn_vteps_v1, &vni);

	if (!to || !to->count || !pace)
		return REASON_NOT_REPLICATED;
	due = *pace < now ? now : *pace;
	if (due - now > (REPLICATION_BURST - 1) * REPLICATION_INTERVAL)
		return REASON_REPLICATION_LIMIT;
	*pace = due + REPLICATION_INTERVAL;
	return 0;
}

/* replicates_to reports whether a VTEP is one of a tenant's segment. */
__noinline int replicates_to(__u32 vni, __be32 vtep)
{
	struct replication *to = bpf_map_lookup_elem(&evpn_vteps_v1, &vni);

	if (!to)
		return 0;
	for (int i = 0; i < MAX_REPLICAS; i++) {
		if (i >= to->count)
			break;
		if (to->vteps[i] == vtep)
			return 1;
	}
	return 0;
}

static __always_inline __u32 tunnel_device(void)
{
	__u32 zero = 0;
	struct nimitz_node *node = bpf_map_lookup_elem(&nim_node_v1, &zero);

	return node ? node->vxlan : 0;
}

/* set_vtep sets the tunnel key of a frame that the tunnel device gets next, and no group policy: without the option the
 * kernel would send what is on its stack. */
static __noinline int set_vtep(struct __sk_buff *skb, __be32 vtep, __u32 wire)
{
	struct bpf_tunnel_key key = {.tunnel_id = wire, .tunnel_ttl = TUNNEL_HOPS};
	struct vxlan_metadata policy = {};

	key.remote_ipv4 = bpf_ntohl(vtep);
	key.local_ipv4 = bpf_ntohl(own_vtep4);
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX | BPF_F_DONT_FRAGMENT) ||
	       bpf_skb_set_tunnel_opt(skb, &policy, sizeof(policy));
}

/* send_frame sends a frame to a VTEP. */
static __always_inline int send_frame(struct __sk_buff *skb, __be32 vtep, __u32 wire)
{
	if (set_vtep(skb, vtep, wire))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);
	skb->mark = tunnel_mark;
	skb->tstamp = 0;
	return bpf_redirect(tunnel_device(), 0);
}

/* replicate sends a frame to all VTEPs of a tenant's segment: a copy to each but the first, which gets the frame. The
 * tunnel device encapsulates each copy before the next one gets its key. */
__noinline int replicate(struct __sk_buff *skb, __u32 vni, __u32 wire)
{
	struct replication *to = bpf_map_lookup_elem(&evpn_vteps_v1, &vni);
	__u32 device = tunnel_device();

	if (!to || !to->count)
		return drop(skb, REASON_NOT_REPLICATED, HOOK_CONTAINER);
	skb->mark = tunnel_mark;
	skb->tstamp = 0;
	for (int i = 1; i < MAX_REPLICAS; i++) {
		if (i >= to->count)
			break;
		if (!set_vtep(skb, to->vteps[i], wire))
			bpf_clone_redirect(skb, device, 0);
	}
	return send_frame(skb, to->vteps[0], wire);
}
