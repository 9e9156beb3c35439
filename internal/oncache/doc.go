// Package oncache is a cache for a VXLAN network with IPv6 (OC1). Its eBPF programs record what the network's own
// devices do with the first packets of a connection in each direction, and do the same with later packets, which then
// bypass most of these devices. The design is ONCache's (NSDI '25); the programs and maps in bpf/oncache.bpf.c are our
// own.
//
// The package attaches the programs to the devices of a network that another program has set up. It does not notice
// changes of that network: the program that changes the network must clear the cache. (OC3 also requires that the cache
// learns nothing during the change.)
package oncache

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package oncache oncache ../../bpf/oncache.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3
