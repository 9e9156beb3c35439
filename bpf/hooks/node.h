/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets between the node's own stack and its containers. Containers see the node as its alias, an address of their
 * tenant with a reserved app; those of clear tenants see its address. They can reply to it, and open connections if the
 * tenant may reach nodes. */
#pragma once
#include "common/border.h"
#include "net/netpila/forward.h"
#include "net/netpila/resolve.h"
#include "net/netpila/service_datagrams.h"

#define ICMPV6_REPLY  129
#define CURRENT_NETNS ((__u64)-1)

/* has_connection reports whether a process of the node has a connection: a TCP socket that does not listen, or a UDP
 * socket that is connected to this peer, or has sent to it as a backend of a service. */
static __noinline bool has_connection(struct __sk_buff *skb, struct bpf_sock_tuple *t, __u32 proto)
{
	struct bpf_sock *socket;
	struct addr peer;
	bool connected;

	if (proto == NEXTHDR_TCP) {
		socket = bpf_skc_lookup_tcp(skb, t, sizeof(t->ipv6), CURRENT_NETNS, 0);
		if (!socket)
			return false;
		connected = socket->state != BPF_TCP_LISTEN;
	} else {
		socket = bpf_sk_lookup_udp(skb, t, sizeof(t->ipv6), CURRENT_NETNS, 0);
		if (!socket)
			return false;
		__builtin_memcpy(&peer, t->ipv6.saddr, sizeof(peer));
		connected = socket->state == BPF_TCP_ESTABLISHED || has_sent_datagrams(socket, &peer, t->ipv6.sport);
	}
	bpf_sk_release(socket);
	return connected;
}

/* check_reply drops a packet that does not belong to a connection that the node opened. A socket of the node proves the
 * connection: a container cannot make the node create one, because check_reply drops the packets that would. */
static __always_inline int check_reply(struct __sk_buff *skb, const struct packet *p, const struct flow_key *key)
{
	struct bpf_sock_tuple t = {};
	struct addr node = node_address();
	__u8 flags = 0;

	/* Fragments of incomplete packets could fill the reassembly memory of the node. */
	if (p->parts & HAS_FRAGMENT)
		return REASON_TO_NODE;
	if (p->proto == NEXTHDR_ICMP)
		return is_error(p) || p->icmp_type == ICMPV6_REPLY ? 0 : REASON_TO_NODE;
	if (p->proto != NEXTHDR_TCP && p->proto != NEXTHDR_UDP)
		return REASON_TO_NODE;
	if (bpf_skb_load_bytes(skb, p->l4, &t.ipv6.sport, 2 * sizeof(t.ipv6.sport)))
		return REASON_MALFORMED;
	__builtin_memcpy(t.ipv6.saddr, &key->src, sizeof(key->src));
	__builtin_memcpy(t.ipv6.daddr, &node, sizeof(node));
	if (p->proto == NEXTHDR_TCP) {
		if (bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &flags, sizeof(flags)))
			return REASON_MALFORMED;
		/* In TIME_WAIT the kernel accepts a SYN as a new connection. */
		if ((flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)
			return REASON_TO_NODE;
	}
	return has_connection(skb, &t, p->proto) ? 0 : REASON_TO_NODE;
}

/* to_node delivers a container's reply to the node. It checks each packet, so it uses the flow slot only as scratch
 * space and leaves it invalid. */
static __always_inline int to_node(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
				   const struct flow_key *key, struct flow *f, __u32 tenant)
{
	int why = check_reply(skb, p, key);

	if (why == REASON_TO_NODE && !(p->parts & HAS_FRAGMENT) && may_reach_node(tenant, own_node))
		why = 0;
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	f->egress = 0;
	f->key = *key;
	f->src = key->src;
	f->dst = node_address();
	f->translate = TRANSLATE;
	f->policy_ep[TX] = f->policy_ep[RX] = 0; /* no policy applies between a node and its own containers */
	f->checksum = csum_diff_addr(&f->key.dst, &f->dst);
	f->ifindex = node_ifindex;
	__builtin_memcpy(f->dmac, container_mac, ETH_ALEN);
	__builtin_memcpy(f->smac, gateway_mac, ETH_ALEN);
	return forward(skb, h, p, f, EGRESS_DEVICE, NULL, HOOK_CONTAINER);
}

static __always_inline int from_node_slow(struct __sk_buff *skb, struct eth_ip6 *h, const struct packet *p,
					  const struct flow_key *key, struct flow *f)
{
	struct addr node = node_address();
	struct tenant *its;
	struct ep_src *to;

	if (!same_addr(&key->src, &node))
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_NODE);
	to = bpf_map_lookup_elem(&pil_sources_v2, &key->dst);
	if (!to)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_NODE);
	its = bpf_map_lookup_elem(&pil_tenants_v2, &to->tenant_id);
	if (!its)
		return drop(skb, REASON_NO_KEY, HOOK_NODE);
	f->egress = 0; /* invalidates the slot until all fields are written */
	f->key = *key;
	f->src = its->gateway;
	f->dst = key->dst;
	f->translate = TRANSLATE;
	f->policy_ep[TX] = f->policy_ep[RX] = 0;
	f->checksum = csum_diff_addr(&f->key.src, &f->src);
	send_to(f, to->ifindex);
	f->egress = EGRESS_DEVICE;
	return forward(skb, h, p, f, EGRESS_DEVICE, NULL, HOOK_NODE);
}

static __always_inline int from_node(struct __sk_buff *skb)
{
	struct flow_key key = {.generation = generation(), .device = skb->ifindex};
	struct packet p = {};
	struct eth_ip6 *h;
	struct flow *f;
	int why;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return drop(skb, REASON_NOT_IP6, HOOK_NODE);
	/* A packet that entered by a device is not the node's own, whatever its source. */
	if (skb->ingress_ifindex)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_NODE);
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_NODE);
	key.src = *src_of(h);
	key.dst = *dst_of(h);
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_NODE);
	h = eth_ip6_of(skb);
	f = flow_slot(&key);
	if (!h || !f)
		return drop(skb, REASON_MALFORMED, HOOK_NODE);
	if (likely(flow_matches(f, &key)))
		return forward(skb, h, &p, f, EGRESS_DEVICE, NULL, HOOK_NODE);
	return from_node_slow(skb, h, &p, &key, f);
}
