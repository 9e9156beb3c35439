package store_test

import (
	"net/netip"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// testReservation: the prefix of identifiers is reserved from the first tenant on that uses it, unless something of the
// cluster is in it; from then on, nothing else of the cluster can be in it.
func testReservation(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.Register(ctx, store.Registration{Node: node(2), Edge: true}); err != nil {
		t.Fatal(err)
	}
	inside := east("10.1.0.0/16")
	inside.BasePrefix, inside.Edge = "fd70:696c:e100::/44", "fd70:696c:e100:3::/64"
	create := func() error {
		_, err := s.CreateTenantOn(ctx, tenant.ILA, "silver", 0, nil)
		return err
	}
	service := func() error {
		_, err := s.CreateUnderlayService(ctx, "green", tenant.UnderlayService{
			Name: "dns", Virtual: netip.MustParseAddr("fd13::7"), Real: netip.MustParseAddr("fd70:696c:e1ff::9"),
		})
		return err
	}
	uplink := func(a string) {
		t.Helper()
		_, err := s.Register(ctx, store.Registration{Node: node(1), Uplinks: []netip.Addr{netip.MustParseAddr(a)}})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := makeNimitz(t, s, "green", "fd12::/16"); err != nil {
		t.Fatal(err)
	}
	const overlap = "fd70:696c:e100::/40, which its network reserves"

	uplink("fd70:696c:e1ff::1")
	refused(t, create(), store.Refused, overlap, "an address of node n1", "nothing was changed")
	uplink("2001:db8::1")
	if err := service(); err != nil {
		t.Fatal(err)
	}
	refused(t, create(), store.Refused, overlap, "underlay service green/dns")
	if err := s.DeleteUnderlayService(ctx, "green", "dns"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportRegion(ctx, "west", inside, nil, true); err != nil {
		t.Fatal(err)
	}
	refused(t, create(), store.Refused, overlap, "the base prefix of region east")
	if err := s.DeleteRegion(ctx, "east"); err != nil {
		t.Fatal(err)
	}

	if err := create(); err != nil {
		t.Fatal(err)
	}
	refused(t, service(), store.Refused, "real address", "reserves for tenants on network ila")
	_, err := s.ImportRegion(ctx, "west", inside, nil, true)
	refused(t, err, store.Refused, "base prefix fd70:696c:e100::/44 overlaps fd70:696c:e100::/40, which this cluster")
	if err := s.DeleteTenant(ctx, "silver"); err != nil {
		t.Fatal(err)
	}
	refused(t, service(), store.Refused, "reserves") // for good: nodes still drop packets with these addresses
}
