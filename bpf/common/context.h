/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Access to the context of a program, and to constants that user space sets at load. */
#pragma once
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define CHECKSUM_PARTIAL 3 /* a device fills in the checksum later */

void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

/* The compiler likes to keep the address of a context field in a register, but the verifier accepts only a constant
 * offset. So the load is written in assembly. */
#define CTX_POINTER(skb, field)                                                                                        \
	({                                                                                                             \
		void *p;                                                                                               \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                                                  \
			     : "=r"(p)                                                                                 \
			     : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, field)));                            \
		p;                                                                                                     \
	})

/* Constants that user space sets at load. One section puts them on one cache line. They are initialised, because the
 * compiler would otherwise reorder them. */
#define CONSTANT volatile const __attribute__((section(".rodata.node")))
