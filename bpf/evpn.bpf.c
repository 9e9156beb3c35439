/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Entry points of network evpn: packets of its containers, and packets from tunnels over IPv4. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define TUNNELS_OVER_IPV4
#include "hooks/uplink_class.h"
#include "net/evpn/stages.h"

SEC("tc")
int pil_evpn(struct __sk_buff *skb)
{
	return evpn_from_container(skb);
}

SEC("tc")
int pil_evpn_in(struct __sk_buff *skb)
{
	return evpn_from_tunnel(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
