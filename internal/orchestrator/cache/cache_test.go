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

// newTestModel has node n1, tenants blue (hosted by n1) and red, at revision 10.
func newTestModel() (*Cache, map[string]int) {
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
		deltas, tenants int // of all deltas
	}{
		{name: "first time", resume: 0, hosted: []string{"blue"}, snapshot: true},
		{name: "before this orchestrator read the store", resume: 9, hosted: []string{"blue"}, snapshot: true},
		{name: "from the future", resume: 99, hosted: []string{"blue"}, snapshot: true},
		{name: "missed two of blue", resume: 10, hosted: []string{"blue"}, deltas: 3},
		{name: "missed one of blue", resume: 11, hosted: []string{"blue"}, deltas: 2},
		{name: "missed nothing", resume: 13, hosted: []string{"blue"}, deltas: 1},
		{name: "hosts nothing", resume: 10, deltas: 1},
		{name: "knows nothing of red", resume: 12, hosted: []string{"blue", "red"}, incomplete: []string{"red", "red"}, deltas: 2, tenants: 1},
		{name: "asks for what it does not host", resume: 12, hosted: []string{"blue"}, incomplete: []string{"red"}, deltas: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, _ := newTestModel()
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
					t.Fatalf("got %v", r)
				}
				if d := r.GetDelta(); d != nil {
					deltas++
					tenants += len(d.Tenants)
				}
			}
			if deltas != c.deltas || tenants != c.tenants || last != 13 {
				t.Errorf(
					"%d deltas with %d tenants up to %d, want %d with %d up to 13",
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

func TestResumeAfterTooMuch(t *testing.T) {
	m, _ := newTestModel()
	for i := range int64(MaxHistory) {
		app(m, 11+i, "red")
	}
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetDelta() == nil {
		t.Error("everything since is remembered, yet a snapshot came")
	}
	app(m, 11+MaxHistory, "red")
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("one change is forgotten, yet no snapshot came")
	}
	if f, _ := testFollow(m, 11, "red"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("more was missed than a queue holds, yet no snapshot came")
	}
}

// Changes of very many records are remembered as long as those are not too many together.
func TestResumeAfterManyRecords(t *testing.T) {
	m, _ := newTestModel()
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
		t.Error("one change is forgotten, yet no snapshot came")
	}
	if f, _ := testFollow(m, 11, "blue"); f.Queue.Next().GetDelta() == nil {
		t.Error("everything since is remembered, yet a snapshot came")
	}
}

// Nodes are asked to come back as slowly as those take that follow the same orchestrator.
func TestShare(t *testing.T) {
	m, _ := newTestModel()
	var events []store.Event
	for i := range 6 * reconnectRate {
		events = append(events, store.Event{Node: &pilasterv1.Node{Name: fmt.Sprint("n", i)}})
	}
	m.Apply(store.Batch{Revision: 20, Whole: true, Events: events})
	for i, c := range []struct {
		node, orchestrator string
		seconds            uint32
	}{{"n1", "self", 6}, {"n2", "b", 3}, {"n3", "c", 2}, {"n4", "c", 2}, {"n3", "", 2}, {"n4", "b", 3}, {"n1", "b", 3}, {"n2", "self", 3}, {"n1", "", 3}, {"n4", "", 6}} {
		s := store.NodeSession{Node: c.node}
		if c.orchestrator != "" {
			s.Session = store.Session{Orchestrator: c.orchestrator, Instance: "i", Stream: "s"}
		}
		m.Apply(store.Batch{Revision: 21 + int64(i), Events: []store.Event{{Session: &s}}})
		if got := m.spread(); got != c.seconds*1000 {
			t.Errorf("%v: asked to come within %d ms, want %d s", c, got, c.seconds)
		}
	}
}

func TestSlowFollowerIsEnded(t *testing.T) {
	m, ended := newTestModel()
	f, ctx := testFollow(m, 0, "blue")
	for i := range int64(maxQueue - 1) { // the snapshot takes a place
		app(m, 11+i, "blue")
	}
	if ctx.Err() != nil {
		t.Fatal("ended while there was room")
	}
	if m.Heartbeat(f) != nil {
		t.Error("a heartbeat promises what was not told")
	}
	app(m, 1000, "red")
	if ctx.Err() != nil {
		t.Fatal("ended by what it does not hear")
	}
	app(m, 1001, "blue")
	if connect.CodeOf(context.Cause(ctx)) != connect.CodeResourceExhausted || ended["slow"] != 1 ||
		m.Size().Streams != 0 {
		t.Errorf("cause %v, ended %v, connected %d", context.Cause(ctx), ended, m.Size().Streams)
	}
	again, _ := testFollow(m, 11, "blue")
	if r := again.Queue.Next(); r.GetSnapshot() == nil || again.Queue.Len() != 0 {
		t.Errorf("followed again it hears %v, and more", r)
	}
}

func TestStoreReadAnewEndsStreams(t *testing.T) {
	m, ended := newTestModel()
	_, ctx := testFollow(m, 0, "blue")
	m.Apply(store.Batch{Revision: 500, Whole: true})
	if connect.CodeOf(context.Cause(ctx)) != connect.CodeAborted || ended["restart"] != 1 {
		t.Errorf("cause %v, ended %v", context.Cause(ctx), ended)
	}
	if got := m.Size(); got != (Counts{Revision: 500}) {
		t.Errorf("what is gone is still there: %+v", got)
	}
}

func TestOneStreamANode(t *testing.T) {
	m, _ := newTestModel()
	old, oldCtx := testFollow(m, 0, "blue")
	now, nowCtx := testFollow(m, 0, "blue")
	m.Unsubscribe(old) // as its handler does at last
	if oldCtx.Err() == nil || nowCtx.Err() != nil || m.Subscribers["n1"] != now {
		t.Error("the newer stream is not the one that stays")
	}
}

// A tenant may leave a node and come back before the model has heard of either.
func TestWhatIsNotedDoesNotDependOnTheModel(t *testing.T) {
	m, _ := newTestModel()
	f, _ := testFollow(m, 0, "blue")
	for i, c := range []struct{ hosted, add, remove string }{
		{"blue", "[blue]", "[]"}, // another orchestrator may have noted otherwise since
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

// A node that forgot a tenant and learnt it anew between two reports gets it whole again.
func TestIncompleteTenantsComeWhole(t *testing.T) {
	m, _ := newTestModel()
	app(m, 11, "blue")
	f, _ := testFollow(m, 0, "blue")
	f.Queue.Next()
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}})
	if f.Queue.Len() != 0 {
		t.Fatalf("nothing changed, yet %v came", f.Queue.Next())
	}
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, IncompleteTenants: []string{"blue"}})
	if d := f.Queue.Next().GetDelta(); len(d.Tenants) != 1 || len(d.Apps) != 1 || len(d.WholeTenants) != 1 {
		t.Errorf("got %v", d)
	}
}

// What a Resolve under way has noted stays, until a report says that nothing came of it.
func TestReportsLeaveWhatIsAskedFor(t *testing.T) {
	m, _ := newTestModel()
	f, _ := testFollow(m, 0, "blue")
	for i, c := range []struct {
		hosted, resolving string
		add, remove       int
	}{
		{"blue", "", 1, 0},
		{"", "blue red", 0, 0},
		{"", "red", 0, 1},
		{"blue red", "red", 2, 0}, // blue was taken back before
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
		t.Errorf("an overtaken report is repeated as %v", add)
	}
}

func testNode(n int) pki.Node { return pki.Node{Name: fmt.Sprintf("n%d", n), UUID: storetest.UUID(n)} }
