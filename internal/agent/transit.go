package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/networks"
)

// Transit tenants are tenants that a node must know without having endpoints of them, for example because its gateway
// publishes their addresses, or because it is a frontend of their offloads. The list comes with the node's own record
// and is stored in the tenants' files, so that a start without the orchestrator knows it.

// SetTransit sets the list of transit tenants. It removes every tenant that the node no longer needs, also those that
// it failed to remove before. State of new transit tenants follows on the stream.
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
	unlock, err := c.byTenant.Lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if c.tenants.needed(name) {
		return nil // it became needed meanwhile
	}
	return c.removeTenant(ctx, name)
}

// tenantEmptied handles a tenant without endpoints: it removes the tenant, unless it is a transit tenant or this node
// is a frontend of it. The caller holds the tenant's lock.
func (c *Core) tenantEmptied(ctx context.Context, name string) {
	if c.tenants.IsFrontend(name) {
		return
	}
	if !c.tenants.needed(name) {
		_ = c.removeTenant(ctx, name) // which logs the error; a later call retries
		return
	}
	if err := c.policies.Forget(name); err != nil {
		c.log.Error("removing the policies of a tenant without endpoints failed", "tenant", name, "error", err)
	}
	if known, _, ok := c.tenants.Get(name); ok {
		if err := c.services.Forget(known.Tenant); err != nil {
			c.log.Error("removing the services of a tenant without endpoints failed", "tenant", name, "error", err)
		}
	}
	if err := c.tenants.dropHosted(name); err != nil {
		c.log.Error("removing the subnets of a tenant without endpoints failed", "tenant", name, "error", err)
	}
}

// transitProblems names the transit tenants that this node cannot serve.
func (c *Core) transitProblems() (problems []string) {
	for _, name := range c.tenants.transitNames() {
		known, _, ok := c.tenants.Get(name)
		on := networks.Of(known.Tenant)
		if ok && c.networks.Get(on) == nil {
			problems = append(
				problems,
				fmt.Sprintf(
					"tenant %s is published at this node, which does not have network %s\n  %s, or publish it at "+
						"another node",
					name,
					on,
					c.networks.HowToEnable(on),
				),
			)
		}
	}
	return problems
}

// setTransit replaces the list of transit tenants.
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

// hosts reports whether a tenant has endpoints here, or is about to get one, or has this node as a frontend; another
// transit tenant without endpoints is not hosted. The caller holds the lock.
func (t *Tenants) hosts(name string) bool {
	return t.m[name] != nil && (t.m[name].count() > 0 || !t.transit[name] || t.fronts(name))
}

func (t *Tenants) IsHosted(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.hosts(name)
}

// needed reports whether this node has a reason to know a tenant.
func (t *Tenants) needed(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.transit[name] || t.m[name] != nil && t.m[name].count() > 0
}

// dropHosted drops the node's subnets and apps of a tenant after its last endpoint has gone.
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

// heldTransit returns what the node registers about a transit tenant: without ids, because a registration claims ids,
// and without services and publications.
func heldTransit(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	return &pilasterv1.Tenant{
		Name:       t.Name,
		Network:    t.Network,
		Leaving:    t.Leaving,
		Addressing: t.Addressing,
		Overlays:   t.Overlays,
		Changes:    t.Changes,
	}
}
