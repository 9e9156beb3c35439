// Package ovs is NIMITZ's pipeline on Open vSwitch (NIMITZ §3.1; NM1): a switch with one OpenFlow flow for each entry,
// and a small number of constant flows. It creates bridges and ports by OVSDB.
//
// The agent uses the userspace datapath (netdev). Its tunnels end at a separate bridge, whose device has the VTEP's
// address. A pair of devices connects that bridge to the node's stack, which routes. This datapath does not support
// VXLAN's group policy field; bpf/policy.bpf.c writes and reads the field on the way to and from the stack.
//
// The kernel datapath (system) works the same way, except that the node's own stack encapsulates. It can offload flows
// to tc. The agent does not use it: the agent's programs on containers' devices run before that datapath, and could not
// distinguish a device of the switch from one whose packets would leak into the stack.
package ovs

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -go-package ovs policy ../../../../bpf/policy.bpf.c -- -I../../../../bpf -O2 -g -Wall -Werror -mcpu=v3
