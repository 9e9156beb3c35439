package networks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// Set has the networks of a node.
type Set struct {
	all    map[string]network.Network // by name
	absent map[string]string          // by name of a network that this node lacks: the option that enables it
}

// New returns the set of these networks.
func New(all map[string]network.Network, absent map[string]string) *Set { return &Set{all, absent} }

// Get returns the network with a name; nil if this node lacks it.
func (s *Set) Get(name string) network.Network { return s.all[name] }

// Of is the name of the network for new endpoints of a tenant.
func Of(t tenant.Tenant) string { return t.OnNetwork() }

// Prepare allocates addresses for an endpoint on its tenant's network.
func (s *Set) Prepare(
	ctx context.Context,
	t tenant.Tenant,
	app address.AppID,
	r endpoint.Record,
) ([]endpoint.Attachment, error) {
	n, ok := s.all[Of(t)]
	if !ok {
		return nil, s.missing(t)
	}
	if err := tenant.CheckKeyed(t.Name, Of(t), r.AddressKey); err != nil {
		return nil, refusal.New(refusal.ErrInvalid, "%w", err)
	}
	if err := tenant.CheckPublishes(t.Name, Of(t), len(r.HostPorts)); err != nil {
		return nil, refusal.New(refusal.ErrInvalid, "%w", err)
	}
	a, err := n.Prepare(ctx, t, app, r)
	if errors.Is(err, endpoint.ErrExhausted) {
		return nil, refusal.New(refusal.ErrExhausted, "%w", err)
	}
	return a, err
}

func (s *Set) missing(t tenant.Tenant) error { return s.Missing(t.Name, t.Network) }

// Missing is the refusal of a tenant on a network that this node lacks.
func (s *Set) Missing(name, network string) error {
	return refusal.New(
		refusal.ErrUnavailable,
		"tenant %s is on network %s, which this node does not have\n  nothing was changed; %s, or use another node",
		name,
		network,
		s.HowToEnable(network),
	)
}

// HowToEnable names what adds a network that this node lacks.
func (s *Set) HowToEnable(network string) string {
	if with, ok := s.absent[network]; ok {
		return "start the agent with " + with
	}
	return "start a build of the agent that has it"
}

// EachOf calls do for each network that an endpoint is attached to, with that network's part of the record. An error
// does not stop it.
func (s *Set) EachOf(r endpoint.Record, do func(network.Network, endpoint.Record) error) error {
	var errs []error
	for _, name := range r.Networks() {
		errs = append(errs, do(s.all[name], r.On(name)))
	}
	return errors.Join(errs...)
}

// Each calls do for every network, in the order of their names, until an error.
func (s *Set) Each(do func(name string, n network.Network) error) error {
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		if err := do(name, s.all[name]); err != nil {
			return err
		}
	}
	return nil
}

// Put adds a tenant to the wanted networks and removes it from the others that know it.
func (s *Set) Put(ctx context.Context, t tenant.Tenant, wanted []string, had tenant.Tenant,
	on []string) error {
	return s.Each(func(name string, n network.Network) error {
		switch {
		case slices.Contains(wanted, name):
			return n.PutTenant(ctx, t)
		case slices.Contains(on, name):
			return n.DeleteTenant(ctx, had)
		}
		return nil
	})
}

// AddStatus adds the drops and capabilities of the networks' switches to the driver's status.
func (s *Set) AddStatus(ctx context.Context, to *dpapi.Status) error {
	to.Drops, to.Switches = slices.Clone(to.Drops), map[string]string{}
	return s.Each(func(name string, n network.Network) error {
		if by, ok := n.(network.SwitchInfo); ok {
			to.Switches[name], to.Without = by.Switch(), append(to.Without, by.Lacks()...)
		}
		switched, ok := n.(network.DropCounter)
		if !ok {
			return nil
		}
		dropped, err := switched.Drops(ctx)
		if err != nil {
			to.Problems = append(to.Problems,
				fmt.Sprintf("reading the drop counters of network %s failed: %v", name, err))
		}
		counts := map[string]uint64{}
		for why, packets := range dropped {
			counts[why.String()] = packets
		}
		for i := range to.Drops {
			to.Drops[i].Packets += counts[to.Drops[i].Reason]
		}
		return nil
	})
}

// FollowMTU sets the MTU of the networks' gateways and tunnels.
func (s *Set) FollowMTU(mtu int) error {
	return s.Each(func(_ string, n network.Network) error {
		if follower, ok := n.(network.MTUFollower); ok {
			return follower.FollowMTU(mtu)
		}
		return nil
	})
}

// eachGateway calls do for each network that has a gateway to the underlay.
func (s *Set) eachGateway(do func(network.GatewayProvider) error) error {
	return s.Each(func(_ string, n network.Network) error {
		if outward, ok := n.(network.GatewayProvider); ok {
			return do(outward)
		}
		return nil
	})
}

// Gateways returns the gateways to the underlay that networks of this node have.
func (s *Set) Gateways() (all []network.Gateway) {
	_ = s.eachGateway(func(n network.GatewayProvider) error { all = append(all, n.Gateway()); return nil })
	return all
}

// Locator returns the prefix that the fabric must route to this node beside the node's own; zero if there is none.
func (s *Set) Locator() (locator netip.Prefix) {
	_ = s.Each(func(_ string, n network.Network) error {
		if has, ok := n.(network.LocatorProvider); ok {
			locator = has.Locator()
		}
		return nil
	})
	return locator
}

// OnFabric returns the address that the fabric sees of a container's; zero if its network encapsulates packets, or if
// the attachment has the address itself.
func (s *Set) OnFabric(of endpoint.Attachment) (a netip.Addr) {
	if s == nil || !of.Locator.IsValid() {
		return a
	}
	_ = s.Each(func(name string, n network.Network) error {
		if has, ok := n.(network.LocatorProvider); ok && name == of.Network {
			a = has.OnFabric(of)
		}
		return nil
	})
	return a
}

// Delete removes a tenant, or some of its ids, from every network.
func (s *Set) Delete(ctx context.Context, t tenant.Tenant) error {
	return s.Each(func(_ string, n network.Network) error { return n.DeleteTenant(ctx, t) })
}

// Repair fills the tables of every network.
func (s *Set) Repair(ctx context.Context, recorded, found []endpoint.Record) error {
	return s.Each(
		func(name string, n network.Network) error { return n.Repair(ctx, on(name, recorded), on(name, found)) },
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

// Entries returns the use of the networks' tables.
func (s *Set) Entries(ctx context.Context) ([]dpapi.Entries, error) {
	var all []dpapi.Entries
	err := s.Each(func(name string, n network.Network) error {
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
func (s *Set) MappingSinks(t tenant.Tenant) (all []network.MappingSink) {
	for _, name := range []string{Of(t), t.Leaving} {
		if m, ok := s.all[name].(network.MappingSink); ok {
			all = append(all, m)
		}
	}
	return all
}

// HasMappings reports whether a network has all mappings of a tenant, or needs none.
func (s *Set) HasMappings(of, name string) bool {
	is, ok := s.all[name].(network.MappingStatus)
	return !ok || is.HasMappings(of)
}

// Pullers returns the networks that subscribe to mappings, by name.
func (s *Set) Pullers() map[string]network.MappingPuller {
	all := map[string]network.MappingPuller{}
	_ = s.Each(func(name string, n network.Network) error {
		if p, ok := n.(network.MappingPuller); ok && p.Pulls() {
			all[name] = p
		}
		return nil
	})
	return all
}

// sealTimeout limits Seal, which may outlive the call that caused it.
const sealTimeout = 30 * time.Second

// Seal isolates a tenant's containers on networks that cannot enforce its policies, or ends that.
func (s *Set) Seal(name string, sealed bool) error {
	return s.Each(func(_ string, n network.Network) error {
		u, ok := n.(network.PolicyGuard)
		if !ok || u.PolicyError() == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), sealTimeout) // the caller may have cancelled
		defer cancel()
		return u.Seal(ctx, name, sealed)
	})
}

// PolicyError returns why a network enforces no policies on this node, or nil.
func PolicyError(n network.Network) error {
	if u, ok := n.(network.PolicyGuard); ok {
		return u.PolicyError()
	}
	return nil
}

// CheckGuards returns why one of these networks enforces no policies of a tenant on this node, or nil.
func (s *Set) CheckGuards(name string, networks []string) error {
	for _, on := range networks {
		if why := PolicyError(s.all[on]); why != nil {
			return fmt.Errorf("tenant %s has policies, and network %s enforces none on this node: %w", name, on, why)
		}
	}
	return nil
}
