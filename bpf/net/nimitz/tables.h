/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tables of network nimitz that the agent fills: one entry for each entry of NIMITZ's pipeline (§3.1, fig. 5). Run in
 * internal/network/nimitz/pipeline defines what each stage does. A changed layout gets a new map name. */
#pragma once
#include "common/packet.h"
#include <bpf/bpf_helpers.h>

#define VTEP_HOST    bpf_cpu_to_be64(2) /* low half of each node's tunnel address */
#define GATEWAY_VNI  0xff		/* of packets from the gateway */
#define GBP_IDENTITY 0xffff
#define FIRST_DEVICE 0x10000 /* ports below are numbers of endpoints */

enum nimitz_port {
	PORT_NONE = 0,
	PORT_VXLAN = FIRST_DEVICE,
	PORT_GATEWAY,
};

/* IPv4 addresses are written as IPv4-mapped IPv6 (RFC 4291 §2.5.5.2). The scope of a key separates them: IP version in
 * the high byte, then the VNI. No packet of one version finds an entry of the other. */
enum family {
	FAMILY_4 = 4,
	FAMILY_6 = 6
};

static __always_inline __be32 scope_of(enum family family, __u32 vni)
{
	return bpf_htonl((__u32)family << 24 | vni);
}

/* Decap: nodes that may send tunnel packets, by prefix of their tunnel addresses. */
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

/* Register: senders by port and source. */
struct sender_key {
	struct addr source;
	__u32 port;
	__be32 scope; /* only the IP version */
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

/* Register: senders in other regions, by Edge Switch, VNI there, and source prefix. */
struct remote_sender_key {
	__u32 bits;   /* prefix length, fields before the source included */
	__be32 scope; /* IP version and the remote VNI */
	__u64 edge;   /* the /64 */
	struct addr source;
} __attribute__((packed));
_Static_assert(sizeof(struct remote_sender_key) == 32, "no padding in a key");

struct remote_sender {
	__u32 bits;
	__u32 vni; /* the local VNI */
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct remote_sender_key);
	__type(value, struct remote_sender);
	__uint(max_entries, 1); /* set at load */
} nim_foreign_v1 SEC(".maps");

/* NAT: prefixes that are outside, and both directions of a translation. */
struct scoped_prefix {
	__u32 bits; /* prefix length, scope included */
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

/* Forwarding: the longest prefix in the packet's VNI, then in scope 0. Each value begins with its own prefix length,
 * because a lookup of an exact prefix can return a shorter one. */
struct route {
	__u32 bits;
	__u32 port;
	__u32 ifindex;	  /* if the port is a container's; if it is VXLAN, see offload_of and wire_vni */
	__u32 outside;	  /* 1: the port is VXLAN and no container of the region is there */
	struct addr vtep; /* if the port is VXLAN; see mac_to and vtep4_of */
};
_Static_assert(sizeof(struct route) == 32, "no implicit padding");

/* In ifindex of a route to a node, which older builds ignore: packets from other nodes go there too, because the
 * container has moved there from here. */
#define ROUTE_RELAYS 0x80000000

/* offload_of returns the offload of the node to which a route leads, or 0. */
static __always_inline __u32 offload_of(const struct route *r)
{
	return r->ifindex & ~ROUTE_RELAYS;
}

/* mac_word returns a MAC, and two zeros behind it, as one word. */
static __always_inline __u64 mac_word(const __u8 *mac)
{
	__u64 word = 0;

	__builtin_memcpy(&word, mac, ETH_ALEN);
	return word;
}

/* own_vtep4 is this node's tunnel address if the tunnels are over IPv4, in the programs of network evpn alone. Then a
 * route to another VTEP has the MAC that the inner frame gets, and the VNI on the wire if that is not the packet's own:
 * the frame then goes to a host in the tenant's Ethernet segment, and not to a router. */
#ifdef TUNNELS_OVER_IPV4
#define over_ipv4 true
CONSTANT __be32 own_vtep4 = 0;
#else
#define over_ipv4 false
#define own_vtep4 ((__be32)0)
#endif

static __always_inline __be32 vtep4_of(const struct route *r)
{
	return ip4_unmapped(&r->vtep);
}

/* wire_vni returns the VNI of a packet in the tunnel. */
static __always_inline __u32 wire_vni(const struct route *r, __u32 vni)
{
	return own_vtep4 && r->ifindex ? r->ifindex : vni;
}

/* mac_to returns the MAC that a packet gets. If the port is a container's, vtep begins with its MAC, or with zeros if
 * that is container_mac. */
static __always_inline __u64 mac_to(const struct route *r)
{
	return (own_vtep4 || r->port < FIRST_DEVICE) && r->vtep.hi ? r->vtep.hi : mac_word(container_mac);
}

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct scoped_prefix);
	__type(value, struct route);
	__uint(max_entries, 1); /* set at load */
} nim_forward_v1 SEC(".maps");

/* VTEPs of other speakers to which a tenant's frames are replicated (network evpn), by the tenant's VNI. */
#define MAX_REPLICAS 64

struct replication {
	__u32 count;
	__be32 vteps[MAX_REPLICAS];
};
_Static_assert(sizeof(struct replication) == 260, "no implicit padding");
const struct replication *unused_replication __attribute__((unused)); /* keeps the type in BTF */

/* Devices of the VXLAN and gateway ports and of the gateway's underlay; 0: none. */
struct nimitz_node {
	__u32 vxlan;
	__u32 gateway;
	__u32 backends; /* 1: this node is a backend. If it is 0 by mistake, its rules deny all (lookup_backend) */
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
