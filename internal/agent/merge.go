package agent

import (
	"fmt"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// Merge adds state to a tenant, or adds the tenant, and returns the state before. Of a tenant that was known, save
// writes the result to disk.
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

// rollback restores the previous state of a known tenant; apps merged meanwhile stay.
func (t *Tenants) rollback(before TenantState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := t.m[before.Tenant.Name]; now != nil {
		h := *now
		h.Tenant, h.Retiring, h.Restricted = before.Tenant, before.Retiring, before.Restricted
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
