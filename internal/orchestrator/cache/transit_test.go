package cache

import (
	"fmt"
	"slices"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// publish makes the tenant a transit tenant of nodes: their gateways publish it.
func publish(m *Cache, revision int64, tenant string, nodes ...string) {
	t := &pilasterv1.Tenant{Name: tenant, Changes: uint64(revision)}
	for i, node := range nodes {
		t.Publications = append(t.Publications, &pilasterv1.Publication{Name: fmt.Sprint("p", i), Node: node})
	}
	m.Apply(store.Batch{Revision: revision, Events: []store.Event{{Tenant: t}}})
}

// nextMessage formats the next message of a stream: the node's transit tenants if the message has the node's record,
// else -; the tenants; the whole ones of these; the number of apps; the deleted tenants.
func nextMessage(f *Subscriber) string {
	if f.Queue.Len() == 0 {
		return "nothing"
	}
	r := f.Queue.Next()
	node, tenants, apps := r.GetDelta().GetNode(), r.GetDelta().GetTenants(), r.GetDelta().GetApps()
	if s := r.GetSnapshot(); s != nil {
		node, tenants, apps = s.Node, s.Tenants, s.Apps
	}
	transit := "-"
	if node != nil {
		transit = fmt.Sprint(node.Carries)
	}
	var names []string
	for _, t := range tenants {
		names = append(names, t.Name)
	}
	slices.Sort(names)
	whole := r.GetDelta().GetWholeTenants()
	slices.Sort(whole)
	return fmt.Sprintf("%s%v%v%d%v", transit, names, whole, len(apps), r.GetDelta().GetDeletedTenants())
}

func want(t *testing.T, f *Subscriber, messages ...string) {
	t.Helper()
	for _, want := range append(messages, "nothing") {
		if got := nextMessage(f); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// A node receives each change of its transit tenants and their updates. A new transit tenant is sent whole.
func TestTransitTenants(t *testing.T) {
	m, _ := newTestCache()
	app(m, 11, "red")
	f, _ := testFollow(m, 0, "blue")
	want(t, f, "[][blue][]0[]")

	publish(m, 12, "red", "n2")
	want(t, f)
	publish(m, 13, "red", "n2", "n1", "n1")
	want(t, f, "[red][red][red]1[]")
	app(m, 14, "red")
	want(t, f, "-[][]1[]")
	publish(m, 15, "red", "n1")
	want(t, f, "[red][red][]0[]")

	publish(m, 16, "blue", "n1") // a tenant that n1 hosts
	want(t, f, "[blue red][blue blue][blue]0[]")
	m.Rehost(f, &pilasterv1.FollowRequest{})
	app(m, 17, "blue")
	want(t, f, "-[][]1[]")
	m.Rehost(f, &pilasterv1.FollowRequest{IncompleteTenants: []string{"blue", "green"}})
	want(t, f, "-[blue][blue]1[]")

	publish(m, 18, "blue")
	want(t, f, "[red][blue][]0[]")
	app(m, 19, "blue")
	want(t, f)
	m.Apply(store.Batch{Revision: 20, Events: []store.Event{{DeletedTenant: "red"}}})
	want(t, f, "[][][]0[red]")
	publish(m, 21, "red")
	want(t, f)
	m.Apply(store.Batch{Revision: 22, Events: []store.Event{{Node: m.Nodes["n1"]}}})
	want(t, f, "[][][]0[]")
}

// A stream that resumes receives the missed updates of the transit tenants that the node already has. It receives new
// transit tenants, and those that were deleted and created again, whole.
func TestTransitTenantsResume(t *testing.T) {
	m, _ := newTestCache()
	publish(m, 11, "red", "n1")
	app(m, 12, "red")
	publish(m, 13, "green", "n1")
	for _, c := range []struct {
		name     string
		resume   int64
		transit  []string
		messages []string
	}{
		{"without a revision", 0, []string{"red"}, []string{"[green red][green red][]1[]"}},
		{"with one tenant", 11, []string{"red"}, []string{"-[][]1[]", "[green red][green][green]0[]"}},
		{"with a tenant that was not sent whole", 11, nil, []string{"[green red][green red][green red]1[]"}},
		{"with all tenants", 13, []string{"red", "green"}, []string{"[green red][][]0[]"}},
		{"with a former transit tenant", 13, []string{"red", "green", "blue"}, []string{"[green red][][]0[]"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := m.Subscribe(
				testNode(1),
				store.Session{},
				&pilasterv1.FollowRequest{ResumeRevision: c.resume, CarriedTenants: c.transit},
				func(error) {},
			)
			want(t, f, c.messages...)
			app(m, m.Revision+1, "red")
			want(t, f, "-[][]1[]")
			m.Apps["red"] = map[uint32]*pilasterv1.App{12: {Tenant: "red", Id: 12}}
			m.history, m.Revision = m.history[:3], 13
		})
	}
	m.Apply(store.Batch{Revision: 20, Events: []store.Event{{DeletedTenant: "red"}}})
	publish(m, 21, "red", "n1")
	f := m.Subscribe(
		testNode(1),
		store.Session{},
		&pilasterv1.FollowRequest{ResumeRevision: 13, CarriedTenants: []string{"red", "green"}},
		func(error) {},
	)
	want(t, f, "-[][]0[red]", "[green red][red][red]0[]")
}
