package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// An endpoint has attachments of its tenant's network and, while the tenant migrates, also of the network that it
// leaves. During a migration running endpoints get attachments of the new network, and lose those of the old one at its
// end. The tenant's record has the desired state and the endpoint's record the actual one, so a migration can stop
// anywhere, and the next agent continues it.

// wakeup signals pending work; signals coalesce.
type wakeup chan struct{}

func newWakeup() wakeup { return make(wakeup, 1) }

func (s wakeup) wake() {
	select {
	case s <- struct{}{}:
	default: // a signal is pending
	}
}

// migrationRetry is the first pause after a failure, maxMigrationRetry the longest, and migrationReport the interval of
// progress reports to the orchestrator.
const (
	maxProblem        = 512 // bytes of an error in a report
	migrationRetry    = 10 * time.Second
	maxMigrationRetry = 5 * time.Minute
	migrationReport   = time.Second
)

// runMigrations keeps endpoints on their tenants' networks, with the egress that their tenants' rules require, until
// ctx ends.
func (c *Core) runMigrations(ctx context.Context) {
	for failures := 0; ; {
		var again <-chan time.Time
		if c.migrateAll(ctx) {
			failures = 0
		} else {
			again = time.After(retryPause(failures))
			failures++
		}
		select {
		case <-c.migrationDue:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// retryPause is the pause after a number of consecutive failures: the cause may stay until an operator removes it.
func retryPause(failures int) time.Duration {
	return min(migrationRetry<<min(failures, 10), maxMigrationRetry)
}

// migrateAll changes every endpoint that needs it, and reports whether all are done.
func (c *Core) migrateAll(ctx context.Context) (done bool) {
	records := map[string][]endpoint.Record{}
	for _, r := range c.store.List() {
		records[r.Tenant] = append(records[r.Tenant], r)
	}
	done = true
	for _, name := range c.tenants.Names() {
		if ctx.Err() == nil && !c.migrateTenant(ctx, name, records[name]) {
			done = false
		}
		if ctx.Err() == nil && !c.settleTenant(ctx, name, records[name]) {
			done = false
		}
	}
	return done
}

func (c *Core) migrateTenant(ctx context.Context, name string, records []endpoint.Record) (done bool) {
	known, _, ok := c.tenants.Get(name)
	if !ok ||
		known.Tenant.Leaving == "" && c.tenants.migration(name) == nil &&
			!slices.ContainsFunc(records, func(r endpoint.Record) bool { return isMigrating(known.Tenant, r) }) {
		return true
	}
	var failed error
	reported := time.Now()
	for _, r := range records {
		if r.State != endpoint.Active || !c.needsMigration(known.Tenant, r) {
			continue
		}
		if err := c.migrateOne(ctx, r.ContainerID, r.Interface); err != nil {
			c.log.Error(
				"migrating an endpoint failed",
				"endpoint",
				r.ID,
				"container",
				r.ContainerID,
				"tenant",
				name,
				"error",
				err,
			)
			failed = cmp.Or(failed, fmt.Errorf("endpoint %d: %w", r.ID, err))
		}
		if time.Since(reported) > migrationReport {
			c.reportMigration(name, failed)
			reported = time.Now()
		}
	}
	// removes the tenant from the network that the last endpoint has left
	if err := c.reinstallTenant(ctx, name); err != nil {
		c.log.Error("removing a tenant from the network that it has left failed", "tenant", name, "error", err)
		failed = cmp.Or(failed, err)
	}
	return c.reportMigration(name, failed) == nil
}

func (c *Core) reinstallTenant(ctx context.Context, name string) error {
	unlock, err := c.byTenant.Lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	return c.installTenant(ctx, name)
}

// isMigrating reports whether an endpoint's tenant leaves a network, or its networks differ from its tenant's.
func isMigrating(t tenant.Tenant, r endpoint.Record) bool {
	return t.Leaving != "" || !slices.Equal(r.Networks(), []string{networks.Of(t)})
}

// signalMigration wakes the migration loop for an added or removed endpoint if its tenant migrates.
func (c *Core) signalMigration(r endpoint.Record) {
	known, _, ok := c.tenants.Get(r.Tenant)
	if ok && (isMigrating(known.Tenant, r) || c.tenants.migration(r.Tenant) != nil) {
		c.migrationDue.wake()
	}
}

// needsMigration reports whether an endpoint has to join or leave a network.
func (c *Core) needsMigration(t tenant.Tenant, r endpoint.Record) bool {
	if t.KeepsAddresses() {
		return !c.isMigrated(r.ID) || !hasSwitched(t, r)
	}
	on := r.Networks()
	if slices.Equal(on, []string{networks.Of(t)}) {
		return false
	}
	return !c.isMigrated(r.ID) ||
		slices.ContainsFunc(on, func(name string) bool { return name != networks.Of(t) && name != t.Leaving })
}

func (c *Core) isMigrated(id endpoint.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.migrated[id]
}

func (c *Core) setMigrated(id endpoint.ID, is bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.migrated[id] = is
}

func (c *Core) migrateOne(ctx context.Context, containerID, iface string) error {
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
	if !ok || !c.needsMigration(known.Tenant, r) {
		return nil
	}
	if keepsAddresses(known.Tenant, r) {
		err := c.switchNetworks(ctx, known.Tenant, &r)
		if err != nil || known.Tenant.KeepsAddresses() || !isMigrating(known.Tenant, r) {
			return err
		}
		c.setMigrated(r.ID, false)
	}
	if err := c.joinNetwork(ctx, known.Tenant, &r); err != nil {
		return err
	}
	if err := c.leaveNetworks(ctx, known.Tenant, &r); err != nil {
		return err
	}
	if err := c.fitMTU(&r); err != nil { // the packet path sends ICMP Packet Too Big meanwhile
		c.log.Error("setting the MTU of an endpoint failed", "endpoint", r.ID, "error", err)
	}
	return nil
}

// joinNetwork gives an endpoint addresses of its tenant's network, or leaves it unchanged. If it already has them, all
// their state is verified; after an error they stay, because they may be in use.
func (c *Core) joinNetwork(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	name := networks.Of(t)
	was := r.Without(name)
	if c.isMigrated(r.ID) {
		return nil
	}
	isNew := len(was.Attachments) == len(r.Attachments)
	if isNew {
		bare := was
		bare.Attachments = nil
		more, err := c.networks.Prepare(ctx, t, r.App, bare)
		if err != nil {
			return err
		}
		both := was
		both.Attachments = append(slices.Clone(was.Attachments), more...)
		// The record is on disk before the kernel changes. CanReaddress comes first: a container that forbids the
		// change would cause a write at every retry.
		if err = c.driver.CanReaddress(was, both); err == nil {
			err = c.store.Put(both)
		}
		if err != nil {
			return errors.Join(err, c.networks.Get(name).Release(ctx, both.On(name)))
		}
		*r = both
	}
	// After a label change the new address contains the wrong app.
	err := c.policies.Renew(r.Tenant)
	if err == nil {
		err = c.driver.Readdress(ctx, was, *r)
	}
	if err == nil {
		err = c.networks.Get(name).Activate(ctx, r.On(name))
	}
	if err != nil && !isNew {
		return err
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		return errors.Join(err, c.detachNetwork(undo, r, name, was))
	}
	c.setMigrated(r.ID, true)
	c.services.EndpointsChanged(r.Tenant)
	c.log.Info(
		"endpoint joined its tenant's network",
		"endpoint",
		r.ID,
		"container",
		r.ContainerID,
		"pod",
		r.Pod,
		"network",
		name,
		"addresses",
		r.Addresses(),
	)
	return nil
}

// leaveNetworks removes an endpoint's attachments of networks that its tenant has left.
func (c *Core) leaveNetworks(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	for _, name := range r.Networks() {
		if name == networks.Of(t) || name == t.Leaving {
			continue
		}
		stays := r.Without(name)
		stays.Left = append(slices.Clone(r.Left), r.On(name).Addresses()...)
		if err := c.detachNetwork(ctx, r, name, stays); err != nil {
			return err
		}
		c.log.Info(
			"endpoint left a network",
			"endpoint",
			r.ID,
			"container",
			r.ContainerID,
			"pod",
			r.Pod,
			"network",
			name,
			"addresses",
			r.Addresses(),
		)
	}
	return nil
}

// detachNetwork removes an endpoint's attachments of a network: first entries, then the container's addresses, then the
// record. After an error the record still has them, and the next call continues.
func (c *Core) detachNetwork(ctx context.Context, r *endpoint.Record, name string, stays endpoint.Record) error {
	n, gone := c.networks.Get(name), r.On(name)
	if err := n.Deactivate(ctx, gone); err != nil {
		return err
	}
	if err := c.driver.Readdress(ctx, *r, stays); err != nil {
		return err
	}
	stays.Device = r.Device
	if err := c.store.Put(stays); err != nil {
		return err
	}
	*r = stays
	c.services.EndpointsChanged(r.Tenant)
	if err := n.Release(ctx, gone); err != nil {
		// The addresses leak for now; they are never allocated twice.
		c.log.Warn("addresses are not noted as released", "addresses", gone.Addresses(), "error", err)
	}
	return nil
}

// reportMigration updates a tenant's migration progress for the orchestrator, with the first failure, and returns that.
// If the addresses stay, the report is about the tenant as it is known here now.
func (c *Core) reportMigration(name string, failed error) error {
	known, _, ok := c.tenants.Get(name)
	if !ok {
		return failed
	}
	moving, keeps := &pilasterv1.Moving{}, known.Tenant.KeepsAddresses()
	if keeps {
		moving.Changes = known.Tenant.Changes
		failed = cmp.Or(failed, c.lacksMappings(known.Tenant))
	}
	for _, r := range c.store.List() {
		if r.Tenant != name || r.State == endpoint.Lost || r.State == endpoint.Deleting ||
			!keeps && len(r.Without(networks.Of(known.Tenant)).Attachments) == 0 {
			continue
		}
		moving.Endpoints++
		if c.isMigrated(r.ID) && (!keeps || r.State == endpoint.Active && hasSwitched(known.Tenant, r)) {
			moving.Moved++
		}
	}
	if failed != nil {
		words := failed.Error()
		moving.Problem = strings.ToValidUTF8(words[:min(len(words), maxProblem)], "")
	}
	if known.Tenant.Leaving == "" && moving.Endpoints == 0 && failed == nil {
		moving = nil
	}
	c.tenants.setMigration(name, moving)
	return failed
}

func (t *Tenants) setMigration(name string, m *pilasterv1.Moving) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	if h == nil || (h.migration == nil) == (m == nil) && proto.Equal(h.migration, m) {
		return
	}
	h.migration = m
	t.signal()
}

// migration is the last reported progress of a tenant; nil if there is none.
func (t *Tenants) migration(name string) *pilasterv1.Moving {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return h.migration
	}
	return nil
}

// migrationProblems describes failed migrations, by tenant.
func (t *Tenants) migrationProblems() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, name := range slices.Sorted(maps.Keys(t.m)) {
		h := t.m[name]
		if h.migration.GetProblem() != "" {
			all = append(
				all,
				fmt.Sprintf(
					"tenant %s: %d of %d endpoints have migrated to network %s; retrying: %s",
					name,
					h.migration.Moved,
					h.migration.Endpoints,
					networks.Of(h.Tenant),
					h.migration.Problem,
				),
			)
		}
	}
	return all
}
