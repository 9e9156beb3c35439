package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// A running endpoint has the default route and an egress address while its tenant's rules require it. One that an older
// build has made gets the route to services in the same way.
// What it gets is in its record before the device and the tables have it; what it loses stays in the record until they
// do not have it. So after a crash the start repairs the former, and the comparison of record and tenant repeats the
// latter. Both run in the loop of migrations.

// sameEgress reports whether endpoints of a tenant need the same in two states of it.
func sameEgress(a, b tenant.Tenant) bool {
	return a.NeedsDefaultRoute() == b.NeedsDefaultRoute() && a.NeedsEgressAddress() == b.NeedsEgressAddress()
}

// needsSettling reports whether an endpoint has to get or lose a default route or an egress address.
func (c *Core) needsSettling(t tenant.Tenant, r endpoint.Record) bool {
	if c.tenants.Lost(t.Name) != nil {
		return false // its rules are unknown
	}
	return c.isSettling(r.ID) ||
		slices.ContainsFunc(r.Attachments, func(a endpoint.Attachment) bool { return !c.egress.Settled(t, r, a) })
}

func (c *Core) isSettling(id endpoint.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.settling[id]
}

func (c *Core) setSettling(id endpoint.ID, is bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.settling[id] = is; !is {
		delete(c.settling, id)
	}
}

// signalEgress wakes the loop for an added endpoint whose tenant has other rules by now.
func (c *Core) signalEgress(r endpoint.Record) {
	if known, _, ok := c.tenants.Get(r.Tenant); ok && c.needsSettling(known.Tenant, r) {
		c.migrationDue.wake()
	}
}

// settleTenant gives a tenant's endpoints what its rules require, and reports whether all have it.
func (c *Core) settleTenant(ctx context.Context, name string, records []endpoint.Record) (done bool) {
	known, _, ok := c.tenants.Get(name)
	var failed error
	for _, r := range records {
		if !ok || r.State != endpoint.Active || !c.needsSettling(known.Tenant, r) {
			continue
		}
		if err := c.settleOne(ctx, r.ContainerID, r.Interface); err != nil {
			c.log.Error("changing the egress of an endpoint failed", "endpoint", r.ID, "container", r.ContainerID,
				"tenant", name, "error", err)
			failed = cmp.Or(failed, fmt.Errorf("endpoint %d: %w", r.ID, err))
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unsettled[name] = failed; failed == nil {
		delete(c.unsettled, name)
	}
	return failed == nil
}

func (c *Core) settleOne(ctx context.Context, containerID, iface string) error {
	unlock, err := c.byKey.Lock(ctx, EndpointKey(containerID, iface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(containerID, iface)
	if !ok || r.State != endpoint.Active {
		return nil // a DEL removed it, or its device is gone
	}
	known, _, ok := c.tenants.Get(r.Tenant)
	if !ok || !c.needsSettling(known.Tenant, r) {
		return nil
	}
	more, is, err := c.settled(known.Tenant, r)
	if err != nil {
		return err
	}
	if err := c.addEgress(ctx, r, more); err != nil {
		return err
	}
	if err := c.dropEgress(ctx, more, is); err != nil {
		return err
	}
	c.setSettling(r.ID, false)
	c.log.Info("egress of an endpoint changed", "endpoint", r.ID, "container", r.ContainerID, "pod", r.Pod,
		"addresses", egressOf(is))
	return nil
}

// settled returns the record that a tenant's rules require, and before it the one with what the endpoint gets and
// without what it loses.
func (c *Core) settled(t tenant.Tenant, r endpoint.Record) (more, is endpoint.Record, err error) {
	more, is = r, r
	more.Attachments, is.Attachments = slices.Clone(r.Attachments), slices.Clone(r.Attachments)
	for i, a := range r.Attachments {
		settled, err := c.egress.Settle(t, r, a)
		if err != nil {
			c.releaseEgress(is, r)
			return more, is, err
		}
		is.Attachments[i] = settled
		both := &more.Attachments[i]
		both.Egress, both.Routes = cmp.Or(settled.Egress, a.Egress), slices.Clone(settled.Routes)
		for _, route := range a.Routes {
			if !slices.Contains(both.Routes, route) {
				both.Routes = append(both.Routes, route)
			}
		}
	}
	return more, is, nil
}

// addEgress gives an endpoint what it gets: the record first, then the device, then the entries.
func (c *Core) addEgress(ctx context.Context, was, is endpoint.Record) error {
	if sameAttachments(was, is) && !c.isSettling(is.ID) {
		return nil
	}
	if !sameAttachments(was, is) {
		// CanReaddress comes first: a container that forbids the change would cause a write at every retry.
		err := c.driver.CanReaddress(was, is)
		if err == nil {
			err = c.store.Put(is)
		}
		if err != nil {
			c.releaseEgress(is, was)
			return err
		}
		c.setSettling(is.ID, true)
	}
	if err := c.driver.Readdress(ctx, c.withoutEgress(is), is); err != nil {
		return err
	}
	err := c.networks.EachOf(is, func(n Network, r endpoint.Record) error { return n.Activate(ctx, r) })
	if err == nil {
		c.releaseEgress(was, is)
	}
	return err
}

// dropEgress takes from an endpoint what it loses: the entries first, then the device, then the record.
func (c *Core) dropEgress(ctx context.Context, was, is endpoint.Record) error {
	if sameAttachments(was, is) {
		return nil
	}
	c.setSettling(is.ID, true)
	err := c.networks.EachOf(is, func(n Network, r endpoint.Record) error { return n.Activate(ctx, r) })
	if err != nil {
		return err
	}
	if err := c.driver.Readdress(ctx, was, is); err != nil {
		return err
	}
	if err := c.store.Put(is); err != nil {
		return err
	}
	c.releaseEgress(was, is)
	return nil
}

// releaseEgress releases the egress addresses of was that is does not have.
func (c *Core) releaseEgress(was, is endpoint.Record) {
	for _, a := range egressOf(was) {
		if slices.Contains(egressOf(is), a) {
			continue
		}
		if err := c.egress.Release(a); err != nil {
			// It leaks until the next start.
			c.log.Warn("an egress address is not noted as released", "address", a, "error", err)
		}
	}
}

func egressOf(r endpoint.Record) (all []netip.Addr) {
	for _, a := range r.Attachments {
		if a.Egress.IsValid() {
			all = append(all, a.Egress)
		}
	}
	return all
}

// withoutEgress returns a record without what its endpoint may have to get, so that the device gets it again.
func (c *Core) withoutEgress(r endpoint.Record) endpoint.Record {
	services, _ := c.plan.ServicePrefix()
	r.Attachments = slices.Clone(r.Attachments)
	for i := range r.Attachments {
		a := &r.Attachments[i]
		a.Egress = netip.Addr{}
		a.Routes = slices.DeleteFunc(slices.Clone(a.Routes), func(p netip.Prefix) bool {
			return a.LeadsOutside(p) || p == services
		})
	}
	return r
}

func sameAttachments(a, b endpoint.Record) bool {
	return slices.EqualFunc(a.Attachments, b.Attachments, func(x, y endpoint.Attachment) bool {
		return x.Egress == y.Egress && slices.Equal(x.Routes, y.Routes)
	})
}

// egressProblems describes endpoints that lack egress, or still have it, by tenant.
func (c *Core) egressProblems() (all []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(c.unsettled)) {
		all = append(all, fmt.Sprintf("tenant %s: containers do not have the routes or the egress address that its "+
			"services and rules require, or still have one; retrying: %v", name, c.unsettled[name]))
	}
	return all
}

// EgressGateways returns the gateways of each egress rule that has some, of tenants with containers here.
func (c *Core) EgressGateways() (all [][]tenant.EgressGateway) {
	for _, k := range c.tenants.All() {
		if c.tenants.endpoints(k.Tenant.Name) == 0 {
			continue
		}
		for _, r := range k.Tenant.Egress {
			if len(r.Via) > 0 {
				all = append(all, r.Via)
			}
		}
	}
	return all
}

// MayReachContainers returns a tenant here whose containers on other nodes processes of this node may reach.
func (c *Core) MayReachContainers() (tenantName string, ok bool) {
	for _, k := range c.tenants.All() {
		if slices.ContainsFunc(k.Tenant.Nodes, func(p netip.Prefix) bool { return p.Contains(c.tenants.node.Addr()) }) {
			return k.Tenant.Name, true
		}
	}
	return "", false
}

// GatewayRole is a tenant that this node is an egress gateway of.
type GatewayRole struct {
	Tenant  string
	Address netip.Addr // at which hosts outside see the tenant
}

// GatewayRoles returns the tenants that this node is an egress gateway of, by name. A tenant has one address at a node.
func (c *Core) GatewayRoles() (all []GatewayRole) {
	for _, k := range c.tenants.All() {
		for _, r := range k.Tenant.Egress {
			i := slices.IndexFunc(r.Via, func(g tenant.EgressGateway) bool { return g.Prefix == c.tenants.node })
			if i >= 0 {
				all = append(all, GatewayRole{k.Tenant.Name, r.Via[i].Address})
				break
			}
		}
	}
	slices.SortFunc(all, func(a, b GatewayRole) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return all
}

// GatewaysChanged receives a value after a change of EgressGateways.
func (c *Core) GatewaysChanged() <-chan struct{} { return c.gatewaysChanged }

// signalGateways wakes the prober of gateways if one of the tenants' rules has some.
func (c *Core) signalGateways(of ...tenant.Tenant) {
	if slices.ContainsFunc(of, func(t tenant.Tenant) bool {
		return slices.ContainsFunc(t.Egress, func(r tenant.EgressRule) bool { return len(r.Via) > 0 })
	}) {
		c.gatewaysChanged.wake()
	}
}

// EgressUsed returns how many egress addresses endpoints of this node have.
func (c *Core) EgressUsed() int { return c.egress.Used() }

// FindEgressAddress returns who had an egress address of this node, as far as the log goes back, oldest first, and
// since when that is. If the address is another node's, the error says which node to ask.
func (c *Core) FindEgressAddress(a netip.Addr) (had []egress.Entry, since time.Time, err error) {
	owner, ok := tenant.NodeOfEgress(c.plan, a)
	_, gateway := c.outside(a)
	switch {
	case gateway != "":
		return nil, since, refusal.New(refusal.ErrInvalid, "%v is now the address of tenant %s at an egress "+
			"gateway, which its containers share; earlier tenants of the address are not recorded", a, gateway)
	case !ok:
		return nil, since, refusal.New(refusal.ErrInvalid, "%v is not an egress address of this cluster", a)
	case address.Split(a).Index < tenant.FirstEgressIndex:
		return nil, since, refusal.New(refusal.ErrInvalid,
			"%v is an address of the egress gateway with the prefix %v, not of one container\n  `pilaster egress "+
				"list` on an orchestrator shows the tenants that have one", a, owner)
	case owner != c.tenants.node:
		return nil, since, refusal.New(refusal.ErrNotFound, "%v is an egress address of the node with the prefix "+
			"%v\n  run this command there; `pilaster node list` shows its name", a, owner)
	}
	return c.egress.Find(a)
}
