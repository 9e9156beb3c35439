// Package hook attaches the programs that are not on containers' devices: on the uplink, on the node's other
// interfaces, between the node's stack and its containers, and on the devices of tunnels, the gateway and Open
// vSwitch.
package hook
