// Package dpapi is the interface between a node's agent and the driver of its packet path. Package datapath implements
// it on Linux with eBPF; a simulation counts the calls. It has only types and interfaces: agent and driver import this
// package, and neither imports the other.
package dpapi

import "errors"

// ErrNoNamespace means that an endpoint's container is gone, and its device with it.
var ErrNoNamespace = errors.New("its container's namespace is gone")

// NodeDevice leads from the node's own stack to its containers.
const NodeDevice = "pilaster0"

// Default limits of a node.
const (
	DefaultMaxEndpoints = 4096
	DefaultMaxTenantIDs = 4095 // tables are one entry larger: a power of two costs least
)

// Driver applies the agent's decisions to the kernel. Every call may be repeated: the second one changes nothing.
//
// A driver owns devices and hooks. What the packet path knows of endpoints and tenants is in the tables of their
// networks (package network).
type Driver interface {
	Devices
	Policies
	Services
	Access
	Stats
	Events
}
