/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is to be done with a packet from one address to another, and the cache of such decisions: what
 * NETPILA §6.2 installs in the NIC after a first packet in software. */
#pragma once
#include "common/device.h"
#include "net/netpila/tables.h"

/* How the packet goes on. */
enum flow_egress {
	EGRESS_LOCAL = 1, /* into the namespace of a container here */
	EGRESS_UPLINK,	  /* out, to a next hop whose MAC is known */
	EGRESS_NEIGHBOUR, /* out, through the kernel's neighbour table */
	EGRESS_DEVICE,	  /* over a device pair of ours, between the node's stack and a container */
};

struct flow_key {
	struct addr src, dst; /* as the packet came */
	__u32 device;	      /* it came from: ifindex */
	__u32 generation;
	__u32 path; /* see path_of */
	__u32 zero;
};

struct flow {
	struct flow_key key;
	__u8 dmac[ETH_ALEN], smac[ETH_ALEN];
	__u8 egress;
	__u8 translate;	      /* 0: the addresses stay */
	__u16 mtu;	      /* longest packet that goes there, from the IPv6 header on; not for EGRESS_LOCAL */
	struct addr src, dst; /* as the packet goes; plaintext where it goes as it came */
	__u64 expires;	      /* jiffies; only EGRESS_UPLINK */
	__u32 checksum;	      /* difference of both addresses */
	__u32 ifindex;	      /* where it goes */
	__u32 policy_ep[2];   /* endpoints here whose tenant has policies: of the source and of the destination, or 0 */
	__u64 zero;
};
_Static_assert(sizeof(struct flow_key) == 48, "no padding in a key");
_Static_assert(sizeof(struct flow) == 128, "two lines of the data cache");

/* Both MACs at once: an Ethernet header begins with them, in this order. */
static __always_inline void set_macs(void *frame, const struct flow *f)
{
	const void *macs = f->dmac;

	*(__u64 *)frame = *(const __u64 *)macs;
	*(__u32 *)(frame + sizeof(__u64)) = *(const __u32 *)(macs + sizeof(__u64));
}

/* send_to has the packets go to a device of the node, or to a container. */
static __always_inline void send_to(struct flow *f, __u32 device)
{
	f->ifindex = device;
	mac_of(device, f->dmac);
	__builtin_memcpy(f->smac, gateway_mac, ETH_ALEN);
}

/* Direct-mapped, and a slot's whole key is compared: two busy flows on one slot cost speed, never
 * correctness. Each CPU has FLOW_SLOTS of its own, and programs run with softirqs off, so a slot is never seen
 * half-written. A per-CPU map would cost one more line of the data cache, where the slots of a CPU are listed; and
 * what can be mapped to user space begins at a page, so that slots do not straddle lines. Where memory is on several
 * sockets all slots lie on one, and a slot in use in the caches of the CPU that it is of. */
#define FLOW_SLOTS 4096

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow);
	__uint(max_entries, FLOW_SLOTS); /* times the CPUs, set at load */
} pil_flows SEC(".maps");

/* A next hop is believed for at most a second; then a packet asks the FIB again and goes through the
 * neighbour table, so that a dead or moved neighbour is noticed although no agent runs. Jiffies, because
 * reading them costs nothing where any clock costs 30 ns; a hundred are 0.1 to 1 s. */
#define NEXT_HOP_LIFE 100

/* Where several routers lead to a node, connections of two containers spread over them by flow label
 * (RFC 6438), as the kernel's own do: all packets of one take one path. A few paths, and not a label
 * each, because every path costs a slot and its own first packet. */
#define PATHS 8

static __always_inline __u32 path_of(const struct eth_ip6 *h)
{
	return h->flow[2] % PATHS;
}

static __always_inline struct flow *flow_slot(const struct flow_key *key)
{
	/* Ciphertexts are as good as random; plaintexts differ in few bits, hence the multiplications. */
	__u64 h = (key->dst.lo ^ key->src.hi) * 0x9e3779b97f4a7c15ULL;

	h = (h ^ key->src.lo ^ key->dst.hi ^ key->device ^ (__u64)key->path << 32) * 0xc2b2ae3d27d4eb4fULL;
	__u32 slot = bpf_get_smp_processor_id() * FLOW_SLOTS + (h >> 52);

	_Static_assert(FLOW_SLOTS == 1 << 12, "the slot is the top 12 bits");
	return bpf_map_lookup_elem(&pil_flows, &slot);
}

/* For measuring what the cache is worth: then nothing in it counts. */
CONSTANT bool no_flow_cache = false;

static __always_inline bool flow_matches(const struct flow *f, const struct flow_key *key)
{
	if (no_flow_cache)
		return false;
	return same_addr(&f->key.dst, &key->dst) && same_addr(&f->key.src, &key->src) && f->key.device == key->device &&
	       f->key.generation == key->generation && f->key.path == key->path && f->egress;
}
