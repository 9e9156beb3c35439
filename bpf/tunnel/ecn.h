/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Explicit congestion notification through a tunnel (RFC 6040). Push copies the inner field outward (normal mode). The
 * kernel's tunnels instead write ECT(0) for CE, as RFC 3168 had it; a receiver gives the same result for both. */
#pragma once
#include "common/proto.h"

#define ECN_MASK 3

enum ecn {
	ECN_NOT_CAPABLE = 0,
	ECN_ECT1 = 1,
	ECN_ECT0 = 2,
	ECN_CE = 3,
	ECN_DROP = 4, /* the answer to a mark that the receiver would not understand */
};

/* ecn_decap is the ECN field of a packet that leaves a tunnel (RFC 6040 §4.2, figure 4). */
static __always_inline enum ecn ecn_decap(__u8 outer, __u8 inner)
{
	if (outer == ECN_CE)
		return inner == ECN_NOT_CAPABLE ? ECN_DROP : ECN_CE;
	return outer == ECN_ECT1 && inner == ECN_ECT0 ? ECN_ECT1 : inner;
}
