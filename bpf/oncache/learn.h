/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Learns from packets that the overlay has let through. */
#pragma once
#include "oncache/track.h"

/* put writes an entry whole: the map may give the memory of a found one to another key at any time. */
#define put(map, key, new, size)                                                                                       \
	({                                                                                                             \
		const void *known = bpf_map_lookup_elem(map, key);                                                     \
		bool changes = !known || differ(known, new, size);                                                     \
		if (changes)                                                                                           \
			bpf_map_update_elem(map, key, new, BPF_ANY);                                                   \
		changes;                                                                                               \
	})

/* Entries are written again after an eighth of their validity, not for every packet. */
static __always_inline bool is_fresh(__u64 until, const struct once_now *now)
{
	return until > now->time + valid_for - valid_for / 8;
}

static __always_inline void note_sender(__u32 device, __u64 mac)
{
	__u64 *known = bpf_map_lookup_elem(&once_sender, &device);

	if (!known || *known != mac)
		bpf_map_update_elem(&once_sender, &device, &mac, BPF_ANY);
}

/* claim tells whether the overlay's answer to a container's packet may be learnt. It must not be if the entry of the
 * flow is of another device or has other MACs: a container that sends with another one's address would keep that one's
 * flow valid. A flow without an entry gets one, so that the answer counts for this container. Flows to
 * destinations that the overlay has not been seen to reach get none: there are many, to the node and beyond. */
static __always_inline bool claim(struct __sk_buff *skb, const struct once_now *now, const struct inner *p)
{
	struct once_verdict new = {.generation = now->generation.filter, .device = skb->ifindex}, *known;
	struct once_inner key = inner_of(&p->flow.remote);

	known = bpf_map_lookup_elem(&once_filter, &p->flow);
	if (known && known->generation == now->generation.filter)
		return known->device == skb->ifindex && !differ(known->macs, p->macs, sizeof(p->macs));
	__builtin_memcpy(new.macs, p->macs, sizeof(new.macs));
	if (bpf_map_lookup_elem(&once_egress, &key))
		bpf_map_update_elem(&once_filter, &p->flow, &new, BPF_ANY);
	return true;
}

/* let_out makes the direction out of a flow valid, for the container that has claimed it. It returns false if it is so,
 * or if no container has: then a later packet does. Only now is the container's MAC known to be one that the overlay
 * accepts from it. */
static __always_inline bool let_out(const struct once_flow *f, const struct once_now *now)
{
	struct once_verdict new = {};

	if (!copy(&new, bpf_map_lookup_elem(&once_filter, f)))
		return false;
	note_sender(new.device, source_of(new.macs));
	if (is_fresh(new.out, now))
		return false;
	new.out = now->time + valid_for;
	bpf_map_update_elem(&once_filter, f, &new, BPF_EXIST);
	return true;
}

/* let_in does so for the direction in, for a device and the MACs of the frame to it. */
static __always_inline bool let_in(const struct once_flow *f, const struct once_now *now, __u32 device,
				   const __u8 *macs)
{
	struct once_verdict new = {.generation = now->generation.filter, .device = device}, *known;

	__builtin_memcpy(new.macs, macs + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(new.macs + ETH_ALEN, macs, ETH_ALEN);
	known = bpf_map_lookup_elem(&once_filter, f);
	if (known && known->generation == new.generation && known->device == device &&
	    !differ(known->macs, new.macs, sizeof(new.macs))) {
		if (is_fresh(known->in, now))
			return false;
		new.out = known->out;
	}
	new.in = now->time + valid_for;
	bpf_map_update_elem(&once_filter, f, &new, BPF_ANY);
	return true;
}

/* forget_packet clears the fields of outer headers that differ from packet to packet, and those of the VNI. */
static __always_inline void forget_packet(void *headers, bool ip4)
{
	struct udp_vxlan *udp = headers + (ip4 ? offsetof(struct outer4, udp) : offsetof(struct outer6, udp));
	struct outer4 *h4 = headers;
	struct outer6 *h6 = headers;

	if (ip4) {
		h4->tos &= ~ECN_MASK;
		h4->length = h4->id = h4->check = 0;
	} else {
		((__u8 *)&h6->tos_flow)[1] &= ~(ECN_MASK << ECN_SHIFT6);
		h6->payload_len = 0;
	}
	udp->sport = udp->len = udp->check = 0;
	udp->vni = 0; /* not WIDE: the stack wants aligned access */
}

static __always_inline bool put_vtep(struct __sk_buff *skb, const struct tunnel *t, bool ip4)
{
	struct once_vtep new = {.uplink = skb->ifindex}, *known;

	if (bpf_skb_load_bytes(skb, 0, new.headers, ip4 ? sizeof(struct outer4) : sizeof(struct outer6)))
		return false;
	forget_packet(new.headers, ip4);
	known = bpf_map_lookup_elem(&once_vtep, &t->dst);
	if (known)
		new.id = known->id;
	if (!known || differ(known, &new, offsetof(struct once_vtep, id)))
		bpf_map_update_elem(&once_vtep, &t->dst, &new, BPF_ANY);
	return true;
}

/* mtu_of asks for the MTU of a device, 0 for that of the packet. */
static __always_inline __u32 mtu_of(struct __sk_buff *skb, __u32 device)
{
	__u32 mtu = 0;

	return bpf_check_mtu(skb, device, &mtu, 0, 0) < 0 ? 0 : mtu;
}

/* path_mtu returns the MTU of the route to a VTEP. What is longer the overlay's device fragments, or tells its sender.
 * A node that does not forward gets no answer from the FIB, and has the MTU of the uplink. */
static __always_inline __u32 path_mtu(struct __sk_buff *skb, const struct tunnel *t, bool ip4)
{
	struct bpf_fib_lookup fib = {.ifindex = skb->ifindex, .tot_len = 1, .l4_protocol = NEXTHDR_UDP};

	fib.family = ip4 ? AF_INET : AF_INET6;
	if (ip4) {
		fib.ipv4_src = ip4_unmapped(&t->src);
		fib.ipv4_dst = ip4_unmapped(&t->dst);
	} else {
		__builtin_memcpy(fib.ipv6_src, &t->src, sizeof(t->src));
		__builtin_memcpy(fib.ipv6_dst, &t->dst, sizeof(t->dst));
	}
	if (bpf_fib_lookup(skb, &fib, sizeof(fib), BPF_FIB_LOOKUP_OUTPUT | BPF_FIB_LOOKUP_SKIP_NEIGH))
		return mtu_of(skb, 0);
	return fib.mtu_result;
}

/* learn_out learns from a packet that leaves by the uplink. It returns CAUSE_HIT if the entries are fresh. */
static __always_inline enum once_cause learn_out(struct __sk_buff *skb, const struct once_now *now,
						 const struct tunnel *t, const struct inner *p)
{
	struct once_inner key = inner_of(&p->flow.remote);
	struct once_egress e = {.vtep = t->dst};
	enum once_cause cause;
	bool ip4 = is_ip4_mapped(&t->dst), changed;
	__u32 size = ip4 ? sizeof(struct outer4) : sizeof(struct outer6), path;

	/* The receiver might want one, and the programs compute none. */
	if (!ip4 && t->flags & TUNNEL_CSUM)
		return CAUSE_CHECKSUM;
	cause = tracked(skb, p, true);
	if (cause)
		return cause;
	e.mtu = mtu_of(skb, overlay_device);
	path = path_mtu(skb, t, ip4);
	if (path < size + e.mtu)
		e.mtu = path > size ? path - size : 0;
	if (!e.mtu || !(ip4 ? put_vtep(skb, t, true) : put_vtep(skb, t, false)))
		return CAUSE_FAILED;
	__builtin_memcpy(e.macs, p->macs, sizeof(e.macs));
	changed = put(&once_egress, &key, &e, sizeof(e));
	if (!let_out(&p->flow, now) && !changed)
		return CAUSE_HIT;
	if (is_current(now))
		return CAUSE_LEARNT;
	bpf_map_delete_elem(&once_filter, &p->flow);
	bpf_map_delete_elem(&once_egress, &key);
	bpf_map_delete_elem(&once_vtep, &t->dst);
	return CAUSE_CHANGED;
}

/* learn_in learns from a packet to a container, at the node's end of its veth. */
static __always_inline enum once_cause learn_in(struct __sk_buff *skb, const struct once_now *now,
						const struct inner *p)
{
	struct once_inner key = inner_of(&p->flow.local);
	struct once_ingress c = {.device = skb->ifindex};
	enum once_cause cause;
	__u64 *sender;
	bool changed;

	/* A bridge floods what it does not know the port of. */
	sender = bpf_map_lookup_elem(&once_sender, &c.device);
	if (!sender || *sender != mac_of(p->macs))
		return CAUSE_FLOODED;
	cause = tracked(skb, p, false);
	if (cause)
		return cause;
	c.mtu = mtu_of(skb, 0);
	if (!c.mtu)
		return CAUSE_FAILED;
	__builtin_memcpy(c.macs, p->macs, sizeof(c.macs));
	changed = put(&once_ingress, &key, &c, sizeof(c));
	if (!let_in(&p->flow, now, c.device, p->macs) && !changed)
		return CAUSE_HIT;
	if (is_current(now))
		return CAUSE_LEARNT;
	bpf_map_delete_elem(&once_filter, &p->flow);
	bpf_map_delete_elem(&once_ingress, &key);
	return CAUSE_CHANGED;
}

/* teaches tells whether a packet of the overlay can be learnt from. */
static __always_inline bool teaches(enum once_cause read)
{
	return read == CAUSE_HIT || read == CAUSE_SYN_ACK;
}
