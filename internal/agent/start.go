package agent

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"pilaster.io/pilaster/internal/endpoint"
)

// Start makes the kernel agree with the records: what was half made or half removed goes, what
// was active is written again, and what belongs to nobody is swept away.
func (c *Core) Start(ctx context.Context) error {
	for _, r := range c.store.List() {
		if lives(r) {
			continue
		}
		c.log.Info("endpoint was left unfinished and is removed", "endpoint", r.ID, "state", r.State, "container", r.ContainerID)
		if err := c.remove(ctx, r); err != nil {
			c.log.Error("endpoint is still there", "endpoint", r.ID, "error", err)
		}
	}
	if err := c.putTenants(ctx); err != nil {
		return err
	}
	records := c.store.List()
	if err := c.driver.Sweep(ctx, records); err != nil {
		return fmt.Errorf("sweeping what no endpoint owns: %w", err)
	}
	for _, r := range records {
		if lives(r) {
			c.bringBack(r)
		}
	}
	return nil
}

// lives reports whether an endpoint is one the runtime has and has not deleted.
func lives(r endpoint.Record) bool { return r.State == endpoint.Active || r.State == endpoint.Lost }

// bringBack activates an endpoint, or marks it as lost: after a reboot devices are gone until the
// runtime has deleted their endpoints, and one such must not keep the others away.
func (c *Core) bringBack(r endpoint.Record) {
	was := r.State
	r.State = endpoint.Active
	if err := c.driver.Activate(r); err != nil {
		c.log.Error("endpoint could not be brought back", "endpoint", r.ID, "container", r.ContainerID, "pod", r.Pod, "error", err)
		r.State = endpoint.Lost
	}
	if r.State == was {
		return
	}
	if err := c.store.Put(r); err != nil {
		c.log.Error("endpoint is not shown as it is", "endpoint", r.ID, "state", r.State, "error", err)
	}
}

// lost says which endpoints could not be brought back, or returns "".
func (c *Core) lost() string {
	var names []string
	for _, r := range c.store.List() {
		if r.State == endpoint.Lost {
			names = append(names, fmt.Sprintf("%d (%s)", r.ID, cmp.Or(r.Pod, r.ContainerID)))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("the devices of %d endpoints are gone: %s; their containers have no network until the runtime deletes them and makes them anew",
		len(names), strings.Join(names, ", "))
}

// putTenants makes the driver know the tenants that have endpoints, and forget the others.
func (c *Core) putTenants(ctx context.Context) error {
	for _, name := range c.tenants.Names() {
		unlock, err := c.byTenant.lock(ctx, name)
		if err != nil {
			return err
		}
		if c.tenants.endpoints(name) == 0 {
			c.forget(name)
		} else {
			err = c.put(name)
		}
		unlock()
		if err != nil {
			return err
		}
	}
	return nil
}
