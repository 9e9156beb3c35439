/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The tunnel without the kernel's VXLAN device (--accelerate oncache): the programs push and pull the outer headers
 * themselves, and the flow cache has the next hop of each peer, as the egress cache of ONCache has. All stages run for
 * every packet, so the verdicts are those of the path through the device. Packets of several segments, and those that
 * only the kernel can encapsulate (tunnel/push.h, tunnel/pull.h), pass the device. */
#pragma once
#include "net/netpila/resolve.h"
#include "net/nimitz/nat.h"
#include "tunnel/pull.h"
#include "tunnel/push.h"

/* UDP port of the tunnel; 0: all packets pass the device */
CONSTANT __be16 direct_port = 0;

/* Data that is too large for the stack. Programs run with softirqs off, so a CPU's copy is never shared. */
struct direct_scratch {
	struct tunnel outer;
	struct flow_key key;
	struct addr next_hop;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct direct_scratch);
	__uint(max_entries, 1);
} nim_direct SEC(".maps");

static __always_inline struct direct_scratch *direct_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&nim_direct, &zero);
}

/* A packet that a node passes on to another one, because the container is there, has these flags in its group policy
 * id: first the D bit, which says that the outer source is not the node of the inner one, then the A bit too. Nodes
 * evaluate neither for anything else. While nodes disagree about where a container is, a packet is passed on twice at
 * most: a frontend and the former node may both not know of a move. */
#define GBP_FLAGS_AT 16
#define GBP_ONCE     (GROUP_DONT_LEARN >> GBP_FLAGS_AT)
#define GBP_TWICE    ((GROUP_DONT_LEARN | GROUP_POLICY_APPLIED) >> GBP_FLAGS_AT)

static __always_inline __u32 gbp_of(const struct pkt_ctx *j)
{
	return over_ipv4 ? j->identity : j->identity | (__u32)j->relayed << GBP_FLAGS_AT;
}

static __always_inline void read_gbp(struct pkt_ctx *j, __u32 gbp)
{
	j->identity = gbp & GBP_IDENTITY;
	j->relayed = gbp >> GBP_FLAGS_AT & GBP_TWICE;
}

/* may_relay reports whether a packet from another node may be passed on, and counts that. */
static __always_inline bool may_relay(struct pkt_ctx *j)
{
	if (j->relayed == GBP_TWICE)
		return false;
	j->relayed = j->relayed ? GBP_TWICE : GBP_ONCE;
	return true;
}

/* peer_flow returns the flow with the next hop to a peer, NULL if the packet has to pass the device. The device in the
 * key makes it different from those of containers' flows. */
static __noinline struct flow *peer_flow(struct __sk_buff *skb, const struct addr *vtep, __u32 device)
{
	struct direct_scratch *d = direct_scratch();
	struct flow_key *key;
	struct flow *f;

	if (!d || skb->gso_size)
		return NULL;
	key = &d->key;
	key->src.hi = own_node;
	key->src.lo = VTEP_HOST;
	key->dst = *vtep;
	key->device = device;
	key->generation = generation();
	key->path = bpf_get_hash_recalc(skb) % PATHS;
	f = flow_slot(key);
	if (!f)
		return NULL;
	if (!flow_matches(f, key) || f->expires <= bpf_jiffies64()) {
		f->egress = 0; /* invalidates the slot until all fields are written */
		f->key = *key;
		f->src = key->src;
		f->dst = key->dst;
		/* This packet passes the device, and so the kernel's neighbour table, which notices a dead or moved
		 * neighbour. */
		find_next_hop(skb, f, 1, &d->next_hop);
		return NULL;
	}
	return skb->len + sizeof(struct outer6) - ETH_HLEN > f->mtu ? NULL : f;
}

/* direct_push sends a packet to the peer of a flow. It returns 0, with the packet unchanged, if the packet has to pass
 * the device. */
static __noinline int direct_push(struct __sk_buff *skb, const struct pkt_ctx *j, const struct flow *f)
{
	struct direct_scratch *d = direct_scratch();
	struct tunnel *t;
	int why;

	if (!d || !f)
		return 0;
	t = &d->outer;
	t->src = f->src;
	t->dst = f->dst;
	t->vni = j->vni;
	t->group = gbp_of(j);
	t->dport = direct_port;
	t->flags = TUNNEL_CSUM | (t->group ? TUNNEL_GROUP : 0);
	t->tos = 0;
	t->ttl = TUNNEL_HOPS;
	t->next = NEXT_ETHERNET;
	why = tunnel_push(skb, t, NULL, 0);
	if (why && why != TUNNEL_FAILED)
		return 0;
	if (why || bpf_skb_store_bytes(skb, 0, f->dmac, 2 * ETH_ALEN, 0))
		return TC_ACT_SHOT; /* the caller counts it */
	skb->mark = tunnel_mark;    /* see tunnel_xmit */
	skb->tstamp = 0;
	return bpf_redirect(f->ifindex, 0);
}

/* direct_xmit sends a packet to a node, or drops it and counts that. It returns 0, with the packet unchanged, if the
 * packet has to pass the device.
 */
static __always_inline int direct_xmit(struct __sk_buff *skb, const struct pkt_ctx *j, const struct addr *vtep,
				       __u32 device)
{
	const struct flow *f = peer_flow(skb, vtep, device);
	int verdict = f ? direct_push(skb, j, f) : 0;

	return verdict == TC_ACT_SHOT ? drop(skb, REASON_MALFORMED, j->hook) : verdict;
}

/* check_peer accepts tunnel packets of known nodes. */
static __always_inline int check_peer(const struct addr *from, struct pkt_ctx *j)
{
	if (from->lo != VTEP_HOST || !is_peer(from))
		return REASON_PEER_UNKNOWN;
	if (!in_base(from))
		j->remote_edge = from->hi;
	return 0;
}

/* direct_decap does what the device and decap do. It returns a reason, or TCX_NEXT if the packet has to pass the
 * device. */
static __noinline int direct_decap(struct __sk_buff *skb, struct pkt_ctx *j)
{
	struct direct_scratch *d = direct_scratch();
	struct tunnel *t;
	int why;

	if (!d || skb->gso_size)
		return TCX_NEXT;
	t = &d->outer;
	/* Without a checksum the device drops the packet: nothing else protects VNI and identity. */
	if (tunnel_parse(skb, direct_port, TUNNEL_GROUP, t) || !(t->flags & TUNNEL_CSUM))
		return TCX_NEXT;
	why = check_peer(&t->src, j);
	if (why)
		return why;
	j->vni = t->vni;
	read_gbp(j, t->group);
	return tunnel_pull(skb, t) ? REASON_MALFORMED : 0;
}
