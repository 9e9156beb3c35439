// Package nimitz is the Go side of the paper's first network (NIMITZ §3): tenants have their own addresses, nodes
// exchange packets by VXLAN, and every node stores the location of each of a tenant's subnets or containers. Package
// pipeline defines how a packet is processed.
package nimitz

import (
	"context"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Name is the network's name in attachments.
const Name = "nimitz"

// Switch renders the pipeline's entries and forwards packets by them.
type Switch interface {
	// Plug makes a device a port. It may be repeated.
	Plug(ctx context.Context, port pipeline.Port, device pipeline.Device) error
	Unplug(ctx context.Context, port pipeline.Port) error
	// Apply removes entries and adds others, all or nothing.
	Apply(ctx context.Context, remove, add []pipeline.Entry) error
	// Check returns an error if the device is not this port, or if the switch lacks one of the entries; the error names
	// the first missing one. Check reads only these entries.
	Check(ctx context.Context, port pipeline.Port, device pipeline.Device, entries []pipeline.Entry) error
	// SetMTU sets the MTU of the tunnel devices after the uplink's MTU, in bytes, changed.
	SetMTU(mtu int) error
	// Entries returns the entries of the switch, read from it.
	Entries(ctx context.Context) ([]pipeline.Entry, error)
}

// Lacking is a switch without some features.
type Lacking interface {
	// Lacks lists the missing features, a line each.
	Lacks() []string
}

// PolicyGuard is a switch that cannot enforce policies.
type PolicyGuard interface {
	// PolicyError returns the reason.
	PolicyError() error
}

// Forgetful is a switch that can lose its entries while the agent runs.
type Forgetful interface {
	// Forgets returns nil when the switch may have lost its entries and accepts them again, or an error when ctx has
	// ended.
	Forgets(ctx context.Context) error
}
