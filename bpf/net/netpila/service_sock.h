/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Connections to services over TCP get their backend when a socket connects: its packets then go to the backend as if
 * the process had asked for it, at no cost a packet. The programs are attached to the cgroup of the node's processes.
 * They know a container by the cookie of its network namespace. What they do not see takes the packet path
 * (service_stages.h): sockets of other namespaces, and all that is not TCP. */
#pragma once
#include "net/netpila/service.h"

#define SOCK_STREAM	 1
#define ECONNREFUSED	 111
#define SOCK_ADDR_ALLOW	 1
#define SOCK_ADDR_REFUSE 0

/* A container as a client, by the cookie of its network namespace. */
struct svc_netns {
	struct addr address; /* as the container sees it */
	__u32 services;	     /* number of its tenant's prefix for services */
	__u32 endpoint;
};
_Static_assert(sizeof(struct svc_netns) == 24, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct svc_netns);
	__uint(max_entries, 1); /* set at load */
} pil_svcnetns_v1 SEC(".maps");

/* What a socket is connected to, for getpeername: its process sees the address that it has asked for. */
struct svc_socket {
	struct svc_key service;
	struct addr backend;
	__be16 port;
	__u8 zero[6];
};
_Static_assert(sizeof(struct svc_socket) == 48, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct svc_socket);
} pil_svcsockets_v1 SEC(".maps");

static __always_inline struct addr sock_address(const struct bpf_sock_addr *ctx)
{
	return (struct addr){.hi = (__u64)ctx->user_ip6[1] << 32 | ctx->user_ip6[0],
			     .lo = (__u64)ctx->user_ip6[3] << 32 | ctx->user_ip6[2]};
}

static __always_inline void set_sock_address(struct bpf_sock_addr *ctx, const struct addr *a, __be16 port)
{
	ctx->user_ip6[0] = a->hi;
	ctx->user_ip6[1] = a->hi >> 32;
	ctx->user_ip6[2] = a->lo;
	ctx->user_ip6[3] = a->lo >> 32;
	ctx->user_port = port;
}

/* service_connect replaces the destination of a TCP socket of a container that connects to a service of its tenant. */
static __always_inline int service_connect(struct bpf_sock_addr *ctx)
{
	struct svc_socket *kept, now = {};
	struct svc_netns *client;
	struct svc_backend *b;
	struct svc s = {};
	__u64 cookie;
	__u32 number;

	if (ctx->type != SOCK_STREAM || ctx->protocol != NEXTHDR_TCP || !ctx->sk)
		return SOCK_ADDR_ALLOW;
	now.service.address = sock_address(ctx);
	if (!in_services(&now.service.address))
		return SOCK_ADDR_ALLOW;
	now.service.port = ctx->user_port;
	now.service.proto = NEXTHDR_TCP;
	cookie = bpf_get_netns_cookie(ctx);
	client = bpf_map_lookup_elem(&pil_svcnetns_v1, &cookie);
	if (!client || !client->services || services_number(&now.service.address) != client->services)
		return SOCK_ADDR_ALLOW; /* the packet path decides, and refuses those of other tenants */
	number = svc_choose(&now.service, &client->address, &s);
	if (!s.frontend)
		return SOCK_ADDR_ALLOW;
	b = svc_backend_of(number);
	if (!b) {
		svc_count(s.frontend, true);
		bpf_set_retval(-ECONNREFUSED);
		return SOCK_ADDR_REFUSE;
	}
	now.backend = b->seen;
	now.port = b->port;
	kept = bpf_sk_storage_get(&pil_svcsockets_v1, ctx->sk, &now, BPF_SK_STORAGE_GET_F_CREATE);
	if (!kept)
		return SOCK_ADDR_ALLOW; /* no memory: the packet path does it */
	*kept = now;
	svc_count(s.frontend, false);
	if (s.affinity)
		svc_keep_affinity(&s, &client->address, number);
	set_sock_address(ctx, &now.backend, now.port);
	return SOCK_ADDR_ALLOW;
}

/* service_peer gives the name of a socket's peer the address of the service. */
static __always_inline int service_peer(struct bpf_sock_addr *ctx)
{
	struct svc_socket *kept;
	struct addr peer;

	if (ctx->type != SOCK_STREAM || !ctx->sk)
		return SOCK_ADDR_ALLOW;
	kept = bpf_sk_storage_get(&pil_svcsockets_v1, ctx->sk, NULL, 0);
	if (!kept)
		return SOCK_ADDR_ALLOW;
	peer = sock_address(ctx);
	if (same_addr(&peer, &kept->backend) &&
	    (__be16)ctx->user_port == kept->port) /* it may have connected elsewhere */
		set_sock_address(ctx, &kept->service.address, kept->service.port);
	return SOCK_ADDR_ALLOW;
}
