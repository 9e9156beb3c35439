package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/tenant"
)

// Limits of a node, as named in messages and metrics. The tables of the packet path have the same size, so an ADD is
// refused before it changes anything, never by a full table.
const (
	limitEndpoints = "endpoints"
	limitTenantIDs = "tenant-ids"
)

// flags are the options that raise the limits.
var flags = map[string]string{limitEndpoints: "--max-endpoints", limitTenantIDs: "--max-tenant-ids"}

// Limit is the use of one resource of a node, with its largest user.
type Limit struct {
	dpapi.Entries
	Largest     string // tenant; empty if no tenant uses any
	LargestUsed int
}

// Limits returns the limits of this node and their use.
func (c *Core) Limits() []Limit {
	c.mu.Lock()
	endpoints := len(c.ids)
	c.mu.Unlock()
	c.tenants.mu.Lock()
	defer c.tenants.mu.Unlock()
	return []Limit{
		c.tenants.limit(limitEndpoints, endpoints, c.max),
		c.tenants.limit(limitTenantIDs, c.tenants.ids(""), c.tenants.maxIDs),
	}
}

// limit finds the largest user; among equals the first by name. The caller holds the lock.
func (t *Tenants) limit(name string, used, capacity int) Limit {
	l := Limit{Entries: dpapi.Entries{Table: name, Used: used, Capacity: capacity}}
	for _, tenant := range slices.Sorted(maps.Keys(t.m)) {
		uses := t.m[tenant].count()
		if name == limitTenantIDs {
			uses = len(t.m[tenant].Tenant.IDs)
		}
		if uses > l.LargestUsed {
			l.Largest, l.LargestUsed = tenant, uses
		}
	}
	return l
}

// limitError is the refusal when a limit is reached.
func (t *Tenants) limitError(name string, used, capacity int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.limit(name, used, capacity).refusal()
}

func (l Limit) refusal() error {
	users := ""
	if l.Largest != "" {
		users = fmt.Sprintf(", %d of them by tenant %s, the largest user", l.LargestUsed, l.Largest)
	}
	return refusal.New(
		refusal.ErrExhausted,
		"this node is full: %d of %d %s are in use%s\n  nothing was changed; use another node, remove containers, or "+
			"raise %s",
		l.Used,
		l.Capacity,
		l.Table,
		users,
		flags[l.Table],
	)
}

// ids counts the ids of all tenants except one. The caller holds the lock.
func (t *Tenants) ids(but string) int {
	n := 0
	for name, h := range t.m {
		if name != but {
			n += len(h.Tenant.IDs)
		}
	}
	return n
}

// idsOf returns the ids of a tenant that this node accepts. The caller holds the lock.
func (t *Tenants) idsOf(name string) []tenant.ID {
	if h := t.m[name]; h != nil {
		return h.Tenant.IDs
	}
	return nil
}

// checkIDs refuses a tenant more ids than the limit allows beside those of other tenants. Ids that it already has stay.
// The caller holds the lock.
func (t *Tenants) checkIDs(name string, wants int) error {
	if wants > len(t.idsOf(name)) && t.ids(name)+wants > t.maxIDs {
		return t.limit(limitTenantIDs, t.ids(""), t.maxIDs).refusal()
	}
	return nil
}

// checkRoom refuses a new tenant on a full node, before a request is sent for it.
func (t *Tenants) checkRoom(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.checkIDs(name, max(1, len(t.idsOf(name))))
}

// noteRefused records that an update of a tenant was not applied. The next report, at the latest when a tenant has
// gone, requests the tenant's state again.
func (t *Tenants) noteRefused(name string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		h.refused = fmt.Errorf("the last update of tenant %s is not applied on this node: %w", name, err)
		if errors.Is(err, refusal.ErrExhausted) {
			h.refused = fmt.Errorf(
				"tenant %s has an id that this node could not add, so containers do not use it unless forced: %w",
				name,
				err,
			)
		}
		h.Whole, h.requested = false, false
	}
}

// refusedProblems returns the errors that noteRefused recorded.
func (t *Tenants) refusedProblems() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, name := range slices.Sorted(maps.Keys(t.m)) {
		if err := t.m[name].refused; err != nil {
			all = append(all, err.Error())
		}
	}
	return all
}
