/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network evpn has NIMITZ's pipeline with own_vtep4 (net/nimitz/tables.h), and these tables of it for itself. The
 * others are NIMITZ's: evpn uses the tunnel device in nim_node_v1, and has no NAT. */
#pragma once

#define nim_senders_v1 evpn_senders_v1
#define nim_foreign_v1 evpn_foreign_v1
#define nim_forward_v1 evpn_forward_v1

#include "net/nimitz/tables.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* the tenant's VNI */
	__type(value, struct replication);
	__uint(max_entries, 1); /* set at load */
} evpn_vteps_v1 SEC(".maps");
