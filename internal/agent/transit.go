package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// A node carries tenants that it must know also without an endpoint of them, such as those that its gateway publishes.
// Which these are comes with the node's own record, and lies in the tenants' files: a start without an orchestrator
// knows them.

// SetTransit takes what the cluster says of that. What the node has no more reason to know it forgets, also what it
// failed to forget before; what is new to it follows from the cluster.
func (c *Core) SetTransit(ctx context.Context, names []string) error {
	errs := []error{c.tenants.setTransit(names)}
	for _, name := range c.tenants.Names() {
		if !c.tenants.needed(name) {
			errs = append(errs, c.removeUnneeded(ctx, name))
		}
	}
	return errors.Join(errs...)
}

func (c *Core) removeUnneeded(ctx context.Context, name string) error {
	unlock, err := c.byTenant.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if c.tenants.needed(name) {
		return nil // since a moment ago
	}
	return c.removeTenant(ctx, name)
}

// tenantEmptied goes on without endpoints of a tenant: forgets it, unless it is carried. The caller holds the tenant's lock.
func (c *Core) tenantEmptied(ctx context.Context, name string) {
	if !c.tenants.needed(name) {
		_ = c.removeTenant(ctx, name) // it is logged, and tried again
		return
	}
	if err := c.forgetPolicies(name); err != nil {
		c.log.Error("policies of a tenant without endpoints stay", "tenant", name, "error", err)
	}
	if err := c.tenants.dropHosted(name); err != nil {
		c.log.Error("subnets of a tenant without endpoints stay on disk", "tenant", name, "error", err)
	}
}

// transitProblems says which carried tenants this node does nothing for.
func (c *Core) transitProblems() (problems []string) {
	for _, name := range c.tenants.transitNames() {
		known, _, ok := c.tenants.get(name)
		on := networkOf(known.Tenant)
		if _, has := c.networks[on]; ok && !has {
			problems = append(
				problems,
				fmt.Sprintf(
					"tenant %s is published at this node, which does not have network %s\n  %s, or publish it at another node",
					name,
					on,
					c.howToEnable(on),
				),
			)
		}
	}
	return problems
}

// setTransit takes note of what this node carries.
func (t *Tenants) setTransit(names []string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := map[string]bool{}
	for _, name := range names {
		now[name] = true
	}
	was := t.transit
	t.transit = now
	for _, name := range slices.Sorted(maps.Keys(t.m)) {
		if was[name] == now[name] {
			continue
		}
		if err := t.write(t.m[name]); err != nil {
			t.transit = was
			return err
		}
		t.signal()
	}
	return nil
}

func (t *Tenants) transitNames() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.transit))
}

func (t *Tenants) isTransit(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.transit[name]
}

// hosts tells whether a tenant lives here, or is about to; one that is only carried does not. The caller holds the
// lock.
func (t *Tenants) hosts(name string) bool {
	return t.m[name] != nil && (t.m[name].count() > 0 || !t.transit[name])
}

func (t *Tenants) isHosted(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.hosts(name)
}

// needed tells whether there is a reason to know a tenant.
func (t *Tenants) needed(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.transit[name] || t.m[name] != nil && t.m[name].count() > 0
}

// dropHosted forgets what the node had of a tenant's overlays and knew of its apps: that goes with its last endpoint.
func (t *Tenants) dropHosted(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m[name] == nil || t.m[name].subnets == nil && len(t.m[name].Apps) == 0 {
		return nil
	}
	h := *t.m[name]
	h.subnets, h.Apps = nil, nil
	if err := t.write(&h); err != nil {
		return err
	}
	t.m[name] = &h
	return nil
}

// heldTransit is what the node says of a tenant that it only carries: nothing that needs to be as the cluster has it.
func heldTransit(said *pilasterv1.Tenant) *pilasterv1.Tenant {
	return &pilasterv1.Tenant{
		Name:       said.Name,
		Network:    said.Network,
		Leaving:    said.Leaving,
		Addressing: said.Addressing,
		Overlays:   said.Overlays,
		Changes:    said.Changes,
	}
}
