/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How a container is joined to the node. One behind a veth has a device here, whose ifindex is its number in
 * all tables. One behind a macvlan has none: what it sends meets our program on the uplink's egress, what is for
 * it goes on from the uplink's ingress by its MAC. Its number is made of its network namespace's cookie. One behind a
 * netkit is as one behind a veth, but that our program runs as the container sends. */
#pragma once
#include "common/packet.h"

#define ON_UPLINK    0x80000000u /* set in the number of a container behind a macvlan */
#define SKB_DST_MASK (~1UL)

CONSTANT __u64 node_cookie = 0; /* of its network namespace */
CONSTANT __u32 uplink_ifindex = 0;
/* Tells our packets from the host stack's on the way out, where they came in by a device, and from the fabric's on
 * the way in; the same for all programs of a node. */
CONSTANT __u32 packet_mark = 0;
/* Tells what we have judged and what came in by no device: what a container behind a netkit sends, and what one behind
 * a macvlan sent and the neighbour table brings to us again. The latter can set a mark itself, so it is a secret of the
 * node that is never put on what a container receives. */
CONSTANT __u32 accept_mark = 0;
/* Containers may be behind macvlans. */
CONSTANT bool macvlan = false;

void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym;

/* Whose packet it is that leaves by the uplink: the namespace of the device it was routed by, or of the socket it
 * was written to as a frame. A sender can change neither; 0 if there is neither. (Not the socket first: that of the
 * kernel's own ICMP is of another namespace once the packet has waited for a neighbour.) Null pointers read as zeros
 * here. */
static __always_inline __u64 namespace_of(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);
	struct sock *socket = kernel->sk;
	struct dst_entry *dst;
	__u64 cookie;

	dst = bpf_rdonly_cast((void *)(kernel->_skb_refdst & SKB_DST_MASK), bpf_core_type_id_kernel(struct dst_entry));
	cookie = dst->dev->nd_net.net->net_cookie;
	return cookie || !socket ? cookie : socket->__sk_common.skc_net.net->net_cookie;
}

/* The number of the container that a packet comes from. */
static __always_inline __u32 device_of(struct __sk_buff *skb)
{
	__u64 cookie;

	if (!macvlan || skb->ifindex != uplink_ifindex)
		return skb->ifindex;
	cookie = namespace_of(skb);
	return cookie < ON_UPLINK ? ON_UPLINK | cookie : ON_UPLINK; /* which no container has */
}

/* on_way_in tells a hook that packets come in by from those on the way out: the uplink's egress, where a macvlan's
 * packets meet us, and a netkit's, that a packet gets to from the container's own stack. */
static __always_inline bool on_way_in(struct __sk_buff *skb, __u32 device)
{
	return !(device & ON_UPLINK) && skb->ingress_ifindex;
}

/* The first two bytes of the MACs of containers behind macvlans, and of nobody else's; their number follows. */
static const __u8 macvlan_mac[2] = {0x06, 0x70};

static __always_inline void mac_of(__u32 device, __u8 *mac)
{
	__be32 number = bpf_htonl(device & ~ON_UPLINK);

	if (!(device & ON_UPLINK)) {
		__builtin_memcpy(mac, container_mac, ETH_ALEN);
		return;
	}
	__builtin_memcpy(mac, macvlan_mac, sizeof(macvlan_mac));
	__builtin_memcpy(mac + sizeof(macvlan_mac), &number, sizeof(number));
}

/* pass lets a container's packet by. The guards of guard.h, behind us on the uplink, need not look at it again. */
static __always_inline int pass(struct __sk_buff *skb)
{
	skb->mark = 0;
	return macvlan ? TCX_PASS : TCX_NEXT;
}

/* to_macvlan hands a packet whose MACs are written to the container it is for. The macvlan takes it from what comes in
 * by the uplink: here, where the program on that hook is the one that calls. */
static __always_inline int to_macvlan(struct __sk_buff *skb, bool here)
{
	if (here)
		return pass(skb);
	skb->mark = packet_mark;
	return bpf_redirect(uplink_ifindex, BPF_F_INGRESS);
}

/* to_container hands it over by whatever kind of device, or to another device of the node. Into a namespace at once
 * leads only from a hook on the way in. */
static __always_inline int to_container(struct __sk_buff *skb, __u32 device, bool at_once, bool here)
{
	if (device & ON_UPLINK)
		return to_macvlan(skb, here);
	return at_once ? bpf_redirect_peer(device, 0) : bpf_redirect(device, 0);
}
