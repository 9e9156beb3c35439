// Package nimitz is the Go side of the paper's first network (NIMITZ §3): tenants have addresses of their own, VXLAN carries their
// packets between nodes, and every node keeps where each of a tenant's subnets or containers is. Package pipeline says what becomes of a packet.
package nimitz

import (
	"context"
	"net/netip"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Name is that of the network in attachments.
const Name = "nimitz"

// Mapping says which node a subnet or an address of a tenant is on.
type Mapping struct {
	Tenant string
	To     netip.Prefix
	Node   netip.Prefix // its /64
}

// Cluster gives out the addresses of tenants.
type Cluster interface {
	// NodeCIDRs are this node's subnets of a tenant's overlays, in their order. The first time takes a message, later ones none.
	NodeCIDRs(ctx context.Context, tenant string) ([]netip.Prefix, error)
	// Allocate gives an endpoint an address of each overlay of a tenant without node CIDRs. The same key gets the same ones again.
	// It is "container id/interface".
	Allocate(ctx context.Context, tenant, key string) ([]netip.Addr, error)
	// Free gives them back.
	Free(ctx context.Context, tenant, key string) error
}

// Switch renders the pipeline's entries and moves packets by them.
type Switch interface {
	// Plug makes a device a port, and may be repeated.
	Plug(ctx context.Context, port pipeline.Port, device pipeline.Device) error
	Unplug(ctx context.Context, port pipeline.Port) error
	// Apply takes entries away and adds others, all or nothing.
	Apply(ctx context.Context, remove, add []pipeline.Entry) error
	// Entries is what the switch holds, read from it.
	Entries(ctx context.Context) ([]pipeline.Entry, error)
}

// Forgetful is a switch that can lose its entries while the agent runs.
type Forgetful interface {
	// Forgets returns when that may have happened and it is ready to be told them again, or with an error when ctx has ended.
	Forgets(ctx context.Context) error
}
