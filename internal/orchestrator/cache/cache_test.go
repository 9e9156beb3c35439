package cache

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

// newTestCache returns a cache at revision 10 with node n1 and the tenants blue (hosted by n1) and red. The map counts
// the ended streams, by reason.
func newTestCache() (*Cache, map[string]int) {
	ended := map[string]int{}
	m := New("self", func(reason string) { ended[reason]++ })
	n := testNode(1)
	m.Apply(store.Batch{Revision: 10, Whole: true, Events: []store.Event{
		{Node: &pilasterv1.Node{Name: n.Name, Uuid: n.UUID}},
		{Tenant: &pilasterv1.Tenant{Name: "blue"}}, {Tenant: &pilasterv1.Tenant{Name: "red"}},
		{Hosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n1"}},
	}})
	return m, ended
}

func app(m *Cache, revision int64, tenant string) {
	m.Apply(
		store.Batch{
			Revision: revision,
			Events:   []store.Event{{App: &pilasterv1.App{Tenant: tenant, Id: uint32(revision)}}},
		},
	)
}

func testFollow(m *Cache, resume int64, hosted ...string) (*Subscriber, context.Context) {
	ctx, end := context.WithCancelCause(context.Background())
	return m.Subscribe(
		testNode(1),
		store.Session{},
		&pilasterv1.FollowRequest{HostedTenants: hosted, ResumeRevision: resume},
		end,
	), ctx
}

func TestResume(t *testing.T) {
	for _, c := range []struct {
		name            string
		resume          int64
		hosted          []string
		incomplete      []string
		snapshot        bool
		deltas, tenants int // number of deltas, and of tenants in them
	}{
		{name: "no revision", resume: 0, hosted: []string{"blue"}, snapshot: true},
		{name: "older than the history", resume: 9, hosted: []string{"blue"}, snapshot: true},
		{name: "newer than the cache", resume: 99, hosted: []string{"blue"}, snapshot: true},
		{name: "missed two events of blue", resume: 10, hosted: []string{"blue"}, deltas: 3},
		{name: "missed one event of blue", resume: 11, hosted: []string{"blue"}, deltas: 2},
		{name: "missed nothing", resume: 13, hosted: []string{"blue"}, deltas: 1},
		{name: "hosts nothing", resume: 10, deltas: 1},
		{
			name: "red is incomplete", resume: 12, hosted: []string{"blue", "red"}, incomplete: []string{"red", "red"},
			deltas: 2, tenants: 1,
		},
		{
			name: "incomplete tenant that the node does not host", resume: 12, hosted: []string{"blue"},
			incomplete: []string{"red"}, deltas: 2,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, _ := newTestCache()
			app(m, 11, "blue")
			app(m, 12, "red")
			app(m, 13, "blue")
			f := m.Subscribe(
				testNode(1),
				store.Session{},
				&pilasterv1.FollowRequest{
					HostedTenants:     c.hosted,
					ResumeRevision:    c.resume,
					IncompleteTenants: c.incomplete,
				},
				func(error) {},
			)
			deltas, tenants, last := 0, 0, int64(0)
			for f.Queue.Len() > 0 {
				r := f.Queue.Next()
				last = r.Revision
				if r.GetSnapshot() != nil != c.snapshot {
					t.Fatalf("got %v, want a snapshot: %v", r, c.snapshot)
				}
				if d := r.GetDelta(); d != nil {
					deltas++
					tenants += len(d.Tenants)
				}
			}
			if deltas != c.deltas || tenants != c.tenants || last != 13 {
				t.Errorf(
					"%d deltas with %d tenants, last revision %d; want %d deltas with %d tenants, last revision 13",
					deltas,
					tenants,
					last,
					c.deltas,
					c.tenants,
				)
			}
		})
	}
}

func TestResumeAfterManyEvents(t *testing.T) {
	m, _ := newTestCache()
	for i := range int64(MaxHistory) {
		app(m, 11+i, "red")
	}
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetDelta() == nil {
		t.Error("got a snapshot, want a delta: the history has all events")
	}
	app(m, 11+MaxHistory, "red")
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("got a delta, want a snapshot: the history lacks one event")
	}
	if f, _ := testFollow(m, 11, "red"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("got a delta, want a snapshot: the stream missed more events than its queue can have")
	}
}

// The history has a limit for the records in all its batches, besides the number of batches.
func TestResumeAfterManyRecords(t *testing.T) {
	m, _ := newTestCache()
	const each = 1 << 10
	for i := range int64(MaxHistoryCost/each + 1) {
		m.Apply(
			store.Batch{
				Revision: 11 + i,
				Events:   slices.Repeat([]store.Event{{App: &pilasterv1.App{Tenant: "red", Id: 1}}}, each),
			},
		)
	}
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("got a delta, want a snapshot: the history lacks one batch")
	}
	if f, _ := testFollow(m, 11, "blue"); f.Queue.Next().GetDelta() == nil {
		t.Error("got a snapshot, want a delta: the history has all batches")
	}
}

// The period over which nodes reconnect depends on the number of nodes per orchestrator that has streams.
func TestSpread(t *testing.T) {
	m, _ := newTestCache()
	var events []store.Event
	for i := range 6 * reconnectRate {
		events = append(events, store.Event{Node: &pilasterv1.Node{Name: fmt.Sprint("n", i)}})
	}
	m.Apply(store.Batch{Revision: 20, Whole: true, Events: events})
	for i, c := range []struct {
		node, orchestrator string
		seconds            uint32
	}{
		{"n1", "self", 6}, {"n2", "b", 3}, {"n3", "c", 2}, {"n4", "c", 2}, {"n3", "", 2},
		{"n4", "b", 3}, {"n1", "b", 3}, {"n2", "self", 3}, {"n1", "", 3}, {"n4", "", 6},
	} {
		s := store.NodeSession{Node: c.node}
		if c.orchestrator != "" {
			s.Session = store.Session{Orchestrator: c.orchestrator, Instance: "i", Stream: "s"}
		}
		m.Apply(store.Batch{Revision: 21 + int64(i), Events: []store.Event{{Session: &s}}})
		if got := m.spread(); got != c.seconds*1000 {
			t.Errorf("%v: the nodes reconnect within %d ms, want %d s", c, got, c.seconds)
		}
	}
}

func TestSlowStreamEnds(t *testing.T) {
	m, ended := newTestCache()
	f, ctx := testFollow(m, 0, "blue")
	for i := range int64(maxQueue - 1) { // the snapshot is already in the queue
		app(m, 11+i, "blue")
	}
	if ctx.Err() != nil {
		t.Fatal("the stream ended before its queue was full")
	}
	if m.Heartbeat(f) != nil {
		t.Error("got a heartbeat with the current revision while updates are pending")
	}
	app(m, 1000, "red")
	if ctx.Err() != nil {
		t.Fatal("an event of a tenant that the node does not host ended the stream")
	}
	app(m, 1001, "blue")
	if connect.CodeOf(context.Cause(ctx)) != connect.CodeResourceExhausted || ended["slow"] != 1 ||
		m.Size().Streams != 0 {
		t.Errorf("cause %v, ended %v, %d streams; want ResourceExhausted, slow:1 and no stream",
			context.Cause(ctx), ended, m.Size().Streams)
	}
	again, _ := testFollow(m, 11, "blue")
	if r := again.Queue.Next(); r.GetSnapshot() == nil || again.Queue.Len() != 0 {
		t.Errorf("the next stream has %v and %d more messages, want only a snapshot", r, again.Queue.Len())
	}
}

func TestNewSnapshotOfTheStoreEndsStreams(t *testing.T) {
	m, ended := newTestCache()
	_, ctx := testFollow(m, 0, "blue")
	m.Apply(store.Batch{Revision: 500, Whole: true})
	if connect.CodeOf(context.Cause(ctx)) != connect.CodeAborted || ended["restart"] != 1 {
		t.Errorf("cause %v, ended %v; want Aborted and restart:1", context.Cause(ctx), ended)
	}
	if got := m.Size(); got != (Counts{Revision: 500}) {
		t.Errorf("the cache has %+v, want no records", got)
	}
}

func TestOneStreamPerNode(t *testing.T) {
	m, _ := newTestCache()
	old, oldCtx := testFollow(m, 0, "blue")
	now, nowCtx := testFollow(m, 0, "blue")
	m.Unsubscribe(old) // as its RPC handler does when it returns
	if oldCtx.Err() == nil || nowCtx.Err() != nil || m.Subscribers["n1"] != now {
		t.Error("the cache did not end the older stream, or ended the newer one")
	}
}

// A tenant may leave a node and return before the cache has either event, so Rehost compares with the previous report.
func TestRehostComparesWithPreviousReport(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0, "blue")
	for i, c := range []struct{ hosted, add, remove string }{
		{"blue", "[blue]", "[]"}, // another orchestrator may have recorded a different report since
		{"", "[]", "[blue]"},
		{"blue", "[blue]", "[]"},
		{"red blue", "[red]", "[]"},
		{"blue", "[]", "[red]"},
	} {
		add, remove := m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: strings.Fields(c.hosted)})
		var names []string
		for _, h := range add {
			names = append(names, h.Tenant)
		}
		if fmt.Sprint(names) != c.add || fmt.Sprint(remove) != c.remove {
			t.Errorf("report %d: add %v, remove %v; want %s and %s", i, names, remove, c.add, c.remove)
		}
	}
}

// A node that deleted and resolved a tenant again between two reports receives the whole tenant again.
func TestIncompleteTenantIsSentWhole(t *testing.T) {
	m, _ := newTestCache()
	app(m, 11, "blue")
	f, _ := testFollow(m, 0, "blue")
	f.Queue.Next()
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}})
	if f.Queue.Len() != 0 {
		t.Fatalf("got %v after a report without a change, want no message", f.Queue.Next())
	}
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, IncompleteTenants: []string{"blue"}})
	if d := f.Queue.Next().GetDelta(); len(d.Tenants) != 1 || len(d.Apps) != 1 || len(d.WholeTenants) != 1 {
		t.Errorf("got %v, want a whole tenant with one app", d)
	}
}

// While a node reports a tenant as resolving, its reports do not remove the hosting record that Resolve made.
func TestReportsKeepResolvingTenants(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0, "blue")
	for i, c := range []struct {
		hosted, resolving string
		add, remove       int
	}{
		{"blue", "", 1, 0},
		{"", "blue red", 0, 0},
		{"", "red", 0, 1},
		{"blue red", "red", 2, 0}, // an earlier report removed blue
		{"blue red", "", 0, 0},
	} {
		add, remove := m.Rehost(
			f,
			&pilasterv1.FollowRequest{
				HostedTenants:    strings.Fields(c.hosted),
				ResolvingTenants: strings.Fields(c.resolving),
			},
		)
		if len(add) != c.add || len(remove) != c.remove {
			t.Errorf("report %d: add %v, remove %v; want %d and %d", i, add, remove, c.add, c.remove)
		}
	}
	m.ForgetRecorded(f, []string{"red"})
	if add, _ := m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}}); len(add) != 1 ||
		add[0].Tenant != "red" {
		t.Errorf("after an overtaken report of red, add %v, want red", add)
	}
}

func testNode(n int) pki.Node { return pki.Node{Name: fmt.Sprintf("n%d", n), UUID: storetest.UUID(n)} }
