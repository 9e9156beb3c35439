// Package cache holds the records of the store in memory and sends updates of them to the nodes.
//
// One watch of the store feeds the cache (Apply). Each stream of a node is a Subscriber. It starts with a snapshot, or
// with the events after the revision that the node has. Then it receives an update for each event that concerns its
// node: the record of the node, and the tenants that the node hosts or needs as transit tenants. RPCs read from the
// cache. They write to the store, and wait until the cache has the revision of their change.
package cache

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// Limits of the history from which a stream can resume: number of batches, and cost of their events (see eventCost).
const (
	MaxHistory     = 4096
	MaxHistoryCost = 1 << 16
)

// Cache has the state of the store in memory, and the streams that receive updates of it. Records are shared and never
// modified. Read the exported fields only while Mu is held, as in a condition of Await.
type Cache struct {
	Mu              sync.RWMutex       // read-write: Apply must not queue behind all nodes that reconnect
	waiters         map[string]*waiter // by node; key anything: any change
	Revision        int64              // 0 until the first batch
	Nodes           map[string]*pilasterv1.Node
	Tenants         map[string]*pilasterv1.Tenant
	Apps            map[string]map[uint32]*pilasterv1.App     // by tenant
	quarantinedApps map[string]map[uint32]bool                // by tenant: ids of ended apps
	endedApps       map[string]int                            // by tenant: apps that ended since the process started
	Hosting         map[string]map[string]*pilasterv1.Hosting // by tenant and node
	HostedBy        map[string]map[string]bool                // by node and tenant
	Unreconciled    map[string]bool                           // see markUnreconciled
	Offloaded       map[string]int64                          // see noteOffloads
	OffloadRevision int64                                     // see noteOffloads
	OffloadAuto     bool                                      // offloads start and end by the nodes' loads
	Loads           map[string]Load                           // by connected node
	Allocations     allocations
	Policies        policies
	Services        services
	ExposedRevision int64 // of the last change that Exposed may show
	reserved        reservations
	regions         map[string]region          // other regions, by name
	edge            string                     // name of the node that is the Edge Switch
	protected       []string                   // prefixes that only egress rules for them or parts of them allow
	transit         map[string]map[string]bool // by node and tenant; see transitNodes
	changedNodes    map[string]bool            // by the current batch: record or transit tenants may differ
	identifiers     bool                       // a tenant has had identifiers since this process started
	Sessions        map[string]store.Session   // by node, of all orchestrators
	serving         map[string]int             // number of sessions per orchestrator
	Self            string                     // id of this orchestrator in sessions
	Lag             time.Duration              // MaxLag, except in tests

	history      []store.Batch // all updates after compactedRev, oldest first
	historyCost  int           // of history; see eventCost
	compactedRev int64

	stopping    bool
	Subscribers map[string]*Subscriber          // by node
	byTenant    map[string]map[*Subscriber]bool // streams that receive updates of a tenant
	byMappings  map[string]map[*Subscriber]bool // streams that also receive its mappings
	// streams whose node subscribes to a mapping
	bySubscription map[subscription]map[*Subscriber]bool
	dropped        func(reason string) // counts streams that the orchestrator ended, by reason

	listing sync.Mutex // serialises the building of lists
}

func New(self string, dropped func(reason string)) *Cache {
	return &Cache{
		Self:         self,
		Lag:          MaxLag,
		waiters:      map[string]*waiter{},
		Unreconciled: map[string]bool{},
		Offloaded:    map[string]int64{},
		changedNodes: map[string]bool{},
		reserved:     reservations{pending: map[*reservation]bool{}},
		Subscribers:  map[string]*Subscriber{},
		byTenant:     map[string]map[*Subscriber]bool{},
		byMappings:   map[string]map[*Subscriber]bool{},
		dropped:      dropped,

		bySubscription: map[subscription]map[*Subscriber]bool{},
	}
}

// Apply applies a batch of events to the cache and notifies the streams and the waiting goroutines. It is the callback
// for store.Watch.
func (m *Cache) Apply(b store.Batch) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	before := m.Policies
	if b.Whole {
		m.Nodes = map[string]*pilasterv1.Node{}
		m.Tenants = map[string]*pilasterv1.Tenant{}
		m.Apps = map[string]map[uint32]*pilasterv1.App{}
		m.quarantinedApps, m.endedApps = map[string]map[uint32]bool{}, map[string]int{}
		m.Hosting = map[string]map[string]*pilasterv1.Hosting{}
		m.HostedBy = map[string]map[string]bool{}
		m.Loads, m.OffloadAuto = map[string]Load{}, false
		m.transit = map[string]map[string]bool{}
		m.Allocations, m.Policies, m.Services = newAllocations(), newPolicies(), newServices()
		m.regions, m.edge, m.protected = map[string]region{}, "", nil
		m.Sessions, m.serving = map[string]store.Session{}, map[string]int{}
		m.history, m.historyCost, m.compactedRev = nil, 0, b.Revision
		// The events since the previous batch are unknown, so every stream must resume or start with a snapshot.
		m.endStreams(connect.CodeAborted, "restart", "the orchestrator has read the whole store again; follow again")
	}
	edge, identifiers := m.Nodes[m.edge], m.identifiers
	b.Events = m.Services.markSlices(b.Events)
	for _, e := range b.Events {
		m.applyEvent(e, b.Revision)
		if b.Whole || showsInExposed(e) {
			m.ExposedRevision = b.Revision
		}
	}
	if b.Whole {
		m.dropLoads()
		m.Policies.succeed(before, b.Revision)
	}
	b.Events = m.deriveOffloads(m.derive(b.Events, edge != m.Nodes[m.edge]))
	m.noteOffloads(b)
	b.Events = append(b.Events, m.Policies.takeOverrides()...)
	for _, e := range b.Events { // after applyEvent: checkStream needs the whole batch
		m.checkStream(m.Subscribers[e.DeletedNode])
		if e.Session != nil {
			m.checkStream(m.Subscribers[e.Session.Node])
		}
	}
	m.Revision = b.Revision
	m.reserved.releaseUntil(m.Revision)
	if !b.Whole {
		m.broadcast(
			store.Batch{
				Revision: b.Revision,
				Events: slices.DeleteFunc(
					slices.Clone(b.Events),
					func(e store.Event) bool { return tenantOf(e) == "" },
				),
			},
		)
	}
	if m.identifiers != identifiers { // every node protects their prefix, also one without such a tenant
		for _, f := range m.Subscribers {
			m.enqueue(f, response(b.Revision, &pilasterv1.Delta{}))
		}
	}
	m.wake(b, m.changedNodes)
	m.changedNodes = map[string]bool{} // clear would keep the memory of the first, largest batch
}

// broadcast appends updates to the history and sends them to the streams that they concern.
func (m *Cache) broadcast(updates store.Batch) {
	if len(updates.Events) > 0 {
		m.history = append(m.history, updates)
		m.historyCost += eventCost(updates.Events)
		for ; len(m.history) > MaxHistory || m.historyCost > MaxHistoryCost; m.history = m.history[1:] {
			m.compactedRev = m.history[0].Revision
			m.historyCost -= eventCost(m.history[0].Events)
		}
	}
	to := map[*Subscriber]bool{}
	for _, e := range updates.Events {
		streams := m.byTenant
		if of := cmp.Or(e.Mapping, e.EndedMapping); of != nil {
			streams = m.byMappings
			maps.Copy(to, m.bySubscription[subscription{of.Tenant, of.To}])
		}
		maps.Copy(to, streams[tenantOf(e)])
	}
	for node := range m.changedNodes {
		if f := m.Subscribers[node]; f != nil {
			to[f] = true
		}
	}
	all, tenant := common(updates)
	if all != nil {
		all.SpreadMs, all.WithPolicies, all.WithServices = m.spread(), true, true
	}
	for f := range to {
		if all != nil && f.hosted[tenant] && !m.changedNodes[f.Node.Name] {
			m.queueShared(f, all)
		} else {
			m.feed(f, updates)
		}
	}
}

// since returns the updates after a revision and the current revision. It returns false if the history no longer has
// all updates, or if the revision, which may come from another orchestrator, is newer than the cache. The caller may
// read the batches without the lock.
func (m *Cache) since(revision int64) (past []store.Batch, now int64, ok bool) {
	if revision < m.compactedRev || revision > m.Revision || revision == 0 {
		return nil, 0, false
	}
	i, _ := slices.BinarySearchFunc(
		m.history,
		revision+1,
		func(b store.Batch, revision int64) int { return cmp.Compare(b.Revision, revision) },
	)
	return m.history[i:], m.Revision, true
}

// tenantOf returns the tenant whose nodes receive an event, "" if no node does.
func tenantOf(e store.Event) string {
	switch {
	case e.Tenant != nil:
		return e.Tenant.Name
	case e.DeletedTenant != "":
		return e.DeletedTenant
	case e.App != nil:
		return e.App.Tenant
	case e.Mapping != nil:
		return e.Mapping.Tenant
	case e.EndedMapping != nil:
		return e.EndedMapping.Tenant
	}
	return cmp.Or(policyTenantOf(e), serviceTenantOf(e))
}

func (m *Cache) applyEvent(e store.Event, revision int64) {
	switch {
	case e.Node != nil:
		m.Nodes[e.Node.Name] = e.Node
		m.changedNodes[e.Node.Name] = true
		if e.Node.Edge {
			m.edge = e.Node.Name
		}
	case e.DeletedNode != "":
		delete(m.Nodes, e.DeletedNode)
		if m.edge == e.DeletedNode {
			m.edge = ""
		}
	case e.Tenant != nil:
		had := m.Tenants[e.Tenant.Name]
		m.updateTransit(had, e.Tenant)
		m.Tenants[e.Tenant.Name] = e.Tenant
		if had.GetNetwork() != e.Tenant.Network || had.GetLeaving() != e.Tenant.Leaving {
			m.networkChanged(e.Tenant.Name)
		}
		m.identifiers = m.identifiers || tenant.NetworkHas(e.Tenant.Network, tenant.Identifiers)
		m.markUnreconciled(e.Tenant.Name)
	case e.DeletedTenant != "":
		m.updateTransit(m.Tenants[e.DeletedTenant], nil)
		delete(m.Tenants, e.DeletedTenant)
		delete(m.Apps, e.DeletedTenant)
		delete(m.endedApps, e.DeletedTenant)
		m.Policies.removeAll(e.DeletedTenant)
		m.Services.removeAll(e.DeletedTenant)
	case e.App != nil:
		apps := m.Apps[e.App.Tenant]
		if apps == nil {
			apps = map[uint32]*pilasterv1.App{}
			m.Apps[e.App.Tenant] = apps
		}
		apps[e.App.Id] = e.App
	case e.EndedApp != nil:
		if apps := m.Apps[e.EndedApp.Tenant]; apps != nil {
			delete(apps, e.EndedApp.Id)
			m.endedApps[e.EndedApp.Tenant]++
		}
	case e.QuarantinedApp != nil:
		add(m.quarantinedApps, e.QuarantinedApp.Tenant, e.QuarantinedApp.Id)
	case e.FreedApp != nil:
		remove(m.quarantinedApps, e.FreedApp.Tenant, e.FreedApp.Id)
	case e.Hosting != nil:
		nodes := m.Hosting[e.Hosting.Tenant]
		if nodes == nil {
			nodes = map[string]*pilasterv1.Hosting{}
			m.Hosting[e.Hosting.Tenant] = nodes
		}
		m.Policies.override(nodes[e.Hosting.Node], e.Hosting)
		nodes[e.Hosting.Node] = e.Hosting
		add(m.HostedBy, e.Hosting.Node, e.Hosting.Tenant)
		m.markUnreconciled(e.Hosting.Tenant)
	case e.EndedHosting != nil:
		nodes := m.Hosting[e.EndedHosting.Tenant]
		m.Policies.override(nodes[e.EndedHosting.Node], e.EndedHosting)
		if delete(nodes, e.EndedHosting.Node); len(nodes) == 0 {
			delete(m.Hosting, e.EndedHosting.Tenant)
		}
		remove(m.HostedBy, e.EndedHosting.Node, e.EndedHosting.Tenant)
		m.markUnreconciled(e.EndedHosting.Tenant)
	case e.Mapping != nil:
		m.Allocations.add(e.Mapping, revision)
	case e.EndedMapping != nil:
		m.Allocations.remove(e.EndedMapping, revision)
	case e.Policy != nil:
		m.Policies.add(e.Policy)
	case e.EndedPolicy != nil:
		m.Policies.remove(e.EndedPolicy, revision)
	case e.Service != nil:
		m.Services.add(e.Service)
	case e.EndedService != nil:
		m.Services.remove(e.EndedService)
	case e.Slice != nil:
		m.Services.addSlice(e.Slice)
	case e.EndedSlice != nil:
		m.Services.removeSlice(e.EndedSlice)
	case e.Region != nil:
		m.regions[e.Region.Name] = newRegion(e.Region)
	case e.DeletedRegion != "":
		delete(m.regions, e.DeletedRegion)
	case e.Session != nil:
		if had, ok := m.Sessions[e.Session.Node]; ok {
			decrement(m.serving, had.Orchestrator)
			delete(m.Sessions, e.Session.Node)
		}
		if !e.Session.None() {
			m.Sessions[e.Session.Node] = e.Session.Session
			m.serving[e.Session.Orchestrator]++
		} else {
			delete(m.Loads, e.Session.Node)
		}
	case e.Load != nil:
		m.Loads[e.Load.Node] = Load{e.Load, time.Now()}
	case e.EndedLoad != "":
		delete(m.Loads, e.EndedLoad)
	case e.Protected != nil:
		m.protected = nil
		for _, p := range *e.Protected {
			m.protected = append(m.protected, p.String())
		}
	case e.OffloadAuto != nil:
		m.dropLoads() // of former members, if it was off
		m.OffloadAuto = *e.OffloadAuto
		m.dropLoads()
	}
}

// Knows reports whether the node is registered. The caller holds the lock.
func (m *Cache) Knows(n pki.Node) bool {
	record := m.Nodes[n.Name]
	return record != nil && record.Uuid == n.UUID
}

// Node returns a copy of a node's record with its connection state, or nil.
func (m *Cache) Node(name string) *pilasterv1.Node {
	m.Mu.RLock()
	record, connected := m.Nodes[name], m.Connected(name)
	m.Mu.RUnlock()
	if record == nil {
		return nil
	}
	record = proto.CloneOf(record)
	record.Connected = connected
	return record
}

// Connected reports whether a node has a stream: to this process, or to another orchestrator by its session in the
// store. The caller holds the lock.
func (m *Cache) Connected(name string) bool {
	return m.Subscribers[name] != nil || m.isElsewhere(m.Sessions[name])
}

func (m *Cache) isElsewhere(s store.Session) bool { return !s.None() && s.Orchestrator != m.Self }

// decrement reduces a count, and deletes the entry at zero.
func decrement[K comparable](count map[K]int, k K) {
	if count[k]--; count[k] == 0 {
		delete(count, k)
	}
}

// copies returns copies of records of nodes, sorted by node. The function setState sets the connection state of a
// record. It copies without the lock, because there may be many records.
func copies[R proto.Message](m *Cache, has func() []R, node func(R) string, setState func(R, bool)) []R {
	m.Mu.RLock()
	all := has()
	connected := make([]bool, len(all))
	for i, r := range all {
		connected[i] = m.Connected(node(r))
	}
	m.Mu.RUnlock()
	for i, r := range all {
		all[i] = proto.CloneOf(r)
		setState(all[i], connected[i])
	}
	slices.SortFunc(all, func(a, b R) int { return cmp.Compare(node(a), node(b)) })
	return all
}

// HasIdentifiers reports whether a tenant has identifiers as addresses, or had since this process started.
func (m *Cache) HasIdentifiers() bool {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.identifiers
}

// AllNodes returns all nodes, sorted by name.
func (m *Cache) AllNodes() []*pilasterv1.Node {
	return copies(m, func() []*pilasterv1.Node { return slices.Collect(maps.Values(m.Nodes)) },
		(*pilasterv1.Node).GetName, func(n *pilasterv1.Node, connected bool) { n.Connected = connected })
}

// TenantsOf returns the tenants that a node hosts.
func (m *Cache) TenantsOf(node string) []string {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return slices.Sorted(maps.Keys(m.HostedBy[node]))
}

// Tenant returns the tenant (nil if there is none), its apps by id, and the hosting records of its nodes, by node.
func (m *Cache) Tenant(name string) (t *pilasterv1.Tenant, apps []*pilasterv1.App, hosting []*pilasterv1.Hosting) {
	hosting = copies(m, func() []*pilasterv1.Hosting {
		t, apps = m.Allocations.counted(m.Tenants[name]), m.appsOf(name)
		return m.hostingOf(name)
	}, (*pilasterv1.Hosting).GetNode, func(h *pilasterv1.Hosting, connected bool) { h.Connected = connected })
	return t, apps, hosting
}

// Quarantined returns the number of a tenant's quarantined app ids.
func (m *Cache) Quarantined(tenant string) int {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return len(m.quarantinedApps[tenant])
}

func (m *Cache) hostingOf(tenant string) []*pilasterv1.Hosting {
	return slices.Collect(maps.Values(m.Hosting[tenant]))
}

// AllTenants returns all tenants, sorted by name.
func (m *Cache) AllTenants() []*pilasterv1.Tenant {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	var all []*pilasterv1.Tenant
	for _, name := range slices.Sorted(maps.Keys(m.Tenants)) {
		all = append(all, m.Allocations.counted(m.Tenants[name]))
	}
	return all
}

func (m *Cache) appsOf(tenant string) []*pilasterv1.App {
	var apps []*pilasterv1.App
	for _, id := range slices.Sorted(maps.Keys(m.Apps[tenant])) {
		apps = append(apps, m.Apps[tenant][id])
	}
	return apps
}

// Counts are the numbers of records and streams.
type Counts struct {
	Revision                                 int64
	Nodes, Connected, Streams, Tenants, Apps int
	Policies, Subscriptions                  int
	MostApps, RetiringApps, QuarantinedApps  int
	Unreachable                              int // nodes
}

func (m *Cache) Size() Counts {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	s := Counts{
		Revision:  m.Revision,
		Nodes:     len(m.Nodes),
		Connected: len(m.Subscribers) + len(m.Sessions) - m.serving[m.Self],
		Streams:   len(m.Subscribers),
		Tenants:   len(m.Tenants),

		Unreachable: len(m.Services.unreachable),
	}
	for _, apps := range m.Apps {
		s.Apps += len(apps)
		s.MostApps = max(s.MostApps, len(apps))
	}
	for _, t := range m.Tenants {
		s.RetiringApps += len(t.GetRetiringApps().GetApps())
	}
	for _, ids := range m.quarantinedApps {
		s.QuarantinedApps += len(ids)
	}
	for _, policies := range m.Policies.Of {
		s.Policies += len(policies)
	}
	for _, f := range m.Subscribers {
		s.Subscriptions += len(f.subscribed)
	}
	return s
}
