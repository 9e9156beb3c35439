package cache

import (
	"fmt"
	"slices"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// TestOffloadedContainers: a tenant has the containers that its backends reported, if their addresses are the
// backends' own, in updates, in history and for Resolve. A change of another tenant's report sends nothing, and other
// nodes than frontends get no updates of the containers.
func TestOffloadedContainers(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0, "blue") // n1
	f.Queue.Next()                   // the snapshot
	n2 := testNode(2)
	m.Apply(store.Batch{Revision: 10, Events: []store.Event{{Node: &pilasterv1.Node{Name: n2.Name, Uuid: n2.UUID}}}})
	other := m.Subscribe(n2, store.Session{},
		&pilasterv1.FollowRequest{HostedTenants: []string{"blue"}}, func(error) {})
	other.Queue.Next()
	revision := int64(10)
	next := func(events ...store.Event) (sent string) {
		t.Helper()
		revision++
		m.Apply(store.Batch{Revision: revision, Events: events})
		for f.Queue.Len() > 0 {
			for _, of := range f.Queue.Next().GetDelta().GetTenants() {
				for _, o := range of.Offloads {
					sent += o.Node + ":"
					for _, e := range o.Endpoints {
						sent += fmt.Sprint(e.Addresses, e.App)
					}
				}
				sent += ";"
			}
		}
		return sent
	}
	mapping := func(to, node string) *pilasterv1.Mapping {
		return &pilasterv1.Mapping{Tenant: "blue", To: to, Name: node}
	}
	report := func(of, node string, last byte) store.Event {
		has := &pilasterv1.OffloadedEndpoint{Addresses: [][]byte{{10, 0, 0, last}, {10, 1, 0, last}}, App: 7}
		return store.Event{Hosting: &pilasterv1.Hosting{
			Tenant: of, Node: node, Offloaded: []*pilasterv1.OffloadedEndpoint{has},
		}}
	}
	blue := func() *pilasterv1.Tenant {
		return &pilasterv1.Tenant{
			Name: "blue", Overlays: []*pilasterv1.Overlay{{Cidr: "10.1.0.0/16", NodeBits: 24}},
			Offloads: []*pilasterv1.Offload{
				{
					Id: 1, Node: "n2", Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE,
					Frontends: []*pilasterv1.Frontend{{Node: "n1"}},
				},
			},
		}
	}
	ended := store.Event{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n2"}}
	const both = "n2:[[10 0 0 5] [10 1 0 5]] 7;"
	for _, c := range []struct {
		what   string
		events []store.Event
		want   string
	}{
		{"a report before the offload", []store.Event{report("blue", "n2", 5)}, ""},
		{"the offload, without addresses", []store.Event{{Tenant: blue()}}, "n2:;n2:;"}, // see refreshTransit
		{"an address", []store.Event{{Mapping: mapping("10.0.0.5/32", "n2")}}, "n2:[[10 0 0 5]] 7;"},
		{"a subnet", []store.Event{{Mapping: mapping("10.1.0.0/24", "n2")}}, both},
		{"the same report", []store.Event{report("blue", "n2", 5)}, ""},
		{"the tenant again", []store.Event{{Tenant: blue()}}, both},
		{"another node's report", []store.Event{report("blue", "n1", 5)}, ""},
		{"another tenant's report", []store.Event{report("red", "n2", 5)}, ""},
		{"a report with another address", []store.Event{report("blue", "n2", 6)}, "n2:[[10 1 0 6]] 7;"},
		{"both in one batch", []store.Event{report("blue", "n2", 5), {Tenant: blue()}}, both},
		{"the address moves", []store.Event{{Mapping: mapping("10.0.0.5/32", "n1")}}, "n2:[[10 1 0 5]] 7;"},
		{"the end of the report", []store.Event{ended}, "n2:;"},
		{"a report again", []store.Event{report("blue", "n2", 5)}, "n2:[[10 1 0 5]] 7;"},
		{"the end of the offload", []store.Event{{Tenant: &pilasterv1.Tenant{Name: "blue"}}}, ";"},
		{"a report after it", []store.Event{report("blue", "n2", 6)}, ""},
	} {
		if got := next(c.events...); got != c.want {
			t.Errorf("%s: sent %q, want %q", c.what, got, c.want)
		}
		recorded := slices.ContainsFunc(c.events, func(e store.Event) bool { return e.Tenant != nil })
		got := false
		for other.Queue.Len() > 0 {
			got = got || len(other.Queue.Next().GetDelta().GetTenants()) > 0
		}
		if got != recorded {
			t.Errorf("%s: the tenant was sent to a node that is no frontend: %v, want %v", c.what, got, recorded)
		}
		of := blue()
		if o := m.WithDerived(of).Offloads[0]; c.want != "" && c.want != ";" &&
			len(o.Endpoints) != len(m.Tenants["blue"].Offloads[0].Endpoints) {
			t.Errorf("%s: Resolve returns %v, want %v", c.what, o, m.Tenants["blue"].Offloads)
		}
	}
}

// TestFrontendsReceiveTenant: frontends need the tenant without hosting it; tenants with offloads are indexed, with the
// revision of what their frontends need.
func TestFrontendsReceiveTenant(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0)
	want(t, f, "[][][]0[]")
	offloaded := func(revision int64, phase pilasterv1.OffloadPhase, frontends ...*pilasterv1.Frontend) {
		m.Apply(store.Batch{Revision: revision, Events: []store.Event{{Tenant: &pilasterv1.Tenant{
			Name:     "red",
			Offloads: []*pilasterv1.Offload{{Node: "n2", Phase: phase, Frontends: frontends}},
		}}}})
	}
	noted := func(needed, any int64) {
		t.Helper()
		if m.Offloaded["red"] != needed || m.OffloadRevision != any {
			t.Errorf("revision %d of red, %d of all; want %d, %d", m.Offloaded["red"], m.OffloadRevision, needed, any)
		}
	}
	noted(0, 0)
	offloaded(11, pilasterv1.OffloadPhase_OFFLOAD_PHASE_PREPARING, &pilasterv1.Frontend{Node: "n1"})
	want(t, f, "[red][red][red]0[]")
	noted(11, 11)
	offloaded(12, pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE, &pilasterv1.Frontend{Node: "n1"})
	want(t, f, "[red][red][]0[]")
	for i, e := range []store.Event{
		{Hosting: &pilasterv1.Hosting{Tenant: "red", Node: "n2"}},
		{Mapping: &pilasterv1.Mapping{Tenant: "red", To: "10.0.0.1/32", Name: "n2"}},
		{Tenant: &pilasterv1.Tenant{Name: "blue"}},
		{Hosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n2"}},
		{App: &pilasterv1.App{Tenant: "red", Id: 5}},
	} {
		m.Apply(store.Batch{Revision: int64(13 + i), Events: []store.Event{e}})
		if i < 4 {
			noted(12, 13)
		}
	}
	noted(17, 17)
	m.Apply(store.Batch{Revision: 18, Events: []store.Event{{Tenant: m.Tenants["red"], ToFrontends: true}}})
	noted(17, 18)
	whole := []store.Event{{Tenant: m.Tenants["red"]}, {App: &pilasterv1.App{Tenant: "red", Id: 5}}}
	m.Apply(store.Batch{Revision: 19, Whole: true, Events: whole})
	noted(17, 19)
	m.Apply(store.Batch{Revision: 20, Events: []store.Event{{DeletedTenant: "red"}}})
	noted(0, 20)
}

// TestPoliciesChanged: the revision of the last change of a tenant's policies rises by changes and deletions only, also
// if they are known from a read of the whole store.
func TestPoliciesChanged(t *testing.T) {
	m, _ := newTestCache()
	policy := func(name string, revision int64) *pilasterv1.Policy {
		return &pilasterv1.Policy{Tenant: "red", Kind: "NetworkPolicy", Name: name, Revision: revision}
	}
	for i, c := range []struct {
		whole  bool
		events []store.Event
		want   int64
	}{
		{false, []store.Event{{Policy: policy("a", 100)}}, 100},
		{false, []store.Event{{Policy: policy("b", 101)}}, 101},
		{false, []store.Event{{Tenant: &pilasterv1.Tenant{Name: "red"}}}, 101},
		{true, []store.Event{{Policy: policy("a", 100)}, {Policy: policy("b", 101)}}, 101},
		{true, []store.Event{{Policy: policy("a", 100)}, {Policy: policy("b", 104)}}, 104},
		{true, []store.Event{{Policy: policy("a", 100)}}, 105}, // b is gone
		{false, []store.Event{{EndedPolicy: policy("a", 0)}}, 106},
		{true, nil, 106},
		{false, []store.Event{{DeletedTenant: "red"}}, 0},
	} {
		m.Apply(store.Batch{Revision: int64(100 + i), Whole: c.whole, Events: c.events})
		if got := m.Policies.Changed("red"); got != c.want {
			t.Errorf("after revision %d: %d, want %d", 100+i, got, c.want)
		}
	}
}
