package orchestrator

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

func changes(t *testing.T, c *join.Client, tenant string, after int64) (*pilasterv1.ListMappingsResponse, error) {
	t.Helper()
	resp, err := c.ListMappings(
		t.Context(),
		connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: tenant, AfterRevision: after}),
	)
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

// inWords is what an answer has, in order: prefixes with their nodes, and with their keys where they are told.
func inWords(r *pilasterv1.ListMappingsResponse) string {
	var all []string
	for _, m := range r.Mappings {
		all = append(all, strings.TrimSpace(m.To+" "+m.Name+" "+m.Key))
	}
	for _, m := range r.EndedMappings {
		all = append(all, "not "+m.To)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// A node that asks is told what has changed since it asked the last time, before which it was given; its stream tells
// it nothing of that.
func TestChangedMappings(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	createNimitz(t, s, "lime", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "green", "web")
	resolve(t, n2, "green", "web")
	resolve(t, n2, "lime", "web")
	f := follow(t, n1, &pilasterv1.FollowRequest{HostedTenants: []string{"green"}, WithoutMappings: true})
	f.next(t)
	page, err := list(t, n1, "green")
	if err != nil {
		t.Fatal(err)
	}
	after := page.Revision
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, ""},
		{func() {
			allocate(t, n1, "green", "c1/eth0")
			allocate(t, n2, "green", "c2/eth0")
			allocate(t, n2, "lime", "")
		}, "10.0.0.2/32 n1 c1/eth0, 10.0.0.3/32 n2"},
		{func() {
			allocate(t, n2, "green", "c3/eth0")
			for _, key := range []string{"c2/eth0", "c3/eth0"} {
				if _, err := n2.Free(t.Context(), connect.NewRequest(&pilasterv1.FreeRequest{Tenant: "green", Key: key})); err != nil {
					t.Fatal(err)
				}
			}
		}, "not 10.0.0.3/32, not 10.0.0.4/32"},
	} {
		step.do()
		r, err := changes(t, n1, "green", after)
		if err != nil || inWords(r) != step.want || r.NextPageToken != "" || r.Revision < after {
			t.Errorf("step %d: %q at %d, %v; want %q", i, inWords(r), r.GetRevision(), err, step.want)
		}
		after = r.GetRevision()
	}
	resolve(t, n1, "green", "db")
	if d := f.next(t).GetDelta(); len(d.GetApps()) != 1 || len(d.GetMappings())+len(d.GetEndedMappings()) > 0 {
		t.Errorf("the stream tells %v", d)
	}

	_, err = changes(t, n1, "lime", after)
	wantCode(t, err, connect.CodePermissionDenied)
	for _, unknown := range []int64{1, after + 1000, -1} {
		_, err = changes(t, n1, "green", unknown)
		if wantCode(t, err, connect.CodeAborted); err != nil &&
			!strings.Contains(err.Error(), "begin with the first page") {
			t.Errorf("after revision %d: %v", unknown, err)
		}
	}
	_, err = n1.ListMappings(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.ListMappingsRequest{Tenant: "green", AfterRevision: after, PageToken: "7:0a000002/32"},
		),
	)
	wantCode(t, err, connect.CodeInvalidArgument)
}

// Such a query is one of those of which a tenant has so many a second, and is counted apart.
func TestChangedMappingsAreThrottledAndCounted(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Lists = 3
	s := start(t, c)
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1 := registered(t, s, testNode(1))
	resolve(t, n1, "green", "web")
	page, err := list(t, n1, "green")
	if err != nil {
		t.Fatal(err)
	}
	answered, refused := 0, 0
	for range 12 {
		if _, err := changes(t, n1, "green", page.Revision); err != nil {
			wantCode(t, err, connect.CodeResourceExhausted)
			refused++
		} else {
			answered++
		}
	}
	if refused == 0 {
		t.Error("13 queries at once are not too many")
	}
	wantRefusals(t, s, limitLists, refused)
	for event, want := range map[string]int{"": 1, eventChanges: answered} {
		if n := metric(t, s.config.RunDir, fmt.Sprintf("pilaster_orchestrator_messages_total{direction=%q,event=%q,procedure=%q}", sent, event, pilasterv1connect.NodeServiceListMappingsProcedure)); n != want {
			t.Errorf("%d answers of kind %q are counted, want %d", n, event, want)
		}
	}
}

// Of each prefix the last change counts, however often it went from node to node; what is forgotten is not told in
// part.
func TestChanged(t *testing.T) {
	m, _ := newTestModel()
	has := func(to, node string) store.Event {
		return store.Event{Mapping: &pilasterv1.Mapping{Tenant: "green", To: to, Name: node, Key: "k"}}
	}
	gone := func(to string) store.Event {
		return store.Event{EndedMapping: &pilasterv1.Mapping{Tenant: "green", To: to}}
	}
	m.apply(store.Batch{Revision: 11, Events: []store.Event{has("10.0.0.1/32", "n1"), has("10.0.0.2/32", "n2")}})
	m.apply(
		store.Batch{
			Revision: 12,
			Events:   []store.Event{gone("10.0.0.1/32"), gone("10.0.0.2/32"), has("10.0.0.2/32", "n3")},
		},
	)
	app(m, 13, "green")
	m.apply(
		store.Batch{
			Revision: 14,
			Events: []store.Event{
				has("10.0.0.1/32", "n4"),
				{Mapping: &pilasterv1.Mapping{Tenant: "lime", To: "10.0.0.9/32"}},
			},
		},
	)
	for after, want := range map[int64]string{10: "10.0.0.1/32 n4, 10.0.0.2/32 n3", 11: "10.0.0.1/32 n4, 10.0.0.2/32 n3", 12: "10.0.0.1/32 n4", 14: ""} {
		if r, ok := m.changed("n1", "green", after); !ok || inWords(r) != want || r.Revision != 14 {
			t.Errorf("after %d: %q, %v, want %q", after, inWords(r), ok, want)
		}
	}
	if r, _ := m.changed("n3", "green", 11); inWords(r) != "10.0.0.1/32 n4, 10.0.0.2/32 n3 k" {
		t.Errorf("n3 is told %q of its own", inWords(r))
	}
	for i := range int64(maxHistory) {
		m.apply(
			store.Batch{Revision: 15 + i, Events: []store.Event{has(fmt.Sprintf("10.1.%d.%d/32", i/256, i%256), "n1")}},
		)
	}
	if _, ok := m.changed("n1", "green", 13); ok {
		t.Error("something of it is forgotten, and it is told")
	}
	if r, ok := m.changed("n1", "green", 14); !ok || len(r.Mappings) != maxHistory {
		t.Errorf("%d mappings, %v", len(r.GetMappings()), ok)
	}
}

// A page comes from memory as long as nothing of its tenant has changed since the first, and what this orchestrator
// knows is as new.
func TestPagesFromMemory(t *testing.T) {
	m, _ := newTestModel()
	has := func(revision int64, tenant string, numbers ...int) {
		b := store.Batch{Revision: revision}
		for _, i := range numbers {
			b.Events = append(
				b.Events,
				store.Event{
					Mapping: &pilasterv1.Mapping{
						Tenant: tenant,
						To:     fmt.Sprintf("10.0.%d.%d/32", i/256, i%256),
						Name:   "n1",
					},
				},
			)
		}
		m.apply(b)
	}
	var many []int
	for i := range store.MappingsPage + 2 {
		many = append(many, i)
	}
	has(11, "green", many...)
	token := func(revision int64, after int) string { return fmt.Sprintf("%d:0a00%04x/32", revision, after) }
	want := func(what, tenant, token string, from, to int) {
		t.Helper()
		page, ok := m.page(tenant, token)
		if ok != (to > from) || len(page.Mappings) != to-from {
			t.Errorf("%s: %d mappings, %v; want %d", what, len(page.Mappings), ok, to-from)
			return
		}
		if ok && (page.Mappings[0].To != fmt.Sprintf("10.0.%d.%d/32", from/256, from%256) || page.Next != "") {
			t.Errorf("%s: begins with %v and goes on at %q", what, page.Mappings[0], page.Next)
		}
	}
	want("a page", "green", token(11, 499), 500, 502)
	has(12, "lime", 1)
	want("after a change of another tenant", "green", token(11, 499), 500, 502)
	want("of a later revision", "green", token(12, 499), 500, 502)
	want("of one that is not read yet", "green", token(13, 499), 0, 0)
	want("the first", "green", "", 0, 0)
	want("no tenant", "red", token(12, 499), 0, 0)
	has(13, "green", 502)
	want("after a change", "green", token(12, 499), 0, 0)
	want("after it", "green", token(13, 499), 500, 503)
	m.apply(
		store.Batch{
			Revision: 14,
			Events:   []store.Event{{EndedMapping: &pilasterv1.Mapping{Tenant: "green", To: "10.0.1.246/32"}}},
		},
	)
	want("after one that ended", "green", token(13, 499), 0, 0)
	want("without it", "green", token(14, 499), 500, 502)
}
