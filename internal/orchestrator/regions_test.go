package orchestrator

import (
	"net/netip"
	"slices"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
)

// edge joins as a region's Edge Switch.
func edge(t *testing.T, s *Server, n int) *join.Client {
	t.Helper()
	c := dial(t, s, testNode(n))
	if _, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Edge: true})); err != nil {
		t.Fatal(err)
	}
	return c
}

// startRegion starts an orchestrator of one, with its Edge Switch as node 9 and a tenant of each name and CIDR.
func startRegion(t *testing.T, name, base string, tenants ...string) (*Server, *join.Client) {
	t.Helper()
	c := testConfig(t)
	c.Region = name
	if base != "" {
		c.Plan.Base = netip.MustParsePrefix(base)
	}
	s := start(t, c)
	for i := 0; i < len(tenants); i += 2 {
		createNimitz(t, s, tenants[i], &pilasterv1.Overlay{Cidr: tenants[i+1], NodeBits: 24})
	}
	return s, edge(t, s, 9)
}

func exported(t *testing.T, s *Server) *pilasterv1.Region {
	t.Helper()
	resp, err := operator(
		s.config.RunDir,
	).ExportRegion(t.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.Region
}

// imported takes a region in, with those tenants or with all.
func imported(t *testing.T, s *Server, r *pilasterv1.Region, only ...string) {
	t.Helper()
	if _, err := operator(s.config.RunDir).ImportRegion(t.Context(), connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: r, Tenants: only, All: len(only) == 0})); err != nil {
		t.Fatal(err)
	}
}

// TestRegions has nodes told where else their tenants are, and told anew when that changes (NM6).
func TestRegions(t *testing.T) {
	t.Parallel()
	west, switching := startRegion(t, "west", "", "blue", "10.0.0.0/16", "red", "10.0.0.0/16")
	east, _ := startRegion(
		t,
		"east",
		"fd70:696c:6200::/40",
		"other",
		"10.9.0.0/16",
		"blue",
		"10.1.0.0/16",
		"red",
		"10.1.0.0/16",
	)
	people := operator(west.config.RunDir)
	n1 := registered(t, west, testNode(1))
	resolve(t, n1, "blue", "web")
	e := follow(t, switching, hosting())
	if n := e.next(t).GetSnapshot().GetNode(); !n.GetEdge() || len(n.Carries) != 0 {
		t.Errorf("before the import the Edge Switch is %v", n)
	}
	f := follow(t, n1, hosting("blue"))
	if got := f.next(t).GetSnapshot().GetTenants(); len(got) != 1 || len(got[0].Regions) != 0 {
		t.Errorf("before the import: %v", got)
	}
	there := exported(t, east)
	if there.Name != "east" || there.BasePrefix != "fd70:696c:6200::/40" || there.Edge != "fd70:696c:6200:1::/64" ||
		len(there.Tenants) != 3 ||
		there.Tenants[0].Created == nil ||
		there.Tenants[0].Name != "blue" ||
		there.Tenants[0].Vni != 2 {
		t.Errorf("exported %v", there)
	}
	imported(t, west, there, "blue")
	want := &pilasterv1.TenantRegion{
		Name:     "east",
		Cidrs:    []string{"10.1.0.0/16"},
		Edge:     "fd70:696c:6100:1::/64",
		PeerEdge: "fd70:696c:6200:1::/64",
		PeerVni:  2,
	}
	hears := func(what string, want ...*pilasterv1.TenantRegion) {
		t.Helper()
		d := f.next(t).GetDelta()
		same := func(a, b *pilasterv1.TenantRegion) bool { return proto.Equal(a, b) }
		if len(d.GetTenants()) != 1 || d.Tenants[0].Name != "blue" ||
			!slices.EqualFunc(d.Tenants[0].Regions, want, same) {
			t.Errorf("%s: the node hears %v, want %v", what, d, want)
		}
	}
	hears("import", want)
	carries := func(what string, whole []string, carries ...string) {
		t.Helper()
		if d := e.next(t).GetDelta(); !slices.Equal(d.GetNode().GetCarries(), carries) ||
			!slices.Equal(d.GetWholeTenants(), whole) {
			t.Errorf("%s: the Edge Switch hears %v, want %v, and of these %v whole", what, d, carries, whole)
		}
	}
	carries("import", []string{"blue"}, "blue")

	// Who asks hears the same: nodes, people, and nodes that come later.
	resp, err := n1.Resolve(
		t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Labels: map[string]string{"app": "web"}}),
	)
	if err != nil || len(resp.Msg.Tenant.Regions) != 1 || !proto.Equal(resp.Msg.Tenant.Regions[0], want) {
		t.Errorf("resolved %v, %v", resp, err)
	}
	got, err := people.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue"}))
	if err != nil || len(got.Msg.Tenant.Regions) != 1 {
		t.Errorf("people see %v, %v", got, err)
	}
	if red, _, _ := west.cache.Tenant("red"); len(red.Regions) != 0 {
		t.Errorf("red, which was left out, has %v", red.Regions)
	}
	n2 := registered(t, west, testNode(2))
	resolve(t, n2, "blue", "web")
	if s := follow(t, n2, hosting("blue")).next(t).GetSnapshot(); len(s.GetTenants()) != 1 ||
		len(s.Tenants[0].Regions) != 1 {
		t.Errorf("a new node's snapshot is %v", s)
	}

	// Import again refreshes; what changes nothing is not told.
	imported(t, west, there, "blue", "red")
	carries("import of red", []string{"red"}, "blue", "red")
	there.Tenants[0].Cidrs = []string{"10.2.0.0/16"}
	imported(t, west, there, "blue", "red")
	want.Cidrs = []string{"10.2.0.0/16"}
	hears("import again", want)
	carries("import again", nil, "blue", "red")
	imported(t, west, there, "red")
	hears("without blue")
	carries("without blue", nil, "red")
	imported(t, west, there)
	hears("with all", want)
	carries("with all", []string{"blue"}, "blue", "red")

	// A tenant that is made later is joined then.
	overlay := &pilasterv1.Overlay{Cidr: "10.9.0.0/24", NodeBits: 28}
	_, err = people.CreateTenant(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.CreateTenantRequest{Name: "other", Network: "nimitz", Overlays: []*pilasterv1.Overlay{overlay}},
		),
	)
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantText(t, err, "10.9.0.0/16 in region east")
	createNimitz(t, west, "other", &pilasterv1.Overlay{Cidr: "10.8.0.0/24", NodeBits: 28})
	carries("made later", []string{"other"}, "blue", "other", "red")
	if _, err := people.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: "red"})); err != nil {
		t.Errorf("delete a tenant that is in another region: %v", err)
	}
	carries("red deleted", nil, "blue", "other")

	// Made anew it is another, until somebody says that it is meant.
	createNimitz(t, west, "red", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	carries("red created again", nil, "blue", "other")
	if red, _, _ := west.cache.Tenant("red"); len(red.Regions) != 0 {
		t.Errorf("red, created again, has %v", red.Regions)
	}
	_, err = people.ImportRegion(t.Context(), connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: there}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantText(t, err, "tenant red was deleted and created again here since region east was imported")
	imported(t, west, there)
	carries("red is meant", []string{"red"}, "blue", "other", "red")
	if _, err := people.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: "red"})); err != nil {
		t.Fatal(err)
	}
	carries("red deleted again", nil, "blue", "other")
	if other, _, _ := west.cache.Tenant("other"); len(other.Regions) != 1 || other.Regions[0].PeerVni != 1 {
		t.Errorf("other has %v", other.Regions)
	}

	// Without the Edge Switch there is no way; with another there is again.
	_, err = people.DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n9"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	if _, err := people.DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n9", Force: true})); err != nil {
		t.Fatal(err)
	}
	hears("without an Edge Switch")
	_, err = people.ExportRegion(t.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	edge(t, west, 8)
	want.Edge = "fd70:696c:6100:4::/64"
	hears("another Edge Switch", want)

	if _, err := people.DeleteRegion(t.Context(), connect.NewRequest(&pilasterv1.DeleteRegionRequest{Name: "east"})); err != nil {
		t.Fatal(err)
	}
	hears("region deleted")
}

// TestRegionsRestored: what was imported is in a backup, and is told by a restored orchestrator.
func TestRegionsRestored(t *testing.T) {
	t.Parallel()
	west, _ := startRegion(t, "west", "", "blue", "10.0.0.0/16")
	east, _ := startRegion(t, "east", "fd70:696c:6200::/40", "blue", "10.1.0.0/16")
	imported(t, west, exported(t, east))
	again := restored(t, backup(t, west.config), 10)
	blue, _, _ := again.cache.Tenant("blue")
	if len(blue.Regions) != 1 || blue.Regions[0].Name != "east" || blue.Regions[0].Edge != "fd70:696c:6100:1::/64" {
		t.Errorf("blue has %v", blue.Regions)
	}
	list, err := operator(
		again.config.RunDir,
	).ListRegions(t.Context(), connect.NewRequest(&pilasterv1.ListRegionsRequest{}))
	if err != nil || len(list.Msg.Regions) != 1 || list.Msg.Own.Edge == "" {
		t.Errorf("the restored one lists %v, %v", list, err)
	}
	// It was started without --region.
	_, err = operator(
		again.config.RunDir,
	).ExportRegion(t.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantText(t, err, "--region NAME")
	_, err = operator(
		again.config.RunDir,
	).ImportRegion(t.Context(), connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: exported(t, east)}))
	wantCode(t, err, connect.CodeFailedPrecondition)
}
