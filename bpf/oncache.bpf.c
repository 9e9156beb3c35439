/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A cache for any VXLAN network (the idea of ONCache, NSDI '25). The packets of a flow pass the overlay's own devices
 * until it has let one through in each direction. From then on one program per direction does the same work: where
 * packets leave the container, and where they enter by the uplink. These programs drop nothing: packets on a cache
 * miss, and those that need a decision, pass the overlay itself. */
#include "oncache/fast.h"
#include "oncache/learn.h"

/* missed sends a packet by the overlay's own path. If one direction of a flow lacks an entry, both go there, because an
 * overlay that tracks connections has to see both. */
static __always_inline int missed(struct __sk_buff *skb, const struct once_now *now, const struct inner *p,
				  enum once_way way, enum once_cause cause)
{
	/* Another connection, the reset or the end of one: conntrack has to see it all, also the last ACK. */
	if (cause == CAUSE_TCP_FLAGS || cause == CAUSE_FIN || cause == CAUSE_ROUTE)
		expire(&p->flow);
	if (cause >= CAUSE_SYN_ACK && cause <= CAUSE_ROUTE)
		mark(skb, now->generation.marks && may_mark(skb, p, way) && (way == WAY_IN || claim(skb, now, p))
				  ? mark_of(now->generation.marks, way)
				  : 0);
	return TCX_NEXT;
}

static __always_inline bool is_ip(struct __sk_buff *skb)
{
	return !skb->vlan_present && (skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6));
}

static __always_inline enum once_cause leave(struct __sk_buff *skb, const struct once_now *now, struct inner *p,
					     int *verdict)
{
	struct once_verdict v;
	struct once_inner key;
	struct once_egress e;
	struct once_vtep *h;
	enum once_cause cause;

	readable(skb, ETH_HLEN + INNER_MOST);
	cause = read_inner(skb, 0, true, p);
	if (cause)
		return cause;
	if (!copy(&v, bpf_map_lookup_elem(&once_filter, &p->flow)))
		return CAUSE_UNKNOWN;
	cause = established(&v, now);
	if (cause)
		return cause;
	if (v.device != skb->ifindex)
		return CAUSE_DEVICE;
	key = inner_of(&p->flow.remote);
	if (!copy(&e, bpf_map_lookup_elem(&once_egress, &key)))
		return CAUSE_ROUTE;
	h = bpf_map_lookup_elem(&once_vtep, &e.vtep);
	if (!h)
		return CAUSE_ROUTE;
	if (!routed && mac_of(p->macs) != mac_of(e.macs))
		return CAUSE_PACKET;
	/* A bridge forwards frames to others than its own MAC, and rules may ask for the sender's. */
	if (differ(v.macs, p->macs, sizeof(v.macs)))
		return CAUSE_DEVICE;
	if (p->longest > e.mtu || skb->len + sizeof(struct outer6) > 0xffff)
		return CAUSE_TOO_LONG;
	return push(skb, &e, h, p, verdict);
}

/* A container's packets, at the node's end of its veth. */
SEC("tc")
int once_out(struct __sk_buff *skb)
{
	struct once_now now = {};
	struct inner p = {};
	enum once_cause cause;
	int verdict = TCX_NEXT;

	/* A tunnel device inside of the container must not teach. */
	if (!is_ip(skb) || is_encapsulated(skb))
		return TCX_NEXT;
	read_segments(skb, &p);
	cause = lease(&now) ? leave(skb, &now, &p, &verdict) : CAUSE_LEASE;
	count(WAY_OUT, cause);
	return cause && verdict != TCX_DROP ? missed(skb, &now, &p, WAY_OUT, cause) : verdict;
}

/* is_verified tells whether a device or GRO has verified the outer checksum, or a device of this machine leaves it to
 * others. The kernel verifies what others have only added up (CHECKSUM_COMPLETE). */
static __always_inline bool is_verified(struct __sk_buff *skb)
{
	__u8 how = BPF_CORE_READ_BITFIELD((struct sk_buff *)bpf_cast_to_kern_ctx(skb), ip_summed);

	return how == CHECKSUM_UNNECESSARY || how == CHECKSUM_PARTIAL;
}

static __always_inline bool changes_ecn(__u8 outer, __u8 inner)
{
	return outer != inner && ecn_decap(outer, inner) != inner;
}

static __always_inline enum once_cause enter(struct __sk_buff *skb, const struct once_now *now, const struct tunnel *t,
					     struct inner *p, int *verdict)
{
	struct once_verdict v;
	struct once_inner key;
	struct once_ingress c;
	struct once_egress *e;
	enum once_cause cause;

	/* The overlay handles what a congested router has marked (RFC 6040). */
	if (changes_ecn(t->tos & ECN_MASK, p->ecn))
		return CAUSE_CONGESTED;
	if (t->flags & TUNNEL_CSUM && !is_verified(skb))
		return CAUSE_UNVERIFIED;
	if (!copy(&v, bpf_map_lookup_elem(&once_filter, &p->flow)))
		return CAUSE_UNKNOWN;
	cause = established(&v, now);
	if (cause)
		return cause;
	/* Rules of the node, such as a list of nodes that may send to the tunnel's port, decide about other senders. */
	key = inner_of(&p->flow.remote);
	e = bpf_map_lookup_elem(&once_egress, &key);
	if (!e || !same_addr(&e->vtep, &t->src))
		return CAUSE_SENDER;
	key = inner_of(&p->flow.local);
	if (!copy(&c, bpf_map_lookup_elem(&once_ingress, &key)) || c.device != v.device)
		return CAUSE_ROUTE;
	if (mac_of(p->macs) != (routed ? overlay_mac : mac_of(c.macs)))
		return CAUSE_PACKET;
	if (p->longest > c.mtu)
		return CAUSE_TOO_LONG;
	return pull(skb, &c, p, verdict);
}

/* Packets that enter by the uplink. */
SEC("tc")
int once_in(struct __sk_buff *skb)
{
	struct once_now now = {};
	struct inner p = {};
	enum once_cause cause;
	struct tunnel t;
	int verdict = TCX_NEXT;

	if (skb->pkt_type != PACKET_HOST)
		return TCX_NEXT;
	read_segments(skb, &p);
	cause = tunnelled(skb, false, &t, &p);
	if (cause == CAUSES)
		return TCX_NEXT;
	if (!lease(&now))
		cause = CAUSE_LEASE;
	else if (!cause)
		cause = enter(skb, &now, &t, &p, &verdict);
	count(WAY_IN, cause);
	return cause && verdict != TCX_DROP ? missed(skb, &now, &p, WAY_IN, cause) : verdict;
}

/* Packets that leave by the uplink: the overlay has let them out. */
SEC("tc")
int once_learn_out(struct __sk_buff *skb)
{
	struct once_now now = {};
	struct inner p = {};
	enum once_cause cause;
	struct tunnel t;

	if (!(skb->mark & mark_mask) || !lease(&now))
		return TCX_NEXT;
	read_segments(skb, &p);
	if (!teaches(tunnelled(skb, true, &t, &p)))
		return TCX_NEXT;
	cause = CAUSE_MARK;
	if (may_learn(skb, &now, WAY_OUT) && is_encapsulated(skb))
		cause = learn_out(skb, &now, &t, &p);
	if (cause)
		count(WAY_OUT, cause);
	return TCX_NEXT;
}

/* Packets to a container, at the node's end of its veth: the overlay has let them in. */
SEC("tc")
int once_learn_in(struct __sk_buff *skb)
{
	struct once_now now = {};
	struct inner p = {};
	enum once_cause cause;

	if (!is_ip(skb) || !(skb->mark & mark_mask) || !lease(&now))
		return TCX_NEXT;
	read_segments(skb, &p);
	readable(skb, ETH_HLEN + INNER_MOST);
	if (!teaches(read_inner(skb, 0, false, &p)))
		return TCX_NEXT;
	cause = may_learn(skb, &now, WAY_IN) ? learn_in(skb, &now, &p) : CAUSE_MARK;
	if (cause)
		count(WAY_IN, cause);
	return TCX_NEXT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
