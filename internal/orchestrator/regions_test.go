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

// edge joins and registers a node as the region's Edge Switch.
func edge(t *testing.T, s *Server, n int) *join.Client {
	t.Helper()
	c := dial(t, s, testNode(n))
	request := connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Edge: true})
	if _, err := c.Register(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	return c
}

// startRegion starts the orchestrator of a region, with node 9 as its Edge Switch. tenants has the name and then the
// CIDR of each tenant.
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

func exportRegion(t *testing.T, s *Server) *pilasterv1.Region {
	t.Helper()
	op := operator(s.config.RunDir)
	resp, err := op.ExportRegion(t.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.Region
}

// importRegion imports a region with some tenants, or with all if none is named.
func importRegion(t *testing.T, s *Server, r *pilasterv1.Region, tenants ...string) {
	t.Helper()
	request := &pilasterv1.ImportRegionRequest{Region: r, Tenants: tenants, All: len(tenants) == 0}
	if _, err := operator(s.config.RunDir).ImportRegion(t.Context(), connect.NewRequest(request)); err != nil {
		t.Fatal(err)
	}
}

// TestRegions: nodes receive the other regions of the tenants that they host, and every change (NM6).
func TestRegions(t *testing.T) {
	t.Parallel()
	west, edgeSwitch := startRegion(t, "west", "", "blue", "10.0.0.0/16", "red", "10.0.0.0/16")
	east, _ := startRegion(t, "east", "fd70:696c:6200::/40",
		"other", "10.9.0.0/16", "blue", "10.1.0.0/16", "red", "10.1.0.0/16")
	op := operator(west.config.RunDir)
	deleteTenant := func(name string) error {
		_, err := op.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: name}))
		return err
	}
	n1 := registered(t, west, testNode(1))
	resolve(t, n1, "blue", "web")
	e := follow(t, edgeSwitch, hosting())
	if n := e.next(t).GetSnapshot().GetNode(); !n.GetEdge() || len(n.Carries) != 0 {
		t.Errorf("before the import: got Edge Switch %v, want no transit tenants", n)
	}
	f := follow(t, n1, hosting("blue"))
	if got := f.next(t).GetSnapshot().GetTenants(); len(got) != 1 || len(got[0].Regions) != 0 {
		t.Errorf("before the import: got tenants %v, want one without regions", got)
	}
	exported := exportRegion(t, east)
	if exported.Name != "east" || exported.BasePrefix != "fd70:696c:6200::/40" ||
		exported.Edge != "fd70:696c:6200:1::/64" ||
		len(exported.Tenants) != 3 ||
		exported.Tenants[0].Created == nil ||
		exported.Tenants[0].Name != "blue" ||
		exported.Tenants[0].Vni != 2 {
		t.Errorf("exported %v", exported)
	}
	importRegion(t, west, exported, "blue")
	want := &pilasterv1.TenantRegion{
		Name:     "east",
		Cidrs:    []string{"10.1.0.0/16"},
		Edge:     "fd70:696c:6100:1::/64",
		PeerEdge: "fd70:696c:6200:1::/64",
		PeerVni:  2,
	}
	wantRegions := func(what string, want ...*pilasterv1.TenantRegion) {
		t.Helper()
		d := f.next(t).GetDelta()
		same := func(a, b *pilasterv1.TenantRegion) bool { return proto.Equal(a, b) }
		if len(d.GetTenants()) != 1 || d.Tenants[0].Name != "blue" ||
			!slices.EqualFunc(d.Tenants[0].Regions, want, same) {
			t.Errorf("%s: the node received %v, want regions %v", what, d, want)
		}
	}
	wantRegions("import", want)
	wantTransit := func(what string, whole []string, transit ...string) {
		t.Helper()
		if d := e.next(t).GetDelta(); !slices.Equal(d.GetNode().GetCarries(), transit) ||
			!slices.Equal(d.GetWholeTenants(), whole) {
			t.Errorf("%s: the Edge Switch received %v, want transit tenants %v, complete %v", what, d, transit, whole)
		}
	}
	wantTransit("import", []string{"blue"}, "blue")

	// Resolve, GetTenant and the snapshot of a new node have the region, too.
	resp, err := n1.Resolve(
		t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Labels: map[string]string{"app": "web"}}),
	)
	if err != nil || len(resp.Msg.Tenant.Regions) != 1 || !proto.Equal(resp.Msg.Tenant.Regions[0], want) {
		t.Errorf("Resolve returned %v, %v; want region %v", resp, err, want)
	}
	got, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue"}))
	if err != nil || len(got.Msg.Tenant.Regions) != 1 {
		t.Errorf("GetTenant returned %v, %v; want one region", got, err)
	}
	if red, _, _ := west.cache.Tenant("red"); len(red.Regions) != 0 {
		t.Errorf("red was not imported, got regions %v", red.Regions)
	}
	n2 := registered(t, west, testNode(2))
	resolve(t, n2, "blue", "web")
	if s := follow(t, n2, hosting("blue")).next(t).GetSnapshot(); len(s.GetTenants()) != 1 ||
		len(s.Tenants[0].Regions) != 1 {
		t.Errorf("got snapshot %v for a new node, want one region", s)
	}

	// A second import replaces the first. Nodes receive a message only if it changes something.
	importRegion(t, west, exported, "blue", "red")
	wantTransit("import of red", []string{"red"}, "blue", "red")
	exported.Tenants[0].Cidrs = []string{"10.2.0.0/16"}
	importRegion(t, west, exported, "blue", "red")
	want.Cidrs = []string{"10.2.0.0/16"}
	wantRegions("import again", want)
	wantTransit("import again", nil, "blue", "red")
	importRegion(t, west, exported, "red")
	wantRegions("without blue")
	wantTransit("without blue", nil, "red")
	importRegion(t, west, exported)
	wantRegions("with all", want)
	wantTransit("with all", []string{"blue"}, "blue", "red")

	// West creates a tenant that the import already named: its creation connects it to the region.
	overlay := &pilasterv1.Overlay{Cidr: "10.9.0.0/24", NodeBits: 28}
	_, err = op.CreateTenant(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.CreateTenantRequest{Name: "other", Network: "nimitz", Overlays: []*pilasterv1.Overlay{overlay}},
		),
	)
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantText(t, err, "10.9.0.0/16 in region east")
	createNimitz(t, west, "other", &pilasterv1.Overlay{Cidr: "10.8.0.0/24", NodeBits: 28})
	wantTransit("created later", []string{"other"}, "blue", "other", "red")
	if err := deleteTenant("red"); err != nil {
		t.Errorf("delete a tenant that is in another region: %v", err)
	}
	wantTransit("red deleted", nil, "blue", "other")

	// After red was deleted, a new tenant red is not connected until the region is imported again.
	createNimitz(t, west, "red", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	wantTransit("red created again", nil, "blue", "other")
	if red, _, _ := west.cache.Tenant("red"); len(red.Regions) != 0 {
		t.Errorf("red was created again, got regions %v", red.Regions)
	}
	_, err = op.ImportRegion(t.Context(), connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: exported}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantText(t, err, "tenant red was deleted and created again here since region east was imported")
	importRegion(t, west, exported)
	wantTransit("red imported again", []string{"red"}, "blue", "other", "red")
	if err := deleteTenant("red"); err != nil {
		t.Fatal(err)
	}
	wantTransit("red deleted again", nil, "blue", "other")
	if other, _, _ := west.cache.Tenant("other"); len(other.Regions) != 1 || other.Regions[0].PeerVni != 1 {
		t.Errorf("got regions %v of tenant other, want one with VNI 1", other.Regions)
	}

	// Without an Edge Switch, tenants have no regions. A new Edge Switch restores them.
	request := &pilasterv1.DeleteNodeRequest{Name: "n9"}
	_, err = op.DeleteNode(t.Context(), connect.NewRequest(request))
	wantCode(t, err, connect.CodeFailedPrecondition)
	request.Force = true
	if _, err := op.DeleteNode(t.Context(), connect.NewRequest(request)); err != nil {
		t.Fatal(err)
	}
	wantRegions("without an Edge Switch")
	_, err = op.ExportRegion(t.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	edge(t, west, 8)
	want.Edge = "fd70:696c:6100:4::/64"
	wantRegions("another Edge Switch", want)

	_, err = op.DeleteRegion(t.Context(), connect.NewRequest(&pilasterv1.DeleteRegionRequest{Name: "east"}))
	if err != nil {
		t.Fatal(err)
	}
	wantRegions("region deleted")
}

// TestRegionsRestored: a backup contains imported regions, and a restored orchestrator has them.
func TestRegionsRestored(t *testing.T) {
	t.Parallel()
	west, _ := startRegion(t, "west", "", "blue", "10.0.0.0/16")
	east, _ := startRegion(t, "east", "fd70:696c:6200::/40", "blue", "10.1.0.0/16")
	importRegion(t, west, exportRegion(t, east))
	again := restored(t, backup(t, west.config), 10)
	blue, _, _ := again.cache.Tenant("blue")
	if len(blue.Regions) != 1 || blue.Regions[0].Name != "east" || blue.Regions[0].Edge != "fd70:696c:6100:1::/64" {
		t.Errorf("got regions %v of tenant blue, want east", blue.Regions)
	}
	op := operator(again.config.RunDir)
	list, err := op.ListRegions(t.Context(), connect.NewRequest(&pilasterv1.ListRegionsRequest{}))
	if err != nil || len(list.Msg.Regions) != 1 || list.Msg.Own.Edge == "" {
		t.Errorf("ListRegions returned %v, %v; want one region, and an Edge Switch of its own", list, err)
	}
	// The restored orchestrator was started without --region.
	_, err = op.ExportRegion(t.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantText(t, err, "--region NAME")
	request := &pilasterv1.ImportRegionRequest{Region: exportRegion(t, east)}
	_, err = op.ImportRegion(t.Context(), connect.NewRequest(request))
	wantCode(t, err, connect.CodeFailedPrecondition)
}
