package store_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// keyed allocates the address of key db-0 of silver for a container.
func keyed(t *testing.T, s *store.Store, n int, container string, app uint32, sequence uint64) store.Allocation {
	t.Helper()
	is, err := s.AllocateFor(t.Context(), node(n), "silver",
		store.Endpoint{Key: container, App: app, AddressKey: "db-0", Sequence: sequence})
	if err != nil {
		t.Fatal(err)
	}
	return is
}

// testAddressKeys: an address stays with its key, has one container at a time, and moves in one change.
func testAddressKeys(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	if _, err := s.CreateTenantOn(t.Context(), tenant.ILA, "silver", 0, nil); err != nil {
		t.Fatal(err)
	}
	addressKeys(t, etcd, s, 7)
}

// testAddressKeysNimitz is testAddressKeys on network nimitz, with what its tenants refuse.
func testAddressKeysNimitz(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "silver", "10.0.0.0/16")
	addressKeys(t, etcd, s, 0)
	for _, to := range []string{tenant.Netpila, tenant.EVPN} {
		_, err := s.Migrate(ctx, "silver", to, 0)
		refused(t, err, store.Refused, "has no address keys", "1 address key;")
	}
	nimitz(t, s, "both", "10.0.0.0/16", "fd00:1::/48")
	nimitz(t, s, "subnets", "10.0.0.0/16,24")
	nimitz(t, s, "moves", "10.0.0.0/16")
	for name, why := range map[string]string{
		"both": "has 2 CIDRs", "subnets": "has a subnet", "moves": "is migrating",
	} {
		hosts(t, s, name, 1)
		if name == "moves" {
			enforcing(t, s, 1, tenant.EVPN, tenant.Netpila, tenant.Nimitz)
			if _, err := s.Migrate(ctx, name, tenant.EVPN, 0); err != nil {
				t.Fatal(err)
			}
		}
		_, err := s.AllocateFor(ctx, node(1), name, store.Endpoint{Key: "c2/eth0", AddressKey: "db-0"})
		refused(t, err, store.Invalid, why, "nothing was changed")
	}
}

func addressKeys(t *testing.T, etcd *clientv3.Client, s *store.Store, app uint32) {
	ctx := t.Context()
	overlay := tenant.Overlay{CIDR: netip.MustParsePrefix("10.1.0.0/16")}
	if _, err := s.CreateTenantOn(ctx, tenant.EVPN, "green", 0, []tenant.Overlay{overlay}); err != nil {
		t.Fatal(err)
	}
	hosts(t, s, "silver", 1, 2, 3)
	hosts(t, s, "green", 1)
	at := func(want string) {
		t.Helper()
		page, err := s.ListMappings(ctx, "silver", "")
		var got []string
		for _, m := range page.Mappings {
			got = append(got, fmt.Sprint(m.Name, " ", m.Key, " ", m.Sequence))
		}
		if err != nil || strings.Join(got, ", ") != want {
			t.Errorf("mappings %q, %v; want %q", got, err, want)
		}
	}
	first := keyed(t, s, 1, "c1/eth0", app, 0)
	if first.Sequence != 1 || first.Elsewhere {
		t.Errorf("first %+v", first)
	}
	for range 2 {
		at("n1 c1/eth0 1")
		if again := keyed(t, s, 1, "c1/eth0", app, 0); fmt.Sprint(again) != fmt.Sprint(first) {
			t.Errorf("again %+v, before %+v", again, first)
		}
	}
	of := store.Endpoint{Key: "c2/eth0", App: app, AddressKey: "db-0"}
	_, err := s.AllocateFor(ctx, node(1), "silver", of)
	refused(t, err, store.Exists, "in use by container c1/eth0")
	_, err = s.AllocateFor(ctx, node(1), "green", store.Endpoint{Key: "c2/eth0", AddressKey: "db-0"})
	refused(t, err, store.Invalid, "is on network evpn")
	_, err = s.AllocateFor(ctx, node(1), "silver", store.Endpoint{Key: "c2/eth0", App: app, AddressKey: "db 0"})
	refused(t, err, store.Invalid, "letters, digits")
	of.AddressKey = strings.Repeat("k", 129)
	_, err = s.AllocateFor(ctx, node(1), "silver", of)
	refused(t, err, store.Invalid, "at most 128")
	_, err = s.AllocateFor(ctx, node(1), "silver", store.Endpoint{Key: "c2/eth0", App: app, Sequence: 2})
	refused(t, err, store.Invalid, "without an address key")

	// The first call changes nothing, the second moves the address.
	offer := keyed(t, s, 2, "c2/eth0", app, 0)
	at("n1 c1/eth0 1")
	if !offer.Elsewhere || offer.Sequence != 2 || offer.Prefixes[0] != first.Prefixes[0] {
		t.Errorf("offer %+v", offer)
	}
	if moved := keyed(t, s, 2, "c2/eth0", app, 2); moved.FormerNode == "" || moved.Sequence != 2 {
		t.Errorf("moved %+v", moved)
	}
	if again := keyed(t, s, 2, "c2/eth0", app, 2); again.FormerNode != "" || again.Sequence != 2 {
		t.Errorf("moved again %+v", again)
	}
	at("n2 c2/eth0 2")

	// Nothing that the former node says about its container changes the mapping.
	if err := s.Free(ctx, node(1), "silver", "c1/eth0"); err != nil {
		t.Error(err)
	}
	_, err = s.AllocateFor(ctx, node(1), "silver",
		store.Endpoint{Key: "c1/eth0", App: app, AddressKey: "db-0", Sequence: 1})
	refused(t, err, store.Refused, "has moved to node n2")
	report := func(sequence uint64) error {
		r := store.Registration{Node: node(1), Mappings: []*pilasterv1.Mapping{{
			Tenant: "silver", To: first.Prefixes[0].String(), Key: "c1/eth0", App: app, AddressKey: "db-0",
			Sequence: sequence,
		}}}
		_, err := s.Register(ctx, r)
		return err
	}
	if err := report(1); err != nil {
		t.Error(err)
	}
	at("n2 c2/eth0 2")
	if err := report(3); err != nil { // the store was restored from a backup that is older than the move
		t.Error(err)
	}
	at("n1 c1/eth0 3")
	if err := s.Free(ctx, node(2), "silver", "c2/eth0"); err != nil {
		t.Error(err)
	}
	at("n1 c1/eth0 3")

	// A released address is reserved for its key, and its sequence goes on.
	if err := s.Free(ctx, node(1), "silver", "c1/eth0"); err != nil {
		t.Fatal(err)
	}
	at("")
	if next := keyed(t, s, 3, "c3/eth0", app, 0); next.Prefixes[0] != first.Prefixes[0] || next.Sequence != 4 ||
		next.Elsewhere {
		t.Errorf("after the release: %+v", next)
	}
	at("n3 c3/eth0 4")
	if err := s.Free(ctx, node(3), "silver", "c3/eth0"); err != nil {
		t.Fatal(err)
	}
	left, err := etcd.Get(ctx, "/pilaster/1/address-keys/", clientv3.WithPrefix())
	if err != nil || len(left.Kvs) != 1 || left.Kvs[0].Lease == 0 {
		t.Errorf("the record of the key: %v, %v; want one with a lease", left, err)
	}
}
