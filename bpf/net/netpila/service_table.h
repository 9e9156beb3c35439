/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tables of services: one stable address of a tenant for many containers. The agent fills them with the services of the
 * tenants that this node hosts. Numbers of frontends, sets and backends are never reused: sessions have them. */
#pragma once
#include "common/address.h"
#include <bpf/bpf_helpers.h>

/* Addresses of services: prefix | number of the tenant (24 bits) | number of the service (64 bits). The initial values
 * match no address. */
CONSTANT __u64 service_prefix = -1, service_mask = 0;

static __always_inline bool in_services(const struct addr *a)
{
	return (a->hi & service_mask) == service_prefix;
}

/* services_number returns the number of the tenant whose service an address is. */
static __always_inline __u32 services_number(const struct addr *a)
{
	return bpf_be64_to_cpu(a->hi) & 0xffffff;
}

/* The source of a connection of a container to itself through a service: ::0 of the tenant's prefix. */
static __always_inline bool is_hairpin_alias(const struct addr *a)
{
	return !a->lo;
}

/* An address and a port. */
struct svc_end {
	struct addr address;
	__be16 port;
	__u8 zero[6];
};

/* A port of a service. */
struct svc_key {
	struct addr address;
	__be16 port;
	__u8 proto;
	__u8 zero[5];
};

struct svc {
	__u32 frontend; /* its number */
	__u32 set;	/* its backends are (set, 0) to (set, count - 1) */
	__u32 count;
	__u32 affinity; /* seconds for which a client keeps its backend; 0: none */
	__u32 exposed;	/* to hosts outside: the tenant's number for services; else 0 */
	__u32 zero;
};
_Static_assert(sizeof(struct svc_key) == 24 && sizeof(struct svc) == 24, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct svc_key);
	__type(value, struct svc);
	__uint(max_entries, 1); /* set at load */
} pil_svc_v1 SEC(".maps");

/* A frontend by its number: what answers get as their source. */
struct svc_frontend {
	struct svc_key key;
	__u64 flows;   /* new ones that got a backend */
	__u64 refused; /* packets without a backend */
};
_Static_assert(sizeof(struct svc_frontend) == 40, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct svc_frontend);
	__uint(max_entries, 1); /* set at load */
} pil_svcfronts_v1 SEC(".maps");

/* The members of a set. A changed set is a new one, so a program sees the old or the new one. */
struct svc_member {
	__u32 set, index;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct svc_member);
	__type(value, __u32);	/* number of the backend */
	__uint(max_entries, 1); /* set at load */
} pil_svcsets_v1 SEC(".maps");

/* A port of an endpoint of a service. */
struct svc_backend {
	struct addr plain, seen; /* its plaintext address, and the one that containers of the tenant see */
	__be16 port;
	__u8 draining; /* 1: it is in no set; its flows go on */
	__u8 zero;
	__u32 frontend;
};
_Static_assert(sizeof(struct svc_backend) == 40, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct svc_backend);
	__uint(max_entries, 1); /* set at load */
} pil_svcbacks_v1 SEC(".maps");

/* Plaintext addresses of backends. Packets from them may be answers that need the address of the service. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);	/* how many backends have it */
	__uint(max_entries, 1); /* set at load */
} pil_svcpeers_v1 SEC(".maps");

static __always_inline bool is_backend(const struct addr *plain)
{
	return bpf_map_lookup_elem(&pil_svcpeers_v1, plain);
}

/* Until when a client and a backend may have a session of a service that the packet path translates, by a hash of
 * protocol and both addresses as the client sees them. Answers are looked up only until then: connections whose socket
 * got its backend, and those to a backend itself, pay nothing. Pairs may share an entry. */
#define SERVICE_PAIRS 65536
#define PAIR_TICK     10 /* log2, in jiffies: reading another clock costs more than the rest */
/* As long as the longest timeout of a session (ct_timeout) where a second has 1,000 jiffies, longer elsewhere. */
#define PAIR_LIFE (1 << 13)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32); /* in 2^PAIR_TICK jiffies */
	__uint(max_entries, SERVICE_PAIRS);
} pil_svcpairs_v1 SEC(".maps");

static __always_inline __u32 *service_pair(const struct addr *client, const struct addr *backend, __u8 proto)
{
	__u64 h = (client->lo ^ backend->hi) * 0x9e3779b97f4a7c15ULL;
	__u32 slot;

	h = (h ^ client->hi ^ backend->lo ^ proto) * 0xc2b2ae3d27d4eb4fULL;
	slot = h >> 48;
	_Static_assert(SERVICE_PAIRS == 1 << 16, "the slot is the top 16 bits");
	return bpf_map_lookup_elem(&pil_svcpairs_v1, &slot);
}

/* service_pair_lives reports whether packets of a backend to a client may be answers. */
static __always_inline bool service_pair_lives(const struct addr *client, const struct addr *backend, __u8 proto)
{
	__u32 *until = service_pair(client, backend, proto);

	return until && *until > (__u32)(bpf_jiffies64() >> PAIR_TICK);
}

/* keep_service_pair notes that both have a session. Programs of other CPUs may write the same. */
static __always_inline void keep_service_pair(const struct addr *client, const struct addr *backend, __u8 proto)
{
	__u32 *until = service_pair(client, backend, proto), now = bpf_jiffies64() >> PAIR_TICK;

	if (until && *until != now + PAIR_LIFE + 1)
		*until = now + PAIR_LIFE + 1;
}

/* Which backend a client has last got, for services with affinity. */
struct svc_client {
	struct addr client; /* as it sees itself */
	__u32 frontend;
	__u32 zero;
};

struct svc_affinity {
	__u64 until; /* CLOCK_MONOTONIC, ns */
	__u32 backend;
	__u32 zero;
};
_Static_assert(sizeof(struct svc_client) == 24 && sizeof(struct svc_affinity) == 16, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct svc_client);
	__type(value, struct svc_affinity);
	__uint(max_entries, 65536);
} pil_svcclients_v1 SEC(".maps");

/* Datagrams that processes of the node send to services by sockets that are not connected (service_host.h): a socket
 * keeps its backend, and its process sees answers of the service. Each flow has an entry by the address that
 * the process has asked for, with that of the backend, and one the other way round. */
struct datagram_key {
	__u64 socket; /* cookie */
	struct svc_end peer;
};

struct datagram_peer {
	struct svc_end other;
	__u32 backend; /* number */
	__u32 zero;
};
_Static_assert(sizeof(struct datagram_key) == 32 && sizeof(struct datagram_peer) == 32, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct datagram_key);
	__type(value, struct datagram_peer);
	__uint(max_entries, 16384);
} pil_svcudp_v1 SEC(".maps");

/* has_sent_datagrams reports whether a socket has sent datagrams to a backend. */
static __always_inline bool has_sent_datagrams(struct bpf_sock *socket, const struct addr *backend, __be16 port)
{
	struct udp6_sock *kernel = bpf_skc_to_udp6_sock(socket);
	struct datagram_key key = {.peer = {.address = *backend, .port = port}};

	if (!kernel)
		return false;
	key.socket = kernel->udp.inet.sk.__sk_common.skc_cookie.counter;
	return bpf_map_lookup_elem(&pil_svcudp_v1, &key);
}

/* The programs of packets to services and of answers. */
enum service_program {
	SERVICE_OUT = 0,
	SERVICE_IN = 1,
	EXPOSED_IN = 2,	    /* from a client of an exposed port */
	EXPOSED_TUNNEL = 3, /* between the ingress node and the backend's */
	EXPOSED_OUT = 4,    /* answers of a backend's container */
	SERVICE_PROGRAMS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, SERVICE_PROGRAMS);
} pil_services_v1 SEC(".maps");
