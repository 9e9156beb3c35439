package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/statefile"
)

// Start makes the kernel agree with the records: what was half made or half removed goes, what was
// active is compared and repaired, containers that are gone are reaped, and what belongs to nobody is
// swept away. The packet path may be another build's; it is taken over.
func (c *Core) Start(ctx context.Context) error {
	if err := c.checkAllRecorded(); err != nil {
		return err
	}
	for _, r := range c.store.List() {
		if r.Lives() {
			continue
		}
		c.log.Info(
			"endpoint was left unfinished and is removed",
			"endpoint",
			r.ID,
			"state",
			r.State,
			"container",
			r.ContainerID,
		)
		if err := c.remove(ctx, r); err != nil {
			c.log.Error("endpoint is still there", "endpoint", r.ID, "error", err)
		}
	}
	if err := c.installTenants(ctx); err != nil {
		return err
	}
	if err := c.startPolicies(); err != nil {
		return err
	}
	records := c.store.List()
	lost, err := c.driver.Restore(
		ctx,
		records,
		func(found []endpoint.Record) error { return c.repair(ctx, records, found) },
	)
	if err != nil {
		return fmt.Errorf("taking over the packet path: %w", err)
	}
	for _, r := range records {
		if r.Lives() {
			c.setRestored(ctx, r, lost[r.ID])
		}
	}
	return nil
}

// checkAllRecorded refuses to start where a record was lost: records are written before a device carries anything and
// removed after it. The container lives, and with its device it would lose the network.
func (c *Core) checkAllRecorded() error {
	ids, err := c.driver.Attached()
	if err != nil {
		return fmt.Errorf("looking for containers: %w", err)
	}
	ids = slices.DeleteFunc(ids, func(id endpoint.ID) bool { _, ok := c.store.Get(id); return ok })
	if len(ids) == 0 {
		return nil
	}
	return &statefile.CorruptError{
		Path: c.store.RecordPath(ids[0]),
		Err:  fmt.Errorf("it is missing, though devices of endpoints without a record carry packets: %v", ids),
	}
}

// setRestored notes how an endpoint is. After a reboot devices are gone, and containers with them; one whose
// device alone is gone stays until the runtime deletes it, and must not keep the others away.
func (c *Core) setRestored(ctx context.Context, r endpoint.Record, lost error) {
	if errors.Is(lost, dpapi.ErrNoNamespace) {
		c.log.Warn(
			"endpoint is removed with its container",
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
			c.log.Error("endpoint is still there", "endpoint", r.ID, "error", err)
		}
		return
	}
	was := r.State
	r.State = endpoint.Active
	if lost != nil {
		c.log.Error(
			"endpoint could not be brought back",
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
	if err := c.store.Put(r); err != nil {
		c.log.Error("endpoint is not shown as it is", "endpoint", r.ID, "state", r.State, "error", err)
	}
}

// markLost settles those active endpoints whose device has gone while the agent runs. Most go with a container that
// nobody deletes. All are looked for at once: it may take a walk through the machine.
func (c *Core) markLost(ctx context.Context, suspected func(endpoint.Record) bool) error {
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

func onDevice(name string) func(endpoint.Record) bool {
	return func(r endpoint.Record) bool { return r.Device.HostName == name }
}

// netnsGone suspects a device whose end the kernel tells the node nothing of, if its namespace is not where it was.
func netnsGone(r endpoint.Record) bool {
	if r.Device.HostName != "" {
		return false
	}
	_, err := os.Stat(r.Netns)
	return errors.Is(err, os.ErrNotExist)
}

func (c *Core) markOneLost(ctx context.Context, seen endpoint.Record, why error) error {
	unlock, err := c.byKey.lock(ctx, key(seen.ContainerID, seen.Interface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(seen.ContainerID, seen.Interface)
	if !ok || r.State != endpoint.Active || r.ID != seen.ID || r.Device.HostIfindex != seen.Device.HostIfindex {
		return nil // it went by a DEL
	}
	if err = c.deactivate(ctx, r); err == nil {
		err = c.driver.RemoveRoutes(r)
	}
	c.setRestored(ctx, r, why)
	return err
}

// markDisconnected says which endpoints could not be brought back, or returns "".
func (c *Core) lostProblem() string {
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
		"the devices of %s are gone: %s; their containers have no network until the runtime deletes them and makes them anew",
		humanize.Of(len(names), "endpoint", "endpoints"),
		strings.Join(names, ", "),
	)
}

// installTenants makes the driver know the tenants that have endpoints or are carried, and forget the others.
func (c *Core) installTenants(ctx context.Context) error {
	for _, name := range c.tenants.Names() {
		if err := c.installKnown(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// installKnown does so of one. What a network refuses of it, as after an upgrade, does not end the start, without which
// nobody would hear what mends it: its containers go on without services, publications and other regions until the
// cluster has told the tenant again.
func (c *Core) installKnown(ctx context.Context, name string) error {
	unlock, err := c.byTenant.lock(ctx, name)
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
	c.log.Error("tenant is not taken whole", "tenant", name, "error", err)
	c.tenants.noteRefused(name, err)
	c.tenants.restrict(name)
	if err = c.installTenant(ctx, name); isConflict(err) && c.tenants.endpoints(name) == 0 {
		return nil // it is only carried
	}
	return err
}
