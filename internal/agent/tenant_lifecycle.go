package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// Resolver asks the orchestrator for a tenant or for the app of a label set. Its errors are refusals of kind
// ErrNotFound, ErrExhausted, ErrInvalid, ErrUnavailable or ErrNever. With exposes, a tenant whose network has services
// gets a number for them.
type Resolver interface {
	Resolve(ctx context.Context, name string, identity map[string]string, exposes bool) (Resolved, error)
}

// Resolved is the orchestrator's answer.
type Resolved struct {
	Tenant   tenant.Tenant
	App      address.AppID
	Policies bool // the tenant has policies; they arrive on the stream
	Retiring Retiring
}

// acquire finds the tenant and app of a new endpoint and installs the tenant on its network until release. The app
// counts as used until unclaim. A tenant and app that this node knows need no request, unless the container exposes
// ports and its tenant has no number for services yet.
func (c *Core) acquire(
	ctx context.Context,
	name string,
	identity map[string]string,
	exposes bool,
) (tenant.Tenant, address.AppID, error) {
	t, app, ok, err := c.acquireKnown(ctx, name, identity, exposes, nil)
	if !ok && err == nil {
		t, app, err = c.resolveTenant(ctx, name, identity, exposes)
	}
	if err != nil {
		return t, app, err
	}
	if err := c.policies.Await(ctx, name); err != nil {
		c.tenants.unclaim(name, app)
		c.release(ctx, name, t.Current().ID)
		return tenant.Tenant{}, 0, err
	}
	return t, app, nil
}

// maxResolves limits how often an ADD requests an app: while an answer is on its way, the stream may report that the
// app may be retired.
const maxResolves = 5

// resolveTenant is acquireKnown after a request to the orchestrator.
func (c *Core) resolveTenant(
	ctx context.Context,
	name string,
	identity map[string]string,
	exposes bool,
) (t tenant.Tenant, app address.AppID, err error) {
	if err := c.tenants.checkRoom(name); err != nil {
		return t, 0, err
	}
	defer c.tenants.markResolving(name)()
	var answer Resolved
	for range maxResolves {
		if answer, err = c.resolver.Resolve(ctx, name, identity, exposes); err != nil {
			if lost := c.tenants.Lost(name); lost != nil {
				err = fmt.Errorf("%w\n  the agent lost the keys of tenant %s: %w", err, name, lost)
			}
			return t, 0, err
		}
		if err := checkResolved(answer.Tenant, answer.App, name); err != nil {
			return t, 0, err
		}
		if exposes && lacksNumber(answer.Tenant) {
			return t, 0, refusal.New(refusal.ErrUnavailable, "the orchestrator gave tenant %s no number for services, "+
				"which host ports need\n  nothing was changed; upgrade the orchestrator", name)
		}
		t, app, ok, err := c.acquireKnown(ctx, name, identity, exposes, &answer)
		if ok || err != nil {
			return t, app, err
		}
	}
	return t, 0, fmt.Errorf(
		"the orchestrator answered app %[2]d of tenant %[1]s for labels %[3]q, but this node knows that app with "+
			"other labels",
		name,
		answer.App,
		tenant.Canonical(identity),
	)
}

// acquireKnown merges the answer, if any, and counts one more endpoint of the tenant if tenant and app are known then.
func (c *Core) acquireKnown(
	ctx context.Context,
	name string,
	identity map[string]string,
	exposes bool,
	answer *Resolved,
) (t tenant.Tenant, app address.AppID, ok bool, err error) {
	unlock, err := c.byTenant.Lock(ctx, name)
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
		// Changes does not count regions, so this answer may have older regions than the stream.
		if known, _, ok := c.tenants.Get(name); ok && c.tenants.Lost(name) == nil {
			if known.Tenant.Created.Equal(answer.Tenant.Created) && known.Tenant.Changes > answer.Tenant.Changes {
				return t, 0, false, nil // outdated: the app may have retired meanwhile
			}
			learnt.Tenant.Regions = known.Tenant.Regions
			learnt.Tenant.Offloads = keepEndpoints(answer.Tenant.Offloads, known.Tenant.Offloads)
			if known.Tenant.Changes == answer.Tenant.Changes { // nor protected prefixes, which come with the rules
				learnt.Tenant.Protected = known.Tenant.Protected
			}
		}
		if err := c.mergeTenant(ctx, learnt); err != nil {
			if c.tenants.endpoints(name) == 0 {
				c.tenantEmptied(ctx, name)
			}
			return t, 0, false, err
		}
	}
	known, deleted, ok := c.tenants.Get(name)
	if deleted {
		return t, 0, false, refusal.New(
			refusal.ErrNotFound,
			"tenant %s was deleted; this node still has endpoints of it",
			name,
		)
	}
	if !ok || answer == nil && (!c.tenants.needsNoRequest(name) || c.tenants.Lost(name) != nil) ||
		exposes && lacksNumber(known.Tenant) {
		return t, 0, false, nil // for a transit tenant the orchestrator first has to learn that this node hosts it
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
		c.policies.Expect(name)
	}
	if c.tenants.count(name, known.Tenant.Current().ID, +1) == 1 && known.Tenant.ServicesNumber != 0 {
		c.services.Expect(name)
	}
	return known.Tenant, app, true, nil
}

// lacksNumber reports whether a tenant has no number for services, although its network has services.
func lacksNumber(t tenant.Tenant) bool {
	return t.ServicesNumber == 0 && tenant.NetworkHas(t.OnNetwork(), tenant.Services)
}

// mergeTenant merges an update of a tenant and installs it on the networks. If a network rejects it, a tenant that was
// known stays as it was, also on disk, which is written last: a start restores its containers with that state. The
// caller holds the tenant's lock.
func (c *Core) mergeTenant(ctx context.Context, k TenantState) error {
	lost := c.tenants.Lost(k.Tenant.Name)
	before, err := c.tenants.Merge(k)
	if err != nil {
		return err
	}
	if isMember(before.Tenant, c.tenants.node) || isMember(k.Tenant, c.tenants.node) {
		defer c.offloadsChanged.wake()
		defer c.loadDue.wake()
	}
	defer c.signalGateways(before.Tenant, k.Tenant)
	c.loadRulesFirst(before.Tenant)
	if err := c.installTenant(ctx, k.Tenant.Name); err != nil {
		if isConflict(err) {
			c.tenants.rollback(before, lost)
		}
		return err
	}
	c.services.TenantChanged(k.Tenant.Name)
	if after, _, _ := c.tenants.Get(k.Tenant.Name); !sameEgress(before.Tenant, after.Tenant) {
		defer c.migrationDue.wake()
	}
	return c.tenants.save(k.Tenant.Name)
}

// isConflict reports whether a tenant itself is the reason of the refusal, so that other tenants are not affected.
func isConflict(err error) bool {
	return errors.Is(err, refusal.ErrExhausted) || errors.Is(err, network.ErrConflict) ||
		errors.Is(err, endpoint.ErrExhausted)
}

// installTenant installs the tenant on its networks. The caller holds the tenant's lock.
func (c *Core) installTenant(ctx context.Context, name string) error {
	known, _, ok := c.tenants.Get(name)
	if !ok || c.tenants.Lost(name) != nil {
		return nil // the kernel keeps a lost tenant
	}
	if known.Restricted {
		known.Tenant = known.Tenant.WithoutNorthSouth()
	}
	had, on := c.tenants.installed(name)
	had.Changes = known.Tenant.Changes // which also counts changes that do not concern networks
	same := had.Equal(known.Tenant)
	if same && len(on) == 1 {
		return nil // only its own network
	}
	wanted := c.networksOf(known.Tenant)
	if same && slices.Equal(on, wanted) {
		return nil
	}
	if err := c.networks.Put(ctx, known.Tenant, wanted, had, on); err != nil {
		return fmt.Errorf("installing tenant %s in the packet path: %w", name, err)
	}
	// Retired ids are removed once no list contains them.
	retired := known.Tenant
	retired.IDs = slices.DeleteFunc(slices.Clone(had.IDs), func(id tenant.ID) bool { return known.Tenant.Has(id.ID) })
	if len(retired.IDs) > 0 {
		if err := c.networks.Delete(ctx, retired); err != nil {
			return fmt.Errorf("removing retired ids of tenant %s from the packet path: %w", name, err)
		}
	}
	c.tenants.setInstalled(name, known.Tenant, wanted)
	return nil
}

// release counts one endpoint less of the tenant's id; after the last one the node removes the tenant.
func (c *Core) release(ctx context.Context, name string, id address.TenantID) {
	unlock, err := c.byTenant.Lock(context.WithoutCancel(ctx), name)
	if err != nil {
		return // cannot happen: the context never ends
	}
	defer unlock()
	if c.tenants.count(name, id, -1) == 0 {
		c.tenantEmptied(ctx, name)
	}
}

// removeTenant removes a tenant without endpoints. A failure is retried with the next update of the node's record, at
// the latest after a reconnect or restart, or is superseded by the tenant's next endpoint. The caller holds the
// tenant's lock.
func (c *Core) removeTenant(ctx context.Context, name string) error {
	known, _, ok := c.tenants.Get(name)
	if !ok {
		return nil
	}
	c.tenants.setInstalled(name, tenant.Tenant{}, nil)
	err := c.networks.Delete(ctx, known.Tenant)
	if err == nil {
		err = c.policies.Forget(name)
	}
	if err == nil {
		err = c.services.Forget(known.Tenant)
	}
	if err == nil {
		err = c.tenants.forget(name)
	}
	if err != nil {
		c.log.Error("removing a tenant without endpoints failed", "tenant", name, "error", err)
		return fmt.Errorf("removing tenant %s: %w", name, err)
	}
	return nil
}

// Apply applies the orchestrator's updates of hosted and transit tenants, and ignores those of other tenants. A tenant
// missing from an update is not removed.
func (c *Core) Apply(ctx context.Context, updates []TenantState, deleted []string) error {
	for len(updates) > 0 {
		var rejected []TenantState
		for _, k := range updates {
			if err := c.applyOne(ctx, k); isConflict(err) {
				rejected = append(rejected, k)
			} else if err != nil {
				return err
			}
		}
		if len(rejected) == len(updates) {
			break // none of the applied updates made room for the rest
		}
		updates = rejected
	}
	for _, name := range deleted {
		if err := c.tenants.markDeleted(name); err != nil {
			return err
		}
	}
	return nil
}

func (c *Core) applyOne(ctx context.Context, k TenantState) error {
	unlock, err := c.byTenant.Lock(ctx, k.Tenant.Name)
	if err != nil {
		return err
	}
	defer unlock()
	before, _, known := c.tenants.Get(k.Tenant.Name)
	if !known && (!c.tenants.isTransit(k.Tenant.Name) || len(k.Tenant.IDs) == 0) {
		return nil
	}
	if known && c.tenants.endpoints(k.Tenant.Name) == 0 && len(k.Tenant.IDs) > 0 &&
		!k.Tenant.Created.Equal(before.Tenant.Created) {
		// a new tenant with this name; nothing here belongs to the old one
		if err := c.removeTenant(ctx, k.Tenant.Name); err != nil {
			return err
		}
		if !c.tenants.isTransit(k.Tenant.Name) {
			return nil
		}
	}
	fronted := c.tenants.IsFrontend(k.Tenant.Name)
	if !c.tenants.IsHosted(k.Tenant.Name) && !isFrontend(k.Tenant, c.tenants.node) {
		k.Apps = nil // transit tenants need no apps: the node receives all when it hosts the tenant
	}
	if err := c.mergeTenant(ctx, k); err != nil {
		if isConflict(err) {
			c.log.Error("an update of a tenant is not applied", "tenant", k.Tenant.Name, "error", err)
			c.tenants.noteRefused(k.Tenant.Name, err)
		}
		return err
	}
	if fronted && !c.tenants.IsFrontend(k.Tenant.Name) && c.tenants.endpoints(k.Tenant.Name) == 0 {
		c.tenantEmptied(ctx, k.Tenant.Name)
		return nil
	}
	c.renewPolicies(k)
	if after, _, _ := c.tenants.Get(k.Tenant.Name); after.Tenant.Network != before.Tenant.Network ||
		after.Tenant.Leaving != before.Tenant.Leaving ||
		after.Tenant.KeepsAddresses() && after.Tenant.Changes != before.Tenant.Changes {
		c.migrationDue.wake()
	}
	return nil
}

// renewPolicies enforces a tenant's policies after an update of the tenant, and acknowledges what is in force.
func (c *Core) renewPolicies(k TenantState) {
	name := k.Tenant.Name
	known, _, _ := c.tenants.Get(name)
	err := c.policies.Renew(name)
	if err != nil {
		c.log.Error("renewing policies failed", "error", err)
	} else {
		c.tenants.ackRound(name, k.Retiring.Round)
	}
	// A refusal is part of the report; once a retry succeeds, the policies are those of these changes too.
	if err == nil || c.tenants.hasPolicyProblem(name) {
		c.tenants.setApplied(name, known.Tenant.Changes)
	}
}

// loadRulesFirst loads the rules of a tenant that this node's frontends looked up, before the networks know that they
// do no longer: packets would be denied meanwhile. An error is reported when the update is applied.
func (c *Core) loadRulesFirst(before tenant.Tenant) {
	now, _, _ := c.tenants.Get(before.Name)
	if policies.Offloaded(before, c.tenants.node) && !policies.Offloaded(now.Tenant, c.tenants.node) {
		if err := c.policies.Renew(before.Name); err != nil {
			c.log.Error("loading the rules of an offload again failed", "tenant", before.Name, "error", err)
		}
	}
}

func checkResolved(t tenant.Tenant, app address.AppID, name string) error {
	if t.Name != name || len(t.IDs) == 0 || app == 0 || app >= address.FirstReservedApp {
		return fmt.Errorf(
			"the orchestrator's answer for tenant %s is invalid: name %q, %d ids, app %#x",
			name,
			t.Name,
			len(t.IDs),
			app,
		)
	}
	return nil
}

// ListWait is how long an ADD of a newly hosted tenant waits for the tenant's mappings: until they arrive, packets to
// other nodes are dropped.
const ListWait = 5 * time.Second

// SetHasMappings sets which tenants have mappings; ADDs of newly hosted ones then wait for the first list.
func (t *Tenants) SetHasMappings(isMapped func(tenant.Tenant) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hasMappings = isMapped
}

// SetListed ends the wait of ADDs for a tenant's mappings, and that of a move between networks.
func (t *Tenants) SetListed(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && h.mappingsListed != nil {
		close(h.mappingsListed)
		h.mappingsListed = nil
		t.signalOffloads(h)
	}
	if h := t.m[name]; h != nil && h.Tenant.KeepsAddresses() {
		t.listed()
	}
}

// awaitList waits up to ListWait for the first list of mappings of a newly hosted tenant.
func (c *Core) awaitList(ctx context.Context, name string) {
	c.tenants.mu.Lock()
	h := c.tenants.m[name]
	var listed <-chan struct{}
	if h != nil {
		listed = h.mappingsListed
	}
	c.tenants.mu.Unlock()
	if listed == nil {
		return
	}
	select {
	case <-listed:
	case <-ctx.Done():
	case <-time.After(ListWait):
		c.log.Warn(
			"an endpoint is active before the mappings of its tenant arrived; packets to other nodes are dropped "+
				"until then",
			"tenant",
			name,
			"waited",
			ListWait,
		)
	}
}
