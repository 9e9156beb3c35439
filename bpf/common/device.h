/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The device kinds that connect a container to the node, and how to hand a packet to each. All tables identify a
 * container's device by a number.
 *
 * veth: the number is the ifindex of the device on the node. netkit: the same, but our program runs in the container's
 * transmit path.
 *
 * macvlan: the node has no device. Packets from the container reach our program on the uplink's egress hook; packets to
 * the container leave the uplink's ingress hook with its MAC. The number is derived from the network namespace cookie.
 */
#pragma once
#include "common/packet.h"

#define ON_UPLINK    0x80000000u /* set in the number of a container behind a macvlan */
#define SKB_DST_MASK (~1UL)

CONSTANT __u64 node_cookie = 0; /* network namespace cookie of the node */
/* The devices to the fabric and to hosts outside; 0: none. With macvlans there is only the first. */
#define MAX_UPLINKS 8
CONSTANT __u32 uplinks[MAX_UPLINKS] = {};
/* Marks packets that our programs have accepted, so that the uplink's programs recognise them. On egress the mark
 * counts only if the packet entered the node by a device, because processes of the node can set marks. The fabric
 * cannot set it. All programs of a node use the same value. */
CONSTANT __u32 packet_mark = 0;
/* Marks accepted packets for which packet_mark is not enough: packets that entered by no device (from a netkit), and
 * packets of a macvlan that come back from the neighbour table. A container behind a macvlan can set marks, so the
 * value is a secret of the node, and no packet to a container has it. */
CONSTANT __u32 accept_mark = 0;
/* the node accepts containers behind macvlans */
CONSTANT bool macvlan = false;

void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym;

/* is_uplink compares a device with all uplinks. Only slow paths call it. */
static __always_inline bool is_uplink(__u32 ifindex)
{
	bool found = false;
	__u32 i;

	for (i = 0; i < MAX_UPLINKS; i++)
		found |= uplinks[i] == ifindex;
	return found;
}

/* namespace_of returns the cookie of the network namespace that sends a packet by the uplink: that of the packet's
 * route, else that of its socket (a packet socket has no route), else 0. A sender can change neither. The route is read
 * first, because the socket of the kernel's ICMP packets is back in another namespace when a packet has waited for a
 * neighbour. Loads through a null pointer yield 0 here. */
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

/* Returns the number of the container that sent a packet. */
static __always_inline __u32 device_of(struct __sk_buff *skb)
{
	__u64 cookie;

	if (!macvlan || skb->ifindex != uplinks[0])
		return skb->ifindex;
	cookie = namespace_of(skb);
	return cookie < ON_UPLINK ? ON_UPLINK | cookie : ON_UPLINK; /* no container has this number */
}

/* on_way_in reports whether the program runs on a hook for incoming packets. The uplink's egress hook (packets of a
 * macvlan) is not one. Nor is a netkit's, where the program runs in the container's transmit path. */
static __always_inline bool on_way_in(struct __sk_buff *skb, __u32 device)
{
	return !(device & ON_UPLINK) && skb->ingress_ifindex;
}

/* MACs of the containers behind pairs of devices, by the device on the node. The container of a device without an entry
 * has container_mac, which older builds gave to all of them. */
struct dev_mac {
	__u8 mac[ETH_ALEN];
	__u8 zero[2];
};
_Static_assert(sizeof(struct dev_mac) == 8, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* number of the device */
	__type(value, struct dev_mac);
	__uint(max_entries, 1); /* set at load */
} pil_macs_v1 SEC(".maps");

/* The first two bytes of the MACs of containers behind macvlans; the container's number follows. */
static const __u8 macvlan_mac[2] = {0x06, 0x70};

/* mac_of returns the MAC of a container. The kernel drops what a container's device receives with another one, unless
 * the packet enters the container's namespace without crossing the device. */
static __slowpath void mac_of(__u32 device, __u8 *mac)
{
	__be32 number = bpf_htonl(device & ~ON_UPLINK);
	struct dev_mac *own;

	if (!(device & ON_UPLINK)) {
		own = bpf_map_lookup_elem(&pil_macs_v1, &device);
		__builtin_memcpy(mac, own ? own->mac : container_mac, ETH_ALEN);
		return;
	}
	__builtin_memcpy(mac, macvlan_mac, sizeof(macvlan_mac));
	__builtin_memcpy(mac + sizeof(macvlan_mac), &number, sizeof(number));
}

/* pass lets a container's packet continue. With macvlans the packet then skips the backstop programs
 * (macvlan_backstop.h) that follow on the uplink. */
static __always_inline int pass(struct __sk_buff *skb)
{
	skb->mark = 0;
	return macvlan ? TCX_PASS : TCX_NEXT;
}

/* to_macvlan delivers a packet, whose MACs are already written, to a container behind a macvlan. The macvlan receives
 * the packet as input of the uplink. here: the caller is the program on the uplink's ingress hook. */
static __always_inline int to_macvlan(struct __sk_buff *skb, bool here)
{
	if (here)
		return pass(skb);
	skb->mark = packet_mark;
	return bpf_redirect(uplinks[0], BPF_F_INGRESS);
}

/* to_container delivers a packet to a container behind any device kind, or to another device of the node. With at_once
 * the packet enters the container's namespace directly, which works only from a hook for incoming packets. */
static __always_inline int to_container(struct __sk_buff *skb, __u32 device, bool at_once, bool here)
{
	if (device & ON_UPLINK)
		return to_macvlan(skb, here);
	return at_once ? bpf_redirect_peer(device, 0) : bpf_redirect(device, 0);
}
