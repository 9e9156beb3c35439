/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Access to the context of a program, and to constants that user space sets at load. */
#pragma once
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define CHECKSUM_PARTIAL 3 /* a device fills in the checksum later */

void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

/* The compiler may compute the address of a context field in a register, but the verifier accepts only loads at a
 * constant offset from the context. So the load is written in assembly. */
#define CTX_POINTER(skb, field)                                                                                        \
	({                                                                                                             \
		void *p;                                                                                               \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                                                  \
			     : "=r"(p)                                                                                 \
			     : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, field)));                            \
		p;                                                                                                     \
	})

/* readable makes up to need bytes of a packet readable in place, or all of it if it is shorter. */
static __always_inline void readable(struct __sk_buff *skb, __u32 need)
{
	__u32 there = CTX_POINTER(skb, data_end) - CTX_POINTER(skb, data);

	if (there < need && there < skb->len)
		bpf_skb_pull_data(skb, skb->len < need ? skb->len : need);
}

/* Constants that user space sets at load. One section puts them on one cache line. They are initialised, because the
 * compiler would otherwise reorder them. */
#define CONSTANT volatile const __attribute__((section(".rodata.node")))
