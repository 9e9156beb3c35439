/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Asks conntrack whether a flow is established and not translated. Comparing tuples would not do: a service's
 * connection and a direct one from one source port have the same tuple behind the translation. */
#pragma once
#include "oncache/inner.h"

#define IPS_SEEN_REPLY (1 << 1)
#define IPS_NAT	       (3 << 4) /* IPS_SRC_NAT, IPS_DST_NAT */
#define IPS_HELPER     (1 << 13)

/* struct bpf_ct_opts without zones, as all kernels take it. */
struct ct_opts {
	__s32 netns_id, error;
	__u8 l4proto, dir, reserved[2];
};
_Static_assert(sizeof(struct ct_opts) == 12, "NF_BPF_CT_OPTS_SZ before zones");

/* Weak: without conntrack the kernel lacks them, and tracks is false. */
struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 size, struct ct_opts *opts,
				  __u32 opts_size) __ksym __weak;
void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

static __always_inline __u32 tuple_of(const struct inner *p, bool out, struct bpf_sock_tuple *tuple)
{
	const struct once_flow *f = &p->flow;
	const struct addr *src = out ? &f->local : &f->remote, *dst = out ? &f->remote : &f->local;
	__be16 sport = out ? f->local_port : f->remote_port, dport = out ? f->remote_port : f->local_port;

	if (p->type == bpf_htons(ETH_P_IP)) {
		tuple->ipv4.saddr = ip4_unmapped(src);
		tuple->ipv4.daddr = ip4_unmapped(dst);
		tuple->ipv4.sport = sport;
		tuple->ipv4.dport = dport;
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, src, sizeof(*src));
	__builtin_memcpy(tuple->ipv6.daddr, dst, sizeof(*dst));
	tuple->ipv6.sport = sport;
	tuple->ipv6.dport = dport;
	return sizeof(tuple->ipv6);
}

/* tracked returns CAUSE_HIT for a flow that may be learnt. The lookup finds entries by the tuple of either direction.
 */
static __always_inline enum once_cause tracked(struct __sk_buff *skb, const struct inner *p, bool out)
{
	struct ct_opts opts = {.netns_id = BPF_F_CURRENT_NETNS, .l4proto = p->proto};
	struct bpf_sock_tuple tuple = {};
	unsigned long status;
	struct nf_conn *ct;

	if (!tracks)
		return CAUSE_HIT;
	if (tuple_of(p, out, &tuple) == sizeof(tuple.ipv4))
		ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));
	else
		ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv6), &opts, sizeof(opts));
	if (!ct)
		return CAUSE_UNTRACKED;
	status = ct->status;
	bpf_ct_release(ct);
	/* A helper, such as that of FTP, reads the payload. */
	if (status & (IPS_NAT | IPS_HELPER))
		return CAUSE_NAT;
	return status & IPS_SEEN_REPLY ? CAUSE_HIT : CAUSE_UNREPLIED;
}

/* may_mark tells whether a packet's flow may be learnt. Rules of type nat may compare whole marks, so packets that
 * conntrack asks them for get none: those before it has seen both directions, and those that it translates. */
static __noinline bool may_mark(struct __sk_buff *skb, const struct inner *p, enum once_way way)
{
	enum once_cause why = tracked(skb, p, way == WAY_OUT);

	if (why)
		count(way, why);
	return !why;
}
