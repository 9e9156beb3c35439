/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the agent tells the second network: the tables of NIMITZ's pipeline (§3.1, fig 5), an entry each for an entry
 * of it. A stage is what internal/network/nimitz/pipeline's Run says. A changed layout gets a new name. */
#pragma once
#include "common/address.h"
#include <bpf/bpf_helpers.h>

#define VTEP_HOST    bpf_cpu_to_be64(2) /* low half of each node's tunnel address, beside the node's own */
#define GATEWAY_VNI  0xff		/* of what comes from the gateway */
#define GBP_IDENTITY 0xffff
#define FIRST_DEVICE 0x10000 /* ports below are endpoints */

enum nimitz_port {
	PORT_NONE = 0,
	PORT_VXLAN = FIRST_DEVICE,
	PORT_GATEWAY,
};

/* Addresses of IPv4 are written as of IPv6 (RFC 4291 §2.5.5.2); they are told by what says whose an address is: a
 * family in the high byte, and a VNI. No packet of the one finds an entry of the other. */
enum family {
	FAMILY_4 = 4,
	FAMILY_6 = 6
};

static __always_inline __be32 scope_of(enum family family, __u32 vni)
{
	return bpf_htonl((__u32)family << 24 | vni);
}

/* Decap: who encapsulates, by prefixes of their tunnel addresses. */
struct peer_key {
	__u32 bits;
	struct addr node;
} __attribute__((packed));

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct peer_key);
	__type(value, __u32);
	__uint(max_entries, 1); /* set at load */
} nim_peers_v1 SEC(".maps");

/* Register: who may send, by port and source. */
struct sender_key {
	struct addr source;
	__u32 port;
	__be32 scope; /* the family alone */
};

struct sender {
	__u32 vni;
	__u32 identity;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sender_key);
	__type(value, struct sender);
	__uint(max_entries, 1); /* set at load */
} nim_senders_v1 SEC(".maps");

/* And who sends from another region: by its Edge Switch, the VNI there and the source. */
struct remote_sender_key {
	__u32 bits;   /* with those before the source */
	__be32 scope; /* a family and their VNI */
	__u64 edge;   /* the /64 */
	struct addr source;
} __attribute__((packed));
_Static_assert(sizeof(struct remote_sender_key) == 32, "no padding in a key");

struct remote_sender {
	__u32 bits;
	__u32 vni; /* here */
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct remote_sender_key);
	__type(value, struct remote_sender);
	__uint(max_entries, 1); /* set at load */
} nim_foreign_v1 SEC(".maps");

/* NAT: what is outside, and both ways of a translation. */
struct scoped_prefix {
	__u32 bits; /* with those of the scope */
	__be32 scope;
	struct addr address;
} __attribute__((packed));
_Static_assert(sizeof(struct scoped_prefix) == 24, "no padding in a key");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct scoped_prefix);
	__type(value, __u32);
	__uint(max_entries, 1); /* set at load */
} nim_outside_v1 SEC(".maps");

struct scoped_addr {
	struct addr address;
	__be32 scope;
	__u32 zero;
};

struct translation {
	struct addr address;
	__u32 vni;
	__u32 zero;
};
_Static_assert(sizeof(struct scoped_addr) == 24 && sizeof(struct translation) == 24, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct scoped_addr);
	__type(value, struct translation);
	__uint(max_entries, 1); /* set at load */
} nim_dnat_v1 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct scoped_addr);
	__type(value, struct translation);
	__uint(max_entries, 1); /* set at load */
} nim_snat_v1 SEC(".maps");

/* Forwarding: the longest prefix in the packet's VNI, then in any. What a prefix leads to begins with the prefix's own
 * length, here as above: who asks for a longer one is told a shorter one's. */
struct route {
	__u32 bits;
	__u32 port;
	__u32 ifindex;	  /* where it is a container's */
	__u32 outside;	  /* 1: where it is VXLAN, that no container of the region is there */
	struct addr vtep; /* where it is VXLAN */
};
_Static_assert(sizeof(struct route) == 32, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct scoped_prefix);
	__type(value, struct route);
	__uint(max_entries, 1); /* set at load */
} nim_forward_v1 SEC(".maps");

/* The devices of the two other ports, and the gateway's other one, 0 where there is none. */
struct nimitz_node {
	__u32 vxlan;
	__u32 gateway;
	__u32 zero;
	__u32 underlay; /* between the gateway and the fabric */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nimitz_node);
	__uint(max_entries, 1);
} nim_node_v1 SEC(".maps");

static __always_inline bool is_peer(const struct addr *vtep)
{
	struct peer_key key = {.bits = 128, .node = *vtep};

	return bpf_map_lookup_elem(&nim_peers_v1, &key);
}
