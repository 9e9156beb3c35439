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
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// An endpoint has attachments of the network that its tenant is on, and while the tenant leaves another those of that
// too. When the tenant moves, endpoints that run are given the ones and, when the move is finished, lose the others.
// What an endpoint is to have follows from its tenant's record and what it has from its own, so this may be cut off
// anywhere, and is gone on with by the next agent.

// wake tells that something is to be looked at.
type wakeup chan struct{}

func newWakeup() wakeup { return make(wakeup, 1) }

func (s wakeup) wake() {
	select {
	case s <- struct{}{}:
	default: // it is about to be
	}
}

// migrationRetry is how long what failed rests at first, maxMigrationRetry at most, and migrationReport how often the cluster is told
// how many are done.
const (
	maxProblem        = 512 // bytes of it that the cluster is told
	migrationRetry    = 10 * time.Second
	maxMigrationRetry = 5 * time.Minute
	migrationReport   = time.Second
)

// runMigrations has endpoints be on their tenants' networks until ctx ends.
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

// retryPause is the pause after so many failures one after the other: what keeps an endpoint from moving may stay until
// somebody takes it away.
func retryPause(failures int) time.Duration {
	return min(migrationRetry<<min(failures, 10), maxMigrationRetry)
}

// migrateAll does what is due, and tells whether all of it is done.
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
	}
	return done
}

func (c *Core) migrateTenant(ctx context.Context, name string, records []endpoint.Record) (done bool) {
	known, _, ok := c.tenants.get(name)
	if !ok ||
		known.Tenant.Leaving == "" && c.tenants.migration(name) == nil &&
			!slices.ContainsFunc(records, func(r endpoint.Record) bool { return isMigrating(known.Tenant, r) }) {
		return true
	}
	var failed error
	told := time.Now()
	for _, r := range records {
		if r.State != endpoint.Active || !c.needsMigration(known.Tenant, r) {
			continue
		}
		if err := c.migrateOne(ctx, r.ContainerID, r.Interface); err != nil {
			c.log.Error(
				"endpoint is not on its tenant's network alone, or not on it",
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
		if time.Since(told) > migrationReport {
			c.reportMigration(name, failed)
			told = time.Now()
		}
	}
	if err := c.reinstallTenant(ctx, name); err != nil { // the network that the last has left
		c.log.Error("a network still knows a tenant that has left it", "tenant", name, "error", err)
		failed = cmp.Or(failed, err)
	}
	c.reportMigration(name, failed)
	return failed == nil
}

func (c *Core) reinstallTenant(ctx context.Context, name string) error {
	unlock, err := c.byTenant.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	return c.installTenant(ctx, name)
}

// isMigrating tells whether an endpoint's tenant leaves a network, or it is on others than its tenant.
func isMigrating(t tenant.Tenant, r endpoint.Record) bool {
	return t.Leaving != "" || !slices.Equal(r.Networks(), []string{networkOf(t)})
}

// signalMigration has somebody look at an endpoint that came or went, where more is to be done or to be counted than that.
func (c *Core) signalMigration(r endpoint.Record) {
	known, _, ok := c.tenants.get(r.Tenant)
	if ok && (isMigrating(known.Tenant, r) || c.tenants.migration(r.Tenant) != nil) {
		c.migrationDue.wake()
	}
}

// needsMigration tells whether something is to be done about an endpoint.
func (c *Core) needsMigration(t tenant.Tenant, r endpoint.Record) bool {
	on := r.Networks()
	if slices.Equal(on, []string{networkOf(t)}) {
		return false
	}
	return !c.isMigrated(r.ID) ||
		slices.ContainsFunc(on, func(name string) bool { return name != networkOf(t) && name != t.Leaving })
}

func (c *Core) isMigrated(id endpoint.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.migrated[id]
}

func (c *Core) setMigrated(id endpoint.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.migrated[id] = true
}

func (c *Core) migrateOne(ctx context.Context, containerID, iface string) error {
	unlock, err := c.byKey.lock(ctx, key(containerID, iface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(containerID, iface)
	if !ok || r.State != endpoint.Active {
		return nil // it went by a DEL, or its device is gone
	}
	known, _, ok := c.tenants.get(r.Tenant)
	if !ok || !c.needsMigration(known.Tenant, r) {
		return nil
	}
	if err := c.joinNetwork(ctx, known.Tenant, &r); err != nil {
		return err
	}
	if err := c.leaveNetworks(ctx, known.Tenant, &r); err != nil {
		return err
	}
	if err := c.fitMTU(&r); err != nil { // its container is told when a packet is too big
		c.log.Error("endpoint does not have the MTU that it could", "endpoint", r.ID, "error", err)
	}
	return nil
}

// joinNetwork gives an endpoint addresses of its tenant's network, or leaves it as it was. Where it has them, all that belongs
// sinks them is made sure of, and after an error they stay: they may be in use.
func (c *Core) joinNetwork(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	name := networkOf(t)
	was := r.Without(name)
	if c.isMigrated(r.ID) {
		return nil
	}
	isNew := len(was.Attachments) == len(r.Attachments)
	if isNew {
		bare := was
		bare.Attachments = nil
		more, err := c.prepareAttachments(ctx, t, r.App, bare)
		if err != nil {
			return err
		}
		both := was
		both.Attachments = append(slices.Clone(was.Attachments), more...)
		// On disk before anything of it is there; but what the container forbids would be written again and again.
		if err = c.driver.CanReaddress(was, both); err == nil {
			err = c.store.Put(both)
		}
		if err != nil {
			return errors.Join(err, c.networks[name].Release(ctx, both.On(name)))
		}
		*r = both
	}
	// Of one whose labels have changed since, the new address says too little.
	err := c.renewPolicies(r.Tenant)
	if err == nil {
		err = c.driver.Readdress(ctx, was, *r)
	}
	if err == nil {
		err = c.networks[name].Activate(ctx, r.On(name))
	}
	if err != nil && !isNew {
		return err
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		return errors.Join(err, c.detachNetwork(undo, r, name, was))
	}
	c.setMigrated(r.ID)
	c.log.Info(
		"endpoint has addresses of its tenant's network too",
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

// leaveNetworks takes away what an endpoint has of networks that its tenant is not on and has left.
func (c *Core) leaveNetworks(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	for _, name := range r.Networks() {
		if name == networkOf(t) || name == t.Leaving {
			continue
		}
		stays := r.Without(name)
		stays.Left = append(slices.Clone(r.Left), r.On(name).Addresses()...)
		if err := c.detachNetwork(ctx, r, name, stays); err != nil {
			return err
		}
		c.log.Info(
			"endpoint has left a network",
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

// detachNetwork takes an endpoint's attachments of a network away: entries, then the container's side, then the record. After an
// error the record has them still, and the next call goes on from there.
func (c *Core) detachNetwork(ctx context.Context, r *endpoint.Record, name string, stays endpoint.Record) error {
	n, gone := c.networks[name], r.On(name)
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
	if err := n.Release(ctx, gone); err != nil {
		// They are lost for now, never given out twice.
		c.log.Warn("addresses are not noted as released", "addresses", gone.Addresses(), "error", err)
	}
	return nil
}

// reportMigration has the cluster hear how far a tenant's endpoints are, with the first thing that failed.
func (c *Core) reportMigration(name string, failed error) {
	known, _, ok := c.tenants.get(name)
	if !ok {
		return
	}
	moving := &pilasterv1.Moving{}
	for _, r := range c.store.List() {
		if r.Tenant != name || r.State == endpoint.Lost || r.State == endpoint.Deleting ||
			len(r.Without(networkOf(known.Tenant)).Attachments) == 0 {
			continue
		}
		moving.Endpoints++
		if c.isMigrated(r.ID) {
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

// migration is what was last told of a tenant; nil where nothing was to be.
func (t *Tenants) migration(name string) *pilasterv1.Moving {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return h.migration
	}
	return nil
}

// migrationProblems says which tenants' endpoints are not where they are to be, and why.
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
					"tenant %s: %d of %d endpoints that are to move to network %s have addresses there; trying again: %s",
					name,
					h.migration.Moved,
					h.migration.Endpoints,
					networkOf(h.Tenant),
					h.migration.Problem,
				),
			)
		}
	}
	return all
}
