/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* An IPv6 or IPv4 address. Which IPv6 addresses belong to a network is in the network's own headers. */
#pragma once
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Both halves stay in network byte order, so that comparing and copying cost nothing. */
struct addr {
	__u64 hi, lo;
};
_Static_assert(sizeof(struct addr) == 16, "an address is 16 bytes");

static __always_inline bool same_addr(const struct addr *a, const struct addr *b)
{
	return a->lo == b->lo && a->hi == b->hi;
}

/* ip4_mapped returns an IPv4 address as an IPv4-mapped IPv6 address (RFC 4291 §2.5.5.2). */
static __always_inline struct addr ip4_mapped(__be32 ip4)
{
	struct addr a = {.lo = (__u64)ip4 << 32 | bpf_htonl(0xffff)};

	return a;
}

static __always_inline __be32 ip4_unmapped(const struct addr *a)
{
	return a->lo >> 32;
}

static __always_inline bool is_ip4_mapped(const struct addr *a)
{
	return !a->hi && (__u32)a->lo == bpf_htonl(0xffff);
}
