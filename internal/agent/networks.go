package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Network allocates addresses for containers and forwards their packets.
type Network = network.Network

// networkOf is the name of the network for new endpoints of a tenant.
func networkOf(t tenant.Tenant) string { return cmp.Or(t.Network, tenant.Netpila) }

// prepareAttachments allocates addresses for an endpoint on its tenant's network.
func (c *Core) prepareAttachments(
	ctx context.Context,
	t tenant.Tenant,
	app address.AppID,
	r endpoint.Record,
) ([]endpoint.Attachment, error) {
	n, ok := c.networks[networkOf(t)]
	if !ok {
		return nil, c.missingNetwork(t)
	}
	a, err := n.Prepare(ctx, t, app, r)
	if errors.Is(err, endpoint.ErrExhausted) {
		return nil, refusal.New(refusal.ErrExhausted, "%w", err)
	}
	return a, err
}

func (c *Core) missingNetwork(t tenant.Tenant) error {
	return refusal.New(
		refusal.ErrUnavailable,
		"tenant %s is on network %s, which this node does not have\n  nothing was changed; %s, or use another node",
		t.Name,
		t.Network,
		c.howToEnable(t.Network),
	)
}

func (c *Core) howToEnable(network string) string {
	if with, ok := c.absent[network]; ok {
		return "start the agent with " + with
	}
	return "start a build of the agent that has it"
}

// forNetworksOf calls do for each network that an endpoint is attached to, with that network's part of the record. An
// error does not stop it.
func (c *Core) forNetworksOf(r endpoint.Record, do func(Network, endpoint.Record) error) error {
	var errs []error
	for _, name := range r.Networks() {
		errs = append(errs, do(c.networks[name], r.On(name)))
	}
	return errors.Join(errs...)
}

// forAllNetworks calls do for every network, in the order of their names, until an error.
func (c *Core) forAllNetworks(do func(name string, n Network) error) error {
	for _, name := range slices.Sorted(maps.Keys(c.networks)) {
		if err := do(name, c.networks[name]); err != nil {
			return err
		}
	}
	return nil
}

// networksOf returns the networks that must know a tenant: its own, the one it leaves, and those that endpoints here
// have addresses of.
func (c *Core) networksOf(t tenant.Tenant) []string {
	names := []string{networkOf(t)}
	if _, ok := c.networks[t.Leaving]; ok {
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

// putOnNetworks adds a tenant to the wanted networks and removes it from the others that know it.
func (c *Core) putOnNetworks(ctx context.Context, t tenant.Tenant, wanted []string, had tenant.Tenant,
	on []string) error {
	return c.forAllNetworks(func(name string, n Network) error {
		switch {
		case slices.Contains(wanted, name):
			return n.PutTenant(ctx, t)
		case slices.Contains(on, name):
			return n.DeleteTenant(ctx, had)
		}
		return nil
	})
}

// DatapathStatus is the driver's status plus drops and capabilities of the networks' switches.
func (c *Core) DatapathStatus(ctx context.Context) (dpapi.Status, error) {
	s, err := c.driver.Status()
	if err != nil {
		return s, err
	}
	s.Drops, s.Switches = slices.Clone(s.Drops), map[string]string{}
	err = c.forAllNetworks(func(name string, n Network) error {
		if by, ok := n.(network.SwitchInfo); ok {
			s.Switches[name], s.Without = by.Switch(), append(s.Without, by.Lacks()...)
		}
		switched, ok := n.(network.DropCounter)
		if !ok {
			return nil
		}
		dropped, err := switched.Drops(ctx)
		if err != nil {
			s.Problems = append(s.Problems,
				fmt.Sprintf("reading the drop counters of network %s failed: %v", name, err))
		}
		counts := map[string]uint64{}
		for why, packets := range dropped {
			counts[why.String()] = packets
		}
		for i := range s.Drops {
			s.Drops[i].Packets += counts[s.Drops[i].Reason]
		}
		return nil
	})
	return s, err
}

// eachGateway calls do for each network that has a gateway to the underlay.
func (c *Core) eachGateway(do func(network.GatewayProvider) error) error {
	return c.forAllNetworks(func(_ string, n Network) error {
		if outward, ok := n.(network.GatewayProvider); ok {
			return do(outward)
		}
		return nil
	})
}

// Gateways returns the gateways to the underlay that networks of this node have.
func (c *Core) Gateways() (all []network.Gateway) {
	_ = c.eachGateway(func(n network.GatewayProvider) error { all = append(all, n.Gateway()); return nil })
	return all
}

func (c *Core) deleteTenant(ctx context.Context, t tenant.Tenant) error {
	return c.forAllNetworks(func(_ string, n Network) error { return n.DeleteTenant(ctx, t) })
}

// repair fills the tables of every network.
func (c *Core) repair(ctx context.Context, recorded, found []endpoint.Record) error {
	return c.forAllNetworks(
		func(name string, n Network) error { return n.Repair(ctx, on(name, recorded), on(name, found)) },
	)
}

// on returns the records with attachments of a network, reduced to that network.
func on(name string, records []endpoint.Record) []endpoint.Record {
	var some []endpoint.Record
	for _, r := range records {
		if part := r.On(name); len(part.Attachments) > 0 {
			some = append(some, part)
		}
	}
	return some
}

// validate refuses a record from disk that is invalid for its networks, or whose network this node lacks.
func (c *Core) validate(r endpoint.Record) error {
	for _, name := range r.Networks() {
		n, ok := c.networks[name]
		if !ok {
			return fmt.Errorf(
				"endpoint %d is on network %s, which this node does not have\n  packets flow as before; %s, or "+
					"remove such containers first",
				r.ID,
				name,
				c.howToEnable(name),
			)
		}
		if err := n.Validate(r.On(name)); err != nil {
			return &statefile.CorruptError{Path: c.store.RecordPath(r.ID), Err: err}
		}
	}
	return nil
}

// Entries returns the use of the networks' tables.
func (c *Core) Entries(ctx context.Context) ([]dpapi.Entries, error) {
	var all []dpapi.Entries
	err := c.forAllNetworks(func(name string, n Network) error {
		entries, err := n.Entries(ctx)
		if err != nil {
			return fmt.Errorf("network %s: %w", name, err)
		}
		all = append(all, entries...)
		return nil
	})
	return all, err
}

// MappingSinks returns the networks that receive a tenant's mappings: its own and the one that it leaves, if they use
// mappings.
func (c *Core) MappingSinks(t tenant.Tenant) (all []network.MappingSink) {
	for _, name := range []string{networkOf(t), t.Leaving} {
		if m, ok := c.networks[name].(network.MappingSink); ok {
			all = append(all, m)
		}
	}
	return all
}
