package services

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/service"
)

// Status is the state of services on this node.
type Status struct {
	Services  int // of hosted tenants
	Endpoints int // of them, on all nodes
	Own       int // of these, on this node
	Counts    []Count
	Problems  []string
}

// Count is what clients on this node have done with a port of a service.
type Count struct {
	Tenant  string
	Service service.Name
	dpapi.FrontendKey
	dpapi.ServiceCounts
}

// Status returns the state of services, with counts if wanted.
func (m *Manager) Status(counts bool) (s Status) {
	var counted map[dpapi.FrontendKey]dpapi.ServiceCounts
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, t := range m.tenants {
		s.Services += len(t.services)
	}
	if counts && s.Services > 0 {
		var err error
		if counted, err = m.config.Driver.ServiceCounts(); err != nil {
			s.Problems = append(s.Problems, "reading the counters of services failed: "+err.Error())
		}
	}
	for _, p := range m.hosts.all {
		if p.err != nil {
			s.Problems = append(s.Problems, fmt.Sprintf("host ports of %s are not as they should be: %v", p.name(),
				p.err))
		}
	}
	for name, t := range m.tenants {
		for of := range t.services {
			for _, slice := range t.slicesOf(of, m.config.Node) {
				s.Endpoints += len(slice.Endpoints)
			}
		}
		for _, slice := range t.own {
			s.Own += len(slice.Endpoints)
		}
		for of, frontends := range t.written {
			for key := range frontends {
				if n, ok := counted[key]; ok {
					s.Counts = append(s.Counts, Count{name, of, key, n})
				}
			}
		}
		s.Problems = append(s.Problems, t.problems(name)...)
	}
	slices.Sort(s.Problems)
	slices.SortFunc(s.Counts, func(a, b Count) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Service.String(), b.Service.String()),
			a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol))
	})
	return s
}

// IsOwn reports whether an address is one of this node.
func (m *Manager) IsOwn(a netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.addresses.Own, a) || slices.Contains(m.addresses.Ports, a)
}

// HostPort returns the container whose host port is at an address of this node; false if none has it.
func (m *Manager) HostPort(at dpapi.FrontendKey) (name string, found bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.hosts.holder(hostPortOf(at)); p != nil {
		return p.name(), true
	}
	return "", false
}

// Publishers returns the containers with host ports at an address of this node.
func (m *Manager) Publishers(a netip.Addr) (all []endpoint.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.hosts.all {
		r := p.record
		r.HostPorts = slices.DeleteFunc(slices.Clone(r.HostPorts), func(port endpoint.HostPort) bool {
			keys, _ := m.addresses.keysOf(port)
			return !slices.ContainsFunc(keys, func(key dpapi.FrontendKey) bool {
				return key.Address.Addr() == a && m.hosts.holder(hostPortOf(key)) == p
			})
		})
		if p.published && len(r.HostPorts) > 0 {
			all = append(all, r)
		}
	}
	return all
}

// At returns the services that containers or hosts outside reach at an address: those of hosted tenants that have it,
// and at an address of this node those with node ports, without ports that are host ports there.
func (m *Manager) At(a netip.Addr) (all []service.Service) {
	m.mu.Lock()
	defer m.mu.Unlock()
	node := slices.Contains(m.addresses.Ports, a)
	for _, t := range m.tenants {
		for _, s := range t.services {
			if s.Address == a || slices.Contains(s.Outside(), a) {
				all = append(all, s)
			} else if node && s.NodePorts {
				s.Ports = slices.DeleteFunc(slices.Clone(s.Ports), func(p service.Port) bool {
					at := endpoint.HostPort{Host: p.NodePort, Protocol: p.Protocol.String(), Address: a}
					return m.hosts.holder(at) != nil
				})
				if len(s.Ports) > 0 {
					all = append(all, s)
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b service.Service) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Name.String(), b.Name.String()))
	})
	return all
}

// problems describes what is not in the packet path, or not known to the orchestrator, of a tenant's services.
func (t *tenantServices) problems(name string) (all []string) {
	if t.err != nil {
		all = append(all, fmt.Sprintf("services of tenant %s are not in the packet path as they should be: %v\n  some "+
			"have their former endpoints, or none; delete services, or move containers of tenants with services to "+
			"other nodes; retrying", name, t.err))
	}
	for of, n := range t.unknown {
		all = append(all, fmt.Sprintf("service %s of tenant %s: %s under tenant ids that this node does not have get "+
			"no connections from here", of, name, humanize.Of(n, "endpoint", "endpoints")))
	}
	for of, why := range t.unexposed {
		all = append(all, fmt.Sprintf("service %s of tenant %s: hosts outside do not reach its node port by this "+
			"node: %s\n  use another node port, or remove the container", of, name, strings.Join(why, ", ")))
	}
	for of, a := range t.reported {
		if a.err != nil && same(a.slice, t.own[of]) {
			all = append(all, fmt.Sprintf("the endpoints of service %s of tenant %s on this node are not known to "+
				"other nodes: %v", of.Service, name, a.err))
		}
	}
	return all
}
