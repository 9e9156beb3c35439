/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The flow cache: what to do with packets of one (source, destination, device, path). Hooks look it up first; their
 * slow paths fill it. It is what NETPILA §6.2 installs in the NIC after a first packet in software. */
#pragma once
#include "common/device.h"
#include "net/netpila/tables.h"

/* Where the packet goes next. */
enum flow_egress {
	EGRESS_LOCAL = 1, /* into the namespace of a container of this node */
	EGRESS_UPLINK,	  /* by the uplink, to a next hop whose MAC is known */
	EGRESS_NEIGHBOUR, /* by the uplink, through the kernel's neighbour table */
	EGRESS_DEVICE,	  /* over our device pair between the node's stack and a container */
};

/* What happens to the addresses of a packet; 0: they stay. */
#define TRANSLATE  1 /* those of the flow are written */
#define MAY_ANSWER 2 /* then: the packet is from a backend of a service, and may need the address of the service */

struct flow_key {
	struct addr src, dst; /* as received */
	__u32 device;	      /* ifindex or number of the device that the packet came from */
	__u32 generation;
	__u32 path; /* see path_of */
	__u32 zero;
};

struct flow {
	struct flow_key key;
	__u8 dmac[ETH_ALEN], smac[ETH_ALEN];
	__u8 egress;
	__u8 translate;	      /* TRANSLATE, MAY_ANSWER */
	__u16 mtu;	      /* longest IPv6 packet that fits; not for EGRESS_LOCAL */
	struct addr src, dst; /* as sent; the plaintext addresses if they stay */
	__u64 expires;	      /* jiffies; of EGRESS_UPLINK, and of the slot of a flow from a host outside */
	__u32 checksum;	      /* checksum difference of both addresses */
	__u32 ifindex;	      /* of the device that sends it */
	__u32 policy_ep[2];   /* local endpoints with policies: of the source (TX) and of the destination (RX), or 0 */
	/* network ila: the apps of both ends, the source's in the upper half of 32 bits; of a flow from or to a host
	 * outside of the cluster: the low half of the container's plaintext address, or the owner of a next hop */
	__u64 extra;
};
_Static_assert(sizeof(struct flow_key) == 48, "no padding in a key");
_Static_assert(sizeof(struct flow) == 128, "two lines of the data cache");

/* Writes both MACs at once: an Ethernet header begins with destination and source, in this order. */
static __always_inline void set_macs(void *frame, const struct flow *f)
{
	const void *macs = f->dmac;

	*(__u64 *)frame = *(const __u64 *)macs;
	*(__u32 *)(frame + sizeof(__u64)) = *(const __u32 *)(macs + sizeof(__u64));
}

/* send_to sets the device and the MACs of a flow to a container. */
static __always_inline void send_to(struct flow *f, __u32 device)
{
	f->ifindex = device;
	mac_of(device, f->dmac);
	__builtin_memcpy(f->smac, gateway_mac, ETH_ALEN);
}

/* Direct-mapped; the whole key is compared. Two busy flows on one slot cost speed, never correctness. Each CPU has
 * FLOW_SLOTS of its own and programs run with softirqs off, so no program sees a slot half-written. A per-CPU map would
 * cost one more cache line per lookup. A mappable array begins at a page, so no slot straddles cache lines. On a
 * machine with several NUMA nodes all slots are in the memory of one, and those in use in the caches of their CPU. */
#define FLOW_SLOTS 4096

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow);
	__uint(max_entries, FLOW_SLOTS); /* times the number of CPUs, set at load */
} pil_flows SEC(".maps");

/* A next hop is valid for at most a second. Then a packet asks the FIB again and goes through the neighbour table, so
 * that a dead or moved neighbour is noticed without an agent. In jiffies, because reading a clock costs 30 ns: 100 are
 * 0.1 to 1 s. */
#define NEXT_HOP_LIFE 100

/* With several routers towards a node, connections between two containers spread over them by flow label (RFC 6438), as
 * the kernel's do. All packets of a connection take one path. A few paths are enough: each costs a slot and a first
 * packet on the slow path. */
#define PATHS 8

static __always_inline __u32 path_of(const struct eth_ip6 *h)
{
	return h->flow[2] % PATHS;
}

/* read_from_container reads a container's packet and its key. It returns the reason to drop a packet that is invalid in
 * every network. */
static __always_inline int read_from_container(struct __sk_buff *skb, struct flow_key *key, struct packet *p)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	int why;

	if (!h)
		return REASON_MALFORMED;
	/* skb->protocol is what the sending socket claims; the header counts. */
	if (h->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return REASON_NOT_IP6;
	key->src = *src_of(h);
	key->dst = *dst_of(h);
	key->path = path_of(h);
	why = parse(skb, h, p);
	if (!why && *(__u8 *)&key->dst == 0xff)
		why = REASON_MULTICAST;
	return why;
}

/* flow_hash returns a hash whose upper bits are good. */
static __always_inline __u64 flow_hash(const struct flow_key *key)
{
	/* Ciphertexts are as good as random. Plaintexts differ in few bits, hence the multiplications. */
	__u64 h = (key->dst.lo ^ key->src.hi) * 0x9e3779b97f4a7c15ULL;

	return (h ^ key->src.lo ^ key->dst.hi ^ key->device ^ (__u64)key->path << 32) * 0xc2b2ae3d27d4eb4fULL;
}

static __always_inline struct flow *flow_slot(const struct flow_key *key)
{
	__u32 slot = bpf_get_smp_processor_id() * FLOW_SLOTS + (flow_hash(key) >> 52);

	_Static_assert(FLOW_SLOTS == 1 << 12, "the slot is the top 12 bits");
	return bpf_map_lookup_elem(&pil_flows, &slot);
}

/* For benchmarks without the cache: no slot matches. */
CONSTANT bool no_flow_cache = false;

static __always_inline bool flow_matches(const struct flow *f, const struct flow_key *key)
{
	if (no_flow_cache)
		return false;
	return same_addr(&f->key.dst, &key->dst) && same_addr(&f->key.src, &key->src) && f->key.device == key->device &&
	       f->key.generation == key->generation && f->key.path == key->path && f->egress;
}
