// Package device creates, attaches, checks, changes and removes the devices that join containers to the node: one
// driver for each kind (veth, netkit, macvlan). It does not write the networks' tables.
package device
