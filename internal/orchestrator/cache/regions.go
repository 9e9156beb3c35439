package cache

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// RegionName is another one, as it was imported.
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

// deriveRegions completes events with what follows from others: where else tenants are. It may change for all of them with a
// RegionName, or where the Edge Switch is another.
func (m *Cache) deriveRegions(events []store.Event, all bool) []store.Event {
	at := map[string]int{} // Of tenants in events
	for i, e := range events {
		if e.Tenant != nil {
			at[e.Tenant.Name] = i
		}
		if e.Tenant != nil || e.DeletedTenant != "" {
			m.changedNodes[m.edge] = true
		}
		all = all || e.Region != nil || e.DeletedRegion != ""
	}
	touched := slices.Sorted(maps.Keys(at))
	if all {
		touched = slices.Sorted(maps.Keys(m.Tenants))
	}
	for _, name := range touched {
		t := m.Tenants[name]
		regions := m.regionsOf(t)
		if t == nil ||
			slices.EqualFunc(
				t.Regions,
				regions,
				func(a, b *pilasterv1.TenantRegion) bool { return proto.Equal(a, b) },
			) {
			continue
		}
		m.changedNodes[m.edge] = true
		t = proto.CloneOf(t)
		t.Regions = regions
		m.Tenants[name] = t
		if i, changed := at[name]; changed {
			events[i].Tenant = t
		} else {
			events = append(events, store.Event{Tenant: t})
		}
	}
	return events
}

// regionsOf is what a tenant's nodes must know of other regions: nothing while there is no Edge Switch.
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

// hasOverlays tells whether a tenant has addresses of its own, which other regions may know: also while it leaves network
// nimitz.
func hasOverlays(t *pilasterv1.Tenant) bool { return len(t.GetOverlays()) > 0 }

// WithRegions is a tenant, read from the store, as nodes are told of it.
func (m *Cache) WithRegions(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	t.Regions = m.regionsOf(t)
	return t
}

// RegionName is this one: with an edge where there is an Edge Switch.
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

// OtherRegions is sorted by name.
func (m *Cache) OtherRegions() (all []*pilasterv1.Region) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(m.regions)) {
		all = append(all, m.regions[name].Region)
	}
	return all
}
