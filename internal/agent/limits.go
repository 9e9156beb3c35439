package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/tenant"
)

// Limits of a node, as messages and metrics call them. The tables of the packet path are made as
// large, so that an ADD is refused before it has begun, and never by a table.
const (
	limitEndpoints = "endpoints"
	limitTenantIDs = "tenant-ids"
)

// flags raise the limits.
var flags = map[string]string{limitEndpoints: "--max-endpoints", limitTenantIDs: "--max-tenant-ids"}

// Limit is how much a node takes of something, and who has most of it.
type Limit struct {
	dpapi.Entries
	Largest     string // tenant; empty where nobody has any
	LargestUsed int
}

// Limits of this node, and their use.
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

// limit finds the largest user; of equals the first by name. The caller holds the lock.
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

// limitError is the refusal of one more.
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
	return refuse(
		ErrExhausted,
		"this node has no room: %d of %d %s are in use%s\n  nothing was changed; use another node, remove containers, or raise %s",
		l.Used,
		l.Capacity,
		l.Table,
		users,
		flags[l.Table],
	)
}

// ids counts those of all tenants but one. The caller holds the lock.
func (t *Tenants) ids(but string) int {
	n := 0
	for name, h := range t.m {
		if name != but {
			n += len(h.Tenant.IDs)
		}
	}
	return n
}

// idsOf are what a tenant has here. The caller holds the lock.
func (t *Tenants) idsOf(name string) []tenant.ID {
	if h := t.m[name]; h != nil {
		return h.Tenant.IDs
	}
	return nil
}

// checkIDs refuses a tenant more ids than fit beside those of the others. What it has already stays.
// The caller holds the lock.
func (t *Tenants) checkIDs(name string, wants int) error {
	if wants > len(t.idsOf(name)) && t.ids(name)+wants > t.maxIDs {
		return t.limit(limitTenantIDs, t.ids(""), t.maxIDs).refusal()
	}
	return nil
}

// checkRoom refuses a tenant that is new to a full node, before anybody is asked about it.
func (t *Tenants) checkRoom(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.checkIDs(name, max(1, len(t.idsOf(name))))
}

// noteRefused notes that news of a tenant could not be taken; the cluster is asked for them again with
// the next report, which follows when a tenant has gone.
func (t *Tenants) noteRefused(name string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		h.refused = fmt.Errorf("tenant %s is not here as the cluster has it: %w", name, err)
		if errors.Is(err, ErrExhausted) {
			h.refused = fmt.Errorf(
				"tenant %s has an id this node did not take, so nothing is drawn from it unless it is forced: %w",
				name,
				err,
			)
		}
		h.Whole, h.requested = false, false
	}
}

// refusedProblems are what refuse noted.
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
