package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/statefile"
)

// Start reconciles the kernel with the records: it removes unfinished endpoints, repairs active ones, removes those
// whose container is gone, and sweeps unknown state. The packet path may be of another build; it is taken over.
func (c *Core) Start(ctx context.Context) error {
	if err := c.checkAllRecorded(); err != nil {
		return err
	}
	for _, r := range c.store.List() {
		if r.Lives() {
			continue
		}
		c.log.Info(
			"removing an unfinished endpoint",
			"endpoint",
			r.ID,
			"state",
			r.State,
			"container",
			r.ContainerID,
		)
		if err := c.remove(ctx, r); err != nil {
			c.log.Error("removing an endpoint failed", "endpoint", r.ID, "error", err)
		}
	}
	// Before policies: it is unknown which ones apply to an endpoint whose record is damaged.
	for _, id := range c.store.Damaged() {
		if err := c.driver.RemoveDevice(ctx, endpoint.Record{ID: id}); err != nil {
			return fmt.Errorf("removing endpoint %d, whose record is damaged: %w", id, err)
		}
	}
	if err := c.installTenants(ctx); err != nil {
		return err
	}
	if err := c.policies.Start(); err != nil {
		return err
	}
	records := c.store.List()
	lost, err := c.driver.Restore(
		ctx,
		records,
		func(found []endpoint.Record) error { return c.networks.Repair(ctx, records, found) },
	)
	if err != nil {
		return fmt.Errorf("taking over the packet path: %w", err)
	}
	for _, r := range records {
		if r.Lives() {
			c.setRestored(ctx, r, lost[r.ID])
		}
	}
	return c.store.NoteDamagedRemoved()
}

// checkAllRecorded refuses to start if a record was lost: a record is written before its device has traffic and removed
// after it. The container still runs, and without its device it would lose the network. Endpoints with a damaged record
// are not refused: Start removes their devices.
func (c *Core) checkAllRecorded() error {
	ids, err := c.driver.Attached()
	if err != nil {
		return fmt.Errorf("listing devices of containers: %w", err)
	}
	ids = slices.DeleteFunc(ids, func(id endpoint.ID) bool {
		_, ok := c.store.Get(id)
		return ok || c.store.IsDamaged(id)
	})
	if len(ids) == 0 {
		return nil
	}
	return &statefile.CorruptError{
		Path: c.store.RecordPath(ids[0]),
		Err:  fmt.Errorf("it is missing, but endpoints without a record have devices with traffic: %v", ids),
	}
}

// setRestored records the state of an endpoint after a restore. After a reboot devices and containers are gone. If only
// the device is gone, the endpoint stays lost until the runtime deletes it; it does not block the others.
func (c *Core) setRestored(ctx context.Context, r endpoint.Record, lost error) {
	if errors.Is(lost, dpapi.ErrNoNamespace) {
		c.log.Warn(
			"removing an endpoint whose container is gone",
			"endpoint",
			r.ID,
			"container",
			r.ContainerID,
			"pod",
			r.Pod,
			"error",
			lost,
		)
		if err := c.remove(ctx, r); err != nil {
			c.log.Error("removing an endpoint failed", "endpoint", r.ID, "error", err)
		}
		return
	}
	was := r.State
	r.State = endpoint.Active
	if lost != nil {
		c.log.Error(
			"restoring an endpoint failed",
			"endpoint",
			r.ID,
			"container",
			r.ContainerID,
			"pod",
			r.Pod,
			"error",
			lost,
		)
		r.State = endpoint.Lost
	}
	if r.State == was {
		return
	}
	if r.State == endpoint.Active {
		c.services.RestoreHostPorts(r)
	} else if err := c.services.ReleaseHostPorts(r); err != nil {
		c.log.Error("releasing the host ports of an endpoint failed; retrying", "endpoint", r.ID, "error", err)
	}
	if err := c.store.Put(r); err != nil {
		c.log.Error("writing the state of an endpoint failed", "endpoint", r.ID, "state", r.State, "error", err)
	}
	c.services.EndpointsChanged(r.Tenant)
}

// MarkLost marks active endpoints whose device has gone while the agent runs. Most of them go with a container for
// which no DEL comes. All are checked together, because a check may scan all namespaces of the machine.
func (c *Core) MarkLost(ctx context.Context, suspected func(endpoint.Record) bool) error {
	suspects := slices.DeleteFunc(
		c.store.List(),
		func(r endpoint.Record) bool { return r.State != endpoint.Active || !suspected(r) },
	)
	if len(suspects) == 0 {
		return nil
	}
	lost, err := c.driver.MissingDevices(suspects)
	errs := []error{err}
	for _, r := range suspects {
		if why := lost[r.ID]; why != nil {
			errs = append(errs, c.markOneLost(ctx, r, why))
		}
	}
	return errors.Join(errs...)
}

func (c *Core) markOneLost(ctx context.Context, seen endpoint.Record, why error) error {
	unlock, err := c.byKey.Lock(ctx, EndpointKey(seen.ContainerID, seen.Interface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(seen.ContainerID, seen.Interface)
	if !ok || r.State != endpoint.Active || r.ID != seen.ID || r.Device.HostIfindex != seen.Device.HostIfindex {
		return nil // a DEL removed it
	}
	if err = c.deactivate(ctx, r); err == nil {
		err = c.driver.RemoveRoutes(r)
	}
	c.setRestored(ctx, r, why)
	return err
}

// LostProblem names the endpoints that could not be restored, or returns "".
func (c *Core) LostProblem() string {
	var names []string
	for _, r := range c.store.List() {
		if r.State == endpoint.Lost {
			names = append(names, fmt.Sprintf("%d (%s)", r.ID, cmp.Or(r.Pod, r.ContainerID)))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(
		"the devices of %s are gone: %s; their containers have no network until the runtime recreates them",
		humanize.Of(len(names), "endpoint", "endpoints"),
		strings.Join(names, ", "),
	)
}

// installTenants installs the tenants that have endpoints or are transit tenants, and removes the others.
func (c *Core) installTenants(ctx context.Context) error {
	for _, name := range c.tenants.Names() {
		if err := c.installKnown(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// installKnown does so for one tenant. If a network rejects it, for example after an upgrade, the start continues, so
// that a correction can arrive: its containers run without services, publications and other regions until the next
// update of the tenant.
func (c *Core) installKnown(ctx context.Context, name string) error {
	unlock, err := c.byTenant.Lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if c.tenants.endpoints(name) == 0 {
		c.tenantEmptied(ctx, name)
	}
	err = c.installTenant(ctx, name)
	if !isConflict(err) {
		return err
	}
	c.log.Error("a network rejects a tenant; it is installed without services, publications and other regions",
		"tenant", name, "error", err)
	c.tenants.noteRefused(name, err)
	c.tenants.restrict(name)
	if err = c.installTenant(ctx, name); isConflict(err) && c.tenants.endpoints(name) == 0 {
		return nil // it is only a transit tenant
	}
	return err
}

// GuardInterfaces attaches guards to an interface beside the uplink that changed, or to all if it is nil.
func (c *Core) GuardInterfaces(changed netlink.Link) error { return c.driver.GuardInterfaces(changed) }

// Run migrates endpoints, keeps services, and removes state of retired tenant ids until ctx ends.
func (c *Core) Run(ctx context.Context) {
	var tasks sync.WaitGroup
	tasks.Go(func() { c.runForgetIndexes(ctx) })
	tasks.Go(func() { c.runMigrations(ctx) })
	tasks.Go(func() { c.services.Run(ctx) })
	tasks.Wait()
}
