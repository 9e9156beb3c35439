package cache

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// noteOffloads updates what the controller of offloads waits for. Offloaded has the tenants with offloads, each with
// the revision of the last change of what its frontends need: the tenant, its apps and policies. What backends report,
// and a read of the whole store, is no such change. OffloadRevision is that of the last batch with a tenant that has or
// had offloads, or with a report about one.
func (m *Cache) noteOffloads(b store.Batch) {
	if b.Whole {
		maps.DeleteFunc(m.Offloaded, func(name string, _ int64) bool { return len(m.Tenants[name].GetOffloads()) == 0 })
	}
	for _, e := range b.Events {
		name := tenantOf(e)
		hosting := cmp.Or(e.Hosting, e.EndedHosting)
		_, had := m.Offloaded[cmp.Or(name, hosting.GetTenant())]
		switch {
		case e.OffloadAuto != nil, hosting != nil && had:
			m.OffloadRevision = b.Revision
		case name == "" || e.Mapping != nil || e.EndedMapping != nil:
		case len(m.Tenants[name].GetOffloads()) > 0:
			m.OffloadRevision = b.Revision
			if !had || !b.Whole && !e.ToFrontends {
				m.Offloaded[name] = b.Revision
			}
		case had:
			delete(m.Offloaded, name)
			m.OffloadRevision = b.Revision
		}
	}
}

// AutomaticOffloads reports whether offloads start and end by the nodes' loads.
func (m *Cache) AutomaticOffloads() bool {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.OffloadAuto
}

// deriveOffloads sets the containers of offloads, as the backends reported them, in the cache and in the events. The
// store does not have them in the tenant's record: that would write it for each container.
func (m *Cache) deriveOffloads(events []store.Event) []store.Event {
	at := map[string]int{} // index of the last event of each tenant; -1 for none
	touch := func(tenant string) {
		if _, is := at[tenant]; !is && len(m.Tenants[tenant].GetOffloads()) > 0 {
			at[tenant] = -1
		}
	}
	for i, e := range events {
		switch {
		case e.Tenant != nil:
			if len(e.Tenant.Offloads) > 0 {
				at[e.Tenant.Name] = i
			}
		case e.Hosting != nil:
			touch(e.Hosting.Tenant)
		case e.EndedHosting != nil:
			touch(e.EndedHosting.Tenant)
		case e.Mapping != nil, e.EndedMapping != nil:
			touch(cmp.Or(e.Mapping, e.EndedMapping).Tenant)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(at)) {
		t := m.Tenants[name]
		if t == nil { // a later event deleted it
			continue
		}
		if t = m.withEndpoints(t); t == m.Tenants[name] {
			continue
		}
		m.Tenants[name] = t
		if i := at[name]; i >= 0 {
			events[i].Tenant = t
		} else {
			events = append(events, store.Event{Tenant: t, ToFrontends: true})
		}
	}
	return events
}

// isFrontend reports whether a node is a frontend of a tenant's offload.
func isFrontend(t *pilasterv1.Tenant, node string) bool {
	return slices.ContainsFunc(t.GetOffloads(), func(o *pilasterv1.Offload) bool {
		return slices.ContainsFunc(o.Frontends, func(f *pilasterv1.Frontend) bool { return f.Node == node })
	})
}

// withEndpoints returns a tenant with the containers of its offloads: a copy if they differ, else the tenant.
func (m *Cache) withEndpoints(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	changed := t
	for i, o := range t.Offloads {
		endpoints := m.offloaded(t, o.Node)
		if slices.EqualFunc(o.Endpoints, endpoints, func(a, b *pilasterv1.OffloadedEndpoint) bool {
			return proto.Equal(a, b)
		}) {
			continue
		}
		if changed == t {
			changed = proto.CloneOf(t)
		}
		changed.Offloads[i].Endpoints = endpoints
	}
	return changed
}

// offloaded returns the containers that a backend reported, without addresses that are not its own: frontends would
// send it packets for them.
func (m *Cache) offloaded(t *pilasterv1.Tenant, node string) (all []*pilasterv1.OffloadedEndpoint) {
	for _, e := range m.Hosting[t.Name][node].GetOffloaded() {
		own := slices.DeleteFunc(slices.Clone(e.Addresses), func(a []byte) bool { return !m.isAt(t, a, node) })
		switch {
		case len(own) == len(e.Addresses):
			all = append(all, e)
		case len(own) > 0:
			all = append(all, &pilasterv1.OffloadedEndpoint{Addresses: own, App: e.App})
		}
	}
	return all
}

// isAt reports whether an address, or the subnet that has it, is allocated to a node.
func (m *Cache) isAt(t *pilasterv1.Tenant, raw []byte, node string) bool {
	a, ok := netip.AddrFromSlice(raw)
	of := m.Allocations.byTenant[t.Name]
	if !ok || of == nil {
		return false
	}
	lengths := []int{a.BitLen()}
	for _, o := range t.Overlays {
		if o.NodeBits > 0 && int(o.NodeBits) <= a.BitLen() {
			lengths = append(lengths, int(o.NodeBits))
		}
	}
	return slices.ContainsFunc(lengths, func(bits int) bool {
		return of.mappings[netip.PrefixFrom(a, bits).Masked().String()].GetName() == node
	})
}

// PrefixesOf returns the addresses and subnets of a tenant that are allocated to a node, sorted.
func (m *Cache) PrefixesOf(tenant, node string) (all []string) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	of := m.Allocations.byTenant[tenant]
	if of == nil {
		return nil
	}
	for to, is := range of.mappings {
		if is.Name == node {
			all = append(all, to)
		}
	}
	slices.Sort(all)
	return all
}
