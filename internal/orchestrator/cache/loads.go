package cache

import (
	"math"
	"slices"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Load is the last recorded report of a node, and when this process received it.
type Load struct {
	*pilasterv1.NodeLoad
	At time.Time
}

// Parts of a node's room, 0..1, and times between reports of loads.
const (
	loadStep  = 0.05 // a smaller change is not recorded
	busyLoad  = 0.5  // from here on a node reports often
	oftenLoad = time.Second
	autoLoad  = 10 * time.Second
	rareLoad  = time.Minute
	freshLoad = 10 * time.Second // what a node reports often is recorded after this time, also if it changed little
)

// dropLoads deletes the reports of nodes without a stream.
func (m *Cache) dropLoads() {
	for node := range m.Loads {
		if m.Sessions[node].None() {
			delete(m.Loads, node)
		}
	}
}

// NextLoad returns when a node's next report is due, whether it measures its packet load for it, and whether this report
// is recorded: most do not differ from the last one, and each record is a write that all orchestrators read.
func (m *Cache) NextLoad(now time.Time, load *pilasterv1.NodeLoad) (next time.Duration, measure, record bool) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	member := m.takesPart(load.Node)
	next, measure = rareLoad, m.OffloadAuto || member
	switch {
	case member || m.OffloadAuto && Busy(load):
		next = oftenLoad
	case m.OffloadAuto:
		next = autoLoad
	}
	last, recorded := m.Loads[load.Node]
	record = measure && (!recorded || differ(last.NodeLoad, load) || next == oftenLoad && now.Sub(last.At) >= freshLoad)
	return next, measure, record
}

// takesPart reports whether a node is a backend or a frontend. The caller holds the lock.
func (m *Cache) takesPart(node string) bool {
	for name := range m.transit[node] { // frontends
		for _, o := range m.Tenants[name].GetOffloads() {
			if slices.ContainsFunc(o.Frontends, func(f *pilasterv1.Frontend) bool { return f.Node == node }) {
				return true
			}
		}
	}
	if len(m.Offloaded) == 0 {
		return false
	}
	for name := range m.HostedBy[node] {
		if slices.ContainsFunc(m.Tenants[name].GetOffloads(), func(o *pilasterv1.Offload) bool { return o.Node == node }) {
			return true
		}
	}
	return false
}

// Busy reports whether a node reports often: it may need an offload soon.
func Busy(l *pilasterv1.NodeLoad) bool {
	total := l.Own
	for _, f := range l.Fronting {
		total += f.Load
	}
	return max(total, part(l.Rules, l.RulesCapacity), part(l.Sessions, l.SessionsCapacity)) >= busyLoad
}

func part(used, capacity uint32) float64 {
	if capacity == 0 {
		return 0
	}
	return float64(used) / float64(capacity)
}

// differ reports whether two reports of a node differ by more than a step, or in the tenants that they are about.
func differ(a, b *pilasterv1.NodeLoad) bool {
	far := func(x, y float64) bool { return math.Abs(x-y) >= loadStep }
	return a.Budget != b.Budget || far(a.Own, b.Own) ||
		a.RulesCapacity != b.RulesCapacity || far(part(a.Rules, a.RulesCapacity), part(b.Rules, b.RulesCapacity)) ||
		a.SessionsCapacity != b.SessionsCapacity ||
		far(part(a.Sessions, a.SessionsCapacity), part(b.Sessions, b.SessionsCapacity)) ||
		!slices.EqualFunc(a.Tenants, b.Tenants, func(x, y *pilasterv1.TenantLoad) bool {
			return x.Tenant == y.Tenant && !far(x.Load, y.Load) &&
				!far(part(x.Rules, a.RulesCapacity), part(y.Rules, b.RulesCapacity))
		}) ||
		!slices.EqualFunc(a.Fronting, b.Fronting, func(x, y *pilasterv1.FrontingLoad) bool {
			return x.Tenant == y.Tenant && x.Backend == y.Backend && !far(x.Load, y.Load)
		})
}
