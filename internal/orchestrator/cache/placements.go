package cache

import (
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/service"
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

// Exposed is a tenant that has services with external or load-balancer addresses: these services, their slices, and
// the nodes that host the tenant, all in no order.
type Exposed struct {
	Tenant   string
	Services []*pilasterv1.Service
	Slices   map[service.Name][]*pilasterv1.EndpointSlice
	Nodes    []*pilasterv1.Node
}

// Exposed returns the tenants with such services, and the revision of the cache.
func (m *Cache) Exposed() (all []Exposed, revision int64) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for tenant, services := range m.Services.of {
		e := Exposed{Tenant: tenant, Slices: map[service.Name][]*pilasterv1.EndpointSlice{}}
		for name, s := range services {
			if s.LoadBalancerIp != "" || len(s.ExternalIps) > 0 {
				e.Services = append(e.Services, s)
				e.Slices[name] = nil
			}
		}
		if len(e.Services) == 0 {
			continue
		}
		for name, slice := range m.Services.slices[tenant] {
			if of, ok := e.Slices[name.of]; ok {
				e.Slices[name.of] = append(of, slice)
			}
		}
		for node := range m.Hosting[tenant] {
			if n := m.Nodes[node]; n != nil {
				e.Nodes = append(e.Nodes, n)
			}
		}
		all = append(all, e)
	}
	return all, m.Revision
}

// CurrentRevision returns the revision of the cache.
func (m *Cache) CurrentRevision() int64 {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Revision
}
