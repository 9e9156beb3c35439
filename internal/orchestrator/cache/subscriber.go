package cache

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A stream without other messages receives a heartbeat with the current revision, every heartbeatEvery, or less often
// so that all streams together receive at most heartbeatRate per second: with 100,000 nodes each receives one every 50
// s. No agent waits for it; HTTP/2 pings check the connection. The node's next stream resumes at the last revision, so
// a broken stream needs no snapshot as long as at most MaxHistory changes came since: 80 per second with 100,000
// streams.
const (
	heartbeatEvery = 5 * time.Second
	heartbeatRate  = 2000
)

// reconnectRate is how many nodes per second can start a stream. After a restart all nodes do; spread asks them to
// reconnect no faster.
const reconnectRate = 3000

// Subscriber is the stream of one node. The lock of the cache protects everything but the queue.
type Subscriber struct {
	Node          pki.Node
	Session       store.Session
	hosted        map[string]bool                // tenants that the node hosts, by its own report
	transit       map[string]bool                // tenants that it needs without hosting them
	pullsMappings bool                           // the node queries mappings, and receives no updates of them
	recorded      map[string]*pilasterv1.Hosting // what this stream has recorded in the store
	refused       map[string][]error             // the refused parts of that
	Queue         queue
	end           context.CancelCauseFunc
}

// Subscribe starts a stream with its first message. The queue begins with the updates after the node's revision, or
// with a snapshot. It ends an earlier stream of the node.
func (m *Cache) Subscribe(
	n pki.Node,
	session store.Session,
	first *pilasterv1.FollowRequest,
	end context.CancelCauseFunc,
) *Subscriber {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	f := &Subscriber{Node: n, Session: session, pullsMappings: first.WithoutMappings, Queue: newQueue(), end: end}
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
			m.enqueue(f, r) // missed limits them to what fits
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
func (m *Cache) setTenants(f *Subscriber, hosted, carried map[string]bool) {
	if m.Subscribers[f.Node.Name] != f {
		return // it has ended
	}
	for _, had := range []map[string]bool{f.hosted, f.transit} {
		for tenant := range had {
			remove(m.byTenant, tenant, f)
			remove(m.byMappings, tenant, f)
		}
	}
	f.hosted, f.transit = hosted, carried
	for _, has := range []map[string]bool{hosted, carried} {
		for tenant := range has {
			add(m.byTenant, tenant, f)
			if !f.pullsMappings {
				add(m.byMappings, tenant, f)
			}
		}
	}
}

// missed returns the updates after the node's revision, or false if a snapshot is better.
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
			if f.transit[e.DeletedTenant] { // a new tenant of that name must come whole
				carried := maps.Clone(f.transit)
				delete(carried, e.DeletedTenant)
				m.setTenants(f, f.hosted, carried)
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
	missed = append(missed, response(m.Revision, rest)) // also marks the end
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
		}},
	}
}

// addWhole adds a tenant with its apps, and with its policies if the node hosts it.
func (m *Cache) addWhole(d *pilasterv1.Delta, tenant string, hosted bool) {
	if t := m.Tenants[tenant]; t != nil {
		d.Tenants = append(d.Tenants, t)
		d.Apps = append(d.Apps, m.appsOf(tenant)...)
		d.WholeTenants = append(d.WholeTenants, tenant)
		if hosted {
			m.Policies.addWhole(d, tenant)
		}
	}
}

// Rehost changes the tenants of a stream and queues those that are new to the stream or incomplete on the node. It
// returns what must be recorded in the store. It compares with what this stream recorded last, because the cache may
// lag behind that.
func (m *Cache) Rehost(f *Subscriber, req *pilasterv1.FollowRequest) (add []*pilasterv1.Hosting, remove []string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	now, incomplete, resolving := set(req.HostedTenants), set(req.IncompleteTenants), set(req.ResolvingTenants)
	said := reportedHosting(req)
	var d pilasterv1.Delta
	for tenant := range now {
		if !proto.Equal(f.recorded[tenant], said[tenant]) {
			add = append(add, said[tenant])
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
		if said[tenant] == nil {
			said[tenant] = &pilasterv1.Hosting{} // deleted later if the node does not host it in the end
		}
	}
	f.recorded = said
	m.setTenants(f, now, f.transit)
	if len(d.Tenants) > 0 {
		m.enqueue(f, response(m.Revision, &d))
	}
	return add, remove
}

// alreadyRecorded returns what the store has of a stream's first message. The cache knows: it has the stream's session,
// and only this stream has recorded anything of the node since. For a tenant that rotates its key or retires apps, and
// for later messages, the store decides.
func (m *Cache) alreadyRecorded(f *Subscriber, first *pilasterv1.FollowRequest) map[string]*pilasterv1.Hosting {
	noted := map[string]*pilasterv1.Hosting{}
	for _, name := range first.HostedTenants {
		t, h := m.Tenants[name], m.Hosting[name][f.Node.Name]
		if t != nil && h != nil && len(t.Ids) == 1 && t.Leaving == "" && t.RetiringApps == nil &&
			h.Sequence <= first.Sequence {
			noted[name] = &pilasterv1.Hosting{
				Tenant:     name,
				Accepts:    h.Accepts,
				Holds:      h.Holds,
				Moving:     h.Moving,
				Overrides:  h.Overrides,
				HeardRound: h.HeardRound,
				KeepsApps:  h.KeepsApps,
				Unenforced: h.Unenforced,
			}
		}
	}
	return noted
}

// reportedHosting returns a node's report about each tenant that it hosts.
func reportedHosting(req *pilasterv1.FollowRequest) map[string]*pilasterv1.Hosting {
	said := map[string]*pilasterv1.Hosting{}
	for _, tenant := range req.HostedTenants {
		said[tenant] = &pilasterv1.Hosting{Tenant: tenant}
	}
	for _, h := range req.Hosting {
		if said[h.Tenant] != nil {
			said[h.Tenant] = h
		}
	}
	return said
}

// ForgetRecorded makes the stream record these tenants again at the next message.
func (m *Cache) ForgetRecorded(f *Subscriber, tenants []string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, tenant := range tenants {
		delete(f.recorded, tenant)
	}
}

// MaxReasons is how many reasons a node receives.
const MaxReasons = 16

// Refuse stores which parts of a node's report were refused, and sends them to the node if they changed.
func (m *Cache) Refuse(f *Subscriber, said []*pilasterv1.Hosting, refused map[string][]error) (changed bool) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for tenant := range f.refused {
		if f.recorded[tenant] == nil {
			delete(f.refused, tenant)
			changed = true
		}
	}
	for _, h := range said {
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

func set(names []string) map[string]bool {
	s := map[string]bool{}
	for _, name := range names {
		s[name] = true
	}
	return s
}

// common returns the message that every node that hosts the tenant of the batch receives, and the tenant. It returns
// nil if the batch has several tenants, or if the message depends on the node.
func common(b store.Batch) (*pilasterv1.FollowResponse, string) {
	if len(b.Events) == 0 {
		return nil, ""
	}
	tenant := tenantOf(b.Events[0])
	for _, e := range b.Events {
		if tenantOf(e) != tenant || e.Mapping != nil || e.EndedMapping != nil {
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

// enqueue queues a message that only this stream has.
func (m *Cache) enqueue(f *Subscriber, r *pilasterv1.FollowResponse) {
	r.SpreadMs, r.WithPolicies = m.spread(), true
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

// Heartbeat returns a message with the current revision; nil while other messages wait.
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
		Event:        &pilasterv1.FollowResponse_Heartbeat{Heartbeat: &pilasterv1.Heartbeat{}},
	}
}

// spread is the period in milliseconds over which the nodes should reconnect.
func (m *Cache) spread() uint32 { return uint32(m.share() * 1000 / reconnectRate) }

// share is how many nodes have, or will have after a restart, streams of this orchestrator: all nodes divided by the
// orchestrators that have streams.
func (m *Cache) share() int {
	orchestrators := len(m.serving)
	if m.serving[m.Self] == 0 {
		orchestrators++
	}
	return (len(m.Nodes) + orchestrators - 1) / orchestrators
}

// endStream ends a stream with an error for the node, and a label for the counter.
func (m *Cache) endStream(f *Subscriber, code connect.Code, word, reason string) {
	f.end(connect.NewError(code, fmt.Errorf("%s", reason)))
	m.drop(f)
	m.dropped(word)
}

// Stalled ends a stream whose node has read nothing for that long.
func (m *Cache) Stalled(f *Subscriber, long time.Duration) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Subscribers[f.Node.Name] == f {
		m.endStream(
			f,
			connect.CodeResourceExhausted,
			"stalled",
			fmt.Sprintf("the node read nothing for %v; follow again", long),
		)
	}
}

func (m *Cache) endReplaced(f *Subscriber) {
	m.endStream(f, connect.CodeAborted, "replaced", "the node opened another stream")
}

const storeForgot = "the store has lost the session of this stream; follow again"

// checkStream ends the stream of a node that was deleted or whose session is over, which admits another machine.
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
		m.endStream(f, connect.CodeAborted, "restart", storeForgot)
	default:
		m.endReplaced(f)
	}
	return false
}

func (m *Cache) endStreams(code connect.Code, word, reason string) {
	for _, f := range m.Subscribers {
		m.endStream(f, code, word, reason)
	}
}

// Restart ends all streams; nodes open new ones.
func (m *Cache) Restart() {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.endStreams(connect.CodeAborted, "restart", storeForgot)
}

const isStopping = "the orchestrator is stopping"

// Stop ends all streams, also those that are starting.
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
		case e.Tenant != nil && f.has(e.Tenant.Name):
			d.Tenants = append(d.Tenants, e.Tenant)
		case e.DeletedTenant != "" && f.has(e.DeletedTenant):
			d.DeletedTenants = append(d.DeletedTenants, e.DeletedTenant)
		case e.App != nil && f.has(e.App.Tenant):
			d.Apps = append(d.Apps, e.App)
		case e.Mapping != nil && f.has(e.Mapping.Tenant) && !f.pullsMappings:
			d.Mappings = append(d.Mappings, Visible(e.Mapping, f.Node.Name))
		case e.EndedMapping != nil && f.has(e.EndedMapping.Tenant) && !f.pullsMappings:
			d.EndedMappings = append(d.EndedMappings, e.EndedMapping)
		default:
			if !f.policy(d, e) {
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
