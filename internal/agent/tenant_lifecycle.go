package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// acquire finds tenant and app of a new endpoint and makes its network know the tenant, which
// stays until release. The app counts as used until disclaim. What this node knows costs no message.
func (c *Core) acquire(
	ctx context.Context,
	name string,
	identity map[string]string,
) (tenant.Tenant, address.AppID, error) {
	t, app, ok, err := c.acquireKnown(ctx, name, identity, nil)
	if !ok && err == nil {
		t, app, err = c.resolveTenant(ctx, name, identity)
	}
	if err != nil {
		return t, app, err
	}
	if err := c.awaitPolicies(ctx, name); err != nil {
		c.tenants.unclaim(name, app)
		c.release(ctx, name, t.Current().ID)
		return tenant.Tenant{}, 0, err
	}
	return t, app, nil
}

// maxResolves is how often the cluster is asked for an app of which the stream tells, while the answer comes, that it may
// be another's by now.
const maxResolves = 5

// resolveTenant is hold of what the orchestrator knows.
func (c *Core) resolveTenant(
	ctx context.Context,
	name string,
	identity map[string]string,
) (t tenant.Tenant, app address.AppID, err error) {
	if err := c.tenants.checkRoom(name); err != nil {
		return t, 0, err
	}
	defer c.tenants.markResolving(name)()
	var answer Resolved
	for range maxResolves {
		if answer, err = c.resolver.Resolve(ctx, name, identity); err != nil {
			return t, 0, err
		}
		if err := checkResolved(answer.Tenant, answer.App, name); err != nil {
			return t, 0, err
		}
		t, app, ok, err := c.acquireKnown(ctx, name, identity, &answer)
		if ok || err != nil {
			return t, app, err
		}
	}
	return t, 0, fmt.Errorf(
		"the orchestrator gave tenant %s app %d for labels %q, but this node knows that app by others",
		name,
		answer.App,
		tenant.Canonical(identity),
	)
}

// acquireKnown counts one more endpoint of the tenant when tenant and app are known, after learning what
// is given.
func (c *Core) acquireKnown(
	ctx context.Context,
	name string,
	identity map[string]string,
	answer *Resolved,
) (t tenant.Tenant, app address.AppID, ok bool, err error) {
	unlock, err := c.byTenant.lock(ctx, name)
	if err != nil {
		return t, 0, false, err
	}
	defer unlock()
	if answer != nil {
		learnt := TenantState{
			Tenant:   answer.Tenant,
			Retiring: answer.Retiring,
			Apps:     []App{{answer.App, maps.Clone(identity)}},
		}
		// Changes does not count regions, so that this answer may be older than what the stream has told, and tells, of
		// them.
		if known, _, ok := c.tenants.get(name); ok {
			if known.Tenant.Created.Equal(answer.Tenant.Created) && known.Tenant.Changes > answer.Tenant.Changes {
				return t, 0, false, nil // overtaken: the app may have retired since
			}
			learnt.Tenant.Regions = known.Tenant.Regions
		}
		if err := c.mergeTenant(ctx, learnt); err != nil {
			if c.tenants.endpoints(name) == 0 {
				c.tenantEmptied(ctx, name)
			}
			return t, 0, false, err
		}
	}
	known, deleted, ok := c.tenants.get(name)
	if deleted {
		return t, 0, false, refuse(ErrNotFound, "tenant %s was deleted; endpoints of it still live on this node", name)
	}
	if !ok || answer == nil && !c.tenants.isHosted(name) {
		return t, 0, false, nil // apply one that is only carried the cluster has to know first that it comes to live here
	}
	if app, ok = c.tenants.claim(name, identity); !ok {
		return t, 0, false, nil
	}
	if err := c.installTenant(ctx, name); err != nil {
		c.tenants.unclaim(name, app)
		if c.tenants.endpoints(name) == 0 {
			c.tenantEmptied(ctx, name)
		}
		return t, 0, false, err
	}
	if answer != nil && answer.Policies {
		c.expectPolicies(name)
	}
	c.tenants.count(name, known.Tenant.Current().ID, +1)
	return known.Tenant, app, true, nil
}

// drainPending learns what is given of a tenant. Of what networks refuse a tenant known before stays as it was, and so it does
// installedOn disk, whose turn comes after them: containers of it are brought back with that at a start. The caller holds the
// tenant's lock.
func (c *Core) mergeTenant(ctx context.Context, k TenantState) error {
	before, err := c.tenants.merge(k)
	if err != nil {
		return err
	}
	if err := c.installTenant(ctx, k.Tenant.Name); err != nil {
		if isConflict(err) {
			c.tenants.rollback(before)
		}
		return err
	}
	return c.tenants.save(k.Tenant.Name)
}

// isConflict tells whether a tenant is refused for what it is, and the others are as well as they were.
func isConflict(err error) bool {
	return errors.Is(err, ErrExhausted) || errors.Is(err, network.ErrConflict) || errors.Is(err, endpoint.ErrExhausted)
}

// installTenant makes the tenant's networks know the tenant. The caller holds the tenant's lock.
func (c *Core) installTenant(ctx context.Context, name string) error {
	known, _, ok := c.tenants.get(name)
	if !ok {
		return nil
	}
	if known.Restricted {
		known.Tenant = known.Tenant.WithoutNorthSouth()
	}
	had, on := c.tenants.installed(name)
	had.Changes = known.Tenant.Changes // which also counts what networks do not know of
	same := had.Equal(known.Tenant)
	if same && len(on) == 1 {
		return nil // the one it is on
	}
	wanted := c.networksOf(known.Tenant)
	if same && slices.Equal(on, wanted) {
		return nil
	}
	if err := c.putOnNetworks(ctx, known.Tenant, wanted, had, on); err != nil {
		return fmt.Errorf("making tenant %s known to the packet path: %w", name, err)
	}
	// Retired ids go when no list names them any more.
	retired := known.Tenant
	retired.IDs = slices.DeleteFunc(slices.Clone(had.IDs), func(id tenant.ID) bool { return known.Tenant.Has(id.ID) })
	if len(retired.IDs) > 0 {
		if err := c.deleteTenant(ctx, retired); err != nil {
			return fmt.Errorf("taking retired ids of tenant %s from the packet path: %w", name, err)
		}
	}
	c.tenants.setInstalled(name, known.Tenant, wanted)
	return nil
}

// release counts one endpoint of the tenant's id less; with the tenant's last one this node forgets it.
func (c *Core) release(ctx context.Context, name string, id address.TenantID) {
	unlock, err := c.byTenant.lock(context.WithoutCancel(ctx), name)
	if err != nil {
		return // cannot happen: the context never ends
	}
	defer unlock()
	if c.tenants.count(name, id, -1) == 0 {
		c.tenantEmptied(ctx, name)
	}
}

// removeTenant drops a tenant without endpoints. What fails is tried again when the node's record is told next, at the latest
// after the stream has broken, or at the next start, or is made good by the tenant's next endpoint. The caller holds
// the tenant's lock.
func (c *Core) removeTenant(ctx context.Context, name string) error {
	known, _, ok := c.tenants.get(name)
	if !ok {
		return nil
	}
	c.tenants.setInstalled(name, tenant.Tenant{}, nil)
	err := c.deleteTenant(ctx, known.Tenant)
	if err == nil {
		err = c.forgetPolicies(name)
	}
	if err == nil {
		err = c.tenants.forget(name)
	}
	if err != nil {
		c.log.Error("tenant without endpoints stays", "tenant", name, "error", err)
		return fmt.Errorf("forgetting tenant %s: %w", name, err)
	}
	return nil
}

// Apply takes what the orchestrator tells of hosted and carried tenants. Tenants that are neither any
// wake are left out. Nothing is removed because something does not mention it.
func (c *Core) Apply(ctx context.Context, news []TenantState, deleted []string) error {
	for len(news) > 0 {
		var unfit []TenantState
		for _, k := range news {
			if err := c.applyOne(ctx, k); isConflict(err) {
				unfit = append(unfit, k)
			} else if err != nil {
				return err
			}
		}
		if len(unfit) == len(news) {
			break // the others need to be heard; of those that were, none made room
		}
		news = unfit
	}
	for _, name := range deleted {
		if err := c.tenants.markDeleted(name); err != nil {
			return err
		}
	}
	return nil
}

func (c *Core) applyOne(ctx context.Context, k TenantState) error {
	unlock, err := c.byTenant.lock(ctx, k.Tenant.Name)
	if err != nil {
		return err
	}
	defer unlock()
	before, _, known := c.tenants.get(k.Tenant.Name)
	if !known && (!c.tenants.isTransit(k.Tenant.Name) || len(k.Tenant.IDs) == 0) {
		return nil
	}
	if known && !c.tenants.isHosted(k.Tenant.Name) && len(k.Tenant.IDs) > 0 &&
		!k.Tenant.Created.Equal(before.Tenant.Created) {
		if err := c.removeTenant(ctx, k.Tenant.Name); err != nil { // it is another, and nothing here is the old one's
			return err
		}
	}
	if !c.tenants.isHosted(k.Tenant.Name) {
		k.Apps = nil // nobody waits for it to have forgotten one: it is told all when the tenant comes to live here
	}
	if err := c.mergeTenant(ctx, k); err != nil {
		if isConflict(err) {
			c.log.Error("tenant is not taken as the cluster has it", "tenant", k.Tenant.Name, "error", err)
			c.tenants.noteRefused(k.Tenant.Name, err)
		}
		return err
	}
	if err := c.renewPolicies(k.Tenant.Name); err != nil {
		c.log.Error("policies are not in force for all that is known", "error", err)
	} else {
		c.tenants.ackRound(k.Tenant.Name, k.Retiring.Round)
	}
	if after, _, _ := c.tenants.get(k.Tenant.Name); after.Tenant.Network != before.Tenant.Network ||
		after.Tenant.Leaving != before.Tenant.Leaving {
		c.migrationDue.wake()
	}
	return nil
}

func checkResolved(t tenant.Tenant, app address.AppID, name string) error {
	if t.Name != name || len(t.IDs) == 0 || app == 0 || app >= address.FirstReservedApp {
		return fmt.Errorf(
			"the orchestrator's answer for tenant %s cannot be used: name %q, %d ids, app %#x",
			name,
			t.Name,
			len(t.IDs),
			app,
		)
	}
	return nil
}
