/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Addresses of network ila (draft-herbert-intarea-ila-01 §4). Containers see the SIR prefix and an identifier. On the
 * fabric the locator of a node replaces the SIR prefix. The mapping is checksum-neutral (§4.5): the C bit is set, and
 * the last 16 bits of the identifier take up the difference, so no checksum behind the IPv6 header changes.
 *
 *  0   3 4        32          64
 * | 011|C| VNID 28 | index 32  |     identifier; the last 16 bits are never 0, so that they can be restored */
#pragma once
#include "common/address.h"
#include "common/csum.h"

CONSTANT __u64 sir_prefix = 0;
CONSTANT __u64 own_locator = 0; /* the /64 of this node's containers on the fabric */
CONSTANT __u64 neutral_bit = 0; /* the C bit in an identifier on the fabric; 0 if the peers set none */
CONSTANT bool source_stays = 0; /* as the kernel's ILA does it: only the destination has a locator on the fabric */

#define IDENTIFIER_TYPE bpf_cpu_to_be64(3ULL << 61)
#define IDENTIFIER_FORM bpf_cpu_to_be64(0xfULL << 60) /* type and C bit */
#define IDENTIFIER_VNID bpf_cpu_to_be64(0x0fffffffULL << 32)

static __always_inline __u32 identifier_vnid(__u64 identifier)
{
	return bpf_be64_to_cpu(identifier & IDENTIFIER_VNID) >> 32;
}

/* ones_add adds two 16-bit numbers in ones' complement. The result is not 0 if one of them is not 0, so ones_add(x, d)
 * and then ones_add(…, ~d) give x again for every x but 0. */
static __always_inline __u16 ones_add(__u16 a, __u16 b)
{
	__u32 sum = (__u32)a + b;

	return (sum & 0xffff) + (sum >> 16);
}

/* csum_half returns the checksum of half an address. */
static __always_inline __u16 csum_half(__u64 half)
{
	__u64 sum = (half & 0xffffffff) + (half >> 32);

	return csum_fold((sum & 0xffffffff) + (sum >> 32));
}

/* neutral_change returns what the last 16 bits of an identifier take up when a locator replaces the SIR prefix. */
static __always_inline __u16 neutral_change(__u64 locator)
{
	__u16 before = csum_half(sir_prefix), after = ones_add(csum_half(locator), csum_half(neutral_bit));

	return ones_add(before, ~after);
}

static __always_inline __u16 *last_16(__u64 *identifier)
{
	return (__u16 *)identifier + 3;
}

/* to_wire returns the address on the fabric of an identifier at a locator. */
static __always_inline struct addr to_wire(__u64 identifier, __u64 locator)
{
	struct addr a = {.hi = locator, .lo = identifier | neutral_bit};

	*last_16(&a.lo) = ones_add(*last_16(&a.lo), neutral_change(locator));
	return a;
}

/* from_wire returns the identifier of an address on the fabric; 0, which no container has, for any other address. */
static __always_inline __u64 from_wire(const struct addr *a)
{
	__u64 identifier = a->lo;

	if (!in_ila(a) || (identifier & IDENTIFIER_FORM) != (IDENTIFIER_TYPE | neutral_bit) || !*last_16(&identifier))
		return 0;
	*last_16(&identifier) = ones_add(*last_16(&identifier), ~neutral_change(a->hi));
	return identifier & ~neutral_bit;
}

/* sender_of returns the identifier of the source of a packet from the fabric; 0 if it is none. */
static __always_inline __u64 sender_of(const struct addr *a)
{
	if (source_stays)
		return a->hi == sir_prefix ? a->lo : 0;
	return from_wire(a);
}

static __always_inline struct addr sir_address(__u64 identifier)
{
	struct addr a = {.hi = sir_prefix, .lo = identifier};

	return a;
}
