// Package tables is the data path of network evpn on a node: its programs, and its tables of NIMITZ's pipeline.
package tables

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package tables object ../../../../bpf/evpn.bpf.c -- -I../../../../bpf -O2 -g -Wall -Werror -mcpu=v3
