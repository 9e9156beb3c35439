package cache

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// region is the imported record of another region.
type region struct {
	*pilasterv1.Region
	tenants map[string]*pilasterv1.Region_Tenant // by name
}

func newRegion(r *pilasterv1.Region) region {
	tenants := map[string]*pilasterv1.Region_Tenant{}
	for _, t := range r.Tenants {
		tenants[t.Name] = t
	}
	return region{r, tenants}
}

// derive sets the other regions in which a tenant exists, and the protected prefixes of one with egress rules, in the
// cache and in the events. It checks the tenants of the events, or all tenants if a region, the Edge Switch or the
// protected prefixes changed.
func (m *Cache) derive(events []store.Event, all bool) []store.Event {
	at := map[string]int{} // index of the last event of each tenant
	for i, e := range events {
		if e.Tenant != nil {
			at[e.Tenant.Name] = i
		}
		if e.Tenant != nil || e.DeletedTenant != "" {
			m.changedNodes[m.edge] = true
		}
		all = all || e.Region != nil || e.DeletedRegion != "" || e.Protected != nil
	}
	touched := slices.Sorted(maps.Keys(at))
	if all {
		touched = slices.Sorted(maps.Keys(m.Tenants))
	}
	for _, name := range touched {
		t := m.Tenants[name]
		regions, protected := m.regionsOf(t), m.protectedOf(t)
		same := slices.EqualFunc(
			t.GetRegions(),
			regions,
			func(a, b *pilasterv1.TenantRegion) bool { return proto.Equal(a, b) },
		)
		if t == nil || same && slices.Equal(t.Protected, protected) {
			continue
		}
		if !same {
			m.changedNodes[m.edge] = true
		}
		t = proto.CloneOf(t)
		t.Regions, t.Protected = regions, protected
		m.Tenants[name] = t
		if i, changed := at[name]; changed {
			events[i].Tenant = t
		} else {
			events = append(events, store.Event{Tenant: t})
		}
	}
	return events
}

// regionsOf returns the other regions in which a tenant exists; none while this region has no Edge Switch.
func (m *Cache) regionsOf(t *pilasterv1.Tenant) (regions []*pilasterv1.TenantRegion) {
	edge := m.Nodes[m.edge]
	if edge == nil || !hasOverlays(t) {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(m.regions)) {
		r := m.regions[name]
		if there := r.tenants[t.Name]; there != nil &&
			(there.Joined == nil || there.Joined.AsTime().Equal(t.Created.AsTime())) {
			regions = append(
				regions,
				&pilasterv1.TenantRegion{
					Name:     name,
					Cidrs:    there.Cidrs,
					Edge:     edge.Prefix,
					PeerEdge: r.Edge,
					PeerVni:  there.Vni,
				},
			)
		}
	}
	return regions
}

// hasOverlays reports whether a tenant has CIDRs of its own, which other regions may import, also while it migrates to
// a network without them.
func hasOverlays(t *pilasterv1.Tenant) bool {
	return len(t.GetOverlays()) > 0 && !tenant.NetworkHas(t.Network, tenant.Identifiers)
}

// protectedOf returns the protected prefixes for a tenant with egress rules; for others they change nothing.
func (m *Cache) protectedOf(t *pilasterv1.Tenant) []string {
	if len(t.GetEgress()) == 0 {
		return nil
	}
	return m.protected
}

// Protected returns the protected prefixes.
func (m *Cache) Protected() []string {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.protected
}

// WithDerived sets what nodes receive with a tenant and the store does not have in its record: the other regions,
// protected prefixes, and the containers of offloads.
func (m *Cache) WithDerived(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	t.Regions, t.Protected = m.regionsOf(t), m.protectedOf(t)
	return m.withEndpoints(t)
}

// Region returns the record of this region for export. Its edge is empty if there is no Edge Switch.
func (m *Cache) Region(name string, base string) *pilasterv1.Region {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	r := &pilasterv1.Region{Name: name, BasePrefix: base, Edge: m.Nodes[m.edge].GetPrefix()}
	for _, name := range slices.Sorted(maps.Keys(m.Tenants)) {
		t := m.Tenants[name]
		if !hasOverlays(t) {
			continue
		}
		there := &pilasterv1.Region_Tenant{Name: name, Vni: t.Ids[0].Id, Created: t.Created}
		for _, o := range t.Overlays {
			there.Cidrs = append(there.Cidrs, o.Cidr)
		}
		r.Tenants = append(r.Tenants, there)
	}
	return r
}

// OtherRegions returns the other regions, sorted by name.
func (m *Cache) OtherRegions() (all []*pilasterv1.Region) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(m.regions)) {
		all = append(all, m.regions[name].Region)
	}
	return all
}
