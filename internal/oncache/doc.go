// Package oncache lets containers of a VXLAN network of IPv6 pass most of it (OC1): programs remember what the
// network's own devices did with the first packets of a connection, in each direction, and do the same with the
// rest. The design is ONCache's (NSDI '25); programs and tables, in bpf/oncache.bpf.c, are our own.
//
// It loads the programs and attaches them over a network that another program has set up. It follows no change of
// that network: the program that changes it must clear the cache (OC3 asks for more: nothing may be learnt meanwhile).
package oncache

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package oncache oncache ../../bpf/oncache.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3
