// Package traced has the programs of network evpn with tracing, which a trace puts in the place of those of package
// tables. It loads nothing.
package traced

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package traced object ../../../../bpf/trace_evpn.bpf.c -- -I../../../../bpf -O2 -g -Wall -Werror -mcpu=v3
