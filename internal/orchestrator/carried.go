package orchestrator

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// carriers are the nodes that must know a tenant without having a container of it: those whose gateways publish one.
func carriers(t *pilasterv1.Tenant) []string {
	var nodes []string
	for _, p := range t.GetPublications() {
		nodes = append(nodes, p.Node)
	}
	return nodes
}

// recarry takes note of who carries a tenant, as it was and as it is; nil where it is not there.
func (m *model) recarry(was, is *pilasterv1.Tenant) {
	for _, node := range carriers(was) {
		remove(m.carrying, node, was.Name)
		m.renewed[node] = true
	}
	for _, node := range carriers(is) {
		add(m.carrying, node, is.Name)
		m.renewed[node] = true
	}
}

// carries is the tenants that a node must know without having a container of them: the Edge Switch those that are in
// other regions too.
func (m *model) carries(node string) map[string]bool {
	all := maps.Clone(m.carrying[node])
	if node == m.edge {
		if all == nil {
			all = map[string]bool{}
		}
		for name, t := range m.tenants {
			if len(t.Regions) > 0 {
				all[name] = true
			}
		}
	}
	return all
}

// carry has a stream tell from now on of what its node carries, and returns what of that is new. It must come whole,
// also where the node hosts it: it may be about to forget it.
func (m *model) carry(f *follower) (came []string) {
	now := m.carries(f.node.Name)
	for tenant := range now {
		if !f.carried[tenant] {
			came = append(came, tenant)
		}
	}
	m.hear(f, f.hosted, now)
	return came
}

// own is a node's record as it is told the node itself.
func (m *model) own(f *follower) *pilasterv1.Node {
	record := proto.CloneOf(m.nodes[f.node.Name])
	record.Carries = slices.Sorted(maps.Keys(m.carries(f.node.Name)))
	return record
}
