package store

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant's ids, in order of creation, are: old ids that containers still use; the current id, from which nodes
// allocate addresses; and at most one id that nodes only accept. The last one becomes current when all nodes that host
// the tenant accept it, so that each receiver can decrypt addresses of this id. An old id is removed when no node holds
// it.

// RotateKey adds a new id with a new key to a tenant. If the tenant has an id that is only accepted, RotateKey changes
// nothing, so a call with an unknown result may be repeated.
func (s *Store) RotateKey(ctx context.Context, name string) (*pilasterv1.Tenant, error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	found := new(pilasterv1.Tenant)
	err := s.change(ctx, func(t *txn) error {
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		if keeps := tenant.KeepsAddresses(found.Network, found.Leaving); len(found.Overlays) > 0 &&
			(found.Leaving == "" || keeps) {
			return refuse(
				Refused,
				"tenant %s is on network %s, which encrypts no addresses, so it has no key to rotate; nothing was "+
					"changed",
				name,
				found.Network,
			)
		}
		if n := len(found.Ids); found.Ids[n-1].OnlyAccepted {
			return nil
		} else if n >= tenant.MaxIDs {
			hosting, err := t.hostingOf(name)
			if err != nil {
				return err
			}
			return refuse(Refused, "tenant %s has %d ids, which is the maximum; nothing was changed: an id retires "+
				"with its last container, and id %d is held by %s",
				name, n, found.Ids[0].Id, strings.Join(Holders(hosting, found.Ids[0].Id), ", "))
		}
		id, err := t.newTenantID(name)
		if err != nil {
			return err
		}
		id.OnlyAccepted = true
		found.Ids = append(found.Ids, id)
		return t.saveChanged(found)
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// ForceKey makes an id current, even if not all nodes accept it.
func (s *Store) ForceKey(ctx context.Context, name string, id uint32) (*pilasterv1.Tenant, error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	found := new(pilasterv1.Tenant)
	err := s.change(ctx, func(t *txn) error {
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		i := slices.IndexFunc(found.Ids, func(has *pilasterv1.TenantId) bool { return has.Id == id })
		if i < 0 {
			return refuse(
				NotFound,
				"tenant %s has no id %d; `pilaster tenant get %s` shows its ids",
				name,
				id,
				name,
			)
		}
		if !found.Ids[i].OnlyAccepted {
			return nil
		}
		found.Ids[i].OnlyAccepted = false
		return t.saveChanged(found)
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// Reconcile performs the steps that are due for a tenant's ids and retiring apps. It does nothing for a deleted tenant.
func (s *Store) Reconcile(ctx context.Context, name string) error {
	for {
		more := false
		err := s.change(ctx, func(t *txn) error {
			found := new(pilasterv1.Tenant)
			if exists, err := t.load(dirTenants+name, found); err != nil || !exists {
				return err
			}
			hosting, err := t.hostingOf(name)
			if err != nil {
				return err
			}
			ids, apps := Due(found, hosting), AppsDue(found, hosting)
			if ids != nil {
				found.Ids = ids
			}
			if apps {
				if more, err = s.reconcileApps(t, found, hosting); err != nil {
					return err
				}
			}
			if ids == nil && (more || !apps) {
				return nil
			}
			return t.saveChanged(found)
		})
		if err != nil || !more {
			return err
		}
	}
}

// Due returns the ids after the due steps, nil if no step is due.
func Due(of *pilasterv1.Tenant, hosting []*pilasterv1.Hosting) []*pilasterv1.TenantId {
	var ids []*pilasterv1.TenantId
	last := len(of.Ids) - 1
	for i, id := range of.Ids {
		next := i < last && of.Ids[last].OnlyAccepted && i == last-1
		if i == last || next || len(Holders(hosting, id.Id)) > 0 {
			ids = append(ids, id)
		}
	}
	if of.Ids[last].OnlyAccepted && len(Lacking(hosting, of.Ids[last].Id)) == 0 {
		ids[len(ids)-1] = &pilasterv1.TenantId{Id: of.Ids[last].Id, Key: of.Ids[last].Key}
	} else if len(ids) == len(of.Ids) {
		return nil
	}
	return ids
}

// Holders returns the nodes that have containers with addresses of an id, or may create them. A node that has not
// reported its ids counts as a holder.
func Holders(hosting []*pilasterv1.Hosting, id uint32) []string {
	return nodesWhere(
		hosting,
		func(h *pilasterv1.Hosting) bool { return len(h.Holds) == 0 || slices.Contains(h.Holds, id) },
	)
}

// Lacking returns the nodes that do not accept an id yet.
func Lacking(hosting []*pilasterv1.Hosting, id uint32) []string {
	return nodesWhere(hosting, func(h *pilasterv1.Hosting) bool { return !slices.Contains(h.Accepts, id) })
}

func nodesWhere(hosting []*pilasterv1.Hosting, is func(*pilasterv1.Hosting) bool) []string {
	var names []string
	for _, h := range hosting {
		if is(h) {
			names = append(names, h.Node)
		}
	}
	return names
}

func (t *txn) loadTenant(name string, to *pilasterv1.Tenant) error {
	if exists, err := t.load(dirTenants+name, to); err != nil {
		return err
	} else if !exists {
		return refuse(NotFound, "there is no tenant %q; `pilaster tenant list` lists the tenants", name)
	}
	return nil
}

// newTenantID allocates an id and a random key.
func (t *txn) newTenantID(owner string) (*pilasterv1.TenantId, error) {
	id, err := t.allocateTenantID(owner)
	if err != nil {
		return nil, err
	}
	key := make([]byte, len(address.Key{}))
	rand.Read(key)
	return &pilasterv1.TenantId{Id: id, Key: key}, nil
}

func (t *txn) saveChanged(of *pilasterv1.Tenant) error {
	of.Changes++
	return t.save(dirTenants+of.Name, of)
}
