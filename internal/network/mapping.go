package network

import (
	"context"
	"net/netip"
)

// Mapping maps a subnet or an address of a tenant to the node it is on.
type Mapping struct {
	Tenant string
	To     netip.Prefix
	Node   netip.Prefix // its /64
}

// MappingSink is a network whose nodes store where each subnet or address of a tenant is. The agent sends it updates of
// hosted tenants only, one at a time per tenant. After an error the agent sends the whole list again.
type MappingSink interface {
	// Replace sets the whole list, this node's own subnets included. Before the first call the list is unknown, and the
	// packet path keeps what it had.
	Replace(ctx context.Context, tenant string, all []Mapping) error
	// Apply adds and removes mappings. Of removed ones only tenant and prefix are set.
	Apply(ctx context.Context, tenant string, add, remove []Mapping) error
}

// Cluster allocates the addresses that are a tenant's own.
type Cluster interface {
	// NodeCIDRs returns this node's subnets of a tenant's overlays, in their order. The first call sends a request to
	// the orchestrator, later ones do not.
	NodeCIDRs(ctx context.Context, tenant string) ([]netip.Prefix, error)
	// Allocate gives an endpoint an address of each overlay of a tenant without node CIDRs. The key is "container
	// id/interface"; the same key gets the same addresses again.
	Allocate(ctx context.Context, tenant, key string) ([]netip.Addr, error)
	// Free releases them.
	Free(ctx context.Context, tenant, key string) error
}
