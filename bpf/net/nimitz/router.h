/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* MACs of the routers behind IPv4 tunnel addresses. Those of this cluster's nodes follow from the address
 * (internal/evpn, RouterMAC). */
#pragma once
#include "common/proto.h"
#include <bpf/bpf_endian.h>

/* router_mac returns the MAC of a node's router, and two zeros behind it, as one word: 02:52 and the address. */
static __always_inline __u64 router_mac(__be32 vtep)
{
	__u8 mac[sizeof(__u64)] = {0x02, 0x52};
	__u64 word;

	__builtin_memcpy(mac + 2, &vtep, sizeof(vtep));
	__builtin_memcpy(&word, mac, sizeof(word));
	return word;
}
