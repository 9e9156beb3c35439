package agent

import (
	"context"

	"pilaster.io/pilaster/internal/network/nimitz"
)

// Mappings is a network whose nodes keep where each subnet or address of a tenant is. The Link tells it of hosted tenants only,
// and of one tenant one thing at a time. What an error kept from being done is told again, whole.
type Mappings interface {
	// Replace tells all that there are, this node's own too. Until the first time nothing is known, and what the packet path has from
	// before stays.
	Replace(ctx context.Context, tenant string, all []nimitz.Mapping) error
	// Apply tells what has changed since.
	Apply(ctx context.Context, tenant string, add, remove []nimitz.Mapping) error
}
