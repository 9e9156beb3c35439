package cache

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Registered returns the record of a node whose registration equals the records of the cache, so that thousands of
// nodes that reconnect at once need not wait for the store. It returns nil if the store has to decide. If the cache
// lags, for example behind the deletion of the node, the store refuses the node's stream later.
func (m *Cache) Registered(r store.Registration) *pilasterv1.Node {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	n := m.Nodes[r.Node.Name]
	if n == nil || n.Uuid != r.Node.UUID || r.Prefix.String() != n.Prefix ||
		m.Sessions[r.Node.Name].Admit(r.Node.Name, r.Instance) != nil {
		return nil
	}
	uplinks := make([]string, len(r.Uplinks))
	for i, a := range r.Uplinks {
		uplinks[i] = a.String()
	}
	if n.Version != r.Version || n.Edge != r.Edge || n.Gateway != r.Gateway || !slices.Equal(n.Enforces, r.Enforces) ||
		r.Published != 0 || n.Form != r.Form || n.Offloads != r.Offloads || n.MtuReserve != r.MTUReserve ||
		n.Rack != r.Rack || n.Egress != r.Egress ||
		!slices.Equal(n.UplinkAddresses, uplinks) {
		return nil
	}
	for _, held := range r.Tenants {
		if !m.knowsTenant(held) {
			return nil
		}
	}
	for _, held := range r.Apps {
		if known := m.Apps[held.Tenant][held.Id]; known == nil || !maps.Equal(known.Labels, held.Labels) {
			return nil
		}
	}
	for _, held := range r.Mappings {
		if known := m.Allocations.find(held); held.Key != "" || known.GetKey() != "" ||
			known.GetName() != n.Name { // only the store can check the endpoint of an address
			return nil
		}
	}
	return n
}

// OtherForm returns a connected node whose packets on the fabric have another form; nil if there is none.
func (m *Cache) OtherForm(node, form string) *pilasterv1.Node {
	if form == "" {
		return nil
	}
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for name, n := range m.Nodes {
		if n.Form != "" && n.Form != form && name != node && !m.Sessions[name].None() {
			return n
		}
	}
	return nil
}

// knowsTenant reports whether the tenant exists with all ids that the node holds.
func (m *Cache) knowsTenant(held *pilasterv1.Tenant) bool {
	known := m.Tenants[held.Name]
	if known == nil || held.Changes > known.Changes || held.Network != known.Network ||
		held.Addressing != known.Addressing ||
		held.Created != nil && !proto.Equal(held.Created, known.Created) {
		return false
	}
	for _, id := range held.Ids {
		if !slices.ContainsFunc(known.Ids, func(k *pilasterv1.TenantId) bool { return k.Id == id.Id }) {
			return false
		}
	}
	return true
}
