/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Processes of the node as clients of services: of those of all tenants that this node hosts, at their own addresses,
 * at exposed ones, and at node ports, also of ::1. Their packets meet no program that translates, so each socket
 * gets its backend by the programs of service_sock.h. The node's stack reaches the containers of this node, and those
 * on other nodes whose tenant reaches this node. */
#pragma once
#include "net/netpila/access.h"
#include "net/netpila/exposed_nat.h"

enum sock_choice {
	NO_SERVICE, /* the address stays */
	NO_BACKEND, /* the call is refused */
	CHOSEN,
};

static __always_inline bool host_reaches(const struct svc_backend *b)
{
	return b->plain.hi == own_node || may_reach_node(tenant_id(&b->plain), own_node);
}

/* A search for a backend of a service that the node reaches. start + i does not overflow. */
#define MAX_START (1U << 31)
/* Most tries of a search: with one such backend of 163 in a Maglev table, it misses this one with probability e^-25. */
#define MAX_TRIES 4096

struct host_search {
	struct svc service;
	__u32 start;
	__u32 found;	/* number of the backend */
	__u32 replaced; /* 1: the agent has replaced the set meanwhile */
};

static long host_try(__u32 i, struct host_search *s)
{
	struct svc_member at = {.set = s->service.set};
	__u32 number = 0, *member;
	struct svc_backend *b;

	if (i >= s->service.count)
		return 1;
	if (s->service.exposed) {
		number = maglev_backend(&s->service, s->start + i);
	} else {
		at.index = (s->start + i) % s->service.count;
		member = bpf_map_lookup_elem(&pil_svcsets_v1, &at);
		if (member)
			number = *member;
	}
	b = svc_backend_of(number);
	if (!b) {
		s->replaced = 1;
		return 1;
	}
	if (!host_reaches(b))
		return 0;
	s->found = number;
	return 1;
}

/* host_last sets what a search has found to the backend that the node has last got, by affinity. */
static __always_inline void host_last(struct host_search *s, const struct addr *node)
{
	__u32 last = svc_by_affinity(&s->service, node);
	struct svc_backend *b = svc_backend_of(last);

	if (b && host_reaches(b))
		s->found = last;
}

/* host_search_backend returns the number of a backend for a new flow, or 0. */
static __noinline __u32 host_search_backend(const struct svc_key *key)
{
	struct addr node = node_address();
	struct host_search search;
	struct svc *found;

	if (!key)
		return 0;
	for (int i = 0; i < 2; i++) {
		found = bpf_map_lookup_elem(&pil_svc_v1, key);
		if (!found)
			return 0;
		search = (struct host_search){.service = *found, .start = bpf_get_prandom_u32() % MAX_START};
		if (search.service.affinity)
			host_last(&search, &node);
		if (!search.found)
			bpf_loop(MAX_TRIES, host_try, &search, 0);
		if (!search.replaced)
			break;
	}
	if (search.found && search.service.affinity)
		svc_keep_affinity(&search.service, &node, search.found);
	return search.found;
}

/* The range of node ports of services, as of package service. */
#define FIRST_NODE_PORT 30000
#define LAST_NODE_PORT	32767

static __always_inline bool is_node_port(__be16 port)
{
	__u16 number = bpf_ntohs(port);

	return number >= FIRST_NODE_PORT && number <= LAST_NODE_PORT;
}

/* host_choose chooses a backend for a process of the node. number is that of the backend which the flow has, or 0; the
 * flow keeps it as long as there is one. */
static __noinline enum sock_choice host_choose(const struct svc_key *asked, __u32 *number, struct svc_end *to)
{
	struct svc_backend *b = NULL;
	struct svc *found;
	struct svc_key key;

	if (!asked || !number || !to)
		return NO_SERVICE;
	key = *asked;
	if (!key.address.hi && key.address.lo == bpf_cpu_to_be64(1)) { /* ::1 */
		if (!is_node_port(key.port))
			return NO_SERVICE; /* no host port of a container takes that of a process */
		key.address = node_address();
	}
	found = bpf_map_lookup_elem(&pil_svc_v1, &key);
	if (!found)
		return in_services(&key.address) ? NO_BACKEND : NO_SERVICE; /* only there, all ports are of services */
	if (*number)
		b = svc_backend_of(*number);
	if (!b || !host_reaches(b)) {
		*number = host_search_backend(&key);
		b = svc_backend_of(*number);
		svc_count(found->frontend, !b);
		if (!b)
			return NO_BACKEND;
	}
	to->address = b->plain.hi == own_node ? b->seen : b->plain;
	to->port = b->port;
	return CHOSEN;
}

/* host_keep_datagrams makes both entries of a flow of datagrams, or changes them. */
static __noinline void host_keep_datagrams(const struct datagram_key *key, const struct svc_end *backend, __u32 number)
{
	struct datagram_key back;
	struct datagram_peer is = {.backend = number}, *has;

	if (!key || !backend)
		return;
	is.other = *backend;
	has = bpf_map_lookup_elem(&pil_svcudp_v1, key);
	if (!has || has->backend != number)
		bpf_map_update_elem(&pil_svcudp_v1, key, &is, BPF_ANY);
	back.socket = key->socket;
	back.peer = *backend;
	is.other = key->peer;
	has = bpf_map_lookup_elem(&pil_svcudp_v1, &back);
	if (!has || !same_addr(&has->other.address, &is.other.address) || has->other.port != is.other.port)
		bpf_map_update_elem(&pil_svcudp_v1, &back, &is, BPF_ANY);
}
