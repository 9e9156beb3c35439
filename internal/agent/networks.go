package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Network is one way to give containers addresses and to carry their packets.
type Network = network.Network

// networkOf is the name of the network that new endpoints of a tenant get.
func networkOf(t tenant.Tenant) string { return cmp.Or(t.Network, tenant.Netpila) }

// prepareAttachments takes addresses for an endpoint.
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
		return nil, refuse(ErrExhausted, "%w", err)
	}
	return a, err
}

func (c *Core) missingNetwork(t tenant.Tenant) error {
	return refuse(
		ErrUnavailable,
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

// forNetworksOf has every network that an endpoint has attachments of do something with its part of the record, also when
// one fails.
func (c *Core) forNetworksOf(r endpoint.Record, do func(Network, endpoint.Record) error) error {
	var errs []error
	for _, name := range r.Networks() {
		errs = append(errs, do(c.networks[name], r.On(name)))
	}
	return errors.Join(errs...)
}

// forAllNetworks has every network do something, in the order of their names.
func (c *Core) forAllNetworks(do func(name string, n Network) error) error {
	for _, name := range slices.Sorted(maps.Keys(c.networks)) {
		if err := do(name, c.networks[name]); err != nil {
			return err
		}
	}
	return nil
}

// networksOf are those that are to know a tenant: the one it is on, the one it leaves, and those that endpoints here
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

// putOnNetworks makes a tenant known to networks, and has those forget it that are not among them any more.
func (c *Core) putOnNetworks(ctx context.Context, t tenant.Tenant, wanted []string, had tenant.Tenant, on []string) error {
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

// status is the driver's, with what switches of networks have dropped beside it.
func (c *Core) status(ctx context.Context) (dpapi.Status, error) {
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
			s.Problems = append(s.Problems, fmt.Sprintf("what network %s dropped cannot be read: %v", name, err))
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

// eachGateway does something with each network that has a way to the underlay.
func (c *Core) eachGateway(do func(network.GatewayProvider) error) error {
	return c.forAllNetworks(func(_ string, n Network) error {
		if outward, ok := n.(network.GatewayProvider); ok {
			return do(outward)
		}
		return nil
	})
}

// hasGateway tells whether a network has a way to the underlay that works.
func hasGateway(n Network) bool {
	outward, ok := n.(network.GatewayProvider)
	return ok && outward.Gateway().Missing == ""
}

func (c *Core) deleteTenant(ctx context.Context, t tenant.Tenant) error {
	return c.forAllNetworks(func(_ string, n Network) error { return n.DeleteTenant(ctx, t) })
}

// repair fills every network's tables.
func (c *Core) repair(ctx context.Context, recorded, found []endpoint.Record) error {
	return c.forAllNetworks(
		func(name string, n Network) error { return n.Repair(ctx, on(name, recorded), on(name, found)) },
	)
}

// installedOn is the records with attachments of a network, reduced to these.
func on(name string, records []endpoint.Record) []endpoint.Record {
	var some []endpoint.Record
	for _, r := range records {
		if part := r.On(name); len(part.Attachments) > 0 {
			some = append(some, part)
		}
	}
	return some
}

// validate refuses a record from the disk that its networks cannot have made, or whose network this node does not have.
func (c *Core) validate(r endpoint.Record) error {
	for _, name := range r.Networks() {
		n, ok := c.networks[name]
		if !ok {
			return fmt.Errorf(
				"endpoint %d is on network %s, which this node does not have\n  packets flow as before; %s, or remove such containers first",
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

// Entries says how full the networks' tables are.
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
