/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sockets get the backend of a service when they connect: their packets then go to the backend as if the process had
 * asked for it, at no cost a packet. The programs are attached to the cgroup of the node's processes. They know the
 * client by the cookie of its network namespace: a container, with TCP, or the node (service_host.h). What they do not
 * see of a container takes the packet path (service_stages.h): sockets of other namespaces, and all that is not TCP. */
#pragma once
#include "net/netpila/service_host.h"

#define SOCK_ADDR_ALLOW	 1
#define SOCK_ADDR_REFUSE 0
#define ENOMEM		 12
#define ECONNREFUSED	 111

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

/* What a socket is connected to: its process sees the address that it has asked for. */
struct svc_socket {
	struct svc_key service;
	struct svc_end backend;
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

static __always_inline struct svc_key sock_key(const struct bpf_sock_addr *ctx)
{
	return (struct svc_key){.address = sock_address(ctx), .port = ctx->user_port, .proto = ctx->protocol};
}

static __always_inline int refuse(int error)
{
	bpf_set_retval(-error);
	return SOCK_ADDR_REFUSE;
}

/* container_choose chooses a backend for a container that connects to a service of its tenant by TCP. */
static __always_inline enum sock_choice container_choose(__u64 cookie, const struct svc_key *asked, struct svc_end *to)
{
	struct svc_netns *client;
	struct svc_backend *b;
	struct svc s = {};
	__u32 number;

	if (asked->proto != NEXTHDR_TCP || !in_services(&asked->address))
		return NO_SERVICE;
	client = bpf_map_lookup_elem(&pil_svcnetns_v1, &cookie);
	if (!client || !client->services || services_number(&asked->address) != client->services)
		return NO_SERVICE; /* the packet path decides, and refuses those of other tenants */
	number = svc_choose(asked, &client->address, &s);
	if (!s.frontend)
		return NO_SERVICE;
	b = svc_backend_of(number);
	svc_count(s.frontend, !b);
	if (!b)
		return NO_BACKEND;
	if (s.affinity)
		svc_keep_affinity(&s, &client->address, number);
	to->address = b->seen;
	to->port = b->port;
	return CHOSEN;
}

/* service_connect replaces the destination of a socket that connects to a service. */
static __always_inline int service_connect(struct bpf_sock_addr *ctx)
{
	struct svc_socket *kept, now = {};
	enum sock_choice choice;
	__u32 number = 0;
	__u64 cookie;
	bool host;

	if ((ctx->protocol != NEXTHDR_TCP && ctx->protocol != NEXTHDR_UDP) || !ctx->sk)
		return SOCK_ADDR_ALLOW;
	now.service = sock_key(ctx);
	cookie = bpf_get_netns_cookie(ctx);
	host = cookie == node_cookie;
	choice = host ? host_choose(&now.service, &number, &now.backend)
		      : container_choose(cookie, &now.service, &now.backend);
	if (choice != CHOSEN)
		bpf_sk_storage_delete(&pil_svcsockets_v1, ctx->sk); /* of a connection before this one */
	if (choice == NO_SERVICE)
		return SOCK_ADDR_ALLOW;
	if (choice == NO_BACKEND)
		return refuse(ECONNREFUSED);
	kept = bpf_sk_storage_get(&pil_svcsockets_v1, ctx->sk, &now, BPF_SK_STORAGE_GET_F_CREATE);
	if (!kept)
		return host ? refuse(ENOMEM) : SOCK_ADDR_ALLOW; /* the packet path does it */
	*kept = now;						/* it may be of a connection before this one */
	set_sock_address(ctx, &now.backend.address, now.backend.port);
	return SOCK_ADDR_ALLOW;
}

/* connected_service gives the peer of a socket the address of the service that it is connected to, if any. */
static __always_inline bool connected_service(struct bpf_sock_addr *ctx)
{
	struct svc_socket *kept;
	struct addr peer;

	if (!ctx->sk)
		return false;
	kept = bpf_sk_storage_get(&pil_svcsockets_v1, ctx->sk, NULL, 0);
	peer = sock_address(ctx);
	if (!kept || !same_addr(&peer, &kept->backend.address) || (__be16)ctx->user_port != kept->backend.port)
		return false;
	set_sock_address(ctx, &kept->service.address, kept->service.port);
	return true;
}

/* service_peer is the program of getpeername. */
static __always_inline int service_peer(struct bpf_sock_addr *ctx)
{
	connected_service(ctx);
	return SOCK_ADDR_ALLOW;
}

/* connected_backend gives a datagram to the service that its socket is connected to the backend of the connection: from
 * another one, the socket receives nothing. */
static __always_inline bool connected_backend(struct bpf_sock_addr *ctx, const struct svc_key *asked)
{
	struct svc_socket *kept;

	if (!ctx->sk)
		return false;
	kept = bpf_sk_storage_get(&pil_svcsockets_v1, ctx->sk, NULL, 0);
	if (!kept || !same_addr(&kept->service.address, &asked->address) || kept->service.port != asked->port)
		return false;
	if (ctx->sk->dst_port != kept->backend.port)
		return false; /* the connection has ended */
	set_sock_address(ctx, &kept->backend.address, kept->backend.port);
	return true;
}

/* service_send replaces the destination of a datagram to a service that a process of the node sends with an address.
 */
static __always_inline int service_send(struct bpf_sock_addr *ctx)
{
	struct datagram_key key = {};
	struct svc_key asked;
	struct svc_end to = {};
	struct datagram_peer *has;
	enum sock_choice choice;
	__u32 number;

	if (bpf_get_netns_cookie(ctx) != node_cookie)
		return SOCK_ADDR_ALLOW;
	asked = sock_key(ctx);
	if (connected_backend(ctx, &asked))
		return SOCK_ADDR_ALLOW;
	key.socket = bpf_get_socket_cookie(ctx);
	key.peer.address = asked.address;
	key.peer.port = asked.port;
	has = bpf_map_lookup_elem(&pil_svcudp_v1, &key);
	number = has ? has->backend : 0;
	choice = host_choose(&asked, &number, &to);
	if (choice == NO_SERVICE)
		return SOCK_ADDR_ALLOW;
	if (choice == NO_BACKEND)
		return refuse(ECONNREFUSED);
	host_keep_datagrams(&key, &to, number);
	set_sock_address(ctx, &to.address, to.port);
	return SOCK_ADDR_ALLOW;
}

/* service_receive gives a datagram of a backend the address of the service as its source. */
static __always_inline int service_receive(struct bpf_sock_addr *ctx)
{
	struct datagram_key key = {};
	struct datagram_peer *sent;

	if (bpf_get_netns_cookie(ctx) != node_cookie || connected_service(ctx))
		return SOCK_ADDR_ALLOW;
	key.socket = bpf_get_socket_cookie(ctx);
	key.peer.address = sock_address(ctx);
	key.peer.port = ctx->user_port;
	sent = bpf_map_lookup_elem(&pil_svcudp_v1, &key);
	if (sent)
		set_sock_address(ctx, &sent->other.address, sent->other.port);
	return SOCK_ADDR_ALLOW;
}
