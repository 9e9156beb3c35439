package agent

import (
	"context"
	"fmt"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/network"
)

// seal has none of a tenant's containers here send or receive by networks that could not police it, or lets them again.
func (c *Core) seal(name string, sealed bool) error {
	return c.forAllNetworks(func(_ string, n Network) error {
		u, ok := n.(network.PolicyGuard)
		if !ok || u.PolicyError() == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), removeTimeout) // whoever asked may have gone
		defer cancel()
		return u.Seal(ctx, name, sealed)
	})
}

// guardError says why a network enforces no policies here, nil where it does.
func guardError(n Network) error {
	if u, ok := n.(network.PolicyGuard); ok {
		return u.PolicyError()
	}
	return nil
}

// checkGuards says why some of these networks enforce no policies of a tenant here, nil where they all do.
func (c *Core) checkGuards(name string, networks []string) error {
	for _, on := range networks {
		if why := guardError(c.networks[on]); why != nil {
			return fmt.Errorf("tenant %s has policies, and network %s enforces none on this node: %w", name, on, why)
		}
	}
	return nil
}

// sealProblems says which tenants' containers here are cut off for that.
func (c *Core) sealProblems(name string, t dpapi.TenantPolicies) []string {
	known, _, ok := c.tenants.get(name)
	if !ok || !t.Restricts() {
		return nil
	}
	if err := c.checkGuards(name, c.networksOf(known.Tenant)); err != nil {
		return []string{
			fmt.Sprintf(
				"%v\n  its containers here neither send nor receive by it, and none is added: delete its policies, or move its containers to other nodes",
				err,
			),
		}
	}
	return nil
}
