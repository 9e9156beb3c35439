/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Programs that push and pull what their settings say, for the tests of tunnel/ (internal/tunnel). What the helpers
 * refuse goes on to the kernel's own device. */
#include "tunnel/pull.h"
#include "tunnel/push.h"

#define MOST_CONTEXT 24

struct settings {
	struct tunnel push;
	__u8 context[MOST_CONTEXT]; /* behind the service path of the NSH */
	__u32 size;		    /* bytes of context */
	__u32 uplink;		    /* 0: the packet stays where it is */
	__u32 device;		    /* of the container; 0: the packet stays where it is */
	__be16 port;		    /* of tunnel_parse */
	__u8 accept;
	__u8 pull_segments; /* 1: also those that tunnel_parse leaves to the kernel */
};
_Static_assert(sizeof(struct settings) == 104, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct settings);
	__uint(max_entries, 1);
} tun_settings SEC(".maps");

struct results {
	__u64 push[16], pull[16]; /* packets by enum tunnel_result */
	struct tunnel last;	  /* headers of the last packet that was pulled */
	__u32 mark;		  /* of the last packet at see_mark */
	__u32 zero;
};
_Static_assert(sizeof(struct results) == 328, "no implicit padding");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct results);
	__uint(max_entries, 1);
} tun_results SEC(".maps");

static const __u32 only;

static __always_inline int push(struct __sk_buff *skb, const struct settings *s, struct results *r)
{
	struct tunnel t = s->push;
	__u32 size = s->size;
	int why;

	if (size > MOST_CONTEXT)
		return TUNNEL_BAD_NSH;
	why = tunnel_push(skb, &t, s->context, size);
	__sync_fetch_and_add(&r->push[why & 15], 1);
	return why;
}

static __always_inline int verdict(int why)
{
	return why == TUNNEL_FAILED || why == TUNNEL_CONGESTED ? TCX_DROP : TCX_NEXT;
}

SEC("tc")
int tun_push(struct __sk_buff *skb)
{
	struct settings *s = bpf_map_lookup_elem(&tun_settings, &only);
	struct results *r = bpf_map_lookup_elem(&tun_results, &only);
	int why;

	if (!s || !r)
		return TCX_DROP;
	why = push(skb, s, r);
	if (why)
		return verdict(why);
	return s->uplink ? bpf_redirect_neigh(s->uplink, NULL, 0, 0) : TCX_PASS;
}

static __always_inline int pull(struct __sk_buff *skb, const struct settings *s, struct results *r)
{
	struct tunnel t = {};
	int why = tunnel_parse(skb, s->port, s->accept, &t);

	__sync_fetch_and_add(&r->pull[why & 15], 1);
	if (why == TUNNEL_KERNEL && s->pull_segments && skb->gso_size)
		why = TUNNEL_OK;
	if (why)
		return why;
	r->last = t;
	return tunnel_pull(skb, &t);
}

SEC("tc")
int tun_pull(struct __sk_buff *skb)
{
	struct settings *s = bpf_map_lookup_elem(&tun_settings, &only);
	struct results *r = bpf_map_lookup_elem(&tun_results, &only);
	int why;

	if (!s || !r)
		return TCX_DROP;
	why = pull(skb, s, r);
	if (why)
		return verdict(why);
	return s->device ? bpf_redirect_peer(s->device, 0) : TCX_PASS;
}

/* A packet that a program has pulled from a tunnel and pushes into another one. */
SEC("tc")
int tun_relay(struct __sk_buff *skb)
{
	struct settings *s = bpf_map_lookup_elem(&tun_settings, &only);
	struct results *r = bpf_map_lookup_elem(&tun_results, &only);

	if (s && r && !pull(skb, s, r)) {
		push(skb, s, r);
		return TCX_DROP;
	}
	return TCX_NEXT;
}

/* The kernel's device takes the group policy id to send from the mark, and leaves a received one there. */
SEC("tc")
int tun_set_mark(struct __sk_buff *skb)
{
	struct settings *s = bpf_map_lookup_elem(&tun_settings, &only);

	if (s)
		skb->mark = s->push.group;
	return TCX_NEXT;
}

SEC("tc")
int tun_see_mark(struct __sk_buff *skb)
{
	struct results *r = bpf_map_lookup_elem(&tun_results, &only);

	if (r)
		r->mark = skb->mark;
	return TCX_NEXT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
