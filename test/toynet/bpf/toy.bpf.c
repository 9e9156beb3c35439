/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Data path of the toy network: delivers packets between containers of one tenant on one node. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "common/event.h"

struct toy_endpoint {
	__u32 ifindex;
	__u32 tenant;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct toy_endpoint);
	__uint(max_entries, 1024);
} toy_endpoint_v1 SEC(".maps");

SEC("tc")
int toy_container(struct __sk_buff *skb)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct toy_endpoint *from, *to;
	__u8 macs[2 * ETH_ALEN] = {};
	struct packet p = {};
	struct addr src, dst;
	int why;

	if (!h || h->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return drop(skb, REASON_NOT_IP6, HOOK_CONTAINER);
	src = *src_of(h);
	dst = *dst_of(h);
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	from = bpf_map_lookup_elem(&toy_endpoint_v1, &src);
	if (!from || from->ifindex != device_of(skb))
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);
	to = bpf_map_lookup_elem(&toy_endpoint_v1, &dst);
	if (!to || to->tenant != from->tenant)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_CONTAINER);
	mac_of(to->ifindex, macs);
	__builtin_memcpy(macs + ETH_ALEN, gateway_mac, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	bpf_skb_change_type(skb, PACKET_HOST);
	skb->mark = 0;
	skb->tstamp = 0;
	return to_container(skb, to->ifindex, on_way_in(skb, from->ifindex), false);
}

char _license[] SEC("license") = "Dual BSD/GPL";
