package cache

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// transitNodes are the nodes that need a tenant without hosting it: their gateways publish its containers, or they are
// frontends of its offloads or egress gateways of it.
func transitNodes(t *pilasterv1.Tenant) []string {
	var nodes []string
	for _, p := range t.GetPublications() {
		nodes = append(nodes, p.Node)
	}
	for _, r := range t.GetEgress() {
		for _, g := range r.Gateways {
			nodes = append(nodes, g.Node)
		}
	}
	for _, o := range t.GetOffloads() {
		for _, f := range o.Frontends {
			nodes = append(nodes, f.Node)
		}
	}
	return nodes
}

// updateTransit updates the index for a changed tenant. was is nil for a new tenant, is for a deleted one.
func (m *Cache) updateTransit(was, is *pilasterv1.Tenant) {
	for _, node := range transitNodes(was) {
		remove(m.transit, node, was.Name)
		m.changedNodes[node] = true
	}
	for _, node := range transitNodes(is) {
		add(m.transit, node, is.Name)
		m.changedNodes[node] = true
	}
}

// TransitTenants returns the tenants that a node needs without hosting them. The Edge Switch also needs all tenants
// that exist in another region.
func (m *Cache) TransitTenants(node string) map[string]bool {
	all := maps.Clone(m.transit[node])
	if node == m.edge {
		if all == nil {
			all = map[string]bool{}
		}
		for name, t := range m.Tenants {
			if len(t.Regions) > 0 {
				all[name] = true
			}
		}
	}
	return all
}

// refreshTransit updates the transit tenants of a stream and returns the new ones. The stream sends them whole even if
// the node hosts them, because the node may be deleting them.
func (m *Cache) refreshTransit(f *Subscriber) (added []string) {
	now := m.TransitTenants(f.Node.Name)
	for tenant := range now {
		if !f.transit[tenant] {
			added = append(added, tenant)
		}
	}
	m.setTenants(f, f.hosted, now)
	return added
}

// ownRecord returns the record of a node with its transit tenants, as the node receives it.
func (m *Cache) ownRecord(f *Subscriber) *pilasterv1.Node {
	record := proto.CloneOf(m.Nodes[f.Node.Name])
	record.Carries = slices.Sorted(maps.Keys(m.TransitTenants(f.Node.Name)))
	return record
}
