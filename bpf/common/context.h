/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reading the context of a program. */
#pragma once
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define CHECKSUM_PARTIAL 3 /* a device is still to fill it in */

void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

/* The compiler likes to keep the address of a context field in a register; the verifier takes only a
 * constant offset, so the load is written out. */
#define CTX_POINTER(skb, field)                                                                                        \
	({                                                                                                             \
		void *p;                                                                                               \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                                                  \
			     : "=r"(p)                                                                                 \
			     : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, field)));                            \
		p;                                                                                                     \
	})

/* What is set once at load, all on one line of the data cache; initialised, or a compiler puts them in another order.
 */
#define CONSTANT volatile const __attribute__((section(".rodata.node")))
