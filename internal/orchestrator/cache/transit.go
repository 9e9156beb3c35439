package cache

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// transitNodes are the nodes that must know a tenant without having a container of it: those whose gateways publish one.
func transitNodes(t *pilasterv1.Tenant) []string {
	var nodes []string
	for _, p := range t.GetPublications() {
		nodes = append(nodes, p.Node)
	}
	return nodes
}

// updateTransit takes note of who carries a tenant, as it was and as it is; nil where it is not there.
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

// TransitTenants is the tenants that a node must know without having a container of them: the Edge Switch those that are in
// other regions too.
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

// refreshTransit has a stream tell from now on of what its node carries, and returns what of that is new. It must come whole,
// also where the node hosts it: it may be about to forget it.
func (m *Cache) refreshTransit(f *Subscriber) (came []string) {
	now := m.TransitTenants(f.Node.Name)
	for tenant := range now {
		if !f.transit[tenant] {
			came = append(came, tenant)
		}
	}
	m.setTenants(f, f.hosted, now)
	return came
}

// ownRegion is a node's record as it is told the node itself.
func (m *Cache) ownRecord(f *Subscriber) *pilasterv1.Node {
	record := proto.CloneOf(m.Nodes[f.Node.Name])
	record.Carries = slices.Sorted(maps.Keys(m.TransitTenants(f.Node.Name)))
	return record
}
