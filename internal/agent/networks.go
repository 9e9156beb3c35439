package agent

import (
	"context"
	"fmt"
	"slices"

	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Network allocates addresses for containers and forwards their packets.
type Network = network.Network

// networksOf returns the networks that must know a tenant: its own, the one it leaves, and those that endpoints here
// have addresses of.
func (c *Core) networksOf(t tenant.Tenant) []string {
	names := []string{networks.Of(t)}
	if c.networks.Get(t.Leaving) != nil {
		names = append(names, t.Leaving)
	}
	for _, r := range c.store.List() {
		if r.Tenant == t.Name {
			names = append(names, r.Networks()...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// validate refuses a record from disk that is invalid for its networks, or whose network this node lacks.
func (c *Core) validate(r endpoint.Record) error {
	for _, name := range r.Networks() {
		n := c.networks.Get(name)
		if n == nil {
			return fmt.Errorf(
				"endpoint %d is on network %s, which this node does not have\n  packets flow as before; %s, or "+
					"remove such containers first",
				r.ID,
				name,
				c.networks.HowToEnable(name),
			)
		}
		if err := n.Validate(r.On(name)); err != nil {
			return &statefile.CorruptError{Path: c.store.RecordPath(r.ID), Err: err}
		}
	}
	return nil
}

// DatapathStatus is the driver's status plus drops and capabilities of the networks' switches.
func (c *Core) DatapathStatus(ctx context.Context) (dpapi.Status, error) {
	s, err := c.driver.Status()
	if err != nil {
		return s, err
	}
	err = c.networks.AddStatus(ctx, &s)
	return s, err
}

// Networks returns the networks of this node.
func (c *Core) Networks() *networks.Set { return c.networks }
