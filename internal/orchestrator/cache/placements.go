package cache

import (
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
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
	Live     map[string]bool // of these, the nodes whose agents have a session
}

func showsInExposed(e store.Event) bool {
	return serviceTenantOf(e) != "" || e.Node != nil || e.DeletedNode != "" || e.DeletedTenant != "" ||
		e.Hosting != nil || e.EndedHosting != nil || e.Session != nil || e.Unreachable != nil
}

// Exposed returns the tenants with such services, and ExposedRevision. If this is the revision that the caller knows,
// it returns no tenants.
func (m *Cache) Exposed(known int64) (all []Exposed, revision int64) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	if known == m.ExposedRevision {
		return nil, known
	}
	for tenant, services := range m.Services.of {
		e := Exposed{
			Tenant: tenant, Slices: map[service.Name][]*pilasterv1.EndpointSlice{}, Live: map[string]bool{},
		}
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
				e.Live[node] = !m.Sessions[node].None()
			}
		}
		all = append(all, e)
	}
	return all, m.ExposedRevision
}

// CurrentRevision returns the revision of the cache.
func (m *Cache) CurrentRevision() int64 {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Revision
}

// Reachability says which nodes with endpoints of services may be dead.
type Reachability struct {
	Nodes     int                // with endpoints
	Marked    []string           // in the store as unreachable
	Returned  []string           // of these, the ones whose agents have sessions
	Suspects  []*pilasterv1.Node // with endpoints, without a session and not marked
	Connected []*pilasterv1.Node // whose agents have sessions; only if there are suspects
}

// Reachability returns the present state.
func (m *Cache) Reachability() (r Reachability) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	r.Nodes = len(m.Services.byNode)
	for name := range m.Services.unreachable {
		if r.Marked = append(r.Marked, name); !m.Sessions[name].None() {
			r.Returned = append(r.Returned, name)
		}
	}
	for name := range m.Services.byNode {
		if n := m.Nodes[name]; n != nil && m.Sessions[name].None() && !m.Services.unreachable[name] {
			r.Suspects = append(r.Suspects, n)
		}
	}
	if len(r.Suspects) == 0 {
		return r
	}
	for name, n := range m.Nodes {
		if !m.Sessions[name].None() {
			r.Connected = append(r.Connected, n)
		}
	}
	return r
}
