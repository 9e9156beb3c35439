package cache

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A stream without other messages sends a heartbeat with the current revision every heartbeatEvery. With many nodes the
// period is longer, so that all streams together send at most heartbeatRate per second: 50 s with 100,000 nodes. The
// node's next stream resumes at the last revision that the node received. It needs no snapshot if at most MaxHistory
// batches came since then; with 100,000 nodes, this allows 80 batches per second. Agents do not wait for heartbeats;
// HTTP/2 pings check the connection.
const (
	heartbeatEvery = 5 * time.Second
	heartbeatRate  = 2000 // per second
)

// reconnectRate is how many nodes per second can start a stream. After a restart all nodes start one; spread limits
// them to this rate.
const reconnectRate = 3000

// Subscriber is the stream of one node. The lock of the cache protects everything but the queue.
type Subscriber struct {
	Node          pki.Node
	Session       store.Session
	hosted        map[string]bool                // tenants that the node hosts, as the node reports
	transit       map[string]bool                // tenants that the node needs without hosting them
	pullsMappings bool                           // the node queries mappings, and receives no updates of them
	recorded      map[string]*pilasterv1.Hosting // reports that this stream recorded in the store, by tenant
	refused       map[string][]error             // refused parts of reports, by tenant
	pulls         map[string]bool                // networks of whose tenants it receives only subscribed mappings
	pulled        map[string]bool                // tenants of these networks
	subscribed    map[subscription]bool
	Queue         queue
	end           context.CancelCauseFunc
}

// Subscribe starts a stream. first is the node's first message. The queue begins with the updates after the node's
// revision, or with a snapshot. Subscribe ends an earlier stream of the node.
func (m *Cache) Subscribe(
	n pki.Node,
	session store.Session,
	first *pilasterv1.FollowRequest,
	end context.CancelCauseFunc,
) *Subscriber {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	f := &Subscriber{Node: n, Session: session, pullsMappings: first.WithoutMappings, Queue: newQueue(), end: end,
		pulls: set(first.PulledNetworks), pulled: map[string]bool{}, subscribed: map[subscription]bool{}}
	if !m.checkStream(f) {
		return f
	}
	if old := m.Subscribers[n.Name]; old != nil {
		m.endReplaced(old)
	}
	m.Subscribers[n.Name] = f
	m.setTenants(f, set(first.HostedTenants), set(first.CarriedTenants))
	f.recorded = m.alreadyRecorded(f, first)
	if missed, ok := m.missed(f, first); ok {
		for _, r := range missed {
			m.enqueue(f, r) // they fit: missed returns at most half a queue
		}
	} else {
		m.enqueue(f, m.snapshot(f))
	}
	return f
}

func (m *Cache) Unsubscribe(f *Subscriber) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.drop(f)
}

// drop stops updates to a stream that has ended.
func (m *Cache) drop(f *Subscriber) {
	if m.Subscribers[f.Node.Name] == f {
		m.setTenants(f, nil, nil)
		delete(m.Subscribers, f.Node.Name)
	}
}

// setTenants replaces the tenants whose updates a stream receives.
func (m *Cache) setTenants(f *Subscriber, hosted, transit map[string]bool) {
	if m.Subscribers[f.Node.Name] != f {
		return // the stream has ended
	}
	for _, had := range []map[string]bool{f.hosted, f.transit} {
		for tenant := range had {
			remove(m.byTenant, tenant, f)
			remove(m.byMappings, tenant, f)
		}
	}
	f.hosted, f.transit = hosted, transit
	for _, has := range []map[string]bool{hosted, transit} {
		for tenant := range has {
			add(m.byTenant, tenant, f)
			m.followMappings(f, tenant)
		}
	}
	m.dropSubscriptions(f)
}

// missed returns the updates after the node's revision. It returns false if the stream needs a snapshot: the history
// lacks updates, or the updates would fill more than half of the queue.
func (m *Cache) missed(f *Subscriber, first *pilasterv1.FollowRequest) ([]*pilasterv1.FollowResponse, bool) {
	past, _, ok := m.since(first.ResumeRevision)
	if !ok {
		return nil, false
	}
	var missed []*pilasterv1.FollowResponse
	for _, b := range past {
		if d, found := f.delta(b); found {
			missed = append(missed, response(b.Revision, d))
		}
		for _, e := range b.Events {
			if f.transit[e.DeletedTenant] { // the stream must send a new tenant of that name whole
				transit := maps.Clone(f.transit)
				delete(transit, e.DeletedTenant)
				m.setTenants(f, f.hosted, transit)
			}
		}
	}
	rest, whole := &pilasterv1.Delta{Node: m.ownRecord(f)}, set(m.refreshTransit(f))
	for _, tenant := range first.IncompleteTenants {
		whole[tenant] = f.has(tenant)
	}
	for tenant, is := range whole {
		if is {
			m.addWhole(rest, tenant, f.hosted[tenant])
		}
	}
	missed = append(missed, response(m.Revision, rest)) // even if empty: the node then has the current revision
	return missed, len(missed) <= maxQueue/2
}

func (m *Cache) snapshot(f *Subscriber) *pilasterv1.FollowResponse {
	var d pilasterv1.Delta
	m.setTenants(f, f.hosted, nil)
	whole := set(m.refreshTransit(f))
	maps.Copy(whole, f.hosted)
	for tenant := range whole {
		m.addWhole(&d, tenant, f.hosted[tenant])
	}
	return &pilasterv1.FollowResponse{
		Revision: m.Revision,
		Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{
			Node: m.ownRecord(f), Tenants: d.Tenants, Apps: d.Apps,
			Policies: d.Policies, Overrides: d.Overrides, WholePolicies: d.WholePolicies,
			Services: d.Services, Slices: d.Slices, WholeServices: d.WholeServices,
		}},
	}
}

// addWhole adds a tenant with its apps, and with its policies and services if the node hosts it.
func (m *Cache) addWhole(d *pilasterv1.Delta, tenant string, hosted bool) {
	if t := m.Tenants[tenant]; t != nil {
		d.Tenants = append(d.Tenants, t)
		d.Apps = append(d.Apps, m.appsOf(tenant)...)
		d.WholeTenants = append(d.WholeTenants, tenant)
		if hosted {
			m.Policies.addWhole(d, tenant)
			m.Services.addWhole(d, tenant)
		}
	}
}

func set(names []string) map[string]bool {
	s := map[string]bool{}
	for _, name := range names {
		s[name] = true
	}
	return s
}

// common returns the message that all nodes that host the tenant of the batch receive, and the tenant. It returns nil
// if the batch has several tenants, or if the message depends on the node.
func common(b store.Batch) (*pilasterv1.FollowResponse, string) {
	if len(b.Events) == 0 {
		return nil, ""
	}
	tenant := tenantOf(b.Events[0])
	for _, e := range b.Events {
		if tenantOf(e) != tenant || e.Mapping != nil || e.EndedMapping != nil || e.ToFrontends {
			return nil, ""
		}
	}
	d, _ := (&Subscriber{hosted: map[string]bool{tenant: true}}).delta(b)
	return response(b.Revision, d), tenant
}

// feed queues the part of a batch that concerns a stream.
func (m *Cache) feed(f *Subscriber, b store.Batch) {
	d, found := f.delta(b)
	if m.changedNodes[f.Node.Name] {
		d.Node, found = m.ownRecord(f), true
		for _, tenant := range m.refreshTransit(f) {
			m.addWhole(d, tenant, f.hosted[tenant])
		}
	}
	if found {
		m.enqueue(f, response(b.Revision, d))
	}
}

// enqueue completes and queues a message for one stream.
func (m *Cache) enqueue(f *Subscriber, r *pilasterv1.FollowResponse) {
	r.SpreadMs, r.WithPolicies, r.WithServices, r.WithSubscriptions = m.spread(), true, true, true
	r.Identifiers = m.identifiers
	m.queueShared(f, r)
}

// queueShared queues a message that is complete and that other streams may share.
func (m *Cache) queueShared(f *Subscriber, r *pilasterv1.FollowResponse) {
	if !f.Queue.put(r) {
		m.endStream(
			f,
			connect.CodeResourceExhausted,
			"slow",
			fmt.Sprintf("the node reads too slowly: %d updates are pending; follow again", maxQueue),
		)
	}
}

func (m *Cache) HeartbeatEvery() time.Duration {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return max(heartbeatEvery, time.Duration(m.share())*time.Second/heartbeatRate)
}

// Heartbeat returns a message with the current revision; nil while other messages are pending.
func (m *Cache) Heartbeat(f *Subscriber) *pilasterv1.FollowResponse {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	if f.Queue.Len() > 0 {
		return nil
	}
	return &pilasterv1.FollowResponse{
		Revision:     m.Revision,
		SpreadMs:     m.spread(),
		WithPolicies: true,
		WithServices: true,
		Identifiers:  m.identifiers,
		Event:        &pilasterv1.FollowResponse_Heartbeat{Heartbeat: &pilasterv1.Heartbeat{}},
	}
}

// spread is the period in milliseconds over which the nodes should reconnect.
func (m *Cache) spread() uint32 { return uint32(m.share() * 1000 / reconnectRate) }

// share is how many nodes have a stream to this orchestrator, or will have one after a restart: all nodes divided by
// the orchestrators that have streams.
func (m *Cache) share() int {
	orchestrators := len(m.serving)
	if m.serving[m.Self] == 0 {
		orchestrators++
	}
	return (len(m.Nodes) + orchestrators - 1) / orchestrators
}

// endStream ends a stream. The node receives the text as error, the metric counts the reason.
func (m *Cache) endStream(f *Subscriber, code connect.Code, reason, text string) {
	f.end(connect.NewError(code, fmt.Errorf("%s", text)))
	m.drop(f)
	m.dropped(reason)
}

// Stalled ends a stream whose node has read nothing for a period.
func (m *Cache) Stalled(f *Subscriber, period time.Duration) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Subscribers[f.Node.Name] == f {
		m.endStream(
			f,
			connect.CodeResourceExhausted,
			"stalled",
			fmt.Sprintf("the node read nothing for %v; follow again", period),
		)
	}
}

func (m *Cache) endReplaced(f *Subscriber) {
	m.endStream(f, connect.CodeAborted, "replaced", "the node opened another stream")
}

const sessionLost = "the store has lost the session of this stream; follow again"

// checkStream ends a stream if its node was deleted, or if the store has another session or none: another machine may
// then use the node's identity. It returns whether the stream remains.
func (m *Cache) checkStream(f *Subscriber) (good bool) {
	if f == nil {
		return false
	}
	switch session := m.Sessions[f.Node.Name]; {
	case m.stopping:
		m.endStopping(f)
	case !m.Knows(f.Node):
		m.endStream(f, connect.CodeFailedPrecondition, "deleted", fmt.Sprintf("node %s was deleted", f.Node.Name))
	case session == f.Session:
		return true
	case session.None():
		m.endStream(f, connect.CodeAborted, "restart", sessionLost)
	default:
		m.endReplaced(f)
	}
	return false
}

func (m *Cache) endStreams(code connect.Code, reason, text string) {
	for _, f := range m.Subscribers {
		m.endStream(f, code, reason, text)
	}
}

// Restart ends all streams; nodes open new ones.
func (m *Cache) Restart() {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.endStreams(connect.CodeAborted, "restart", sessionLost)
}

const isStopping = "the orchestrator is stopping"

// Stop ends all streams. Streams that start later end at once.
func (m *Cache) Stop() {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.stopping = true
	for _, f := range m.Subscribers {
		m.endStopping(f)
	}
}

func (m *Cache) endStopping(f *Subscriber) {
	m.endStream(f, connect.CodeUnavailable, "stop", isStopping)
}

func (m *Cache) Stopped() bool {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.stopping
}

// has reports whether the stream receives updates of a tenant.
func (f *Subscriber) has(tenant string) bool { return f.hosted[tenant] || f.transit[tenant] }

// delta returns the part of a batch that concerns the node's tenants, and whether there is any.
func (f *Subscriber) delta(b store.Batch) (d *pilasterv1.Delta, found bool) {
	d = new(pilasterv1.Delta)
	for _, e := range b.Events {
		switch {
		case e.Tenant != nil && f.has(e.Tenant.Name) && (!e.ToFrontends || isFrontend(e.Tenant, f.Node.Name)):
			d.Tenants = append(d.Tenants, e.Tenant)
		case e.DeletedTenant != "" && f.has(e.DeletedTenant):
			d.DeletedTenants = append(d.DeletedTenants, e.DeletedTenant)
		case e.App != nil && f.has(e.App.Tenant):
			d.Apps = append(d.Apps, e.App)
		case e.Mapping != nil && f.receives(e.Mapping):
			d.Mappings = append(d.Mappings, Visible(e.Mapping, f.Node.Name))
		case e.EndedMapping != nil && f.receives(e.EndedMapping):
			d.EndedMappings = append(d.EndedMappings, e.EndedMapping)
		default:
			if !f.policy(d, e) && !f.service(d, e) {
				continue
			}
		}
		found = true
	}
	return d, found
}

func response(revision int64, d *pilasterv1.Delta) *pilasterv1.FollowResponse {
	return &pilasterv1.FollowResponse{Revision: revision, Event: &pilasterv1.FollowResponse_Delta{Delta: d}}
}

// maxQueue is how many messages may be pending for a node; one more ends its stream.
const maxQueue = 256

// queue has the pending messages of one node. It has its own lock: one change may wake thousands of streams, and these
// should wait neither for each other nor for the cache.
type queue struct {
	mu      sync.Mutex
	waiting []*pilasterv1.FollowResponse // nil when empty: most queues are empty, and there are many
	Filled  chan struct{}                // has a token while the queue is not empty
}

func newQueue() queue { return queue{Filled: make(chan struct{}, 1)} }

// put appends a message, which must not be modified afterwards. It returns false if the queue is full.
func (q *queue) put(r *pilasterv1.FollowResponse) (fits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == maxQueue {
		return false
	}
	q.waiting = append(q.waiting, r)
	q.signal()
	return true
}

// Next removes and returns the oldest message, nil if there is none.
func (q *queue) Next() (next *pilasterv1.FollowResponse) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return nil
	}
	if next, q.waiting = q.waiting[0], q.waiting[1:]; len(q.waiting) == 0 {
		q.waiting = nil
	} else {
		q.signal()
	}
	return next
}

func (q *queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

func (q *queue) signal() {
	select {
	case q.Filled <- struct{}{}:
	default:
	}
}
