package network

import (
	"context"
	"net/netip"
)

// Mapping says which node a subnet or an address of a tenant is on.
type Mapping struct {
	Tenant string
	To     netip.Prefix
	Node   netip.Prefix // its /64
}

// MappingSink is a network whose nodes keep where each subnet or address of a tenant is. It is told of hosted tenants
// only, and of one tenant one thing at a time. What an error kept from being done is told again, whole.
type MappingSink interface {
	// Replace tells all that there are, this node's own too. Until the first time nothing is known, and what the packet
	// path has from before stays.
	Replace(ctx context.Context, tenant string, all []Mapping) error
	// Apply tells what has changed since. Of what goes only tenant and prefix are set.
	Apply(ctx context.Context, tenant string, add, remove []Mapping) error
}

// Cluster gives out addresses that tenants have as their own.
type Cluster interface {
	// NodeCIDRs are this node's subnets of a tenant's overlays, in their order. The first time takes a message, later
	// ones none.
	NodeCIDRs(ctx context.Context, tenant string) ([]netip.Prefix, error)
	// Allocate gives an endpoint an address of each overlay of a tenant without node CIDRs. The same key gets the same
	// ones again. It is "container id/interface".
	Allocate(ctx context.Context, tenant, key string) ([]netip.Addr, error)
	// Free gives them back.
	Free(ctx context.Context, tenant, key string) error
}
