/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Datagrams that processes of the node send to services by sockets that are not connected (service_host.h). */
#pragma once
#include "net/netpila/service_table.h"

/* A socket keeps its backend, and its process sees answers of the service. Each flow has an entry by the address that
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
