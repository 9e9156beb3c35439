/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides about ICMP errors to a container of network nimitz. They come from the next hop that the container has
 * inside. */
#pragma once
#include "common/icmp_error.h"
#include "net/nimitz/nat.h"

/* The IPv4 gateway that internal/network/nimitz configures in containers; that of IPv6 is gateway_6. */
#define GATEWAY_4 bpf_htonl(0xa9fe0101) /* 169.254.1.1 */

/* nimitz_icmp_error drops a container's packet, which must be unchanged except for its hop
 * limit, and sends the error about it. */
__slowpath int nimitz_icmp_error(struct __sk_buff *skb, const struct packet *p, const struct pkt_ctx *j)
{
	__u32 device;

	if (!p || !j)
		return TC_ACT_SHOT;
	drop(skb, j->why, HOOK_CONTAINER);
	device = device_of(skb);
	if (j->why == REASON_NO_ROUTE ||
	    !(j->family == FAMILY_4 ? icmp4_error_wanted(skb, p) : icmp_error_wanted(skb, p)) ||
	    !icmp_error_allowed(device))
		return TC_ACT_SHOT;
	if (j->family == FAMILY_4)
		return icmp4_error_build(skb, device, GATEWAY_4, ip4_unmapped(&j->orig_src), j->mtu);
	return icmp6_error_build(skb, device, &j->orig_src, j->mtu);
}
