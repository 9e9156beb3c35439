// Package ovs is NIMITZ's pipeline on Open vSwitch (NIMITZ §3.1; NM1): a switch whose entries are OpenFlow flows, one each, beside a handful
// of constant ones. Bridges and ports are made by OVSDB.
//
// The agent's datapath is the one in user space (netdev). Its tunnels end at a bridge of their own, whose device has the VTEP's address; a pair of
// devices joins that bridge to the node's stack, which routes. It does not know VXLAN's group policy field; bpf/policy.bpf.c writes and reads it for it
// on the way to the stack.
//
// The kernel's datapath (system) does the same with the node's own stack as the tunnels' way, and gives flows to tc. The agent does not use it: its
// programs stand before it on containers' devices, and could not tell a device that is the switch's from one whose packets would leak into the stack.
package ovs

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package ovs policy ../../../../bpf/policy.bpf.c -- -I../../../../bpf -O2 -g -Wall -Werror -mcpu=v3
