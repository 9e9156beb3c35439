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

// hostingEvent is of a node that says which of its containers are of another app: "ADDRESS=APP".
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

// ruled is what a message says of policies, in a few words: +new ones, -ended ones, and * before tenants of which they
// are all.
func ruled(r *pilasterv1.FollowResponse) string {
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

func wantRuled(t *testing.T, f *Subscriber, messages ...string) {
	t.Helper()
	for _, want := range messages {
		if f.Queue.Len() == 0 {
			t.Errorf("heard nothing, want %q", want)
		} else if got := ruled(f.Queue.Next()); got != want {
			t.Errorf("heard %q, want %q", got, want)
		}
	}
	for f.Queue.Len() > 0 {
		t.Errorf("also heard %q", ruled(f.Queue.Next()))
	}
}

func (m *Cache) happens(events ...store.Event) {
	m.Apply(store.Batch{Revision: m.Revision + 1, Events: events})
}

// A node is told of the policies of tenants that it hosts, and of no others: not of one that it only carries.
func TestPoliciesAreToldToHosts(t *testing.T) {
	m, _ := newTestModel()
	f, _ := testFollow(m, 0, "blue")
	wantRuled(t, f, "*blue")
	m.happens(policyEvent("blue", "a", "1"), policyEvent("blue", "b", "1"), policyEvent("red", "c", "1"))
	wantRuled(t, f, "+blue/a=1, +blue/b=1")
	m.happens(policyEvent("red", "d", "1"))
	wantRuled(t, f)
	m.happens(policyEvent("blue", "a", "2"), endedPolicy("blue", "b"))
	wantRuled(t, f, "+blue/a=2, -blue/b")

	publishes(m, m.Revision+1, "red", "n1") // red is carried, which is told whole but for this
	wantRuled(t, f, "")
	m.happens(policyEvent("red", "c", "2"))
	wantRuled(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantRuled(t, f, "*red, +red/c=2, +red/d=1")
	m.happens(policyEvent("red", "c", "3"))
	wantRuled(t, f, "+red/c=3")
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}})
	m.happens(policyEvent("red", "c", "4"))
	wantRuled(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, IncompleteTenants: []string{"blue", "red"}})
	wantRuled(t, f, "*blue, +blue/a=2")

	m.happens(store.Event{DeletedTenant: "red"}, endedPolicy("red", "c"), endedPolicy("red", "d"))
	wantRuled(t, f, "")
	m.happens(store.Event{Tenant: &pilasterv1.Tenant{Name: "red"}})
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantRuled(t, f, "*red")
}

// Followed again, a node hears what it missed of policies, or all of them.
func TestPoliciesResume(t *testing.T) {
	m, _ := newTestModel()
	m.happens(
		policyEvent("blue", "a", "1"),
		policyEvent("blue", "b", "1"),
		policyEvent("red", "c", "1"),
		hostingEvent("blue", "n2", "x=5"),
	)
	m.happens(policyEvent("blue", "b", "2"))
	m.happens(hostingEvent("blue", "n2"), endedPolicy("blue", "a"))
	for _, c := range []struct {
		name       string
		resume     int64
		hosted     string
		incomplete []string
		want       []string
	}{
		{"with nothing", 0, "blue", nil, []string{"*blue, +blue/b=2"}},
		{"after the first", 11, "blue", nil, []string{"+blue/b=2", "-blue x, -blue/a", ""}},
		{"with all", 13, "blue", nil, []string{""}},
		{"with a tenant it does not know", 13, "blue red", []string{"red"}, []string{"*red, +red/c=1"}},
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
			wantRuled(t, f, c.want...)
		})
	}
}

// What a node says of its containers is told to nodes that host the tenant as it changes, and goes with what the node
// says.
func TestOverridesAreToldToHosts(t *testing.T) {
	m, _ := newTestModel()
	f, _ := testFollow(m, 0, "blue")
	wantRuled(t, f, "*blue")
	m.happens(hostingEvent("blue", "n2", "x=5", "y=6"), hostingEvent("red", "n2", "z=7"))
	wantRuled(t, f, "+blue x=5, +blue y=6")
	m.happens(hostingEvent("blue", "n2", "x=5", "y=6"))
	wantRuled(t, f)
	m.happens(hostingEvent("blue", "n2", "y=8", "w=9"))
	wantRuled(t, f, "+blue w=9, +blue y=8, -blue x")
	m.happens(hostingEvent("blue", "n3", "v=1"))
	wantRuled(t, f, "+blue v=1")
	m.happens(store.Event{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n2"}})
	wantRuled(t, f, "-blue w, -blue y")
	m.happens(store.Event{EndedHosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n2"}})
	wantRuled(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantRuled(t, f, "*red, +red z=7")
	again, _ := testFollow(m, 0, "blue", "red")
	wantRuled(t, again, "*blue, *red, +blue v=1, +red z=7")
}

// What the store has of a node's containers already is not noted again when its stream begins.
func TestOverridesAreNotedOnce(t *testing.T) {
	m, _ := newTestModel()
	said := hostingEvent("blue", "n1", "x=5").Hosting
	m.happens(
		store.Event{Hosting: proto.CloneOf(said)},
		store.Event{Tenant: &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1}}}},
	)
	said.Node = ""
	first := &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, Hosting: []*pilasterv1.Hosting{said}}
	f := m.Subscribe(testNode(1), store.Session{}, first, func(error) {})
	if add, _ := m.Rehost(f, first); len(add) != 0 {
		t.Errorf("what is noted is noted again: %v", add)
	}
	said = proto.CloneOf(said)
	said.Overrides[0].App = 6
	if add, _ := m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, Hosting: []*pilasterv1.Hosting{said}}); len(
		add,
	) != 1 {
		t.Errorf("what is new is not noted: %v", add)
	}
}

// Long policies are forgotten sooner than short records.
func TestResumeAfterLongPolicies(t *testing.T) {
	m, _ := newTestModel()
	long := strings.Repeat("x", (64 << 10))
	const fit = MaxHistoryCost / ((64<<10)/512 + 1)
	for range fit {
		m.happens(policyEvent("red", "a", long))
	}
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetDelta() == nil {
		t.Error("everything since is remembered, yet a snapshot came")
	}
	m.happens(policyEvent("red", "a", long))
	if f, _ := testFollow(m, 10, "blue"); f.Queue.Next().GetSnapshot() == nil {
		t.Error("more is remembered than there is room for")
	}
}

// An event that is longer than a message comes in several, none of them much longer than one may be, of which the last
// has the revision; together they are the event.
func TestParts(t *testing.T) {
	for _, c := range []struct {
		name                string
		policies, overrides int // of each tenant
		document            int // bytes of each
		want                int
	}{
		{"short", 3, 3, 100, 1},
		{"just over", 65, 0, maxPart / 64, 3}, // the first has the tenants alone
		{"of single ones", 3, 0, 2 * maxPart, 4},
		{"overrides alone", 0, 110_000, 0, 3},
		{"both", 80, 1000, maxPart / 64, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, _ := newTestModel()
			var events []store.Event
			for i := range c.policies {
				events = append(events, policyEvent("blue", fmt.Sprint("p", i), strings.Repeat("x", c.document)))
			}
			var overrides []string
			for i := range c.overrides {
				overrides = append(overrides, fmt.Sprintf("fd70:696c:6100:1:0:100:500:%x=7", i+1))
			}
			m.happens(append(events, hostingEvent("blue", "n2", overrides...))...)
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
						"part %d of %d: more %v, revision %d of %d",
						i,
						len(all),
						part.More,
						part.Revision,
						revision,
					)
				}
				if d := part.GetDelta(); d != nil {
					got.Policies, got.Overrides = append(
						got.Policies,
						d.Policies...), append(
						got.Overrides,
						d.Overrides...)
					if size := proto.Size(part); size > maxPart+1000 && len(d.Policies) != 1 {
						t.Errorf("part %d has %d bytes", i, size)
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
	as := proto.CloneOf(d)
	if all := Parts(d); len(all) != 2 || len(all[0].GetDelta().EndedPolicies) != 1 ||
		len(all[1].GetDelta().Policies) != 1 ||
		all[1].Revision != 7 {
		t.Errorf("a delta is in parts %.300v", all)
	}
	if !proto.Equal(d, as) {
		t.Error("what other streams may have as well was written to")
	}
}

// Each change is a message to each node that hosts the tenant, and none to others, whether the tenant has policies or
// not.
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
		{"the end of policies", []store.Event{endedPolicy("blue", "a"), endedPolicy("blue", "b")}},
	} {
		m.happens(c.events...)
		for i, f := range streams {
			heard, want := 0, 0
			for ; f.Queue.Len() > 0; heard++ {
				f.Queue.Next()
			}
			if i < hosts {
				want = 1
			}
			if heard != want {
				t.Errorf("%s: node %d heard %d messages, want %d", c.name, i, heard, want)
			}
		}
	}
}

// Many streams have the same message; whatever happens, it says what each of them would be told by itself.
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
				{Mapping: &pilasterv1.Mapping{Tenant: name, To: "10.0.0.5/32", Node: "fd70:696c:6100:1::/64", Name: testNode(0).Name, Key: "k"}},
			}[r.IntN(4)])
		}
		m.Apply(b)
		had := map[*pilasterv1.FollowResponse]bool{}
		for i, f := range streams {
			got := f.Queue.Next()
			if want, any := f.delta(b); any != (got != nil) || any && !proto.Equal(got.GetDelta(), want) ||
				f.Queue.Len() > 0 {
				t.Fatalf("%v: node %d is told %v, want %v", b.Events, i, got, want)
			}
			if had[got] {
				shared++
			}
			had[got] = got != nil
		}
	}
	if shared == 0 {
		t.Error("no two streams had the same message: this proved nothing")
	}
}
