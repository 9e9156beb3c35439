/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Entry points of the packet path. What they do is in one header per concern:
 * container.h, node.h, uplink.h, edge.h and nimitz.h decide, flow.h remembers, forward.h sends. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "hooks/container.h"
#include "hooks/uplink.h"
#include "net/nimitz/ovs_port.h"
#include "net/nimitz/stages.h"

SEC("tc")
int pil_container(struct __sk_buff *skb)
{
	return from_container(skb);
}

SEC("tc")
int pil_uplink_in(struct __sk_buff *skb)
{
	return from_fabric(skb);
}

SEC("tc")
int pil_uplink_out(struct __sk_buff *skb)
{
	return to_fabric(skb);
}

SEC("tc")
int pil_guard_in(struct __sk_buff *skb)
{
	return backstop_in(skb);
}

SEC("tc")
int pil_guard_out(struct __sk_buff *skb)
{
	return backstop_out(skb);
}

SEC("tc")
int pil_edge_in(struct __sk_buff *skb)
{
	return host_if_in(skb);
}

SEC("tc")
int pil_port_in(struct __sk_buff *skb)
{
	return bridge_port_in(skb);
}

SEC("tc")
int pil_edge_out(struct __sk_buff *skb)
{
	return host_if_out(skb);
}

SEC("tc")
int pil_node(struct __sk_buff *skb)
{
	return from_node(skb);
}

SEC("tc")
int pil_nimitz(struct __sk_buff *skb)
{
	return nimitz_from_container(skb);
}

SEC("tc")
int pil_tunnel_in(struct __sk_buff *skb)
{
	return nimitz_from_tunnel(skb);
}

SEC("tc")
int pil_gateway_in(struct __sk_buff *skb)
{
	return nimitz_from_gateway(skb);
}

SEC("tc")
int pil_underlay_in(struct __sk_buff *skb)
{
	return gateway_to_fabric(skb);
}

SEC("tc")
int pil_tapped(struct __sk_buff *skb)
{
	return ovs_port_egress(skb);
}

/* Giving a tenant id its key, and trying the cipher: run by the agent, never by a packet. */
struct key_request {
	__u32 tenant_id;
	__u8 key[16];
	__s32 error;
};

SEC("syscall")
int pil_set_key(struct key_request *request)
{
	struct bpf_crypto_params params = {.type = "skcipher", .algo = "ecb(aes)", .key_len = 16};
	struct bpf_crypto_ctx *ctx;
	struct key_context *slot;
	int err = 0;
	__u32 id = request->tenant_id;

	__builtin_memcpy(params.key, request->key, sizeof(request->key));
	slot = bpf_map_lookup_elem(&pil_keys_v1, &id);
	if (!slot) {
		request->error = -2; /* ENOENT */
		return 0;
	}
	ctx = bpf_crypto_ctx_create(&params, sizeof(params), &err);
	if (!ctx) {
		request->error = err;
		return 0;
	}
	ctx = bpf_kptr_xchg(&slot->ctx, ctx);
	if (ctx)
		bpf_crypto_ctx_release(ctx);
	request->error = 0;
	return 0;
}

/* What rules say of a session that does not have to exist; asked by people, never by a packet. The question is behind
 * an Ethernet header, as a program that may use all tables wants one, and the answer in its place. */
struct why_request {
	struct flow_tuple tuple; /* with the apps that the addresses say */
	struct pre_actions pre;
};
const struct why_request *unused_why_request __attribute__((unused)); /* for BTF */

SEC("tc")
int pil_why(struct __sk_buff *skb)
{
	struct why_request r;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &r, sizeof(r)))
		return -1;
	r.tuple.local_app = current_app(&r.tuple.local, r.tuple.local_app);
	r.tuple.remote_app = current_app(&r.tuple.remote, r.tuple.remote_app);
	return policy_lookup(&r.tuple, &r.pre) || bpf_skb_store_bytes(skb, ETH_HLEN, &r, sizeof(r), 0);
}

/* The decision alone, for tests. */
struct action_request {
	struct pkt_info pkt;
	struct session_state state;
	struct pre_actions pre;
	struct ct_result result;
};

SEC("syscall")
int pil_try_action(struct action_request *request)
{
	struct session_state state = request->state;
	struct pre_actions pre = request->pre;
	struct pkt_info pkt = request->pkt;

	request->result = action(&pkt, &pre, &state);
	return 0;
}

SEC("tc")
int pil_try_cipher(struct __sk_buff *skb)
{
	struct eth_ip6 *h = eth_ip6_of(skb);
	struct addr a;
	int why;

	/* Destination: plaintext in, ciphertext out; the tenant id is in the plaintext. */
	if (!h)
		return REASON_MALFORMED;
	a = *dst_of(h);
	why = crypt(tenant_id(&a), &a, ENCRYPT);
	if (why)
		return why;
	h = eth_ip6_of(skb);
	if (!h)
		return REASON_MALFORMED;
	*src_of(h) = a;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
