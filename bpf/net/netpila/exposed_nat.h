/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Connections to exposed ports at their ingress node: which backend a new one gets, its two entries, and when they are
 * free again. exposed_stages.h calls exposed_connection for packets of clients. */
#pragma once
#include "hooks/node.h"
#include "net/netpila/exposed.h"
#include "net/netpila/service.h"

/* maglev_hash is the same on all nodes. With affinity, only the client's address counts. */
static __always_inline __u64 maglev_hash(const struct nat_key *client, const struct svc *s)
{
	__u64 h = client->remote.hi * 0x9e3779b97f4a7c15ULL;

	h = (h ^ h >> 29 ^ client->remote.lo) * 0xc2b2ae3d27d4eb4fULL;
	if (!s->affinity) {
		h ^= (__u64)client->remote_port << 32 | (__u64)client->local_port << 16 | client->proto;
		h = (h ^ h >> 31 ^ client->local.hi ^ client->local.lo) * 0xc2b2ae3d27d4eb4fULL;
	}
	h = (h ^ h >> 31) * 0x9e3779b97f4a7c15ULL;
	return h ^ h >> 32;
}

/* maglev_backend returns the number of the backend of a connection, or 0. */
static __noinline __u32 maglev_backend(const struct svc *s, __u64 hash)
{
	struct svc_member at = {};
	struct maglev_part *part;
	__u32 slot;

	if (!s || !s->count)
		return 0;
	slot = (__u32)hash % s->count;
	at.set = s->set;
	at.index = slot / MAGLEV_PART;
	part = bpf_map_lookup_elem(&pil_maglev_v1, &at);
	return part ? part->backends[slot % MAGLEV_PART] : 0;
}

/* What the packets of a connection have shown, each entry that of its own direction. */
enum exposed_seen {
	EXPOSED_FIN = 1,
	EXPOSED_RESET = 2,
};

/* Entries have the time in units of 69 s. Their age is right up to five hours, and later seems less. */
#define EXPOSED_UNIT	 36 /* log2, ns */
#define EXPOSED_IDLE_TCP (TIMEOUT_TCP * 1000000000ULL >> EXPOSED_UNIT)
#define EXPOSED_IDLE_UDP (TIMEOUT_DATAGRAMS * 1000000000ULL >> EXPOSED_UNIT)

static __always_inline __u8 exposed_time(void)
{
	return bpf_ktime_get_coarse_ns() >> EXPOSED_UNIT;
}

/* note_packet notes in the entry of a connection that a packet has used it. Programs of other CPUs may write the same.
 */
static __always_inline void note_packet(struct nat_entry *e, __u8 flags)
{
	__u8 now = exposed_time(), seen = e->seen;

	seen |= (flags & TCP_FIN ? EXPOSED_FIN : 0) | (flags & TCP_RST ? EXPOSED_RESET : 0);
	if (e->used != now)
		e->used = now;
	if (e->seen != seen)
		e->seen = seen;
}

/* is_over reports whether a connection has ended, or had no packet for longer than its session lives. */
static __always_inline bool is_over(const struct nat_entry *client, const struct nat_entry *backend, __u8 proto)
{
	__u8 now = exposed_time(), a = now - client->used, b = now - backend->used;

	if ((client->seen | backend->seen) & EXPOSED_RESET || (client->seen & backend->seen & EXPOSED_FIN))
		return true;
	return (a < b ? a : b) > (proto == NEXTHDR_TCP ? EXPOSED_IDLE_TCP : EXPOSED_IDLE_UDP) + 1;
}

/* keep_exposed_answers makes the entry for answers of a connection, whose backend is in d->entry, or begins it anew. It
 * returns false if the client has another connection to the same port of the backend, by another exposed port and from
 * the same port of its own. */
static __noinline bool keep_exposed_answers(void *connections, struct gateway_scratch *d, bool anew)
{
	struct nat_entry *has, *other;

	if (!connections || !d)
		return false;
	d->out = d->back;
	d->out.local = d->entry.address;
	d->out.local_port = d->entry.port;
	has = bpf_map_lookup_elem(connections, &d->out);
	if (has && same_addr(&has->address, &d->back.local) && has->port == d->back.local_port &&
	    has->backend == d->entry.backend && !anew)
		return true;
	if (has && (!same_addr(&has->address, &d->back.local) || has->port != d->back.local_port)) {
		d->other = d->back;
		d->other.local = has->address;
		d->other.local_port = has->port;
		other = bpf_map_lookup_elem(connections, &d->other);
		if (other && !is_over(other, has, d->back.proto))
			return false;
		if (other)
			bpf_map_delete_elem(connections, &d->other);
	}
	d->own = d->entry;
	d->own.address = d->back.local;
	d->own.port = d->back.local_port;
	d->own.seen = 0;
	return !bpf_map_update_elem(connections, &d->out, &d->own, BPF_ANY);
}

/* Backends that a new connection tries if the client has the port of one already. */
#define EXPOSED_TRIES 4

/* new_exposed_connection chooses the backend of a connection. It returns 0 or a reason. */
static __noinline int new_exposed_connection(void *connections, struct gateway_scratch *d, const struct svc *s)
{
	struct svc_backend *b;
	__u64 hash;

	if (!connections || !d || !s)
		return REASON_NO_BACKEND;
	hash = maglev_hash(&d->back, s);
	for (int i = 0; i < EXPOSED_TRIES; i++) {
		__u32 number = maglev_backend(s, hash);

		b = svc_backend_of(number);
		if (!b)
			return REASON_NO_BACKEND;
		d->entry.address = b->plain;
		d->entry.port = b->port;
		d->entry.backend = number;
		d->entry.seen = 0;
		d->entry.used = exposed_time();
		if (keep_exposed_answers(connections, d, true)) {
			svc_count(s->frontend, false);
			return bpf_map_update_elem(connections, &d->back, &d->entry, BPF_ANY) ? REASON_GATEWAY_FULL : 0;
		}
		hash = hash * 0x9e3779b97f4a7c15ULL + 1;
	}
	return REASON_GATEWAY_FULL;
}

/* is_of_node reports whether a packet to a port of the node's own address is for a connection of one of its processes.
 */
static __always_inline bool is_of_node(struct __sk_buff *skb, const struct nat_key *key)
{
	struct bpf_sock_tuple t = {};

	if (exposed_kind_of(&key->local) != EXPOSED_NODE)
		return false;
	__builtin_memcpy(t.ipv6.saddr, &key->remote, sizeof(key->remote));
	__builtin_memcpy(t.ipv6.daddr, &key->local, sizeof(key->local));
	t.ipv6.sport = key->remote_port;
	t.ipv6.dport = key->local_port;
	return has_connection(skb, &t, key->proto);
}

/* EXPOSED_TO_NODE is in place of a reason: a process of the node has the connection. */
#define EXPOSED_TO_NODE (-1)

/* exposed_connection finds the connection of a packet of a client, or makes one. It returns 0, a reason, or
 * EXPOSED_TO_NODE. */
static __noinline int exposed_connection(struct __sk_buff *skb, const struct packet *p, struct gateway_scratch *d,
					 struct svc_work *w)
{
	struct nat_entry *known;
	struct svc_backend *b;
	void *connections;
	__u8 flags;
	__u32 tenant;
	bool opens;
	int why;

	if (!p || !d || !w)
		return REASON_MALFORMED;
	tenant = w->service.exposed;
	connections = bpf_map_lookup_elem(&pil_exconns_v1, &tenant);
	if (!connections)
		return REASON_NO_SERVICE;
	flags = tcp_flags(skb, p);
	opens = is_first_segment(flags);
	known = bpf_map_lookup_elem(connections, &d->back);
	if (known) {
		if (opens)
			known->seen = 0;
		if (!is_error(p))
			note_packet(known, flags);
		d->entry = *known;
		b = svc_backend_of(d->entry.backend);
		if (b && b->frontend == w->service.frontend && !(opens && b->draining))
			return is_error(p) || keep_exposed_answers(connections, d, opens) ? 0 : REASON_GATEWAY_FULL;
		if (p->proto == NEXTHDR_TCP && !opens)
			return REASON_NO_BACKEND; /* the backend of the connection is gone */
	}
	if (is_of_node(skb, &d->back))
		return EXPOSED_TO_NODE;
	if (is_error(p))
		return REASON_NO_SESSION;
	why = new_exposed_connection(connections, d, &w->service);
	if (why == REASON_NO_BACKEND) {
		/* The agent may have replaced the table at the same time. */
		struct svc *now = bpf_map_lookup_elem(&pil_svc_v1, &w->service_key);

		if (now && now->set != w->service.set) {
			w->service = *now;
			why = new_exposed_connection(connections, d, &w->service);
		}
	}
	return why;
}
