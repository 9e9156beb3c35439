/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a network adds to its data path for policy and sessions. A test loads it. */
#include "policy/policy.h"

volatile const __u32 endpoint_number = 0; /* of the sender */
volatile const __u32 policed_tenant = 0;  /* its tenant id */

#define SENDER_APP 5
#define PEER_APP   6

SEC("tc")
int toy_policed(struct __sk_buff *skb)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct session_key *key;
	struct packet p = {};
	struct pol_scratch *d;
	__u32 zero = 0;
	int why;

	if (!h)
		return drop(skb, REASON_NOT_IP6, HOOK_CONTAINER);
	why = parse(skb, h, &p);
	if (why)
		return drop(skb, why, HOOK_CONTAINER);
	h = eth_ip6_of(skb);
	d = bpf_map_lookup_elem(&pil_pol_scratch, &zero);
	if (!h || !d)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	if (!has_policies(policed_tenant))
		return TCX_PASS;
	key = &d->ct.key;
	key->local = *src_of(h);
	key->remote = *dst_of(h);
	key->endpoint = endpoint_number;
	key->tenant = policed_tenant;
	key->dir = key->zero[0] = key->zero[1] = 0;
	d->ct.pkt.dir = TX;
	d->mode = ENFORCE_BY_APP;
	d->apps = SENDER_APP << 16 | PEER_APP;
	if (policy_fast_hit(skb, &p, sizeof(*h), &key->local, &key->remote, endpoint_number, d->apps, TX, false))
		return TCX_PASS;
	return policy_check(skb, &p, d, HOOK_CONTAINER, false);
}

char _license[] SEC("license") = "Dual BSD/GPL";
