/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Internet checksums (RFC 1071) and their incremental update (RFC 1624). */
#pragma once
#include "common/addr.h"
#include "common/proto.h"
#include <bpf/bpf_helpers.h>

static __always_inline __u32 csum_add(__u32 a, __u32 b)
{
	__u64 sum = (__u64)a + b;

	return sum + (sum >> 32);
}

/* csum_diff_addr returns the checksum difference of two addresses. */
static __always_inline __u32 csum_diff_addr(const struct addr *from, const struct addr *to)
{
	__u64 sum = (__u64)(__u32)~from->hi + (__u32)(~from->hi >> 32) + (__u32)~from->lo + (__u32)(~from->lo >> 32);

	sum += (__u64)(__u32)to->hi + (__u32)(to->hi >> 32) + (__u32)to->lo + (__u32)(to->lo >> 32);
	return csum_add(sum, sum >> 32);
}

static __always_inline __u16 csum_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

static __always_inline __u32 l4_csum_offset(__u8 proto)
{
	switch (proto) {
	case NEXTHDR_TCP:
		return 16;
	case NEXTHDR_UDP:
	case NEXTHDR_UDPLITE:
	case NEXTHDR_DCCP:
		return 6;
	case NEXTHDR_ICMP:
		return 2;
	}
	return 0; /* the checksum has no pseudo header, or there is no checksum */
}
