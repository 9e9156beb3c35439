package cache

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
)

// Rehost sets the hosted tenants of a stream, and queues those that are new to the stream or incomplete on the node.
// It returns the reports that the store must record, and the tenants whose reports the store must remove. It compares
// with the reports that this stream recorded last, because the cache may lag behind them.
func (m *Cache) Rehost(f *Subscriber, req *pilasterv1.FollowRequest) (add []*pilasterv1.Hosting, remove []string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	now, incomplete, resolving := set(req.HostedTenants), set(req.IncompleteTenants), set(req.ResolvingTenants)
	reports := reportedHosting(req)
	var d pilasterv1.Delta
	for tenant := range now {
		if !proto.Equal(f.recorded[tenant], reports[tenant]) {
			add = append(add, reports[tenant])
		}
		if !f.hosted[tenant] || incomplete[tenant] {
			m.addWhole(&d, tenant, true)
		}
	}
	for tenant := range incomplete {
		if f.transit[tenant] && !now[tenant] {
			m.addWhole(&d, tenant, false)
		}
	}
	hosts := m.HostedBy[f.Node.Name]
	for tenant := range hosts {
		if !now[tenant] && !resolving[tenant] {
			remove = append(remove, tenant)
		}
	}
	for tenant := range f.recorded {
		if !now[tenant] && !resolving[tenant] && !hosts[tenant] {
			remove = append(remove, tenant)
		}
	}
	for tenant := range resolving {
		if reports[tenant] == nil {
			reports[tenant] = &pilasterv1.Hosting{} // a later report removes it if the node does not host the tenant
		}
	}
	f.recorded = reports
	m.setTenants(f, now, f.transit)
	if len(d.Tenants) > 0 {
		m.enqueue(f, response(m.Revision, &d))
	}
	return add, remove
}

// alreadyRecorded returns the reports of a stream's first message that the store already has. The cache has all of
// them: it has received the stream's session, and since then only this stream records reports of the node. The store
// decides on tenants that rotate their key, migrate, retire apps or have offloads, and on later messages.
func (m *Cache) alreadyRecorded(f *Subscriber, first *pilasterv1.FollowRequest) map[string]*pilasterv1.Hosting {
	recorded := map[string]*pilasterv1.Hosting{}
	for _, name := range first.HostedTenants {
		t, h := m.Tenants[name], m.Hosting[name][f.Node.Name]
		if t != nil && h != nil && len(t.Ids) == 1 && t.Leaving == "" && t.RetiringApps == nil &&
			len(t.Offloads) == 0 && h.Sequence <= first.Sequence {
			recorded[name] = &pilasterv1.Hosting{
				Tenant:     name,
				Accepts:    h.Accepts,
				Holds:      h.Holds,
				Moving:     h.Moving,
				Overrides:  h.Overrides,
				HeardRound: h.HeardRound,
				KeepsApps:  h.KeepsApps,
				Unenforced: h.Unenforced,

				AppliedChanges: h.AppliedChanges, PoliciesRevision: h.PoliciesRevision, Offloaded: h.Offloaded,
				LostFrontends: h.LostFrontends, AnsweringFrontends: h.AnsweringFrontends,
			}
		}
	}
	return recorded
}

// reportedHosting returns a node's report about each tenant that it hosts.
func reportedHosting(req *pilasterv1.FollowRequest) map[string]*pilasterv1.Hosting {
	reports := map[string]*pilasterv1.Hosting{}
	for _, tenant := range req.HostedTenants {
		reports[tenant] = &pilasterv1.Hosting{Tenant: tenant}
	}
	for _, h := range req.Hosting {
		if reports[h.Tenant] != nil {
			reports[h.Tenant] = h
		}
	}
	return reports
}

// ForgetRecorded makes the stream record the reports of these tenants again at the node's next message.
func (m *Cache) ForgetRecorded(f *Subscriber, tenants []string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, tenant := range tenants {
		delete(f.recorded, tenant)
	}
}

// MaxReasons is how many reasons of refusals a node receives.
const MaxReasons = 16

// Refuse stores which parts of a node's reports the store refused, and sends the reasons to the node if they changed.
// It returns true if it sent at least one reason.
func (m *Cache) Refuse(f *Subscriber, reports []*pilasterv1.Hosting, refused map[string][]error) (changed bool) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for tenant := range f.refused {
		if f.recorded[tenant] == nil {
			delete(f.refused, tenant)
			changed = true
		}
	}
	for _, h := range reports {
		if slices.EqualFunc(
			f.refused[h.Tenant],
			refused[h.Tenant],
			func(a, b error) bool { return a.Error() == b.Error() },
		) {
			continue
		}
		if f.refused == nil {
			f.refused = map[string][]error{}
		}
		if f.refused[h.Tenant] = refused[h.Tenant]; refused[h.Tenant] == nil {
			delete(f.refused, h.Tenant)
		}
		changed = true
	}
	if !changed || m.Subscribers[f.Node.Name] != f {
		return false
	}
	reasons, left := []string{}, 0
	for _, tenant := range slices.Sorted(maps.Keys(f.refused)) {
		for _, err := range f.refused[tenant] {
			if len(reasons) < MaxReasons {
				reasons = append(reasons, err.Error())
			} else {
				left++
			}
		}
	}
	if left > 0 {
		reasons = append(reasons, fmt.Sprintf("and %d more", left))
	}
	m.enqueue(
		f,
		&pilasterv1.FollowResponse{
			Refusals: &pilasterv1.Refusals{Reasons: reasons},
			Event:    &pilasterv1.FollowResponse_Heartbeat{Heartbeat: &pilasterv1.Heartbeat{}},
		},
	)
	return len(f.refused) > 0
}

// Load is the last recorded report of a node, and when this process received it.
type Load struct {
	*pilasterv1.NodeLoad
	At time.Time
}

// Parts of a node's room, 0..1, and times between reports of loads.
const (
	loadStep  = 0.05 // a smaller change is not recorded
	busyLoad  = 0.5  // from here on a node reports often
	OftenLoad = time.Second
	autoLoad  = 10 * time.Second
	rareLoad  = time.Minute
	freshLoad = time.Minute      // what a node reports often is recorded after this time, also if it changed little
	staleLoad = 90 * time.Second // what a node should report often is unknown after this time
)

// IsFresh reports whether a load can be used: it is not if nothing keeps it up to date. Member is whether the node is a
// backend or a frontend. The caller holds the lock.
func (m *Cache) IsFresh(now time.Time, l Load, member bool) bool {
	often := member || m.OffloadAuto && Busy(l.NodeLoad)
	return (member || m.OffloadAuto) && (!often || now.Sub(l.At) < staleLoad)
}

// dropLoads deletes the reports of nodes without a stream, and of nodes that measure no loads.
func (m *Cache) dropLoads() {
	for node := range m.Loads {
		if m.Sessions[node].None() || !m.OffloadAuto && !m.takesPart(node) {
			delete(m.Loads, node)
		}
	}
}

// NextLoad returns when a node's next report is due, whether it measures its packet load for it, and whether this
// report is recorded: without packet loads it is not, most do not differ from the last one, and each record is a write
// that all orchestrators read. It removes the tenants that are not recorded from the report.
func (m *Cache) NextLoad(now time.Time, load *pilasterv1.NodeLoad) (next time.Duration, measure, record bool) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	member := m.takesPart(load.Node)
	next, measure = rareLoad, m.OffloadAuto || member
	switch {
	case member || m.OffloadAuto && Busy(load):
		next = OftenLoad
	case m.OffloadAuto:
		next = autoLoad
	}
	last, recorded := m.Loads[load.Node]
	m.keepLarge(load, last.NodeLoad)
	due := next == OftenLoad && now.Sub(last.At) >= freshLoad
	record = measure && load.Measured && (!recorded || differ(last.NodeLoad, load) || due)
	return next, measure, record
}

// keepLarge leaves in a report the tenants with an offload on the node, and of the others the largest that the
// controller would offload. Those in the last report may have half as much, so that noise does not change the report.
// The caller holds the lock.
func (m *Cache) keepLarge(load, last *pilasterv1.NodeLoad) {
	had := map[string]bool{}
	for _, t := range last.GetTenants() {
		had[t.Tenant] = true
	}
	share := func(t *pilasterv1.TenantLoad) float64 { return max(t.Load, part(t.Rules, load.RulesCapacity)) }
	isBackend := func(t *pilasterv1.TenantLoad) bool {
		return slices.ContainsFunc(m.Tenants[t.Tenant].GetOffloads(),
			func(o *pilasterv1.Offload) bool { return o.Node == load.Node })
	}
	var keep, large []*pilasterv1.TenantLoad
	for _, t := range load.Tenants {
		switch is := share(t); {
		case isBackend(t):
			keep = append(keep, t)
		case is >= offload.MinShare || had[t.Tenant] && is >= offload.MinShare/2:
			large = append(large, t)
		}
	}
	if len(large) > maxTenantLoads { // from no agent: the shares of the tenants add up to 1
		slices.SortFunc(large, func(a, b *pilasterv1.TenantLoad) int { return cmp.Compare(share(b), share(a)) })
		large = large[:maxTenantLoads]
	}
	load.Tenants = append(keep, large...)
	slices.SortFunc(load.Tenants, func(a, b *pilasterv1.TenantLoad) int { return strings.Compare(a.Tenant, b.Tenant) })
}

// maxTenantLoads limits the tenants without an offload in a report.
const maxTenantLoads = 256

// takesPart reports whether a node is a backend or a frontend. The caller holds the lock.
func (m *Cache) takesPart(node string) bool {
	for name := range m.transit[node] { // frontends
		if isFrontend(m.Tenants[name], node) {
			return true
		}
	}
	if len(m.Offloaded) == 0 {
		return false
	}
	is := func(o *pilasterv1.Offload) bool { return o.Node == node }
	for name := range m.HostedBy[node] {
		if slices.ContainsFunc(m.Tenants[name].GetOffloads(), is) {
			return true
		}
	}
	return false
}

// Busy reports whether a node reports often: it may need an offload soon. Its sessions do not count, because an offload
// does not move them.
func Busy(l *pilasterv1.NodeLoad) bool {
	total := l.Own
	for _, f := range l.Fronting {
		total += f.Load
	}
	return max(total, part(l.Rules, l.RulesCapacity)) >= busyLoad
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
