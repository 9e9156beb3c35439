package store_test

import (
	"net/netip"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/tenant"
)

// isOn fails unless a tenant sends by the first of these networks, and also receives by the second.
func isOn(t *testing.T, is *pilasterv1.Tenant, err error, network, other string, joining bool) *pilasterv1.Tenant {
	t.Helper()
	if err != nil || is.Network != network || is.Leaving != other || is.Joining != joining ||
		is.Addressing != pilasterv1.Addressing_ADDRESSING_OWN {
		t.Fatalf("the tenant is %v, %v; want network %s, leaving %q, joining %v, own addresses", is, err, network,
			other, joining)
	}
	return is
}

// TestSwitchNetworks: a tenant's containers send by a network only when all nodes have reported that they receive by
// it, and it leaves a network only when no node sends by it any longer. Reports about an earlier step do not count.
func TestSwitchNetworks(t *testing.T) {
	ctx, s := t.Context(), open(t, storetest.Embedded(t), address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16,24")
	for n := range 2 {
		enforcing(t, s, n+1, tenant.EVPN, tenant.Netpila, tenant.Nimitz)
		if _, _, err := s.Resolve(ctx, node(n+1), 1, "green", nil); err != nil {
			t.Fatal(err)
		}
	}
	subnet := allocate(t, s, 1, "green", "")
	sequence := uint64(1)
	report := func(n int, m *pilasterv1.Moving) {
		t.Helper()
		sequence++
		r := &pilasterv1.Hosting{Tenant: "green", Accepts: []uint32{1}, Holds: []uint32{1}, Moving: m}
		if _, err := s.RecordHosting(ctx, node(n), sequence, []*pilasterv1.Hosting{r}, nil); err != nil {
			t.Fatal(err)
		}
	}
	done := func(changes uint64) *pilasterv1.Moving {
		return &pilasterv1.Moving{Endpoints: 2, Moved: 2, Changes: changes}
	}
	migrate := func(to string) (*pilasterv1.Tenant, error) { return s.Migrate(ctx, "green", to, 0) }

	for _, way := range [][2]string{{tenant.Nimitz, tenant.EVPN}, {tenant.EVPN, tenant.Nimitz}} {
		from, to := way[0], way[1]
		is, err := migrate(to)
		is = isOn(t, is, err, from, to, true)
		_, err = s.FinishMigration(ctx, "green", true)
		refused(t, err, store.Refused, "still send by network "+from, "pilaster tenant migrate green --to "+to)
		report(1, done(is.Changes))
		report(2, done(is.Changes-1)) // about the step before
		is, err = migrate(to)
		isOn(t, is, err, from, to, true)
		unready := done(is.Changes)
		unready.Problem = "no mappings yet"
		for _, m := range []*pilasterv1.Moving{unready, {Endpoints: 2, Moved: 1, Changes: is.Changes}} {
			report(2, m)
			is, err = migrate(to)
			isOn(t, is, err, from, to, true)
		}
		report(2, done(is.Changes))
		is, err = migrate(to)
		is = isOn(t, is, err, to, from, false)
		again, err := migrate(to)
		if isOn(t, again, err, to, from, false); again.Changes != is.Changes {
			t.Errorf("a repeated Migrate changed the tenant: %v", again)
		}
		_, err = s.FinishMigration(ctx, "green", false)
		refused(t, err, store.Refused, "send by network "+to, "n1 (has not confirmed), n2 (has not confirmed)",
			"--force")
		// Containers are still added, and nothing depends on one of the two networks.
		if again := allocate(t, s, 1, "green", ""); again != subnet {
			t.Errorf("node n1 has subnet %s, and had %s", again, subnet)
		}
		_, err = s.RotateKey(ctx, "green")
		refused(t, err, store.Refused, "no key to rotate")
		_, err = s.CreateUnderlayService(ctx, "green", tenant.UnderlayService{
			Name: "ntp", Virtual: netip.MustParseAddr("192.0.2.7"), Real: netip.MustParseAddr("2001:db8::7b"),
		})
		refused(t, err, store.Refused, "finish the migration first")
		enforcing(t, s, 3, tenant.Netpila, tenant.Nimitz)
		_, _, err = s.Resolve(ctx, node(3), 1, "green", nil)
		refused(t, err, store.Refused, "node n3 does not have network evpn")
		report(1, done(is.Changes))
		report(2, done(is.Changes))
		is, err = s.FinishMigration(ctx, "green", false)
		isOn(t, is, err, to, "", false)
		if got := mapped(t, s, "green"); len(is.Overlays) != 1 || len(got) != 1 || got[0] != subnet+" n1" {
			t.Errorf("finally green has CIDRs %v and mappings %v", is.Overlays, got)
		}
		report(1, nil)
		report(2, nil)
	}
}

// TestCancelSwitch: a migration can be cancelled before containers send by the new network, and goes back after that.
func TestCancelSwitch(t *testing.T) {
	ctx, s := t.Context(), open(t, storetest.Embedded(t), address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16,24")
	is, err := s.Migrate(ctx, "green", tenant.EVPN, 0) // no node has the tenant, so none has to have the network
	isOn(t, is, err, tenant.Nimitz, tenant.EVPN, true)
	is, err = s.Migrate(ctx, "green", tenant.Nimitz, 0)
	isOn(t, is, err, tenant.Nimitz, tenant.EVPN, false)
	is, err = s.FinishMigration(ctx, "green", false)
	isOn(t, is, err, tenant.Nimitz, "", false)
	_, err = s.Migrate(ctx, "green", tenant.EVPN, pilasterv1.Addressing_ADDRESSING_CLEAR)
	refused(t, err, store.Invalid, "addressing")

	// Back before it has finished.
	for range 2 {
		is, err = s.Migrate(ctx, "green", tenant.EVPN, 0)
	}
	isOn(t, is, err, tenant.EVPN, tenant.Nimitz, false)
	_, err = s.Migrate(ctx, "green", tenant.Netpila, 0)
	refused(t, err, store.Refused, "is migrating from network nimitz to evpn")
	for range 2 {
		is, err = s.Migrate(ctx, "green", tenant.Nimitz, 0)
	}
	isOn(t, is, err, tenant.Nimitz, tenant.EVPN, false)
}

// TestMayNotSwitch: a tenant that uses what the other network lacks is refused, with what to do, and stays as it was.
func TestMayNotSwitch(t *testing.T) {
	etcd := storetest.Embedded(t)
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	no := func(name, to string, words ...string) {
		t.Helper()
		_, err := s.Migrate(ctx, name, to, 0)
		refused(t, err, store.Refused, append(words, "cannot move to network "+to, "nothing was changed: ")...)
		if is, _, err := s.Resolve(ctx, node(1), 99, name, nil); err != nil || is.Leaving != "" {
			t.Errorf("after a refusal, tenant %s is %v, %v", name, is, err)
		}
	}
	enforcing(t, s, 1, tenant.EVPN, tenant.Netpila, tenant.Nimitz)
	enforcing(t, s, 2, tenant.Netpila, tenant.Nimitz)
	if _, err := s.Register(ctx, store.Registration{Node: node(3), Edge: true}); err != nil {
		t.Fatal(err)
	}

	nimitz(t, s, "serving", "fd12:3456::/48,80")
	ntp := tenant.UnderlayService{
		Name: "ntp", Virtual: netip.MustParseAddr("fd99::7b"), Real: netip.MustParseAddr("2001:db8::7b"),
	}
	if _, err := s.CreateUnderlayService(ctx, "serving", ntp); err != nil {
		t.Fatal(err)
	}
	no("serving", tenant.EVPN, "1 underlay service and 0 publications",
		"pilaster underlay service list --tenant serving", "pilaster underlay publication list --tenant serving")

	nimitz(t, s, "t1", "10.0.0.0/16,24")
	if _, err := s.ImportRegion(ctx, "west", east("10.1.0.0/16"), nil, false); err != nil {
		t.Fatal(err)
	}
	no("t1", tenant.EVPN, "it is in region east", "pilaster region import FILE --tenant OTHERS")
	north := east("10.2.0.0/16")
	north.Name, north.Tenants[0].Name, north.Tenants[0].Vni = "north", "moving", 9
	north.BasePrefix, north.Edge = "fd70:696c:6300::/40", "fd70:696c:6300:3::/64"
	nimitz(t, s, "moving", "10.0.0.0/16,24")
	if _, err := s.Migrate(ctx, "moving", tenant.EVPN, 0); err != nil {
		t.Fatal(err)
	}
	_, err := s.ImportRegion(ctx, "west", north, nil, false)
	refused(t, err, store.Refused, "tenant moving of region north", "network evpn", "--tenant OTHERS")

	nimitz(t, s, "lime", "10.0.0.0/16,24")
	if _, _, err := s.Resolve(ctx, node(2), 1, "lime", nil); err != nil {
		t.Fatal(err)
	}
	no("lime", tenant.EVPN, "nodes without that network: n2", "pilaster agent --help")

	bronze, err := s.CreateTenantOn(ctx, tenant.EVPN, "bronze", 0, []tenant.Overlay{
		{CIDR: netip.MustParsePrefix("10.0.0.0/16")},
	})
	if err != nil {
		t.Fatal(err)
	}
	if is, err := s.BecomeImporter(ctx, "o"); err != nil || !is {
		t.Fatal(is, err)
	}
	host := &pilasterv1.Mapping{Tenant: bronze.Name, To: "10.0.9.9/32", NextHops: []string{"10.9.0.2"}, Origin: "bgp"}
	if err := s.Import(ctx, "o", []*pilasterv1.Mapping{host}, nil); err != nil {
		t.Fatal(err)
	}
	no("bronze", tenant.Nimitz, "1 address or prefix", "withdraw their routes")

	if _, err := etcd.Put(ctx, "/pilaster/1/marks/tenant", "65536"); err != nil {
		t.Fatal(err)
	}
	nimitz(t, s, "late", "10.0.0.0/16,24")
	no("late", tenant.EVPN, "id 65536", "up to 65535", "another cluster")
}
