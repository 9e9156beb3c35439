package orchestrator

import (
	"context"
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

// maxPast is how many changes a stream may have missed and still be resumed.
const maxPast = 4096

// model is the store's state in memory, and the streams fed from it. Records in it are shared
// and never written to.
type model struct {
	mu        sync.Mutex
	changed   chan struct{} // closed and replaced at each change
	revision  int64         // 0 until the store has been read
	nodes     map[string]*pilasterv1.Node
	tenants   map[string]*pilasterv1.Tenant
	apps      map[string]map[uint32]*pilasterv1.App     // by tenant
	hosting   map[string]map[string]*pilasterv1.Hosting // tenant, node
	unsettled map[string]bool                           // tenants whose ids may be due for a step
	given     given
	regions   map[string]region          // the others
	edge      string                     // the node that is the Edge Switch
	carrying  map[string]map[string]bool // node, tenant: see carriers
	recarried map[string]bool            // nodes of which that may have changed in the batch at hand
	sessions  map[string]store.Session   // by node, of all orchestrators
	self      string                     // this orchestrator in a session
	lag       time.Duration              // maxLag

	past      []store.Batch // everything after the revision forgotten, oldest first
	forgotten int64

	followers map[string]*follower // by node
	dropped   func(reason string)  // counts streams ended by us
}

func newModel(self string, dropped func(reason string)) *model {
	return &model{self: self, lag: maxLag, changed: make(chan struct{}), unsettled: map[string]bool{}, recarried: map[string]bool{}, followers: map[string]*follower{}, dropped: dropped}
}

// apply is for store.Watch.
func (m *model) apply(b store.Batch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.Whole {
		m.nodes = map[string]*pilasterv1.Node{}
		m.tenants = map[string]*pilasterv1.Tenant{}
		m.apps = map[string]map[uint32]*pilasterv1.App{}
		m.hosting = map[string]map[string]*pilasterv1.Hosting{}
		m.carrying = map[string]map[string]bool{}
		m.given = newGiven()
		m.regions, m.edge = map[string]region{}, ""
		m.sessions = map[string]store.Session{}
		m.past, m.forgotten = nil, b.Revision
		// What happened in between is not known, so each stream starts over.
		m.endAll(connect.CodeAborted, "restart", "the orchestrator has read the store anew; follow again")
	}
	edge := m.nodes[m.edge]
	for _, e := range b.Events {
		m.take(e)
	}
	b.Events = m.derive(b.Events, edge != m.nodes[m.edge])
	for _, e := range b.Events { // now that all of it is known
		m.judge(m.followers[e.DeletedNode])
		if e.Session != nil {
			m.judge(m.followers[e.Session.Node])
		}
	}
	m.revision = b.Revision
	if !b.Whole && slices.ContainsFunc(b.Events, func(e store.Event) bool { return e.Session == nil }) {
		m.past = append(m.past, b)
		if len(m.past) > maxPast {
			m.forgotten = m.past[0].Revision
			m.past = m.past[1:]
		}
		for _, f := range m.followers {
			m.feed(f, b)
		}
	}
	clear(m.recarried)
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *model) take(e store.Event) {
	switch {
	case e.Node != nil:
		m.nodes[e.Node.Name] = e.Node
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
	case e.App != nil:
		apps := m.apps[e.App.Tenant]
		if apps == nil {
			apps = map[uint32]*pilasterv1.App{}
			m.apps[e.App.Tenant] = apps
		}
		apps[e.App.Id] = e.App
	case e.Hosting != nil:
		nodes := m.hosting[e.Hosting.Tenant]
		if nodes == nil {
			nodes = map[string]*pilasterv1.Hosting{}
			m.hosting[e.Hosting.Tenant] = nodes
		}
		nodes[e.Hosting.Node] = e.Hosting
		m.unsettle(e.Hosting.Tenant)
	case e.EndedHosting != nil:
		nodes := m.hosting[e.EndedHosting.Tenant]
		if delete(nodes, e.EndedHosting.Node); len(nodes) == 0 {
			delete(m.hosting, e.EndedHosting.Tenant)
		}
		m.unsettle(e.EndedHosting.Tenant)
	case e.Mapping != nil:
		m.given.add(e.Mapping)
	case e.EndedMapping != nil:
		m.given.remove(e.EndedMapping)
	case e.Region != nil:
		m.regions[e.Region.Name] = newRegion(e.Region)
	case e.DeletedRegion != "":
		delete(m.regions, e.DeletedRegion)
	case e.Session != nil:
		if e.Session.None() {
			delete(m.sessions, e.Session.Node)
		} else {
			m.sessions[e.Session.Node] = e.Session.Session
		}
	}
}

// await waits until the condition, evaluated with the model locked, holds.
func (m *model) await(ctx context.Context, condition func() bool) error {
	for {
		m.mu.Lock()
		ok, changed := condition(), m.changed
		m.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// knows reports whether the node is registered. The model must be locked.
func (m *model) knows(n pki.Node) bool {
	record := m.nodes[n.Name]
	return record != nil && record.Uuid == n.UUID
}

// node returns a copy that says whether the node is connected, or nil.
func (m *model) node(name string) *pilasterv1.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.nodeLocked(name)
}

func (m *model) nodeLocked(name string) *pilasterv1.Node {
	record := m.nodes[name]
	if record == nil {
		return nil
	}
	record = proto.CloneOf(record)
	record.Connected = m.connected(name)
	return record
}

// connected believes itself of its own streams, and the store of those of other orchestrators.
func (m *model) connected(name string) bool {
	s := m.sessions[name]
	return m.followers[name] != nil || !s.None() && s.Orchestrator != m.self
}

// allNodes is sorted by name.
func (m *model) allNodes() []*pilasterv1.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []*pilasterv1.Node
	for _, name := range slices.Sorted(maps.Keys(m.nodes)) {
		all = append(all, m.nodeLocked(name))
	}
	return all
}

// tenantsOf lists the tenants a node hosts.
func (m *model) tenantsOf(node string) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var names []string
	for tenant, nodes := range m.hosting {
		if nodes[node] != nil {
			names = append(names, tenant)
		}
	}
	slices.Sort(names)
	return names
}

// tenant returns the tenant, nil if there is none, its apps by id and what the nodes that host it say.
func (m *model) tenant(name string) (*pilasterv1.Tenant, []*pilasterv1.App, []*pilasterv1.Hosting) {
	m.mu.Lock()
	defer m.mu.Unlock()
	hosting := m.hostingOf(name)
	for i, h := range hosting {
		hosting[i] = proto.CloneOf(h)
		hosting[i].Connected = m.connected(h.Node)
	}
	return m.given.counted(m.tenants[name]), m.appsOf(name), hosting
}

// hostingOf is sorted by node.
func (m *model) hostingOf(tenant string) []*pilasterv1.Hosting {
	var all []*pilasterv1.Hosting
	for _, node := range slices.Sorted(maps.Keys(m.hosting[tenant])) {
		all = append(all, m.hosting[tenant][node])
	}
	return all
}

// allTenants is sorted by name.
func (m *model) allTenants() []*pilasterv1.Tenant {
	m.mu.Lock()
	defer m.mu.Unlock()
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
}

func (m *model) size() size {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := size{revision: m.revision, nodes: len(m.nodes), streams: len(m.followers), tenants: len(m.tenants)}
	for name := range m.nodes {
		if m.connected(name) {
			s.connected++
		}
	}
	for _, apps := range m.apps {
		s.apps += len(apps)
	}
	return s
}
