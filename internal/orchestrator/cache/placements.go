package cache

import (
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Placement says where a tenant is: the nodes that host it, and its mappings, both in no order.
type Placement struct {
	Tenant   *pilasterv1.Tenant
	Nodes    []*pilasterv1.Node
	Mappings []*pilasterv1.Mapping
}

// Placements returns the placements of the tenants on some networks, by name, and their revision.
func (m *Cache) Placements(on func(network string) bool) (all []Placement, revision int64) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(m.Tenants)) {
		t := m.Tenants[name]
		if !on(t.Network) {
			continue
		}
		p := Placement{Tenant: t}
		for node := range m.Hosting[name] {
			if n := m.Nodes[node]; n != nil {
				p.Nodes = append(p.Nodes, n)
			}
		}
		if of := m.Allocations.byTenant[name]; of != nil {
			p.Mappings = slices.Collect(maps.Values(of.mappings))
		}
		all = append(all, p)
	}
	return all, m.Revision
}

// CurrentRevision returns the revision of the cache.
func (m *Cache) CurrentRevision() int64 {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Revision
}
