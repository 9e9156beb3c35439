package orchestrator

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
)

// What a stream may have missed and still be resumed: so many changes, of so many records together.
const (
	maxHistory     = 4096
	maxHistoryCost = 1 << 16
)

// cache is the store's state in memory, and the streams fed from it. Records in it are shared
// and never written to.
type cache struct {
	mu              sync.RWMutex       // thousands look at once when all nodes come back; what the store tells must not wait behind them
	waiters         map[string]*waiter // by node, and for anything
	revision        int64              // 0 until the store has been read
	nodes           map[string]*pilasterv1.Node
	tenants         map[string]*pilasterv1.Tenant
	apps            map[string]map[uint32]*pilasterv1.App     // by tenant
	quarantinedApps map[string]map[uint32]bool                // by tenant: numbers of ended ones
	endedApps       map[string]int                            // by tenant: how many apps have since this process began
	hosting         map[string]map[string]*pilasterv1.Hosting // tenant, node
	hostedBy        map[string]map[string]bool                // node, tenant
	unreconciled    map[string]bool                           // tenants whose ids may be due for a step
	allocations     allocations
	policies        policies
	regions         map[string]region          // the others
	edge            string                     // the node that is the Edge Switch
	transit         map[string]map[string]bool // node, tenant: see carriers
	changedNodes    map[string]bool            // nodes of which that or the record may have changed in the batch at hand
	sessions        map[string]store.Session   // by node, of all orchestrators
	serving         map[string]int             // how many each orchestrator has
	self            string                     // this orchestrator in a session
	lag             time.Duration              // maxLag

	history      []store.Batch // all news after the revision forgotten, oldest first
	historyCost  int           // in them; see burden
	compactedRev int64

	stopping    bool
	subscribers map[string]*subscriber          // by node
	byTenant    map[string]map[*subscriber]bool // by tenant: who has news of it
	byMappings  map[string]map[*subscriber]bool // and who of these also of its mappings
	dropped     func(reason string)             // counts streams ended by us

	listing sync.Mutex // of who sorts what is given of a tenant
}

func newCache(self string, dropped func(reason string)) *cache {
	return &cache{
		self:         self,
		lag:          maxLag,
		waiters:      map[string]*waiter{},
		unreconciled: map[string]bool{},
		changedNodes: map[string]bool{},
		subscribers:  map[string]*subscriber{},
		byTenant:     map[string]map[*subscriber]bool{},
		byMappings:   map[string]map[*subscriber]bool{},
		dropped:      dropped,
	}
}

// apply is for store.Watch.
func (m *cache) apply(b store.Batch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.Whole {
		m.nodes = map[string]*pilasterv1.Node{}
		m.tenants = map[string]*pilasterv1.Tenant{}
		m.apps, m.quarantinedApps, m.endedApps = map[string]map[uint32]*pilasterv1.App{}, map[string]map[uint32]bool{}, map[string]int{}
		m.hosting = map[string]map[string]*pilasterv1.Hosting{}
		m.hostedBy = map[string]map[string]bool{}
		m.transit = map[string]map[string]bool{}
		m.allocations, m.policies = newAllocations(), newPolicies()
		m.regions, m.edge = map[string]region{}, ""
		m.sessions, m.serving = map[string]store.Session{}, map[string]int{}
		m.history, m.historyCost, m.compactedRev = nil, 0, b.Revision
		// What happened in between is not known, so each stream starts over.
		m.endStreams(connect.CodeAborted, "restart", "the orchestrator has read the store anew; follow again")
	}
	edge := m.nodes[m.edge]
	for _, e := range b.Events {
		m.applyEvent(e, b.Revision)
	}
	b.Events = append(m.deriveRegions(b.Events, edge != m.nodes[m.edge]), m.policies.takeOverrides()...)
	for _, e := range b.Events { // now that all of it is known
		m.checkStream(m.subscribers[e.DeletedNode])
		if e.Session != nil {
			m.checkStream(m.subscribers[e.Session.Node])
		}
	}
	m.revision = b.Revision
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
	m.wake(b, m.changedNodes)
	m.changedNodes = map[string]bool{} // emptied it would stay as large as after all was read
}

// writeStream remembers news and feeds them to those they are for.
func (m *cache) broadcast(news store.Batch) {
	if len(news.Events) > 0 {
		m.history = append(m.history, news)
		for m.historyCost += eventCost(news.Events); len(m.history) > maxHistory || m.historyCost > maxHistoryCost; m.history = m.history[1:] {
			m.compactedRev = m.history[0].Revision
			m.historyCost -= eventCost(m.history[0].Events)
		}
	}
	to := map[*subscriber]bool{}
	for _, e := range news.Events {
		hearing := m.byTenant
		if e.Mapping != nil || e.EndedMapping != nil {
			hearing = m.byMappings
		}
		maps.Copy(to, hearing[tenantOf(e)])
	}
	for node := range m.changedNodes {
		if f := m.subscribers[node]; f != nil {
			to[f] = true
		}
	}
	all, tenant := common(news)
	if all != nil {
		all.SpreadMs, all.WithPolicies = m.spread(), true
	}
	for f := range to {
		if all != nil && f.hosted[tenant] && !m.changedNodes[f.node.Name] {
			m.queueShared(f, all)
		} else {
			m.feed(f, news)
		}
	}
}

// since is the news after a revision, and the revision up to which they are told, or false where that is not known: it
// identify forgotten, or another orchestrator's that has read further. The batches may be read without the lock.
func (m *cache) since(revision int64) (past []store.Batch, now int64, ok bool) {
	if revision < m.compactedRev || revision > m.revision || revision == 0 {
		return nil, 0, false
	}
	i, _ := slices.BinarySearchFunc(
		m.history,
		revision+1,
		func(b store.Batch, revision int64) int { return cmp.Compare(b.Revision, revision) },
	)
	return m.history[i:], m.revision, true
}

// tenantOf is the tenant of which an event is news to nodes; empty for none.
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
	return policyTenantOf(e)
}

func (m *cache) applyEvent(e store.Event, revision int64) {
	switch {
	case e.Node != nil:
		m.nodes[e.Node.Name] = e.Node
		m.changedNodes[e.Node.Name] = true
		if e.Node.Edge {
			m.edge = e.Node.Name
		}
	case e.DeletedNode != "":
		delete(m.nodes, e.DeletedNode)
		if m.edge == e.DeletedNode {
			m.edge = ""
		}
	case e.Tenant != nil:
		m.updateTransit(m.tenants[e.Tenant.Name], e.Tenant)
		m.tenants[e.Tenant.Name] = e.Tenant
		m.markUnreconciled(e.Tenant.Name)
	case e.DeletedTenant != "":
		m.updateTransit(m.tenants[e.DeletedTenant], nil)
		delete(m.tenants, e.DeletedTenant)
		delete(m.apps, e.DeletedTenant)
		delete(m.endedApps, e.DeletedTenant)
		m.policies.removeAll(e.DeletedTenant)
	case e.App != nil:
		apps := m.apps[e.App.Tenant]
		if apps == nil {
			apps = map[uint32]*pilasterv1.App{}
			m.apps[e.App.Tenant] = apps
		}
		apps[e.App.Id] = e.App
	case e.EndedApp != nil:
		if apps := m.apps[e.EndedApp.Tenant]; apps != nil {
			delete(apps, e.EndedApp.Id)
			m.endedApps[e.EndedApp.Tenant]++
		}
	case e.QuarantinedApp != nil:
		add(m.quarantinedApps, e.QuarantinedApp.Tenant, e.QuarantinedApp.Id)
	case e.FreedApp != nil:
		remove(m.quarantinedApps, e.FreedApp.Tenant, e.FreedApp.Id)
	case e.Hosting != nil:
		nodes := m.hosting[e.Hosting.Tenant]
		if nodes == nil {
			nodes = map[string]*pilasterv1.Hosting{}
			m.hosting[e.Hosting.Tenant] = nodes
		}
		m.policies.override(nodes[e.Hosting.Node], e.Hosting)
		nodes[e.Hosting.Node] = e.Hosting
		add(m.hostedBy, e.Hosting.Node, e.Hosting.Tenant)
		m.markUnreconciled(e.Hosting.Tenant)
	case e.EndedHosting != nil:
		nodes := m.hosting[e.EndedHosting.Tenant]
		m.policies.override(nodes[e.EndedHosting.Node], e.EndedHosting)
		if delete(nodes, e.EndedHosting.Node); len(nodes) == 0 {
			delete(m.hosting, e.EndedHosting.Tenant)
		}
		remove(m.hostedBy, e.EndedHosting.Node, e.EndedHosting.Tenant)
		m.markUnreconciled(e.EndedHosting.Tenant)
	case e.Mapping != nil:
		m.allocations.add(e.Mapping, revision)
	case e.EndedMapping != nil:
		m.allocations.remove(e.EndedMapping, revision)
	case e.Policy != nil:
		m.policies.add(e.Policy)
	case e.EndedPolicy != nil:
		m.policies.remove(e.EndedPolicy)
	case e.Region != nil:
		m.regions[e.Region.Name] = newRegion(e.Region)
	case e.DeletedRegion != "":
		delete(m.regions, e.DeletedRegion)
	case e.Session != nil:
		if had, ok := m.sessions[e.Session.Node]; ok {
			decrement(m.serving, had.Orchestrator)
			delete(m.sessions, e.Session.Node)
		}
		if !e.Session.None() {
			m.sessions[e.Session.Node] = e.Session.Session
			m.serving[e.Session.Orchestrator]++
		}
	}
}

// add and remove keep an index: what belongs to what.
func add[K, V comparable](index map[K]map[V]bool, k K, v V) {
	if index[k] == nil {
		index[k] = map[V]bool{}
	}
	index[k][v] = true
}

func remove[K, V comparable](index map[K]map[V]bool, k K, v V) {
	if delete(index[k], v); len(index[k]) == 0 {
		delete(index, k)
	}
}

// knows reports whether the node is registered. The model must be locked.
func (m *cache) knows(n pki.Node) bool {
	record := m.nodes[n.Name]
	return record != nil && record.Uuid == n.UUID
}

// node returns a copy that says whether the node is connected, or nil.
func (m *cache) node(name string) *pilasterv1.Node {
	m.mu.RLock()
	record, connected := m.nodes[name], m.connected(name)
	m.mu.RUnlock()
	if record == nil {
		return nil
	}
	record = proto.CloneOf(record)
	record.Connected = connected
	return record
}

// connected believes itself of its own streams, and the store of those of other orchestrators.
func (m *cache) connected(name string) bool {
	return m.subscribers[name] != nil || m.isElsewhere(m.sessions[name])
}

func (m *cache) isElsewhere(s store.Session) bool { return !s.None() && s.Orchestrator != m.self }

// copies are of records that the model has, each of a node, and say whether it is connected; by the nodes' names. There
// may be so many that others must not wait for the copying.
func copies[R proto.Message](m *cache, has func() []R, node func(R) string, say func(r R, connected bool)) []R {
	m.mu.RLock()
	all := has()
	connected := make([]bool, len(all))
	for i, r := range all {
		connected[i] = m.connected(node(r))
	}
	m.mu.RUnlock()
	for i, r := range all {
		all[i] = proto.CloneOf(r)
		say(all[i], connected[i])
	}
	slices.SortFunc(all, func(a, b R) int { return cmp.Compare(node(a), node(b)) })
	return all
}

// allNodes is sorted by name.
func (m *cache) allNodes() []*pilasterv1.Node {
	return copies(m, func() []*pilasterv1.Node { return slices.Collect(maps.Values(m.nodes)) },
		(*pilasterv1.Node).GetName, func(n *pilasterv1.Node, connected bool) { n.Connected = connected })
}

// tenantsOf lists the tenants a node hosts.
func (m *cache) tenantsOf(node string) []string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Sorted(maps.Keys(m.hostedBy[node]))
}

// tenant returns the tenant, nil if there is none, its apps by id and what the nodes that host it say, by node.
func (m *cache) tenant(name string) (t *pilasterv1.Tenant, apps []*pilasterv1.App, hosting []*pilasterv1.Hosting) {
	hosting = copies(m, func() []*pilasterv1.Hosting {
		t, apps = m.allocations.counted(m.tenants[name]), m.appsOf(name)
		return m.hostingOf(name)
	}, (*pilasterv1.Hosting).GetNode, func(h *pilasterv1.Hosting, connected bool) { h.Connected = connected })
	return t, apps, hosting
}

// quarantined is how many numbers of a tenant's ended apps are not free yet.
func (m *cache) quarantined(tenant string) int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.quarantinedApps[tenant])
}

func (m *cache) hostingOf(tenant string) []*pilasterv1.Hosting {
	return slices.Collect(maps.Values(m.hosting[tenant]))
}

// allTenants is sorted by name.
func (m *cache) allTenants() []*pilasterv1.Tenant {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var all []*pilasterv1.Tenant
	for _, name := range slices.Sorted(maps.Keys(m.tenants)) {
		all = append(all, m.allocations.counted(m.tenants[name]))
	}
	return all
}

func (m *cache) appsOf(tenant string) []*pilasterv1.App {
	var apps []*pilasterv1.App
	for _, id := range slices.Sorted(maps.Keys(m.apps[tenant])) {
		apps = append(apps, m.apps[tenant][id])
	}
	return apps
}

// size is what there is to count.
type size struct {
	revision                                 int64
	nodes, connected, streams, tenants, apps int
	policies                                 int
	mostApps, retiringApps, quarantinedApps  int
}

func (m *cache) size() size {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := size{
		revision:  m.revision,
		nodes:     len(m.nodes),
		connected: len(m.subscribers) + len(m.sessions) - m.serving[m.self],
		streams:   len(m.subscribers),
		tenants:   len(m.tenants),
	}
	for _, apps := range m.apps {
		s.apps += len(apps)
		s.mostApps = max(s.mostApps, len(apps))
	}
	for _, t := range m.tenants {
		s.retiringApps += len(t.GetRetiringApps().GetApps())
	}
	for _, rests := range m.quarantinedApps {
		s.quarantinedApps += len(rests)
	}
	for _, policies := range m.policies.of {
		s.policies += len(policies)
	}
	return s
}
