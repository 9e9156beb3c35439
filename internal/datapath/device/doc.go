// Package device creates, attaches, checks, changes and removes the devices that join containers to the node: one
// driver for each kind (veth, netkit, macvlan). What a network's tables say of an endpoint is not its work.
package device
