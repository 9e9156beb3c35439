package orchestrator

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/tenant"
)

// seenRecord is a record, and the record of the cache that it was made from.
type seenRecord struct {
	offload.Record
	from *pilasterv1.Offload
}

type frontendOf struct{ tenant, node string }

// frontendLag is what a frontend lacks.
type frontendLag struct {
	since    time.Time // when this process saw a change that the node does not have; zero if it has all
	changes  uint64    // of the tenant at that time
	policies int64     // revision of their last change at that time
	has      int64     // revision of what the node was sent when it was last connected
}

// input returns what the controller decides by, and the revision of the last report about offloads. It has the reports
// about tenants with offloads, about those of busy nodes, which may get one, and about one more tenant.
func (o *offloads) input(now time.Time, also string) (in offload.Input, seen int64) {
	c := o.cache
	c.Mu.RLock()
	defer c.Mu.RUnlock()
	in.Auto, in.Records = c.OffloadAuto, o.readRecords(now)
	o.sortNodes()
	index := make(map[string]int, len(o.names))
	in.Nodes = make([]offload.Node, 0, len(o.names))
	fronts, members := map[frontendOf]bool{}, map[string]bool{}
	for i := range in.Records {
		members[in.Records[i].Node] = true
		for _, f := range in.Records[i].Frontends {
			fronts[frontendOf{in.Records[i].Tenant, f.Node}], members[f.Node] = true, true
		}
	}
	for i, name := range o.names {
		index[name] = i
		in.Nodes = append(in.Nodes, o.node(name))
		if load, is := c.Loads[name]; is && c.IsFresh(now, load, members[name]) {
			setLoad(&in.Nodes[i], load.NodeLoad)
		}
	}
	hosted := func(name, node string) (h offload.Hosted, n *offload.Node) {
		i, known := index[node]
		if !known {
			return h, nil
		}
		if n = &in.Nodes[i]; n.Tenants == nil {
			n.Tenants = map[string]offload.Hosted{}
		}
		return n.Tenants[name], n
	}
	of := map[string]bool{} // tenants whose nodes matter
	for name := range c.Offloaded {
		of[name] = true
	}
	if also != "" {
		of[also] = true
	}
	for node, load := range c.Loads {
		if cache.Busy(load.NodeLoad) && c.IsFresh(now, load, members[node]) {
			for _, l := range load.Tenants {
				of[l.Tenant] = true
			}
		}
	}
	for name := range of {
		for node, is := range c.Hosting[name] {
			h, n := hosted(name, node)
			if n == nil {
				continue
			}
			h.Applied, h.Unenforced = is.AppliedChanges, is.Unenforced
			h.Lost, h.Answering = is.LostFrontends, is.AnsweringFrontends
			if k := (frontendOf{name, node}); fronts[k] {
				h.Lag = o.lag(now, k, is, n.Connected)
			} else {
				h.Containers = 1 // as store.hasContainers: nodes with only subnets count, too
			}
			n.Tenants[name] = h
		}
	}
	models := map[string]offload.Model{} // of tenants on busy nodes
	for node, load := range c.Loads {
		if !c.IsFresh(now, load, members[node]) {
			continue
		}
		for _, l := range load.Tenants {
			h, n := hosted(l.Tenant, node)
			if n == nil {
				break
			}
			h.Containers, h.Load, h.Rules = max(1, h.Containers), l.Load, int(l.Rules)
			if cache.Busy(load.NodeLoad) {
				m, is := models[l.Tenant]
				if !is {
					m = offload.Modelled(c.Policies.Blocks(l.Tenant))
					models[l.Tenant] = m
				}
				h.Gain, h.Moved = m.Gain(offload.DefaultFrontends), m.Moved()
			}
			h.Refusal = o.refused[offload.Key{Tenant: l.Tenant, Node: node}].text
			n.Tenants[l.Tenant] = h
		}
	}
	return in, c.OffloadRevision
}

// readRecords returns the offloads. They count as changed when this process first saw them as they are.
func (o *offloads) readRecords(now time.Time) (all []offload.Record) {
	records := map[offload.Key]seenRecord{}
	for _, name := range slices.Sorted(maps.Keys(o.cache.Offloaded)) {
		for _, from := range o.cache.Tenants[name].GetOffloads() {
			k := offload.Key{Tenant: name, Node: from.Node}
			is := o.records[k]
			if is.from != from {
				r, err := offload.RecordOf(name, from)
				if err != nil { // the store checks what it writes
					o.log.Warn("an offload of the store is not readable", "tenant", name, "node", from.Node, "error",
						err)
					continue
				}
				if r.Changed = now; r.ID == is.ID && r.Since == is.Since {
					r.Changed = is.Changed
				}
				is = seenRecord{r, from}
			}
			records[k] = is
			all = append(all, is.Record)
		}
	}
	o.records = records
	return all
}

// sortNodes updates the names of the nodes. The caller holds the lock of the cache.
func (o *offloads) sortNodes() {
	gone := func(name string) bool { return o.cache.Nodes[name] == nil }
	if len(o.names) != len(o.cache.Nodes) || slices.ContainsFunc(o.names, gone) {
		o.names = slices.Sorted(maps.Keys(o.cache.Nodes))
	}
}

// node returns what is known of a node, without its tenants and load. The caller holds the lock of the cache.
func (o *offloads) node(name string) offload.Node {
	is := o.cache.Nodes[name]
	n := offload.Node{Name: name, Rack: is.Rack, Connected: o.cache.Connected(name), Offloads: is.Offloads}
	n.Prefix, _ = netip.ParsePrefix(is.Prefix)
	enforces := func(network string) bool { return tenant.NetworkHas(network, tenant.Offloads) }
	has := slices.ContainsFunc(is.Enforces, enforces)
	n.NoReserve = has && is.MtuReserve < tenant.OffloadOverhead
	switch {
	case is.Edge:
		n.Unfit = "with the Edge Switch"
	case !has:
		n.Unfit = "without policies on network " + tenant.NetworksWith(tenant.Offloads)
	}
	return n
}

func setLoad(n *offload.Node, load *pilasterv1.NodeLoad) {
	n.Measured, n.Budget, n.Own = load.Measured, load.Budget, load.Own
	n.Rules = offload.Table{Used: int(load.Rules), Capacity: int(load.RulesCapacity)}
	n.Sessions = offload.Table{Used: int(load.Sessions), Capacity: int(load.SessionsCapacity)}
	if len(load.Fronting) > 0 {
		n.Fronting = make(map[offload.Key]float64, len(load.Fronting))
	}
	for _, f := range load.Fronting {
		n.Fronting[offload.Key{Tenant: f.Tenant, Node: f.Backend}] = f.Load
	}
}

// lag returns for how long a frontend has lacked a change of a tenant or of its policies, by its report. A node that is
// not connected also lacks the apps that began since. The caller holds the lock of the cache.
func (o *offloads) lag(now time.Time, k frontendOf, is *pilasterv1.Hosting, connected bool) time.Duration {
	changes, policies := o.cache.Tenants[k.tenant].GetChanges(), o.cache.Policies.Changed(k.tenant)
	revision := o.cache.Offloaded[k.tenant]
	has := func(changes uint64, policies int64) bool {
		return is.AppliedChanges >= changes && is.PoliciesRevision >= policies
	}
	l := o.lags[k]
	if l == nil {
		l = &frontendLag{has: revision}
		o.lags[k] = l
	}
	if connected {
		l.has = revision
	}
	switch {
	case has(changes, policies) && l.has == revision:
		l.since = time.Time{}
		return 0
	case l.since.IsZero(), connected && has(l.changes, l.policies): // it has the change, and lacks a later one
		l.since, l.changes, l.policies = now, changes, policies
	}
	return now.Sub(l.since)
}
