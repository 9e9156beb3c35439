package store_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// east returns the export of a region with tenants t1, t2, …, one per CIDR, with VNIs 1, 2, …
func east(cidrs ...string) *pilasterv1.Region {
	r := &pilasterv1.Region{Name: "east", BasePrefix: "fd70:696c:6200::/40", Edge: "fd70:696c:6200:3::/64"}
	for i, cidr := range cidrs {
		r.Tenants = append(
			r.Tenants,
			&pilasterv1.Region_Tenant{Name: fmt.Sprintf("t%d", i+1), Vni: uint32(i + 1), Cidrs: []string{cidr}},
		)
	}
	return r
}

func makeNimitz(t *testing.T, s *store.Store, name, cidr string) error {
	t.Helper()
	overlays, err := tenant.ParseOverlays([]*pilasterv1.Overlay{{Cidr: cidr, NodeBits: 24}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.CreateTenantOn(t.Context(), tenant.Nimitz, name, 0, overlays)
	return err
}

func testRegions(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	imports := func(r *pilasterv1.Region, only ...string) error {
		_, err := s.ImportRegion(ctx, "west", r, only, false)
		return err
	}
	for _, name := range []string{"t1", "t2"} {
		if err := makeNimitz(t, s, name, "10.0.0.0/16"); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, imports(east("10.1.0.0/16")), store.Refused, "no Edge Switch", "--edge", "nothing was changed")
	register(t, s, 1)
	if n, err := s.Register(ctx, store.Registration{Node: node(2), Edge: true}); err != nil || !n.Edge {
		t.Fatalf("register the Edge Switch: %v, %v", n, err)
	}
	_, err := s.Register(ctx, store.Registration{Node: node(3), Edge: true})
	refused(t, err, store.Refused, "node n2 is already this region's Edge Switch", "nothing was changed")
	_, err = s.Register(ctx, store.Registration{Node: node(1), Edge: true})
	refused(t, err, store.Refused, "without --edge", "cannot change")
	_, err = s.Register(ctx, store.Registration{Node: node(2)})
	refused(t, err, store.Refused, "with --edge", "cannot change")

	// Services have addresses for hosts outside, and a pool of them, where another region would be.
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	outside := []service.Service{exposed("web", "2001:db8:8000::a", "80")}
	if _, err := s.ApplyServices(ctx, "blue", outside, nil, store.ApplyingServices{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ChangeServicePools(ctx, prefixes("2001:db8:9000::/64"), nil, nil); err != nil {
		t.Fatal(err)
	}

	for name, c := range map[string]struct {
		change func(*pilasterv1.Region)
		reason store.Reason
		want   string
	}{
		"itself":    {func(r *pilasterv1.Region) { r.Name = "west" }, store.Invalid, "region west itself"},
		"no name":   {func(r *pilasterv1.Region) { r.Name = "" }, store.Invalid, "region name"},
		"no prefix": {func(r *pilasterv1.Region) { r.BasePrefix = "x" }, store.Invalid, "not a prefix"},
		"IPv4":      {func(r *pilasterv1.Region) { r.BasePrefix = "10.0.0.0/8" }, store.Invalid, "not an IPv6 prefix"},
		"our base prefix": {func(r *pilasterv1.Region) {
			r.BasePrefix, r.Edge = "fd70:696c:6100::/44", "fd70:696c:6100:3::/64"
		}, store.Refused, "overlaps this region's"},
		"our private prefix": {func(r *pilasterv1.Region) {
			r.BasePrefix, r.Edge = "fc70::/40", "fc70::/64"
		}, store.Invalid, "private prefix"},
		"our gateway prefix": {func(r *pilasterv1.Region) {
			r.BasePrefix, r.Edge = "fd70:696c:6700::/40", "fd70:696c:6700::/64"
		}, store.Invalid, "gateway prefix"},
		"an external address": {func(r *pilasterv1.Region) {
			r.BasePrefix, r.Edge = "2001:db8:8000::/40", "2001:db8:8000:3::/64"
		}, store.Refused, "overlaps 2001:db8:8000::a/128, an external address of services here"},
		"a pool": {func(r *pilasterv1.Region) {
			r.BasePrefix, r.Edge = "2001:db8:9000::/40", "2001:db8:9000:3::/64"
		}, store.Refused, "overlaps 2001:db8:9000::/64, a pool of load-balancer addresses here"},
		"edge elsewhere": {func(r *pilasterv1.Region) {
			r.Edge = "fd70:696c:6300:3::/64"
		}, store.Invalid, "not a /64 inside"},
		"no edge":       {func(r *pilasterv1.Region) { r.Edge = "" }, store.Invalid, "not a prefix"},
		"tenant twice":  {func(r *pilasterv1.Region) { r.Tenants[1].Name = "t1" }, store.Invalid, "there twice"},
		"tenant's name": {func(r *pilasterv1.Region) { r.Tenants[1].Name = "T" }, store.Invalid, "tenant name"},
		"VNI twice": {func(r *pilasterv1.Region) {
			r.Tenants[1].Vni = 1
		}, store.Invalid, "also that of tenant t1"},
		"VNI 0": {func(r *pilasterv1.Region) { r.Tenants[1].Vni = 0 }, store.Invalid, "not in 1..16777215"},
		"VNI too high": {func(r *pilasterv1.Region) {
			r.Tenants[1].Vni = 1 << 24
		}, store.Invalid, "not in 1..16777215"},
		"the gateway's VNI": {func(r *pilasterv1.Region) { r.Tenants[1].Vni = 255 }, store.Invalid, "that of gateways"},
		"no CIDR":           {func(r *pilasterv1.Region) { r.Tenants[1].Cidrs = nil }, store.Invalid, "tenant t2"},
		"a wrong CIDR": {func(r *pilasterv1.Region) {
			r.Tenants[1].Cidrs[0] = "10.2.0.1/16"
		}, store.Invalid, "host bits set"},
		"a CIDR of nodes": {func(r *pilasterv1.Region) {
			r.Tenants[1].Cidrs[0] = "fd70:696c:6100::/48"
		}, store.Invalid, "base prefix"},
		"our CIDR": {func(r *pilasterv1.Region) {
			r.Tenants[1].Cidrs[0] = "10.0.128.0/17"
		}, store.Refused, "tenant t2 has 10.0.128.0/17 in region east and 10.0.0.0/16 in this region"},
		"too large": {func(r *pilasterv1.Region) {
			r.Tenants[1].Cidrs = make([]string, 1<<20)
		}, store.Full, "select tenants with --tenant"},
	} {
		r := east("10.1.0.0/16", "10.2.0.0/16")
		c.change(r)
		err := imports(r)
		refused(t, err, c.reason, c.want)
		if err == nil {
			t.Errorf("%s: the region was imported, want a refusal", name)
		}
	}
	refused(t, s.DeleteRegion(ctx, "east"), store.NotFound, "no other region") // the refused imports wrote nothing

	// An import may leave out tenants with overlapping CIDRs, and may have tenants that do not exist here.
	if err := imports(east("10.1.0.0/16", "10.0.0.0/16", "10.3.0.0/16"), "t1", "t3"); err != nil {
		t.Fatal(err)
	}
	refused(t, imports(east("10.1.0.0/16"), "t1", "t9"), store.NotFound, `no tenant "t9"`)

	// A repeated import has the tenants of the previous one, unless others are selected.
	for _, c := range []struct {
		only []string
		all  bool
		want string
	}{
		{nil, false, "t1 t3"}, {[]string{"t1"}, false, "t1"}, {nil, false, "t1"}, {nil, true, "t1 t2 t3"},
		{nil, false, "t1 t2 t3"},
	} {
		kept, err := s.ImportRegion(ctx, "west", east("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"), c.only, c.all)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, of := range kept.Tenants {
			names = append(names, of.Name)
		}
		if got := strings.Join(names, " "); got != c.want {
			t.Errorf("only %v, all %v: imported %s, want %s", c.only, c.all, got, c.want)
		}
	}
	checkRecreatedTenants(t, s)
	checkNewTenants(t, s)
	refused(
		t,
		makeNimitz(t, s, "t3", "10.3.0.0/20"),
		store.Refused,
		"tenant t3 has 10.3.0.0/20 in this region and 10.3.0.0/16 in region east",
	)
	if err := makeNimitz(t, s, "t3", "10.4.0.0/16"); err != nil {
		t.Error(err)
	}
	// A third region must not overlap the second.
	third := func(change func(*pilasterv1.Region)) error {
		r := east("10.5.0.0/16")
		r.Name, r.BasePrefix, r.Edge = "north", "fd70:696c:6300::/40", "fd70:696c:6300:1::/64"
		change(r)
		return imports(r)
	}
	refused(
		t,
		third(func(r *pilasterv1.Region) { r.BasePrefix, r.Edge = "fd70:696c:6200::/48", "fd70:696c:6200:1::/64" }),
		store.Refused,
		"fd70:696c:6200::/40 of region east",
	)
	refused(
		t,
		third(func(r *pilasterv1.Region) { r.Tenants[0].Cidrs[0] = "10.1.0.0/24" }),
		store.Refused,
		"tenant t1 has 10.1.0.0/24 in region north and 10.1.0.0/16 in region east",
	)
	if err := third(func(*pilasterv1.Region) {}); err != nil {
		t.Error(err)
	}

	// Services of a tenant and its CIDRs in other regions must not overlap, whichever exists first.
	four := east("10.1.128.0/17", "10.6.0.0/16", "10.3.0.0/16", "fd12:9::/48")
	nimitz(t, s, "t4", "fd12:3456::/48")
	if _, err := s.CreateUnderlayService(ctx, "t4", server("storage", "fd12:9::7", "2001:db8::9")); err != nil {
		t.Fatal(err)
	}
	refused(
		t,
		imports(four, "t1", "t2", "t3", "t4"),
		store.Refused,
		"underlay service t4/storage: fd12:9::7 is in the tenant's CIDR fd12:9::/48 in region east",
		"underlay service delete",
		"--tenant",
		"nothing was changed",
	)
	if err := s.DeleteUnderlayService(ctx, "t4", "storage"); err != nil {
		t.Fatal(err)
	}
	if err := imports(four, "t1", "t2", "t3", "t4"); err != nil {
		t.Error(err)
	}
	_, err = s.CreateUnderlayService(ctx, "t4", server("storage", "fd09::7", "fd12:9::9"))
	refused(
		t,
		err,
		store.Invalid,
		"fd12:9::9 is in the tenant's CIDR fd12:9::/48 in region east",
		"nothing was changed",
	)

	// A repeated import replaces the previous one and does not conflict with it.
	if err := imports(east("10.1.128.0/17")); err != nil {
		t.Error(err)
	}
	refused(t, s.DeleteNode(ctx, "n2", false), store.Refused, "Edge Switch", "east, north", "region delete")
	if err := s.DeleteRegion(ctx, "north"); err != nil {
		t.Error(err)
	}
	if err := s.DeleteNode(ctx, "n2", true); err != nil {
		t.Error(err)
	}
	if n, err := s.Register(ctx, store.Registration{Node: node(3), Edge: true}); err != nil || !n.Edge {
		t.Errorf("register another Edge Switch: %v, %v", n, err)
	}
}

// checkRecreatedTenants imports a region again after a tenant was deleted and created again in one of the regions.
func checkRecreatedTenants(t *testing.T, s *store.Store) {
	t.Helper()
	was, is := timestamppb.New(time.Unix(1, 1)), timestamppb.New(time.Unix(1, 2))
	imports := func(created *timestamppb.Timestamp, only ...string) (*pilasterv1.Region, error) {
		r := east("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
		r.Tenants[0].Created = created
		return s.ImportRegion(t.Context(), "west", r, only, false)
	}
	names := []string{"t1", "t2", "t3"}
	for i, c := range []struct {
		created *timestamppb.Timestamp
		only    []string
		want    string
	}{
		{was, names, ""}, {was, nil, ""}, {nil, nil, ""}, {was, nil, ""}, // an export of an older build has no time
		{is, nil, "tenant t1 was deleted and created again in region east since region east was imported"},
		{was, nil, ""}, // the refused import changed nothing
		{is, names, ""}, {is, nil, ""},
	} {
		kept, err := imports(c.created, c.only...)
		if c.want != "" {
			refused(t, err, store.Refused, c.want, "nothing was changed", "--tenant", "--all")
		} else if err != nil || kept.Tenants[0].Joined == nil || kept.Tenants[2].Joined != nil {
			t.Errorf("import %d: %v, %v", i, kept, err)
		}
	}
	before := stored(t, s, "t1")
	if err := s.DeleteTenant(t.Context(), "t1"); err != nil {
		t.Fatal(err)
	}
	if kept, err := imports(is); err != nil || !proto.Equal(kept.Tenants[0].Joined, before.Created) {
		t.Errorf("import while t1 does not exist: %v, %v; want it joined as before", kept, err)
	}
	if err := makeNimitz(t, s, "t1", "10.0.0.0/16"); err != nil {
		t.Fatal(err)
	}
	_, err := imports(is)
	refused(t, err, store.Refused, "tenant t1 was deleted and created again here")
	if kept, err := imports(is, names...); err != nil || proto.Equal(kept.Tenants[0].Joined, before.Created) {
		t.Errorf("import with t1 selected: %v, %v; want it joined to the new t1", kept, err)
	}
	r := east("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
	if _, err := s.ImportRegion(t.Context(), "west", r, nil, true); err != nil {
		t.Fatal(err)
	}
}

// checkNewTenants imports a region again after the region has created tenants. The import omits them unless they are
// selected. It also omits a tenant that was missing in one earlier export.
func checkNewTenants(t *testing.T, s *store.Store) {
	t.Helper()
	cidrs := []string{"10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"}
	for i, c := range []struct {
		exported int
		all      bool
		want     int
	}{
		{2, false, 2}, {3, false, 2}, {1, false, 1}, {2, false, 1}, {3, true, 3}, {0, false, 0}, {3, false, 0},
		{2, true, 2}, {3, false, 2},
	} {
		r := east(cidrs[:c.exported]...)
		r.Name, r.BasePrefix, r.Edge = "south", "fd70:696c:6400::/40", "fd70:696c:6400:1::/64"
		for i := range r.Tenants { // names that do not conflict with the other regions' tenants
			r.Tenants[i].Name = fmt.Sprintf("t%d", i+5)
		}
		if kept, err := s.ImportRegion(t.Context(), "west", r, nil, c.all); err != nil || len(kept.Tenants) != c.want {
			t.Errorf("import %d of %d tenants: got %v, %v; want %d tenants", i, c.exported, kept, err, c.want)
		}
	}
	if err := s.DeleteRegion(t.Context(), "south"); err != nil {
		t.Error(err)
	}
}

// testManyRegions imports the maximum of regions, one of them with almost the maximum size.
func testManyRegions(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.Register(ctx, store.Registration{Node: node(1), Edge: true}); err != nil {
		t.Fatal(err)
	}
	var last error
	for i := range tenant.MaxRegions + 1 {
		r := east("10.1.0.0/16")
		r.Tenants[0].Name = fmt.Sprintf("t%d", i)
		r.Name = fmt.Sprintf("r%d", i)
		r.BasePrefix = fmt.Sprintf("fd70:696c:%x::/48", 0x6200+i)
		r.Edge = fmt.Sprintf("fd70:696c:%x:1::/64", 0x6200+i)
		if i == tenant.MaxRegions-1 {
			for n := range 10_000 {
				r.Tenants = append(
					r.Tenants,
					&pilasterv1.Region_Tenant{
						Name:  fmt.Sprintf("tenant-%04d-with-a-name-like-others-have", n),
						Vni:   uint32(n + 1000),
						Cidrs: []string{"10.1.0.0/16"},
					},
				)
			}
		}
		if _, last = s.ImportRegion(ctx, "west", r, nil, false); last != nil && i < tenant.MaxRegions {
			t.Fatalf("region %d: %v", i, last)
		}
	}
	refused(t, last, store.Full, "has imported 64 others")
}
