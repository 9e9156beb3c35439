// Package follow loads the programs of bpf/trace.bpf.c, which treat packets as those of the packet path do and report
// what they do with selected ones. It attaches nothing.
package follow

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -type addr -type packet_event -type packet_filter -go-package follow object ../../../bpf/trace.bpf.c -- -I../../../bpf -O2 -g -Wall -Werror -mcpu=v3
