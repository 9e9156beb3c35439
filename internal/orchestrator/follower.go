package orchestrator

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

// maxQueue is how many changes may wait for a node before its stream is ended.
const maxQueue = 256

// follower is one node's stream. Everything in it but queue belongs to the model's lock.
type follower struct {
	node    pki.Node
	session store.Session
	hosted  map[string]bool                // whose news the node has, as it asked for
	carried map[string]bool                // and those that it must have
	noted   map[string]*pilasterv1.Hosting // what this stream has had noted in the store
	queue   chan *pilasterv1.FollowResponse
	end     context.CancelCauseFunc
}

// follow starts a stream by its first message: its queue begins with what the node has missed
// since the revision it knows, or with a snapshot. A stream that the node had before is ended.
func (m *model) follow(n pki.Node, session store.Session, first *pilasterv1.FollowRequest, end context.CancelCauseFunc) *follower {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := &follower{node: n, session: session, hosted: set(first.HostedTenants), carried: set(first.CarriedTenants), queue: make(chan *pilasterv1.FollowResponse, maxQueue), end: end}
	if !m.judge(f) {
		return f
	}
	if old := m.followers[n.Name]; old != nil {
		m.endReplaced(old)
	}
	m.followers[n.Name] = f
	if missed, ok := m.missed(f, first); ok {
		for _, r := range missed {
			f.queue <- r // never more than fit; see missed
		}
	} else {
		f.queue <- m.snapshot(f)
	}
	return f
}

func (m *model) unfollow(f *follower) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.followers[f.node.Name] == f {
		delete(m.followers, f.node.Name)
	}
}

// missed is what happened since the revision that the node knows, or false when a snapshot tells
// it better.
func (m *model) missed(f *follower, first *pilasterv1.FollowRequest) ([]*pilasterv1.FollowResponse, bool) {
	resume := first.ResumeRevision
	if resume < m.forgotten || resume > m.revision || resume == 0 {
		return nil, false
	}
	var missed []*pilasterv1.FollowResponse
	for _, b := range m.past {
		if b.Revision <= resume {
			continue
		}
		if d, found := f.delta(b); found {
			missed = append(missed, response(b.Revision, d))
		}
		for _, e := range b.Events {
			delete(f.carried, e.DeletedTenant) // made anew, it comes whole
		}
	}
	rest, whole := &pilasterv1.Delta{Node: m.own(f)}, set(m.carry(f))
	for _, tenant := range first.IncompleteTenants {
		whole[tenant] = f.has(tenant)
	}
	for tenant, is := range whole {
		if is {
			m.addWhole(rest, tenant)
		}
	}
	missed = append(missed, response(m.revision, rest)) // also tells that it is all
	return missed, len(missed) <= maxQueue/2
}

func (m *model) snapshot(f *follower) *pilasterv1.FollowResponse {
	var d pilasterv1.Delta
	f.carried = nil
	whole := set(m.carry(f))
	maps.Copy(whole, f.hosted)
	for tenant := range whole {
		m.addWhole(&d, tenant)
	}
	return &pilasterv1.FollowResponse{
		Revision: m.revision,
		Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{
			Node: m.own(f), Tenants: d.Tenants, Apps: d.Apps,
		}},
	}
}

func (m *model) addWhole(d *pilasterv1.Delta, tenant string) {
	if t := m.tenants[tenant]; t != nil {
		d.Tenants = append(d.Tenants, t)
		d.Apps = append(d.Apps, m.appsOf(tenant)...)
		d.WholeTenants = append(d.WholeTenants, tenant)
	}
}

// rehost changes which tenants a stream carries. Those new to it or to the node come whole. What must be
// noted in the store is returned: what the model knows may be older than what this stream had
// noted a moment ago.
func (m *model) rehost(f *follower, req *pilasterv1.FollowRequest) (add []*pilasterv1.Hosting, remove []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now, incomplete, resolving := set(req.HostedTenants), set(req.IncompleteTenants), set(req.ResolvingTenants)
	said := saidOf(req)
	var d pilasterv1.Delta
	for tenant := range now {
		if !proto.Equal(f.noted[tenant], said[tenant]) {
			add = append(add, said[tenant])
		}
		if !f.hosted[tenant] || incomplete[tenant] {
			m.addWhole(&d, tenant)
		}
	}
	for tenant := range incomplete {
		if f.carried[tenant] && !now[tenant] {
			m.addWhole(&d, tenant)
		}
	}
	for tenant, nodes := range m.hosting {
		if nodes[f.node.Name] != nil && !now[tenant] && !resolving[tenant] {
			remove = append(remove, tenant)
		}
	}
	for tenant := range f.noted {
		if !now[tenant] && !resolving[tenant] && m.hosting[tenant][f.node.Name] == nil {
			remove = append(remove, tenant)
		}
	}
	for tenant := range resolving {
		if said[tenant] == nil {
			said[tenant] = &pilasterv1.Hosting{} // to be taken back when it is not hosted in the end
		}
	}
	f.hosted, f.noted = now, said
	if len(d.Tenants) > 0 {
		m.queue(f, response(m.revision, &d))
	}
	return add, remove
}

// saidOf is what a node says of each tenant it hosts.
func saidOf(req *pilasterv1.FollowRequest) map[string]*pilasterv1.Hosting {
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

// unnote has what a stream said of tenants noted again when it says it the next time.
func (m *model) unnote(f *follower, tenants []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, tenant := range tenants {
		delete(f.noted, tenant)
	}
}

func set(names []string) map[string]bool {
	s := map[string]bool{}
	for _, name := range names {
		s[name] = true
	}
	return s
}

// feed queues what a batch means to a stream.
func (m *model) feed(f *follower, b store.Batch) {
	d, found := f.delta(b)
	if m.recarried[f.node.Name] || slices.ContainsFunc(b.Events, func(e store.Event) bool { return e.Node != nil && e.Node.Name == f.node.Name }) {
		d.Node, found = m.own(f), true
		for _, tenant := range m.carry(f) {
			m.addWhole(d, tenant)
		}
	}
	if found {
		m.queue(f, response(b.Revision, d))
	}
}

func (m *model) queue(f *follower, r *pilasterv1.FollowResponse) {
	select {
	case f.queue <- r:
	default:
		m.endOne(f, connect.CodeResourceExhausted, "slow", fmt.Sprintf("the node reads too slowly: %d changes wait; follow again", maxQueue))
	}
}

// heartbeat carries the revision up to which the stream has told everything, if it has.
func (m *model) heartbeat(f *follower) *pilasterv1.FollowResponse {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(f.queue) > 0 {
		return nil
	}
	return &pilasterv1.FollowResponse{Revision: m.revision, Event: &pilasterv1.FollowResponse_Heartbeat{Heartbeat: &pilasterv1.Heartbeat{}}}
}

// endOne ends a stream with a reason for the node, and one word of it for the counter.
func (m *model) endOne(f *follower, code connect.Code, word, reason string) {
	f.end(connect.NewError(code, fmt.Errorf("%s", reason)))
	if m.followers[f.node.Name] == f {
		delete(m.followers, f.node.Name)
	}
	m.dropped(word)
}

// stalled ends a stream of which nothing was read for so long.
func (m *model) stalled(f *follower, long time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.followers[f.node.Name] == f {
		m.endOne(f, connect.CodeResourceExhausted, "stalled", fmt.Sprintf("the node read nothing for %v; follow again", long))
	}
}

func (m *model) endReplaced(f *follower) {
	m.endOne(f, connect.CodeAborted, "replaced", "the node opened another stream")
}

const storeForgot = "the store forgot this stream; follow again"

// judge ends the stream of a node that was deleted, or whose session is over: then another machine may be let in.
func (m *model) judge(f *follower) (good bool) {
	if f == nil {
		return false
	}
	switch session := m.sessions[f.node.Name]; {
	case !m.knows(f.node):
		m.endOne(f, connect.CodeFailedPrecondition, "deleted", fmt.Sprintf("node %s was deleted", f.node.Name))
	case session == f.session:
		return true
	case session.None():
		m.endOne(f, connect.CodeAborted, "restart", storeForgot)
	default:
		m.endReplaced(f)
	}
	return false
}

func (m *model) endAll(code connect.Code, word, reason string) {
	for _, f := range m.followers {
		m.endOne(f, code, word, reason)
	}
}

// restart ends all streams, which nodes open anew.
func (m *model) restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.endAll(connect.CodeAborted, "restart", storeForgot)
}

// stop ends all streams.
func (m *model) stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.endAll(connect.CodeUnavailable, "stop", "the orchestrator is stopping")
}

// has tells whether the stream has news of a tenant.
func (f *follower) has(tenant string) bool { return f.hosted[tenant] || f.carried[tenant] }

// delta is the part of a batch that is of the node's tenants, and whether there is any.
func (f *follower) delta(b store.Batch) (d *pilasterv1.Delta, found bool) {
	d = new(pilasterv1.Delta)
	for _, e := range b.Events {
		switch {
		case e.Tenant != nil && f.has(e.Tenant.Name):
			d.Tenants = append(d.Tenants, e.Tenant)
		case e.DeletedTenant != "" && f.has(e.DeletedTenant):
			d.DeletedTenants = append(d.DeletedTenants, e.DeletedTenant)
		case e.App != nil && f.has(e.App.Tenant):
			d.Apps = append(d.Apps, e.App)
		case e.Mapping != nil && f.has(e.Mapping.Tenant):
			d.Mappings = append(d.Mappings, visible(e.Mapping, f.node.Name))
		case e.EndedMapping != nil && f.has(e.EndedMapping.Tenant):
			d.EndedMappings = append(d.EndedMappings, e.EndedMapping)
		default:
			continue
		}
		found = true
	}
	return d, found
}

func response(revision int64, d *pilasterv1.Delta) *pilasterv1.FollowResponse {
	return &pilasterv1.FollowResponse{Revision: revision, Event: &pilasterv1.FollowResponse_Delta{Delta: d}}
}
