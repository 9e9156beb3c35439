package agent

import (
	"context"
	"fmt"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/network"
)

// seal isolates a tenant's containers on networks that cannot enforce its policies, or ends that.
func (c *Core) seal(name string, sealed bool) error {
	return c.forAllNetworks(func(_ string, n Network) error {
		u, ok := n.(network.PolicyGuard)
		if !ok || u.PolicyError() == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), removeTimeout) // the caller may have cancelled
		defer cancel()
		return u.Seal(ctx, name, sealed)
	})
}

// PolicyError returns why a network enforces no policies on this node, or nil.
func PolicyError(n Network) error {
	if u, ok := n.(network.PolicyGuard); ok {
		return u.PolicyError()
	}
	return nil
}

// checkGuards returns why one of these networks enforces no policies of a tenant on this node, or nil.
func (c *Core) checkGuards(name string, networks []string) error {
	for _, on := range networks {
		if why := PolicyError(c.networks[on]); why != nil {
			return fmt.Errorf("tenant %s has policies, and network %s enforces none on this node: %w", name, on, why)
		}
	}
	return nil
}

// sealProblems describes tenants whose containers here are isolated for that reason.
func (c *Core) sealProblems(name string, t dpapi.TenantPolicies) []string {
	known, _, ok := c.tenants.Get(name)
	if !ok || !t.Restricts() {
		return nil
	}
	if err := c.checkGuards(name, c.networksOf(known.Tenant)); err != nil {
		return []string{
			fmt.Sprintf(
				"%v\n  its containers on this node are isolated from it, and none is added: delete its policies, or "+
					"move its containers to other nodes",
				err,
			),
		}
	}
	return nil
}
