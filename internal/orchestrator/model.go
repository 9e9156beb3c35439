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
	maxPast       = 4096
	maxPastEvents = 1 << 16
)

// model is the store's state in memory, and the streams fed from it. Records in it are shared
// and never written to.
type model struct {
	mu        sync.RWMutex        // thousands look at once when all nodes come back; what the store tells must not wait behind them
	waiting   map[string]*waiting // by node, and for anything
	revision  int64               // 0 until the store has been read
	nodes     map[string]*pilasterv1.Node
	tenants   map[string]*pilasterv1.Tenant
	apps      map[string]map[uint32]*pilasterv1.App     // by tenant
	rests     map[string]map[uint32]bool                // by tenant: numbers of ended ones
	ended     map[string]int                            // by tenant: how many apps have since this process began
	hosting   map[string]map[string]*pilasterv1.Hosting // tenant, node
	hostedBy  map[string]map[string]bool                // node, tenant
	unsettled map[string]bool                           // tenants whose ids may be due for a step
	given     given
	policies  policies
	regions   map[string]region          // the others
	edge      string                     // the node that is the Edge Switch
	carrying  map[string]map[string]bool // node, tenant: see carriers
	renewed   map[string]bool            // nodes of which that or the record may have changed in the batch at hand
	sessions  map[string]store.Session   // by node, of all orchestrators
	serving   map[string]int             // how many each orchestrator has
	self      string                     // this orchestrator in a session
	lag       time.Duration              // maxLag

	past       []store.Batch // all news after the revision forgotten, oldest first
	pastEvents int           // in them; see burden
	forgotten  int64

	stopping  bool
	followers map[string]*follower          // by node
	hearing   map[string]map[*follower]bool // by tenant: who has news of it
	mapping   map[string]map[*follower]bool // and who of these also of its mappings
	dropped   func(reason string)           // counts streams ended by us

	listing sync.Mutex // of who sorts what is given of a tenant
}

func newModel(self string, dropped func(reason string)) *model {
	return &model{
		self:      self,
		lag:       maxLag,
		waiting:   map[string]*waiting{},
		unsettled: map[string]bool{},
		renewed:   map[string]bool{},
		followers: map[string]*follower{},
		hearing:   map[string]map[*follower]bool{},
		mapping:   map[string]map[*follower]bool{},
		dropped:   dropped,
	}
}

// apply is for store.Watch.
func (m *model) apply(b store.Batch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.Whole {
		m.nodes = map[string]*pilasterv1.Node{}
		m.tenants = map[string]*pilasterv1.Tenant{}
		m.apps, m.rests, m.ended = map[string]map[uint32]*pilasterv1.App{}, map[string]map[uint32]bool{}, map[string]int{}
		m.hosting = map[string]map[string]*pilasterv1.Hosting{}
		m.hostedBy = map[string]map[string]bool{}
		m.carrying = map[string]map[string]bool{}
		m.given, m.policies = newGiven(), newPolicies()
		m.regions, m.edge = map[string]region{}, ""
		m.sessions, m.serving = map[string]store.Session{}, map[string]int{}
		m.past, m.pastEvents, m.forgotten = nil, 0, b.Revision
		// What happened in between is not known, so each stream starts over.
		m.endAll(connect.CodeAborted, "restart", "the orchestrator has read the store anew; follow again")
	}
	edge := m.nodes[m.edge]
	for _, e := range b.Events {
		m.take(e, b.Revision)
	}
	b.Events = append(m.derive(b.Events, edge != m.nodes[m.edge]), m.policies.news()...)
	for _, e := range b.Events { // now that all of it is known
		m.judge(m.followers[e.DeletedNode])
		if e.Session != nil {
			m.judge(m.followers[e.Session.Node])
		}
	}
	m.revision = b.Revision
	if !b.Whole {
		m.tell(
			store.Batch{
				Revision: b.Revision,
				Events: slices.DeleteFunc(
					slices.Clone(b.Events),
					func(e store.Event) bool { return newsOf(e) == "" },
				),
			},
		)
	}
	m.wake(b, m.renewed)
	m.renewed = map[string]bool{} // emptied it would stay as large as after all was read
}

// tell remembers news and feeds them to those they are for.
func (m *model) tell(news store.Batch) {
	if len(news.Events) > 0 {
		m.past = append(m.past, news)
		for m.pastEvents += burden(news.Events); len(m.past) > maxPast || m.pastEvents > maxPastEvents; m.past = m.past[1:] {
			m.forgotten = m.past[0].Revision
			m.pastEvents -= burden(m.past[0].Events)
		}
	}
	to := map[*follower]bool{}
	for _, e := range news.Events {
		hearing := m.hearing
		if e.Mapping != nil || e.EndedMapping != nil {
			hearing = m.mapping
		}
		maps.Copy(to, hearing[newsOf(e)])
	}
	for node := range m.renewed {
		if f := m.followers[node]; f != nil {
			to[f] = true
		}
	}
	all, tenant := common(news)
	if all != nil {
		all.SpreadMs, all.WithPolicies = m.spread(), true
	}
	for f := range to {
		if all != nil && f.hosted[tenant] && !m.renewed[f.node.Name] {
			m.queueShared(f, all)
		} else {
			m.feed(f, news)
		}
	}
}

// since is the news after a revision, and the revision up to which they are told, or false where that is not known: it
// is forgotten, or another orchestrator's that has read further. The batches may be read without the lock.
func (m *model) since(revision int64) (past []store.Batch, now int64, ok bool) {
	if revision < m.forgotten || revision > m.revision || revision == 0 {
		return nil, 0, false
	}
	i, _ := slices.BinarySearchFunc(
		m.past,
		revision+1,
		func(b store.Batch, revision int64) int { return cmp.Compare(b.Revision, revision) },
	)
	return m.past[i:], m.revision, true
}

// newsOf is the tenant of which an event is news to nodes; empty for none.
func newsOf(e store.Event) string {
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
	return newsOfPolicy(e)
}

func (m *model) take(e store.Event, revision int64) {
	switch {
	case e.Node != nil:
		m.nodes[e.Node.Name] = e.Node
		m.renewed[e.Node.Name] = true
		if e.Node.Edge {
			m.edge = e.Node.Name
		}
	case e.DeletedNode != "":
		delete(m.nodes, e.DeletedNode)
		if m.edge == e.DeletedNode {
			m.edge = ""
		}
	case e.Tenant != nil:
		m.recarry(m.tenants[e.Tenant.Name], e.Tenant)
		m.tenants[e.Tenant.Name] = e.Tenant
		m.unsettle(e.Tenant.Name)
	case e.DeletedTenant != "":
		m.recarry(m.tenants[e.DeletedTenant], nil)
		delete(m.tenants, e.DeletedTenant)
		delete(m.apps, e.DeletedTenant)
		delete(m.ended, e.DeletedTenant)
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
			m.ended[e.EndedApp.Tenant]++
		}
	case e.RestingApp != nil:
		add(m.rests, e.RestingApp.Tenant, e.RestingApp.Id)
	case e.RestedApp != nil:
		remove(m.rests, e.RestedApp.Tenant, e.RestedApp.Id)
	case e.Hosting != nil:
		nodes := m.hosting[e.Hosting.Tenant]
		if nodes == nil {
			nodes = map[string]*pilasterv1.Hosting{}
			m.hosting[e.Hosting.Tenant] = nodes
		}
		m.policies.override(nodes[e.Hosting.Node], e.Hosting)
		nodes[e.Hosting.Node] = e.Hosting
		add(m.hostedBy, e.Hosting.Node, e.Hosting.Tenant)
		m.unsettle(e.Hosting.Tenant)
	case e.EndedHosting != nil:
		nodes := m.hosting[e.EndedHosting.Tenant]
		m.policies.override(nodes[e.EndedHosting.Node], e.EndedHosting)
		if delete(nodes, e.EndedHosting.Node); len(nodes) == 0 {
			delete(m.hosting, e.EndedHosting.Tenant)
		}
		remove(m.hostedBy, e.EndedHosting.Node, e.EndedHosting.Tenant)
		m.unsettle(e.EndedHosting.Tenant)
	case e.Mapping != nil:
		m.given.add(e.Mapping, revision)
	case e.EndedMapping != nil:
		m.given.remove(e.EndedMapping, revision)
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
			less(m.serving, had.Orchestrator)
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
func (m *model) knows(n pki.Node) bool {
	record := m.nodes[n.Name]
	return record != nil && record.Uuid == n.UUID
}

// node returns a copy that says whether the node is connected, or nil.
func (m *model) node(name string) *pilasterv1.Node {
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
func (m *model) connected(name string) bool {
	return m.followers[name] != nil || m.isElsewhere(m.sessions[name])
}

func (m *model) isElsewhere(s store.Session) bool { return !s.None() && s.Orchestrator != m.self }

// copies are of records that the model has, each of a node, and say whether it is connected; by the nodes' names. There
// may be so many that others must not wait for the copying.
func copies[R proto.Message](m *model, has func() []R, node func(R) string, say func(r R, connected bool)) []R {
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
func (m *model) allNodes() []*pilasterv1.Node {
	return copies(m, func() []*pilasterv1.Node { return slices.Collect(maps.Values(m.nodes)) },
		(*pilasterv1.Node).GetName, func(n *pilasterv1.Node, connected bool) { n.Connected = connected })
}

// tenantsOf lists the tenants a node hosts.
func (m *model) tenantsOf(node string) []string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Sorted(maps.Keys(m.hostedBy[node]))
}

// tenant returns the tenant, nil if there is none, its apps by id and what the nodes that host it say, by node.
func (m *model) tenant(name string) (t *pilasterv1.Tenant, apps []*pilasterv1.App, hosting []*pilasterv1.Hosting) {
	hosting = copies(m, func() []*pilasterv1.Hosting {
		t, apps = m.given.counted(m.tenants[name]), m.appsOf(name)
		return m.hostingOf(name)
	}, (*pilasterv1.Hosting).GetNode, func(h *pilasterv1.Hosting, connected bool) { h.Connected = connected })
	return t, apps, hosting
}

// resting is how many numbers of a tenant's ended apps are not free yet.
func (m *model) resting(tenant string) int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.rests[tenant])
}

func (m *model) hostingOf(tenant string) []*pilasterv1.Hosting {
	return slices.Collect(maps.Values(m.hosting[tenant]))
}

// allTenants is sorted by name.
func (m *model) allTenants() []*pilasterv1.Tenant {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var all []*pilasterv1.Tenant
	for _, name := range slices.Sorted(maps.Keys(m.tenants)) {
		all = append(all, m.given.counted(m.tenants[name]))
	}
	return all
}

func (m *model) appsOf(tenant string) []*pilasterv1.App {
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
	mostApps, retiringApps, restingApps      int
}

func (m *model) size() size {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := size{
		revision:  m.revision,
		nodes:     len(m.nodes),
		connected: len(m.followers) + len(m.sessions) - m.serving[m.self],
		streams:   len(m.followers),
		tenants:   len(m.tenants),
	}
	for _, apps := range m.apps {
		s.apps += len(apps)
		s.mostApps = max(s.mostApps, len(apps))
	}
	for _, t := range m.tenants {
		s.retiringApps += len(t.GetRetiringApps().GetApps())
	}
	for _, rests := range m.rests {
		s.restingApps += len(rests)
	}
	for _, policies := range m.policies.of {
		s.policies += len(policies)
	}
	return s
}
