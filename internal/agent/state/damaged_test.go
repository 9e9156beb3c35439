package state

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

// Damaged gateway prefixes are set aside and accepted again from the orchestrator; a damaged identity is not replaced.
func TestDamagedNodeFiles(t *testing.T) {
	dir := t.TempDir()
	damages := statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), nil)
	n, err := OpenNode(dir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	m := Membership{"cluster", netip.MustParsePrefix("fd70:696c:6100:1::/64"), address.DefaultPlan()}
	m.Plan.Gateway4 = netip.MustParsePrefix("100.64.0.0/10")
	if err := n.Join(m); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, gatewaysFileName), 20); err != nil {
		t.Fatal(err)
	}
	if n, err = OpenNodeWith(statefile.Disk{}, damages, dir, "n1"); err != nil {
		t.Fatal(err)
	}
	if got := damages.Problems(); len(got) != 1 || !n.LostGateways() {
		t.Errorf("got problems %q, lost: %v; want one, true", got, n.LostGateways())
	}
	if err := n.Join(m); err != nil {
		t.Fatal(err)
	}
	if got, _ := n.Membership(); got != m || n.LostGateways() || len(damages.Problems()) > 0 {
		t.Errorf("got %+v with problems %q, want %+v without", got, damages.Problems(), m)
	}
	if err := os.Truncate(filepath.Join(dir, NodeFileName), 20); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenNodeWith(statefile.Disk{}, damages, dir, "n1"); err == nil {
		t.Error("a damaged node.json was accepted")
	}
}

// TestReservation: a node keeps that the cluster reserves the prefix of identifiers, also if an older orchestrator does
// not say so later, and accepts it after its first registration.
func TestReservation(t *testing.T) {
	dir := t.TempDir()
	n, err := OpenNode(dir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	without := Membership{"cluster", netip.MustParsePrefix("fd70:696c:6100:1::/64"), address.DefaultPlan()}
	with := without
	with.Plan.Identifiers = true
	for i, step := range []struct{ said, want Membership }{{without, without}, {with, with}, {without, with}} {
		if err := n.Join(step.said); err != nil {
			t.Fatalf("registration %d: %v", i, err)
		}
		if n, err = OpenNode(dir, "n1"); err != nil {
			t.Fatal(err)
		}
		if got, _ := n.Membership(); got != step.want {
			t.Errorf("after registration %d: %+v, want %+v", i, got, step.want)
		}
	}
	if err := os.Truncate(filepath.Join(dir, reservedFileName), 5); err != nil {
		t.Fatal(err)
	}
	damages := statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), nil)
	if n, err = OpenNodeWith(statefile.Disk{}, damages, dir, "n1"); err != nil || len(damages.Problems()) != 1 {
		t.Fatalf("a damaged file: %v, problems %q", err, damages.Problems())
	}
	if err := n.Join(with); err != nil {
		t.Fatal(err)
	}
	if got, _ := n.Membership(); got != with || len(damages.Problems()) > 0 {
		t.Errorf("got %+v with problems %q, want %+v without", got, damages.Problems(), with)
	}
}

// TestEgressPrefix: a node that joined without an egress prefix accepts one later, keeps it, also if an older
// orchestrator does not send it, and refuses another one.
func TestEgressPrefix(t *testing.T) {
	dir := t.TempDir()
	n, err := OpenNode(dir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	without := Membership{"cluster", netip.MustParsePrefix("fd70:696c:6100:1::/64"), address.DefaultPlan()}
	with, other := without, without
	with.Plan.Egress = netip.MustParsePrefix("2001:db8:7::/48")
	other.Plan.Egress = netip.MustParsePrefix("2001:db8:8::/48")
	for i, step := range []struct{ said, want Membership }{{without, without}, {with, with}, {without, with}} {
		if err := n.Join(step.said); err != nil {
			t.Fatalf("registration %d: %v", i, err)
		}
		if n, err = OpenNode(dir, "n1"); err != nil {
			t.Fatal(err)
		}
		if got, _ := n.Membership(); got != step.want {
			t.Errorf("after registration %d: %+v, want %+v", i, got, step.want)
		}
	}
	if err := n.Join(other); err == nil {
		t.Error("another egress prefix was accepted")
	}
	text := `{"version":1,"egressPrefix":"fd70:696c:6100::/48"}` // in the base prefix
	if err := os.WriteFile(filepath.Join(dir, reservedFileName), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	damages := statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), nil)
	if n, err = OpenNodeWith(statefile.Disk{}, damages, dir, "n1"); err != nil || len(damages.Problems()) != 1 {
		t.Fatalf("an invalid file: %v, problems %q", err, damages.Problems())
	}
	if err := n.Join(with); err != nil {
		t.Fatal(err)
	}
	if got, _ := n.Membership(); got != with {
		t.Errorf("after the damage: %+v, want %+v", got, with)
	}
}
