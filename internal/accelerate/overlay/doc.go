// Package overlay describes the VXLAN overlay of another network by what netlink says: its device, its containers, and
// which cached flows a change of a neighbour, a forwarding entry, a route or a device concerns. It changes nothing.
package overlay
