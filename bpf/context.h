/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reading the context of a program. */
#pragma once
#include "vmlinux.h"

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
