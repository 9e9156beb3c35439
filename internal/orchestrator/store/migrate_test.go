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

func TestMigrate(t *testing.T) {
	s := open(t, storetest.Embedded(t), address.Plan{})
	ctx := t.Context()
	made := nimitz(t, s, "green", "10.0.0.0/16,24")
	hosts(t, s, "green", 1, 2)
	subnet := allocate(t, s, 1, "green", "")
	report := func(n int, sequence uint64, m *pilasterv1.Moving) {
		t.Helper()
		r := &pilasterv1.Hosting{Tenant: "green", Accepts: []uint32{1}, Holds: []uint32{1}, Moving: m}
		if _, err := s.RecordHosting(ctx, node(n), sequence, []*pilasterv1.Hosting{r}, nil); err != nil {
			t.Fatal(err)
		}
	}

	for _, c := range []struct {
		name, to   string
		addressing pilasterv1.Addressing
		reason     store.Reason
	}{
		{"green", tenant.Nimitz, 0, store.Refused},
		{"green", "", 0, store.Invalid},
		{"Green", tenant.Netpila, 0, store.Invalid},
		{"green", tenant.Netpila, pilasterv1.Addressing_ADDRESSING_OWN, store.Invalid},
		{"blue", tenant.Netpila, 0, store.NotFound},
	} {
		_, err := s.Migrate(ctx, c.name, c.to, c.addressing)
		refused(t, err, c.reason)
	}
	_, err := s.FinishMigration(ctx, "green", true)
	refused(t, err, store.Refused, "is not migrating")

	moved, err := s.Migrate(ctx, "green", tenant.Netpila, pilasterv1.Addressing_ADDRESSING_CLEAR)
	if err != nil {
		t.Fatal(err)
	}
	if moved.Network != tenant.Netpila || moved.Leaving != tenant.Nimitz ||
		moved.Addressing != pilasterv1.Addressing_ADDRESSING_CLEAR ||
		len(moved.Overlays) != 1 ||
		len(moved.Ids) != 1 ||
		moved.Ids[0].Id != made.Ids[0].Id ||
		len(moved.Ids[0].Key) != 16 ||
		moved.Changes != made.Changes+1 {
		t.Errorf("Migrate returned %v, want the same id and overlay, Network netpila, Leaving nimitz", moved)
	}
	if again, err := s.Migrate(ctx, "green", tenant.Netpila, 0); err != nil || again.Changes != moved.Changes {
		t.Errorf("a repeated Migrate returned %v, %v; want no change", again, err)
	}
	_, err = s.Migrate(ctx, "green", tenant.Netpila, pilasterv1.Addressing_ADDRESSING_ENCRYPTED)
	refused(t, err, store.Refused, "another addressing")
	// Allocated subnets remain, but the store allocates no more.
	if got := mapped(t, s, "green"); len(got) != 1 || got[0] != subnet+" n1" {
		t.Errorf("mappings are %v", got)
	}
	_, err = s.Allocate(ctx, node(2), "green", "", 0)
	refused(t, err, store.Refused, "is migrating from network nimitz")

	_, err = s.FinishMigration(ctx, "green", false)
	refused(t, err, store.Refused, "n1 (has not confirmed), n2 (has not confirmed)", "--force")
	report(1, 2, &pilasterv1.Moving{Endpoints: 3, Moved: 2})
	report(2, 2, &pilasterv1.Moving{})
	_, err = s.FinishMigration(ctx, "green", false)
	refused(t, err, store.Refused, "n1 (2 of 3 have)")
	// A Resolve keeps the progress that a node has reported.
	if _, _, err := s.Resolve(ctx, node(2), 3, "green", nil); err != nil {
		t.Fatal(err)
	}
	report(1, 3, &pilasterv1.Moving{Endpoints: 3, Moved: 3})
	for range 2 {
		if moved, err = s.FinishMigration(ctx, "green", false); err != nil || moved.Leaving != "" ||
			moved.Overlays != nil ||
			moved.Network != tenant.Netpila {
			t.Fatalf("FinishMigration returned %v, %v; want network netpila without overlays", moved, err)
		}
	}
	if got := mapped(t, s, "green"); len(got) != 0 {
		t.Errorf("mappings are left: %v", got)
	}
	_, err = s.Migrate(ctx, "green", tenant.Netpila, 0)
	refused(t, err, store.Refused, "is not migrating")
	_, err = s.Allocate(ctx, node(1), "green", "", 0)
	refused(t, err, store.Refused, "no CIDRs of its own")

	// A node that was disconnected may register with its subnet of the old network. A node with a tenant on the new
	// network is refused if the store has lost the migration.
	r := store.Registration{Node: node(1), Mappings: []*pilasterv1.Mapping{{Tenant: "green", To: subnet}}}
	if _, err := s.Register(ctx, r); err != nil {
		t.Errorf("a node with a subnet of the old network: %v", err)
	}
	nimitz(t, s, "lime", "10.0.0.0/16,24")
	_, err = s.Register(
		ctx,
		store.Registration{Node: node(1), Tenants: []*pilasterv1.Tenant{{Name: "lime", Network: tenant.Netpila}}},
	)
	refused(t, err, store.Refused, "pilaster tenant migrate lime --to netpila")
}

func TestFinishMigrationByForce(t *testing.T) {
	s := open(t, storetest.Embedded(t), address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16")
	hosts(t, s, "green", 1)
	allocate(t, s, 1, "green", "c1/eth0")
	if _, err := s.Migrate(t.Context(), "green", tenant.Netpila, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.FinishMigration(t.Context(), "green", true); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); len(got) != 0 {
		t.Errorf("mappings are left: %v", got)
	}
	if err := s.Free(t.Context(), node(1), "green", "c1/eth0"); err != nil {
		t.Errorf("Free of a deleted address: %v", err)
	}
}

func TestFinishMigrationWithServices(t *testing.T) {
	s := open(t, storetest.Embedded(t), address.Plan{})
	nimitz(t, s, "green", "fd12:3456::/48,80")
	ntp := tenant.UnderlayService{
		Name:    "ntp",
		Virtual: netip.MustParseAddr("fd99::7b"),
		Real:    netip.MustParseAddr("2001:db8::7b"),
	}
	if _, err := s.CreateUnderlayService(t.Context(), "green", ntp); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Migrate(t.Context(), "green", tenant.Netpila, 0); err != nil {
		t.Fatal(err)
	}
	_, err := s.FinishMigration(t.Context(), "green", true)
	refused(t, err, store.Refused, "1 underlay service and 0 publications",
		"pilaster underlay service list --tenant green")
	if err := s.DeleteUnderlayService(t.Context(), "green", "ntp"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.FinishMigration(t.Context(), "green", false); err != nil {
		t.Error(err)
	}
}

func TestFinishMigrationInTwoRegions(t *testing.T) {
	s := open(t, storetest.Embedded(t), address.Plan{})
	nimitz(t, s, "t1", "10.0.0.0/16,24")
	if _, err := s.Register(t.Context(), store.Registration{Node: node(2), Edge: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportRegion(t.Context(), "west", east("10.1.0.0/16"), nil, false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Migrate(t.Context(), "t1", tenant.Netpila, 0); err != nil {
		t.Fatal(err)
	}
	_, err := s.FinishMigration(t.Context(), "t1", false)
	refused(
		t,
		err,
		store.Refused,
		"region east reaches tenant t1",
		"nothing was changed",
		"pilaster region import FILE --tenant OTHERS",
		"pilaster region delete east",
		"--force",
	)
	if moved, err := s.FinishMigration(t.Context(), "t1", true); err != nil || moved.Leaving != "" {
		t.Errorf("with force: %v, %v", moved, err)
	}
}

// After a restore that lost a migration, the administrator may repeat the migration, but only with the addressing that
// the node's containers have.
func TestLostMigration(t *testing.T) {
	s := open(t, storetest.Embedded(t), address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16,24")
	register := func(a pilasterv1.Addressing) error {
		_, err := s.Register(
			t.Context(),
			store.Registration{
				Node:    node(1),
				Tenants: []*pilasterv1.Tenant{{Name: "green", Network: tenant.Netpila, Addressing: a}},
			},
		)
		return err
	}
	refused(
		t,
		register(pilasterv1.Addressing_ADDRESSING_CLEAR),
		store.Refused,
		"pilaster tenant migrate green --to netpila --addressing clear",
	)
	refused(
		t,
		register(pilasterv1.Addressing_ADDRESSING_ENCRYPTED),
		store.Refused,
		"pilaster tenant migrate green --to netpila --addressing encrypted",
	)
	if _, err := s.Migrate(t.Context(), "green", tenant.Netpila, 0); err != nil {
		t.Fatal(err)
	}
	refused(
		t,
		register(pilasterv1.Addressing_ADDRESSING_CLEAR),
		store.Refused,
		"tenant green with clear addresses",
		"encrypted",
		"nothing more was accepted",
	)
	if err := register(pilasterv1.Addressing_ADDRESSING_ENCRYPTED); err != nil {
		t.Error(err)
	}
}
