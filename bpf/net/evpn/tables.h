/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Network evpn has NIMITZ's pipeline with own_vtep4 (net/nimitz/tables.h), and these tables of it for itself. The
 * others are NIMITZ's: evpn uses the tunnel device in nim_node_v1, and has no NAT. */
#pragma once

#define nim_senders_v1 evpn_senders_v1
#define nim_foreign_v1 evpn_foreign_v1
#define nim_forward_v1 evpn_forward_v1
