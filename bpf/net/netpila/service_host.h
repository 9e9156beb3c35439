/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Processes of the node as clients of services: of those of all tenants that this node hosts, at their own addresses,
 * at exposed ones, and at node ports, also of ::1. Their packets meet no program that translates, so each socket
 * gets its backend by the programs of service_sock.h. The node's stack reaches the containers of this node, and those
 * on other nodes whose tenant reaches this node. */
#pragma once
#include "net/netpila/access.h"
#include "net/netpila/exposed_nat.h"
#include "net/netpila/service_datagrams.h"

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

	if (!s->service.count)
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

/* host_search_backend returns the number of a backend for a new flow, or 0. */
static __noinline __u32 host_search_backend(const struct svc_key *key, struct svc *s)
{
	struct addr node = node_address();
	struct host_search search;
	struct svc_backend *b;
	struct svc *found;
	__u32 last;

	if (!key || !s)
		return 0;
	for (int i = 0; i < 2; i++) {
		found = bpf_map_lookup_elem(&pil_svc_v1, key);
		if (!found)
			return 0;
		*s = *found;
		if (s->affinity) {
			last = svc_by_affinity(s, &node);
			b = svc_backend_of(last);
			if (b && host_reaches(b))
				return last;
		}
		search = (struct host_search){.service = *s, .start = bpf_get_prandom_u32() % MAX_START};
		bpf_loop(s->count, host_try, &search, 0);
		if (!search.replaced)
			break;
	}
	return search.found;
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

/* host_choose chooses a backend for a process of the node. The flow of datagrams of a socket, whose key has its cookie,
 * keeps its backend as long as there is one. */
static __noinline enum sock_choice host_choose(const struct svc_key *asked, struct datagram_key *flow,
					       struct svc_end *to)
{
	struct datagram_peer *has = NULL;
	struct addr node = node_address();
	struct svc_backend *b = NULL;
	struct svc *found, s = {};
	__u32 kind, number = 0;
	struct svc_key key;

	if (!asked || !to)
		return NO_SERVICE;
	key = *asked;
	if (!key.address.hi && key.address.lo == bpf_cpu_to_be64(1)) /* ::1 */
		key.address = node;
	kind = in_services(&key.address) ? EXPOSED_ADDRESS : exposed_kind_of(&key.address);
	if (!kind)
		return NO_SERVICE;
	found = bpf_map_lookup_elem(&pil_svc_v1, &key);
	if (!found)
		return kind == EXPOSED_NODE ? NO_SERVICE : NO_BACKEND; /* a node's other ports are its processes' */
	if (flow) {
		flow->peer.address = asked->address;
		flow->peer.port = asked->port;
		has = bpf_map_lookup_elem(&pil_svcudp_v1, flow);
	}
	if (has) {
		number = has->backend;
		b = svc_backend_of(number);
	}
	if (!b || !host_reaches(b)) {
		number = host_search_backend(&key, &s);
		b = svc_backend_of(number);
		svc_count(found->frontend, !b);
		if (!b)
			return NO_BACKEND;
		if (s.affinity)
			svc_keep_affinity(&s, &node, number);
	}
	to->address = b->plain.hi == own_node ? b->seen : b->plain;
	to->port = b->port;
	if (flow)
		host_keep_datagrams(flow, to, number);
	return CHOSEN;
}
