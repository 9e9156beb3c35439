// Package datapath drives the packet path in the kernel. It loads the eBPF programs of bpf/, pins their maps and links,
// takes the packet path over from another build, and reads back what the kernel holds and counts. Its parts are:
//
//   - bpfobj: the compiled programs, Go types of the C structs, and the names of pins
//   - host: the node's network namespace, with the loaded programs and maps
//   - hook: programs on the uplink, on other host interfaces and on the node's own devices
//   - device: the devices of containers (veth, netkit, macvlan)
//   - policymap: the maps of policies
//
// No other package attaches programs to the uplink. What the data path leaves in the kernel works without the agent:
// closing a Datapath, or killing the agent, stops no packets.
package datapath
