// Package oncache is a cache for a VXLAN overlay that another program has set up (OC1 to OC4). Its eBPF programs record
// what the overlay's own devices do with the first packets of a connection in each direction, and do the same with
// later packets, which then bypass most of these devices. The design is ONCache's (NSDI '25); the programs and maps in
// bpf/oncache are our own.
//
// The package does not notice changes of the overlay. A program that does calls Pause, Evict, applies the change (or
// has seen it), and calls Resume; or Void, if it does not know what the change concerns. Without any call a change
// takes effect within Config.TTL. The programs use the cache while that program calls Renew: LeaseTime after the last
// call all packets pass the overlay again.
package oncache

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package oncache oncache ../../bpf/oncache.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3
