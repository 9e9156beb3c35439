// Package nimitz is the Go side of the paper's first network (NIMITZ §3): tenants have addresses of their own, VXLAN
// carries their packets between nodes, and every node keeps where each of a tenant's subnets or containers is. Package
// pipeline says what becomes of a packet.
package nimitz

import (
	"context"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Name is that of the network in attachments.
const Name = "nimitz"

// Switch renders the pipeline's entries and moves packets by them.
type Switch interface {
	// Plug makes a device a port, and may be repeated.
	Plug(ctx context.Context, port pipeline.Port, device pipeline.Device) error
	Unplug(ctx context.Context, port pipeline.Port) error
	// Apply takes entries away and adds others, all or nothing.
	Apply(ctx context.Context, remove, add []pipeline.Entry) error
	// Check names the first of a port's entries that the switch does not have, or why the device is not the port; it
	// reads no others.
	Check(ctx context.Context, port pipeline.Port, device pipeline.Device, entries []pipeline.Entry) error
	// SetMTU fits what carries tunnels to what may leave by the uplink, in bytes.
	SetMTU(mtu int) error
	// Entries is what the switch holds, read from it.
	Entries(ctx context.Context) ([]pipeline.Entry, error)
}

// Lacking is a switch that gives containers less than another.
type Lacking interface {
	// Lacks says what they do without, a line each.
	Lacks() []string
}

// PolicyError is a switch that enforces no policies.
type PolicyGuard interface {
	// PolicyError says why.
	PolicyError() error
}

// Forgetful is a switch that can lose its entries while the agent runs.
type Forgetful interface {
	// Forgets returns when that may have happened and it is ready to be told them again, or with an error when ctx has
	// ended.
	Forgets(ctx context.Context) error
}
