package agent

import (
	"errors"
	"fmt"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Merge adds state to a tenant, or adds the tenant, and returns the previous state. If the tenant was known, the caller
// writes the result to disk with save.
func (t *Tenants) Merge(k TenantState) (before TenantState, err error) {
	if err := tenant.CheckName(k.Tenant.Name); err != nil {
		return before, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.m[k.Tenant.Name]
	if old == nil {
		if err := t.checkIDs(k.Tenant.Name, len(k.Tenant.IDs)); err != nil {
			return before, err
		}
		h := newHosted(k)
		t.forgetApps(h)
		if err := t.write(h); err != nil {
			return before, err
		}
		if t.hasMappings != nil && t.hasMappings(k.Tenant) {
			h.mappingsListed = make(chan struct{})
		}
		t.m[k.Tenant.Name] = h
		t.signal()
		return before, nil
	}
	if old.lost != nil {
		h, err := old.found(k)
		if errors.Is(err, errStillLost) {
			return before, nil
		}
		if err == nil {
			err = t.checkIDs(k.Tenant.Name, len(k.Tenant.IDs))
		}
		if err != nil {
			return before, err
		}
		t.forgetApps(h)
		t.m[k.Tenant.Name] = h
		return old.TenantState, nil
	}
	if had, has := old.Tenant.Created, k.Tenant.Created; !has.IsZero() && !has.Equal(had) {
		return before, fmt.Errorf(
			"tenant %s of this node was created at %v, the cluster's at %v\n  nothing was changed; remove this "+
				"node's containers of the tenant, or restore a newer backup of the cluster's store",
			k.Tenant.Name,
			had,
			has,
		)
	}
	h := *old
	if err := h.MergeIDs(k, func(id address.TenantID) bool { return h.endpoints[id] > 0 }); err != nil {
		return before, err
	}
	if len(h.Tenant.Overlays) == 0 {
		h.subnets = nil
	}
	h.Apps = mergeApps(old.Apps, k.Apps)
	grown := len(h.Apps) > len(old.Apps)
	t.forgetApps(&h)
	if err := t.checkIDs(k.Tenant.Name, len(h.Tenant.IDs)); err != nil {
		return before, err
	}
	h.Whole, h.Restricted, h.refused = old.Whole || k.Whole, false, nil // Whole is not on disk
	h.unsaved = old.unsaved || !h.Tenant.Equal(old.Tenant) || !h.Retiring.equal(old.Retiring) || grown ||
		len(h.Apps) != len(old.Apps)
	t.m[k.Tenant.Name] = &h
	return old.TenantState, nil
}

// rollback restores the previous state of a known or lost tenant; apps merged meanwhile stay.
func (t *Tenants) rollback(before TenantState, lost error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := t.m[before.Tenant.Name]; now != nil {
		h := *now
		h.Tenant, h.Retiring, h.Restricted = before.Tenant, before.Retiring, before.Restricted
		h.lost = lost
		t.m[before.Tenant.Name] = &h
	}
}

// restrict hides from networks what they may reject of a tenant, until the next merge.
func (t *Tenants) restrict(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := *t.m[name]
	h.Restricted = true
	t.m[name] = &h
}

// save writes a merged tenant to disk.
func (t *Tenants) save(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.m[name].unsaved {
		return nil
	}
	h := *t.m[name]
	h.unsaved = false
	if err := t.write(&h); err != nil {
		return err
	}
	t.m[name] = &h
	return nil
}

// A lost tenant is one with containers here whose file was damaged. The node knows its name and the ids in its records,
// without keys. The kernel's entries, keys and policies of the tenant stay as they are, and its file is not written,
// until the orchestrator sends the tenant: on the stream, or with the answer to an ADD.

// countRecord counts an endpoint whose record was found on disk.
func (t *Tenants) countRecord(r endpoint.Record) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[r.Tenant]
	if h == nil || h.lost == nil && !h.Tenant.Has(r.TenantID) {
		missing := &statefile.CorruptError{
			Path: t.path(r.Tenant),
			Err:  fmt.Errorf("endpoint %d belongs to tenant %s, id %d, which is missing", r.ID, r.Tenant, r.TenantID),
		}
		if err := t.damages.Check(missing); err != nil {
			return err
		}
		old := h
		h = newHosted(TenantState{Tenant: tenant.Tenant{Name: r.Tenant}})
		h.lost = missing
		if old != nil {
			h.endpoints = old.endpoints
			for id := range old.endpoints {
				h.Tenant.IDs = append(h.Tenant.IDs, tenant.ID{ID: id})
			}
		}
		t.m[r.Tenant] = h
	}
	h.endpoints[r.TenantID]++
	if h.lost == nil {
		return nil
	}
	on := r.Networks()
	if len(on) != 1 || !keptWithoutFile(on[0]) {
		return fmt.Errorf(
			"%w\n  endpoint %d of this tenant is on network %q, whose entries cannot be kept without the file",
			h.lost, r.ID, on)
	}
	if !h.Tenant.Has(r.TenantID) {
		h.Tenant.IDs = append(h.Tenant.IDs, tenant.ID{ID: r.TenantID})
	}
	h.Tenant.Network = on[0]
	return nil
}

// keptWithoutFile reports whether the entries of a network's tenants can stay in the kernel without the tenant's file,
// where its ranges of addresses are.
func keptWithoutFile(network string) bool {
	on, known := tenant.TraitsOf(network)
	return known && !on.Has(tenant.OwnCIDRs) && !on.Has(tenant.Identifiers)
}

// setLostAside sets the files of lost tenants aside, and removes lost tenants without endpoints.
func (t *Tenants) setLostAside() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, h := range t.m {
		if h.lost == nil {
			continue
		}
		instead := fmt.Sprintf("the containers of tenant %s keep the keys that are in the kernel, and the agent "+
			"requests the tenant from the orchestrator; until it has the tenant, no container of it is added here",
			name)
		if h.count() == 0 {
			instead = fmt.Sprintf("no container here belongs to tenant %s; the orchestrator sends the tenant again if "+
				"this node needs it", name)
		}
		if err := t.damages.SetAside(h.lost, instead); err != nil {
			return err
		}
		if h.count() == 0 {
			delete(t.m, name)
		}
	}
	return nil
}

// Lost returns why a tenant's file could not be read; nil if the node knows the tenant.
func (t *Tenants) Lost(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return h.lost
	}
	return nil
}

// errStillLost means that an update does not contain a lost tenant.
var errStillLost = errors.New("the update does not contain the tenant")

// found returns a lost tenant with the orchestrator's state. The caller holds the lock.
func (h *hosted) found(k TenantState) (*hosted, error) {
	if len(k.Tenant.IDs) == 0 {
		return nil, errStillLost
	}
	for id := range h.endpoints {
		if !k.Tenant.Has(id) {
			return nil, fmt.Errorf(
				"tenant %s: containers here use id %d, which the cluster does not have\n  the tenant's file was "+
					"damaged and nothing was changed; recreate these containers", k.Tenant.Name, id)
		}
	}
	now := newHosted(k)
	now.endpoints, now.hasPolicies, now.policyProblem = h.endpoints, h.hasPolicies, h.policyProblem
	now.deleted = h.deleted
	now.synced, now.servicesSynced, now.requested, now.unsaved = h.synced, h.servicesSynced, h.requested, true
	now.Apps, now.Whole = mergeApps(h.Apps, k.Apps), h.Whole || k.Whole
	return now, nil
}
