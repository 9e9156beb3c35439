// Package tunnel tests the outer headers that programs push and pull (bpf/tunnel): their bytes, with packets as data,
// and what the kernel makes of them, between namespaces and with the kernel's VXLAN device at the other end. It has
// nothing else; programs include bpf/tunnel themselves.
package tunnel

//go:generate go tool bpf2go -type addr -type tunnel -output-suffix _test -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package tunnel programs ../../bpf/tunnel_test.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3
