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
		e.Hosting != nil || e.EndedHosting != nil || e.Session != nil
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

// Suspect is a node with endpoints of services whose agent has no session: it may be dead.
type Suspect struct {
	Node   *pilasterv1.Node
	Slices []*pilasterv1.EndpointSlice // that are not marked as unreachable
}

// Suspects returns the suspects, and some nodes whose agents have sessions: if these do not answer probes either, the
// fault may be this machine's. Without suspects it returns nothing.
func (m *Cache) Suspects() (suspects []Suspect, witnesses []*pilasterv1.Node) {
	const enough = 5
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	without := map[string]int{} // index in suspects
	for name, n := range m.Nodes {
		switch {
		case m.Sessions[name].None():
			without[name] = len(suspects)
			suspects = append(suspects, Suspect{Node: n})
		case len(witnesses) < enough:
			witnesses = append(witnesses, n)
		}
	}
	if len(suspects) == 0 {
		return nil, nil
	}
	for _, all := range m.Services.slices {
		for _, is := range all {
			if i, ok := without[is.Node]; ok && !is.Unreachable {
				suspects[i].Slices = append(suspects[i].Slices, is)
			}
		}
	}
	suspects = slices.DeleteFunc(suspects, func(s Suspect) bool { return len(s.Slices) == 0 })
	if len(suspects) == 0 {
		return nil, nil
	}
	return suspects, witnesses
}
