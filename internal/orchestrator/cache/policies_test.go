package cache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

func policyEvent(tenant, name, document string) store.Event {
	return store.Event{
		Policy: &pilasterv1.Policy{
			Tenant:    tenant,
			Kind:      "NetworkPolicy",
			Namespace: "shop",
			Name:      name,
			Document:  document,
		},
	}
}

func endedPolicy(tenant, name string) store.Event {
	return store.Event{
		EndedPolicy: &pilasterv1.Policy{Tenant: tenant, Kind: "NetworkPolicy", Namespace: "shop", Name: name},
	}
}

// hostingEvent is a report of a node with overrides, each as "ADDRESS=APP".
func hostingEvent(tenant, node string, overrides ...string) store.Event {
	h := &pilasterv1.Hosting{Tenant: tenant, Node: node}
	for _, o := range overrides {
		var app uint32
		address, number, _ := strings.Cut(o, "=")
		fmt.Sscan(number, &app)
		h.Overrides = append(h.Overrides, &pilasterv1.Override{Address: address, App: app})
	}
	return store.Event{Hosting: h}
}

// policyChanges lists the policies and overrides in a message, sorted: + before a new or changed one, - before an ended
// one, * before a tenant whose policies are complete in the message.
func policyChanges(r *pilasterv1.FollowResponse) string {
	d := r.GetDelta()
	if s := r.GetSnapshot(); s != nil {
		d = &pilasterv1.Delta{Policies: s.Policies, Overrides: s.Overrides, WholePolicies: s.WholePolicies}
	}
	var words []string
	for _, name := range d.GetWholePolicies() {
		words = append(words, "*"+name)
	}
	for _, p := range d.GetPolicies() {
		words = append(words, "+"+p.Tenant+"/"+p.Name+"="+p.Document)
	}
	for _, p := range d.GetEndedPolicies() {
		words = append(words, "-"+p.Tenant+"/"+p.Name)
	}
	for _, o := range d.GetOverrides() {
		words = append(words, fmt.Sprintf("+%s %s=%d", o.Tenant, o.Address, o.App))
	}
	for _, o := range d.GetEndedOverrides() {
		words = append(words, "-"+o.Tenant+" "+o.Address)
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

func wantPolicyChanges(t *testing.T, f *Subscriber, messages ...string) {
	t.Helper()
	for _, want := range messages {
		if f.Queue.Len() == 0 {
			t.Errorf("no message, want %q", want)
		} else if got := policyChanges(f.Queue.Next()); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for f.Queue.Len() > 0 {
		t.Errorf("got %q, want no further message", policyChanges(f.Queue.Next()))
	}
}

func (m *Cache) applyNext(events ...store.Event) {
	m.Apply(store.Batch{Revision: m.Revision + 1, Events: events})
}

// A node receives the policies of the tenants that it hosts, not those of its transit tenants.
func TestPoliciesOfHostedTenants(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0, "blue")
	wantPolicyChanges(t, f, "*blue")
	m.applyNext(policyEvent("blue", "a", "1"), policyEvent("blue", "b", "1"), policyEvent("red", "c", "1"))
	wantPolicyChanges(t, f, "+blue/a=1, +blue/b=1")
	m.applyNext(policyEvent("red", "d", "1"))
	wantPolicyChanges(t, f)
	m.applyNext(policyEvent("blue", "a", "2"), endedPolicy("blue", "b"))
	wantPolicyChanges(t, f, "+blue/a=2, -blue/b")

	publish(m, m.Revision+1, "red", "n1") // the transit tenant red is sent without its policies
	wantPolicyChanges(t, f, "")
	m.applyNext(policyEvent("red", "c", "2"))
	wantPolicyChanges(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantPolicyChanges(t, f, "*red, +red/c=2, +red/d=1")
	m.applyNext(policyEvent("red", "c", "3"))
	wantPolicyChanges(t, f, "+red/c=3")
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}})
	m.applyNext(policyEvent("red", "c", "4"))
	wantPolicyChanges(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, IncompleteTenants: []string{"blue", "red"}})
	wantPolicyChanges(t, f, "*blue, +blue/a=2")

	m.applyNext(store.Event{DeletedTenant: "red"}, endedPolicy("red", "c"), endedPolicy("red", "d"))
	wantPolicyChanges(t, f, "")
	m.applyNext(store.Event{Tenant: &pilasterv1.Tenant{Name: "red"}})
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantPolicyChanges(t, f, "*red")
}

// A stream that resumes receives the missed events of policies, or all policies.
func TestPoliciesResume(t *testing.T) {
	m, _ := newTestCache()
	m.applyNext(
		policyEvent("blue", "a", "1"),
		policyEvent("blue", "b", "1"),
		policyEvent("red", "c", "1"),
		hostingEvent("blue", "n2", "x=5"),
	)
	m.applyNext(policyEvent("blue", "b", "2"))
	m.applyNext(hostingEvent("blue", "n2"), endedPolicy("blue", "a"))
	for _, c := range []struct {
		name       string
		resume     int64
		hosted     string
		incomplete []string
		want       []string
	}{
		{"without a revision", 0, "blue", nil, []string{"*blue, +blue/b=2"}},
		{"after the first batch", 11, "blue", nil, []string{"+blue/b=2", "-blue x, -blue/a", ""}},
		{"after all batches", 13, "blue", nil, []string{""}},
		{"with an incomplete tenant", 13, "blue red", []string{"red"}, []string{"*red, +red/c=1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := m.Subscribe(
				testNode(1),
				store.Session{},
				&pilasterv1.FollowRequest{
					ResumeRevision:    c.resume,
					HostedTenants:     strings.Fields(c.hosted),
					IncompleteTenants: c.incomplete,
				},
				func(error) {},
			)
			wantPolicyChanges(t, f, c.want...)
		})
	}
}

// Nodes that host a tenant receive the changes of its overrides. Overrides end with the report of their node.
func TestOverridesOfHostedTenants(t *testing.T) {
	m, _ := newTestCache()
	f, _ := testFollow(m, 0, "blue")
	wantPolicyChanges(t, f, "*blue")
	m.applyNext(hostingEvent("blue", "n2", "x=5", "y=6"), hostingEvent("red", "n2", "z=7"))
	wantPolicyChanges(t, f, "+blue x=5, +blue y=6")
	m.applyNext(hostingEvent("blue", "n2", "x=5", "y=6"))
	wantPolicyChanges(t, f)
	m.applyNext(hostingEvent("blue", "n2", "y=8", "w=9"))
	wantPolicyChanges(t, f, "+blue w=9, +blue y=8, -blue x")
	m.applyNext(hostingEvent("blue", "n3", "v=1"))
	wantPolicyChanges(t, f, "+blue v=1")
	m.applyNext(store.Event{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n2"}})
	wantPolicyChanges(t, f, "-blue w, -blue y")
	m.applyNext(store.Event{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n2"}})
	wantPolicyChanges(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantPolicyChanges(t, f, "*red, +red z=7")
	again, _ := testFollow(m, 0, "blue", "red")
	wantPolicyChanges(t, again, "*blue, *red, +blue v=1, +red z=7")
}

// A stream that begins does not record overrides again that the store already has.
func TestOverridesAreRecordedOnce(t *testing.T) {
	m, _ := newTestCache()
	report := hostingEvent("blue", "n1", "x=5").Hosting
	m.applyNext(
		store.Event{Hosting: proto.CloneOf(report)},
		store.Event{Tenant: &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1}}}},
	)
	report.Node = ""
	first := &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, Hosting: []*pilasterv1.Hosting{report}}
	f := m.Subscribe(testNode(1), store.Session{}, first, func(error) {})
	if add, _ := m.Rehost(f, first); len(add) != 0 {
		t.Errorf("a report that the store has is recorded again: %v", add)
	}
	report = proto.CloneOf(report)
	report.Overrides[0].App = 6
	next := &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, Hosting: []*pilasterv1.Hosting{report}}
	if add, _ := m.Rehost(f, next); len(add) != 1 {
		t.Errorf("a changed override is not recorded: %v, want one report", add)
	}
}

// Long policies use more of the history than short records.
func TestResumeAfterLongPolicies(t *testing.T) {
	m, _ := newTestCache()
	long := strings.Repeat("x", (64 << 10))
	const fit = MaxHistoryCost / ((64<<10)/512 + 1)
	for range fit {
		m.applyNext(policyEvent("red", "a", long))
	}
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetDelta() == nil {
		t.Error("got a snapshot, want a delta: the history has all events")
	}
	m.applyNext(policyEvent("red", "a", long))
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("got a delta, want a snapshot: the policies exceed the limit of the history")
	}
}

// Parts splits an event that exceeds maxPart into messages of about maxPart. The last message has the revision. All
// messages together have the content of the event.
func TestParts(t *testing.T) {
	for _, c := range []struct {
		name                string
		policies, overrides int // of each tenant
		document            int // bytes of each
		want                int
	}{
		{"short", 3, 3, 100, 1},
		{"just over", 65, 0, maxPart / 64, 3}, // the first message has only the tenants
		{"one policy per message", 3, 0, 2 * maxPart, 4},
		{"overrides alone", 0, 110_000, 0, 3},
		{"both", 80, 1000, maxPart / 64, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, _ := newTestCache()
			var events []store.Event
			for i := range c.policies {
				events = append(events, policyEvent("blue", fmt.Sprint("p", i), strings.Repeat("x", c.document)))
			}
			var overrides []string
			for i := range c.overrides {
				overrides = append(overrides, fmt.Sprintf("fd70:696c:6100:1:0:100:500:%x=7", i+1))
			}
			m.applyNext(append(events, hostingEvent("blue", "n2", overrides...))...)
			f, _ := testFollow(m, 0, "blue")
			whole := f.Queue.Next()
			snapshot := proto.CloneOf(whole.GetSnapshot())
			revision := whole.Revision
			all := Parts(whole)
			got := proto.CloneOf(all[0].GetSnapshot())
			for i, part := range all {
				last := i == len(all)-1
				if part.More == last || (part.Revision == revision) != last {
					t.Errorf(
						"part %d of %d: more %v, revision %d; want revision %d in the last part only",
						i,
						len(all),
						part.More,
						part.Revision,
						revision,
					)
				}
				if d := part.GetDelta(); d != nil {
					got.Policies = append(got.Policies, d.Policies...)
					got.Overrides = append(got.Overrides, d.Overrides...)
					if size := proto.Size(part); size > maxPart+1000 && len(d.Policies) != 1 {
						t.Errorf("part %d has %d bytes, want about %d", i, size, maxPart)
					}
				}
			}
			if len(all) != c.want || !proto.Equal(got, snapshot) || len(got.Policies) != c.policies ||
				len(got.Overrides) != c.overrides {
				t.Errorf(
					"%d parts with %d policies and %d overrides, want %d with %d and %d",
					len(all),
					len(got.Policies),
					len(got.Overrides),
					c.want,
					c.policies,
					c.overrides,
				)
			}
		})
	}
	d := response(
		7,
		&pilasterv1.Delta{
			Policies:      []*pilasterv1.Policy{{Tenant: "blue", Document: strings.Repeat("x", maxPart)}},
			EndedPolicies: []*pilasterv1.Policy{{Name: "b"}},
		},
	)
	before := proto.CloneOf(d)
	if all := Parts(d); len(all) != 2 || len(all[0].GetDelta().EndedPolicies) != 1 ||
		len(all[1].GetDelta().Policies) != 1 ||
		all[1].Revision != 7 {
		t.Errorf("%d parts of a delta, %.300v; want the ended policy, then the long policy", len(all), all)
	}
	if !proto.Equal(d, before) {
		t.Error("Parts modified its argument, which other streams may share")
	}
}

// Each node that hosts a tenant receives one message per batch; other nodes receive none. Policies do not change that.
func TestMessagesOfPolicies(t *testing.T) {
	m := New("self", func(string) {})
	var events []store.Event
	const nodes, hosts = 20, 7
	for i := range nodes {
		n := testNode(i)
		events = append(events, store.Event{Node: &pilasterv1.Node{Name: n.Name, Uuid: n.UUID}})
	}
	m.Apply(
		store.Batch{
			Revision: 10,
			Whole:    true,
			Events: append(
				events,
				store.Event{Tenant: &pilasterv1.Tenant{Name: "blue"}},
				store.Event{Tenant: &pilasterv1.Tenant{Name: "red"}},
			),
		},
	)
	var streams []*Subscriber
	for i := range nodes {
		tenant := "red"
		if i < hosts {
			tenant = "blue"
		}
		f := m.Subscribe(
			testNode(i),
			store.Session{},
			&pilasterv1.FollowRequest{HostedTenants: []string{tenant}},
			context.CancelCauseFunc(func(error) {}),
		)
		f.Queue.Next() // the snapshot
		streams = append(streams, f)
	}
	for _, c := range []struct {
		name   string
		events []store.Event
	}{
		{"an app", []store.Event{{App: &pilasterv1.App{Tenant: "blue", Id: 1}}}},
		{"policies", []store.Event{policyEvent("blue", "a", "1"), policyEvent("blue", "b", "1")}},
		{"an app, with policies", []store.Event{{App: &pilasterv1.App{Tenant: "blue", Id: 2}}}},
		{"an override", []store.Event{hostingEvent("blue", "n1", "x=1")}},
		{"ended policies", []store.Event{endedPolicy("blue", "a"), endedPolicy("blue", "b")}},
	} {
		m.applyNext(c.events...)
		for i, f := range streams {
			got, want := 0, 0
			for ; f.Queue.Len() > 0; got++ {
				f.Queue.Next()
			}
			if i < hosts {
				want = 1
			}
			if got != want {
				t.Errorf("%s: node %d received %d messages, want %d", c.name, i, got, want)
			}
		}
	}
}

// A message that several streams share has the same content as a message that is made for each stream.
func TestSharedMessages(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	m := New("self", func(string) {})
	events := []store.Event{{Tenant: &pilasterv1.Tenant{Name: "blue"}}, {Tenant: &pilasterv1.Tenant{Name: "red"}}}
	const nodes = 12
	for i := range nodes {
		events = append(events, store.Event{Node: &pilasterv1.Node{Name: testNode(i).Name, Uuid: testNode(i).UUID}})
	}
	m.Apply(store.Batch{Revision: 10, Whole: true, Events: events})
	var streams []*Subscriber
	for i := range nodes {
		hosts := [][]string{{"blue"}, {"red"}, {"blue", "red"}, nil}[i%4]
		f := m.Subscribe(
			testNode(i),
			store.Session{},
			&pilasterv1.FollowRequest{HostedTenants: hosts, WithoutMappings: i >= nodes/2},
			func(error) {},
		)
		f.Queue.Next() // the snapshot
		streams = append(streams, f)
	}
	m.setTenants(streams[3], nil, map[string]bool{"blue": true})
	shared := 0
	for revision := int64(11); revision < 1000; revision++ {
		b := store.Batch{Revision: revision}
		for range 1 + r.IntN(3) {
			name := []string{"blue", "red"}[r.IntN(2)]
			b.Events = append(b.Events, []store.Event{
				{App: &pilasterv1.App{Tenant: name, Id: uint32(revision)}},
				policyEvent(name, "a", fmt.Sprint(revision)),
				endedPolicy(name, "b"),
				{Mapping: &pilasterv1.Mapping{
					Tenant: name, To: "10.0.0.5/32", Node: "fd70:696c:6100:1::/64", Name: testNode(0).Name, Key: "k",
				}},
			}[r.IntN(4)])
		}
		m.Apply(b)
		had := map[*pilasterv1.FollowResponse]bool{}
		for i, f := range streams {
			got := f.Queue.Next()
			if want, any := f.delta(b); any != (got != nil) || any && !proto.Equal(got.GetDelta(), want) ||
				f.Queue.Len() > 0 {
				t.Fatalf("%v: node %d received %v, want %v", b.Events, i, got, want)
			}
			if had[got] {
				shared++
			}
			had[got] = got != nil
		}
	}
	if shared == 0 {
		t.Error("no two streams had the same message, so the test checked nothing")
	}
}
