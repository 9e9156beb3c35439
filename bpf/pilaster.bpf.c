/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Entry points of the packet path, one per hook. What they do is in folders: hooks/ decides per hook, net/ has the
 * networks, policy/ sessions and rules, common/ parsing, drops and devices. A packet from a container:
 * hooks/container.h -> net/netpila/flow.h (hit) or resolve.h (miss) -> net/netpila/forward.h. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "hooks/container.h"
#include "hooks/uplink.h"
#include "net/netpila/exposed_stages.h"
#include "net/netpila/service_answers.h"
#include "net/nimitz/gateway.h"
#include "net/nimitz/offload_nsh.h"
#include "net/nimitz/ovs_port.h"
#include "net/nimitz/stages.h"
#include "policy/ct_move.h"

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
int pil_tunnel_direct(struct __sk_buff *skb)
{
	return nimitz_from_fabric(skb);
}

SEC("tc")
int pil_gateway_in(struct __sk_buff *skb)
{
	return nimitz_from_gateway(skb);
}

SEC("tc")
int pil_to_gateway(struct __sk_buff *skb)
{
	return to_gateway(skb);
}

SEC("tc")
int pil_underlay_in(struct __sk_buff *skb)
{
	return gateway_to_fabric(skb);
}

SEC("tc")
int pil_offload_in(struct __sk_buff *skb)
{
	return offload_in(skb);
}

SEC("tc")
int pil_offload_out(struct __sk_buff *skb)
{
	return offload_out(skb);
}

SEC("tc")
int pil_egress_out(struct __sk_buff *skb)
{
	return egress_from_container(skb);
}

SEC("tc")
int pil_egress_in(struct __sk_buff *skb)
{
	return egress_from_fabric(skb);
}

SEC("tc")
int pil_egress_gw(struct __sk_buff *skb)
{
	return at_egress_gateway(skb);
}

SEC("tc")
int pil_service_out(struct __sk_buff *skb)
{
	return service_out(skb);
}

SEC("tc")
int pil_service_in(struct __sk_buff *skb)
{
	return service_in(skb);
}

SEC("tc")
int pil_exposed_in(struct __sk_buff *skb)
{
	return exposed_in(skb);
}

SEC("tc")
int pil_exposed_tun(struct __sk_buff *skb)
{
	return exposed_tunnel(skb);
}

SEC("tc")
int pil_exposed_out(struct __sk_buff *skb)
{
	return exposed_out(skb);
}

SEC("cgroup/connect6")
int pil_connect6(struct bpf_sock_addr *ctx)
{
	return service_connect(ctx);
}

SEC("cgroup/getpeername6")
int pil_getpeername6(struct bpf_sock_addr *ctx)
{
	return service_peer(ctx);
}

SEC("cgroup/sendmsg6")
int pil_sendmsg6(struct bpf_sock_addr *ctx)
{
	return service_send(ctx);
}

SEC("cgroup/recvmsg6")
int pil_recvmsg6(struct bpf_sock_addr *ctx)
{
	return service_receive(ctx);
}

SEC("tc")
int pil_tapped(struct __sk_buff *skb)
{
	return ovs_port_egress(skb);
}

/* Sets the key of a tenant id. The agent runs it, never a packet. */
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

/* The pre-actions that the rules give for any 5-tuple. The agent runs it for `policy why`, never a packet. The request
 * is behind an Ethernet header, because only a program for packets may use all tables; the result replaces it. */
struct why_request {
	struct flow_tuple tuple; /* with the apps that the addresses contain */
	struct pre_actions pre;
};
const struct why_request *unused_why_request __attribute__((unused)); /* keeps the type in BTF */

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

/* How many buckets a run of pil_sweep visits. */
#define SWEEP_BUCKETS 1024

/* Frees sessions: expired ones, and those of an endpoint that has been deleted. The agent runs it, never a packet, on a
 * part of the table at a time, because softirqs are off meanwhile. The request is behind an Ethernet header, as that of
 * pil_why. */
struct sweep_request {
	__u32 endpoint; /* 0: only expired sessions */
	__u32 bucket;	/* the first of SWEEP_BUCKETS */
};
const struct sweep_request *unused_sweep_request __attribute__((unused)); /* keeps the type in BTF */

SEC("tc")
int pil_sweep(struct __sk_buff *skb)
{
	struct ct_sweep w = {.now = bpf_ktime_get_coarse_ns()};
	struct sweep_request r;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &r, sizeof(r)))
		return -1;
	w.endpoint = r.endpoint;
	for (int i = 0; i < SWEEP_BUCKETS; i++)
		ct_sweep_bucket(&w, r.bucket + i);
	return 0;
}

/* Stores a session of a container that moves here. The request is behind an Ethernet header, as that of pil_why. The
 * result is 1 if there is no room, or if this build does not know the state's version. */
struct keep_request {
	struct session_key key;
	struct session_state state;
};
const struct keep_request *unused_keep_request __attribute__((unused)); /* keeps the type in BTF */

SEC("tc")
int pil_keep_session(struct __sk_buff *skb)
{
	struct ct_ctx t = {.now = bpf_ktime_get_coarse_ns()};
	struct keep_request r;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &r, sizeof(r)))
		return -1;
	if (r.state.version != STATE_VERSION || !r.key.endpoint)
		return 1;
	t.key = r.key;
	t.result.state = r.state;
	return !ct_keep(&t);
}

/* The decision of policy/ct.h alone, for tests. */
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

	/* Destination: plaintext in; source: ciphertext out. The plaintext contains the tenant id. */
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
