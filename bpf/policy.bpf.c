/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The group policy field of VXLAN for Open vSwitch in user space, which neither writes nor reads it and drops packets
 * that have it. The switch instead keeps the identity in bytes of the peer VTEP's address that are zero on the fabric.
 * These programs move it, where the switch's packets meet the node's stack. They drop nothing. */
#include "common/context.h"
#include "common/proto.h"
#include "common/tunnel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Offsets in a frame. */
#define NEXT_HEADER 20
#define SOURCE	    22
#define DESTINATION 38
#define UDP_HEADER  54
#define UDP_PORT    56
#define UDP_SUM	    60
#define FLAGS	    62 /* two bytes with the flags, before the two of the policy */
#define POLICY	    64

/* Offsets in an address. */
#define HALF	   8 /* the interface identifier */
#define IDENTITY   12

#define HAS_VNI	   0x0800
#define HAS_POLICY 0x8000

static __always_inline __u16 get(struct __sk_buff *skb, int at)
{
	__be16 v = 0;

	bpf_skb_load_bytes(skb, at, &v, sizeof(v));
	return bpf_ntohs(v);
}

/* is_left reports whether a device still has to fill in the tunnel's UDP checksum: until then the field holds only the
 * sum of the pseudo header. A tunnel around a packet whose own checksum is pending already has its own, because the
 * kernel can compute it in advance (LCO). Packets to be segmented have none yet. */
static __always_inline bool is_left(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return skb->gso_size || (BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_PARTIAL &&
				 kernel->head + kernel->csum_start == kernel->data + UDP_HEADER);
}

static __always_inline void set(struct __sk_buff *skb, int at, __u16 value)
{
	__be16 v = bpf_htons(value);

	bpf_skb_store_bytes(skb, at, &v, sizeof(v), BPF_F_RECOMPUTE_CSUM);
}

/* A zero checksum means none, and stays. The kernel's helper treats every pending checksum as this one, so a complete
 * one is updated here (RFC 1624). */
static __always_inline void put(struct __sk_buff *skb, int at, __u16 is, __u16 value, __u64 pseudo)
{
	__u32 sum = get(skb, UDP_SUM);

	if (is_left(skb)) {
		bpf_l4_csum_replace(skb, UDP_SUM, bpf_htons(is), bpf_htons(value),
				    sizeof(is) | BPF_F_MARK_MANGLED_0 | pseudo);
	} else if (sum) {
		sum = (sum ^ 0xffff) + (is ^ 0xffff) + value;
		sum = (sum & 0xffff) + (sum >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		set(skb, UDP_SUM, sum == 0xffff ? sum : sum ^ 0xffff);
	}
	set(skb, at, value);
}

static __always_inline bool tunnels(struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IPV6) && get(skb, NEXT_HEADER) >> 8 == NEXTHDR_UDP &&
	       get(skb, UDP_PORT) == UDP_VXLAN;
}

/* Packets from Open vSwitch. */
SEC("tc")
int pil_policy_out(struct __sk_buff *skb)
{
	if (tunnels(skb)) {
		__u16 identity = get(skb, DESTINATION + IDENTITY), flags = get(skb, FLAGS);

		put(skb, DESTINATION + IDENTITY, identity, 0, BPF_F_PSEUDO_HDR);
		put(skb, POLICY, get(skb, POLICY), identity, 0);
		put(skb, FLAGS, flags, flags | HAS_POLICY, 0);
		skb->mark = tunnel_mark;
	}
	return TC_ACT_OK;
}

/* Packets to Open vSwitch. */
SEC("tc")
int pil_policy_in(struct __sk_buff *skb)
{
	if (tunnels(skb)) {
		__u16 flags = get(skb, FLAGS), policy = get(skb, POLICY), host = get(skb, SOURCE + IDENTITY);

		/* No VTEP has a value there. A packet that does, and one that a process of the node sends, must not
		 * look like a VTEP's. It gets a source that the switch does not know, and the switch drops it. */
		if (host || !is_known_tunnel(skb) || was_made_here(skb))
			put(skb, SOURCE + HALF, get(skb, SOURCE + HALF), 0xffff, BPF_F_PSEUDO_HDR);
		put(skb, SOURCE + IDENTITY, host, flags & HAS_POLICY ? policy : 0, BPF_F_PSEUDO_HDR);
		put(skb, POLICY, policy, 0, 0);
		put(skb, FLAGS, flags, flags & HAS_VNI, 0);
	}
	return TC_ACT_OK;
}

char _license[] SEC("license") = "Dual BSD/GPL";
