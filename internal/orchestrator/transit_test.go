package orchestrator

import (
	"fmt"
	"slices"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// publishes has a tenant published by the gateways of nodes.
func publishes(m *cache, revision int64, tenant string, nodes ...string) {
	t := &pilasterv1.Tenant{Name: tenant, Changes: uint64(revision)}
	for i, node := range nodes {
		t.Publications = append(t.Publications, &pilasterv1.Publication{Name: fmt.Sprint("p", i), Node: node})
	}
	m.apply(store.Batch{Revision: revision, Events: []store.Event{{Tenant: t}}})
}

// heard is the next message of a stream in a few words: what the node carries where its record came, tenants, which of
// these are whole, apps, deleted ones.
func heard(f *subscriber) string {
	if f.queue.len() == 0 {
		return "nothing"
	}
	r := f.queue.next()
	node, tenants, apps := r.GetDelta().GetNode(), r.GetDelta().GetTenants(), r.GetDelta().GetApps()
	if s := r.GetSnapshot(); s != nil {
		node, tenants, apps = s.Node, s.Tenants, s.Apps
	}
	carries := "-"
	if node != nil {
		carries = fmt.Sprint(node.Carries)
	}
	var names []string
	for _, t := range tenants {
		names = append(names, t.Name)
	}
	slices.Sort(names)
	whole := r.GetDelta().GetWholeTenants()
	slices.Sort(whole)
	return fmt.Sprintf("%s%v%v%d%v", carries, names, whole, len(apps), r.GetDelta().GetDeletedTenants())
}

func want(t *testing.T, f *subscriber, messages ...string) {
	t.Helper()
	for _, want := range append(messages, "nothing") {
		if got := heard(f); got != want {
			t.Errorf("heard %s, want %s", got, want)
		}
	}
}

// TestCarried: a node is told what it carries as that changes, and has the news of it meanwhile, whole from the
// beginning.
func TestCarried(t *testing.T) {
	m, _ := newTestModel()
	app(m, 11, "red")
	f, _ := testFollow(m, 0, "blue")
	want(t, f, "[][blue][]0[]")

	publishes(m, 12, "red", "n2")
	want(t, f)
	publishes(m, 13, "red", "n2", "n1", "n1")
	want(t, f, "[red][red][red]1[]")
	app(m, 14, "red")
	want(t, f, "-[][]1[]")
	publishes(m, 15, "red", "n1")
	want(t, f, "[red][red][]0[]")

	publishes(m, 16, "blue", "n1") // which it hosts
	want(t, f, "[blue red][blue blue][blue]0[]")
	m.rehost(f, &pilasterv1.FollowRequest{})
	app(m, 17, "blue")
	want(t, f, "-[][]1[]")
	m.rehost(f, &pilasterv1.FollowRequest{IncompleteTenants: []string{"blue", "green"}})
	want(t, f, "-[blue][blue]1[]")

	publishes(m, 18, "blue")
	want(t, f, "[red][blue][]0[]")
	app(m, 19, "blue")
	want(t, f)
	m.apply(store.Batch{Revision: 20, Events: []store.Event{{DeletedTenant: "red"}}})
	want(t, f, "[][][]0[red]")
	publishes(m, 21, "red")
	want(t, f)
	m.apply(store.Batch{Revision: 22, Events: []store.Event{{Node: m.nodes["n1"]}}})
	want(t, f, "[][][]0[]")
}

// TestCarriedResumes: what a node carried before comes as it changed, what it did not, or what is another by now,
// whole.
func TestCarriedResumes(t *testing.T) {
	m, _ := newTestModel()
	publishes(m, 11, "red", "n1")
	app(m, 12, "red")
	publishes(m, 13, "green", "n1")
	for _, c := range []struct {
		name     string
		resume   int64
		carried  []string
		messages []string
	}{
		{"with nothing", 0, []string{"red"}, []string{"[green red][green red][]1[]"}},
		{"with one", 11, []string{"red"}, []string{"-[][]1[]", "[green red][green][green]0[]"}},
		{"with what it had not heard whole", 11, nil, []string{"[green red][green red][green red]1[]"}},
		{"with all", 13, []string{"red", "green"}, []string{"[green red][][]0[]"}},
		{"with more", 13, []string{"red", "green", "blue"}, []string{"[green red][][]0[]"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := m.subscribe(
				testNode(1),
				store.Session{},
				&pilasterv1.FollowRequest{ResumeRevision: c.resume, CarriedTenants: c.carried},
				func(error) {},
			)
			want(t, f, c.messages...)
			app(m, m.revision+1, "red")
			want(t, f, "-[][]1[]")
			m.apps["red"] = map[uint32]*pilasterv1.App{12: {Tenant: "red", Id: 12}}
			m.history, m.revision = m.history[:3], 13
		})
	}
	m.apply(store.Batch{Revision: 20, Events: []store.Event{{DeletedTenant: "red"}}})
	publishes(m, 21, "red", "n1")
	f := m.subscribe(
		testNode(1),
		store.Session{},
		&pilasterv1.FollowRequest{ResumeRevision: 13, CarriedTenants: []string{"red", "green"}},
		func(error) {},
	)
	want(t, f, "-[][]0[red]", "[green red][red][red]0[]")
}

// TestPublishedTenantIsKnown: the node whose gateway publishes a container hears of its tenant and may ask where its
// containers are, though it has none; with the publication that ends.
func TestPublishedTenantIsKnown(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	if _, err := op.CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: "green", Network: "nimitz", Overlays: []*pilasterv1.Overlay{{Cidr: "fd12:3456::/48", NodeBits: 80}}})); err != nil {
		t.Fatal(err)
	}
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n2, "green", "web")
	if _, err := n2.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green"})); err != nil {
		t.Fatal(err)
	}
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Gateway: true})); err != nil {
		t.Fatal(err)
	}
	f := follow(t, n1, hosting())
	if r := f.next(t).GetSnapshot(); r == nil || len(r.Tenants) != 0 || len(r.Node.Carries) != 0 {
		t.Fatalf("first it heard %v", r)
	}
	ask := connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: "green"})
	_, err := n1.ListMappings(t.Context(), ask)
	wantCode(t, err, connect.CodePermissionDenied)

	if _, err := op.CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{Service: &pilasterv1.Service{Tenant: "green", Name: "storage", Virtual: "fd09::7", Real: "2001:db8::9"}})); err != nil {
		t.Fatal(err)
	}
	made, err := op.CreatePublication(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.CreatePublicationRequest{
				Publication: &pilasterv1.Publication{
					Tenant:    "green",
					Name:      "web",
					Container: "fd12:3456::5",
					Node:      "n1",
				},
			},
		),
	)
	if err != nil || made.Msg.Publication.Tenant != "green" {
		t.Fatalf("published %v, %v", made, err)
	}
	d := f.next(t).GetDelta()
	if got := d.GetNode().GetCarries(); len(got) != 1 || got[0] != "green" || len(d.Tenants) != 1 || len(d.Apps) != 1 ||
		len(d.WholeTenants) != 1 {
		t.Fatalf("then it heard %v", d)
	}
	if is := d.Tenants[0]; len(is.Services) != 1 || is.Services[0].Real != "2001:db8::9" || len(is.Publications) != 1 ||
		is.Publications[0].Underlay != made.Msg.Publication.Underlay ||
		is.Publications[0].Tenant != "" {
		t.Errorf("the tenant is %v", is)
	}
	if resp, err := n1.ListMappings(t.Context(), ask); err != nil || len(resp.Msg.Mappings) != 1 {
		t.Errorf("asked where its containers are: %v, %v", resp, err)
	}
	if got, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "green"})); err != nil ||
		len(got.Msg.Hosting) != 1 ||
		got.Msg.Hosting[0].Node != "n2" {
		t.Errorf("it counts as one that hosts: %v, %v", got, err)
	}
	_, err = op.CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)
	_, err = op.CreatePublication(t.Context(), connect.NewRequest(&pilasterv1.CreatePublicationRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)

	if _, err := op.DeletePublication(t.Context(), connect.NewRequest(&pilasterv1.DeletePublicationRequest{Tenant: "green", Name: "web"})); err != nil {
		t.Fatal(err)
	}
	if d := f.next(t).GetDelta(); d.GetNode() == nil || len(d.Node.Carries) != 0 {
		t.Errorf("at last it heard %v", d)
	}
	_, err = n1.ListMappings(t.Context(), ask)
	wantCode(t, err, connect.CodePermissionDenied)
}
