// Package tables is the data path of network ila on a node: its programs, and the maps that package ila fills.
package tables

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -type ila_local -type ila_peer -type ila_miss -type ila_miss_source -go-package tables object ../../../../bpf/ila.bpf.c -- -I../../../../bpf -O2 -g -Wall -Werror -mcpu=v3
