/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Encrypts and decrypts an address, which is one AES-128 block, under the key of a tenant id (NETPILA §6.2), by the
 * kernel's cipher. The slow paths of container.h and uplink.h call it. */
#pragma once
#include "common/packet.h"
#include <bpf/bpf_helpers.h>

struct bpf_crypto_ctx *bpf_crypto_ctx_create(const struct bpf_crypto_params *params, __u32 params__sz, int *err) __ksym;
void bpf_crypto_ctx_release(struct bpf_crypto_ctx *ctx) __ksym;
int bpf_crypto_encrypt(struct bpf_crypto_ctx *ctx, const struct bpf_dynptr *src, const struct bpf_dynptr *dst,
		       const struct bpf_dynptr *iv) __ksym;
int bpf_crypto_decrypt(struct bpf_crypto_ctx *ctx, const struct bpf_dynptr *src, const struct bpf_dynptr *dst,
		       const struct bpf_dynptr *iv) __ksym;

/* A map of its own, because key contexts cannot be copied: they must survive a change of every other layout. */
struct key_context {
	struct bpf_crypto_ctx __kptr *ctx;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* tenant id */
	__type(value, struct key_context);
	__uint(max_entries, 1); /* set at load */
} pil_keys_v1 SEC(".maps");

/* The cipher reads and writes dynptrs, which need map memory. tc programs run with softirqs off, so a slot per CPU is
 * never shared. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct addr);
	__uint(max_entries, 1);
} pil_block SEC(".maps");

enum crypt_op {
	DECRYPT,
	ENCRYPT
};

/* crypt replaces *a by its encryption or decryption. On failure it returns a reason and leaves *a as it is. */
static __always_inline int crypt(__u32 id, struct addr *a, enum crypt_op op)
{
	struct bpf_dynptr block;
	struct key_context *key;
	struct bpf_crypto_ctx *ctx;
	struct addr *scratch;
	__u32 zero = 0;
	int err;

	key = bpf_map_lookup_elem(&pil_keys_v1, &id);
	scratch = bpf_map_lookup_elem(&pil_block, &zero);
	if (!key || !scratch)
		return REASON_NO_KEY;
	ctx = key->ctx;
	if (!ctx)
		return REASON_NO_KEY;

	*scratch = *a;
	bpf_dynptr_from_mem(scratch, sizeof(*scratch), 0, &block);
	err = op == ENCRYPT ? bpf_crypto_encrypt(ctx, &block, &block, NULL)
			    : bpf_crypto_decrypt(ctx, &block, &block, NULL);
	if (err)
		return REASON_NO_KEY;
	*a = *scratch;
	return 0;
}
