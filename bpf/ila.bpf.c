/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Entry points of network ila: packets of its containers, and packets from the fabric to this node's locator. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "common/border.h"
#include "net/ila/stages.h"

SEC("tc")
int pil_ila(struct __sk_buff *skb)
{
	return ila_from_container(skb);
}

SEC("tc")
int pil_ila_in(struct __sk_buff *skb)
{
	return ila_from_fabric(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
