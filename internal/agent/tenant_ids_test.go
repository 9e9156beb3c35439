package agent_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// applyIDs delivers blue's ids to the node; one after a plus is only accepted.
func (b *bed) applyIDs(changes uint64, ids ...int) error {
	blue := b.Orchestrator.Tenants["blue"]
	blue.IDs, blue.Changes = nil, changes
	for _, id := range ids {
		only := id < 0
		id = max(id, -id)
		blue.IDs = append(blue.IDs, tenant.ID{ID: address.TenantID(id), Key: address.Key{byte(id)}, OnlyAccepted: only})
	}
	return b.Apply(b.T.Context(), []agent.TenantState{{Tenant: blue}}, nil)
}

// idsReported is what the node reports of blue: accepted, held.
func (b *bed) idsReported() string {
	var report pilasterv1.FollowRequest
	b.Tenants.Report(&report, true)
	for _, h := range report.Hosting {
		if h.Tenant == "blue" {
			return fmt.Sprint(h.Accepts, h.Holds)
		}
	}
	return "nothing"
}

// A new id is accepted, then used for new endpoints; the old one is held as long as it has containers, also after
// restarts, and is removed when the cluster has retired it.
func TestIdsComeAndGo(t *testing.T) {
	b := newBed(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	says := func(want string) {
		t.Helper()
		for range 2 {
			if got := b.idsReported(); got != want {
				t.Errorf("the node says %s, want %s", got, want)
			}
			b.Reopen()
		}
	}
	must(b.applyIDs(1, 1))
	says("nothing")
	old := b.MustAdd("old")
	says("[1] [1]")
	must(b.applyIDs(2, 1, -8))
	says("[1 8] [1]")
	if r := b.MustAdd("between"); r.TenantID != 1 {
		t.Errorf("allocated from id %d, which is only accepted", r.TenantID)
	}
	must(b.applyIDs(3, 1, 8))
	says("[1 8] [1 8]")
	if r := b.MustAdd("new"); r.TenantID != 8 {
		t.Errorf("allocated from id %d, not from the current one", r.TenantID)
	}
	must(b.applyIDs(2, 1, -8)) // overtaken on its way
	says("[1 8] [1 8]")
	must(b.Delete(t.Context(), "between", "eth0"))
	says("[1 8] [1 8]")
	must(b.Delete(t.Context(), "old", "eth0"))
	says("[1 8] [8]")
	must(b.applyIDs(4, 8))
	says("[8] [8]")
	if ids := b.Driver.IDs("blue"); len(ids) != 1 || ids[0].ID != 8 {
		t.Errorf("the kernel has %v", ids)
	}
	must(b.applyIDs(3, 1, 8)) // overtaken: a retired key does not come back
	says("[8] [8]")
	if r := b.MustAdd("last"); r.TenantID != 8 || old.TenantID != 1 {
		t.Errorf("allocated from id %d", r.TenantID)
	}

	// The disk does not keep its cursor after the quarantine of its addresses.
	cursors := func() string {
		must(b.ForgetIndexes())
		files, err := filepath.Glob(filepath.Join(b.Dir, "cursors", "*.json"))
		must(err)
		for i, file := range files {
			files[i] = filepath.Base(file)
		}
		return fmt.Sprint(files)
	}
	if got := cursors(); got != "[1-1.json 8-1.json]" {
		t.Errorf("during the quarantine: %s", got)
	}
	b.Now = b.Now.Add(endpoint.MinQuarantine)
	if got := cursors(); got != "[8-1.json]" {
		t.Errorf("of ids 1 and 8: %s", got)
	}
	must(b.Delete(t.Context(), "new", "eth0"))
	must(b.Delete(t.Context(), "last", "eth0"))
	b.Now = b.Now.Add(endpoint.MinQuarantine)
	if got := cursors(); got != "[]" {
		t.Errorf("without the tenant: %s", got)
	}
}

// Ids that containers here use stay even if the cluster has lost them, and no update gives them another key.
func TestIdsInUseStay(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	if err := b.applyIDs(5, 8); err != nil {
		t.Fatal(err)
	}
	if got := b.idsReported(); got != "[1 8] [1 8]" {
		t.Errorf("the node says %s", got)
	}
	b.Orchestrator.Tenants["blue"] = tenant.Tenant{Name: "blue"}
	other := tenant.Tenant{Name: "blue", Changes: 6, IDs: []tenant.ID{{ID: 1, Key: address.Key{99}}}}
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: other}}, nil); err == nil ||
		!strings.Contains(err.Error(), "id 1 has one key here and another") {
		t.Errorf("another key under a known id: %v", err)
	}
}

// If the removal of a retired id from the kernel fails, it is retried.
func TestRetiredIdIsTakenAwayAgain(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	if err := b.applyIDs(2, 1, 8); err != nil {
		t.Fatal(err)
	}
	b.MustAdd("c2")
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.Driver.Fail["DeleteTenant"] = agenttest.ErrFake
	if err := b.applyIDs(3, 8); err == nil {
		t.Error("a key stays in the kernel without an error")
	}
	delete(b.Driver.Fail, "DeleteTenant")
	if err := b.applyIDs(3, 8); err != nil {
		t.Fatal(err)
	}
	if ids := b.Driver.IDs("blue"); len(ids) != 1 || ids[0].ID != 8 {
		t.Errorf("the kernel has %v", ids)
	}
}

// While a Resolve of a tenant runs, reports list the tenant as resolving, so that the orchestrator keeps the hosting
// record that Resolve made.
func TestReportsSayWhatIsAskedFor(t *testing.T) {
	b := newBed(t)
	report := func() string {
		var r pilasterv1.FollowRequest
		b.Tenants.Report(&r, true)
		return fmt.Sprint(r.HostedTenants, r.ResolvingTenants)
	}
	first, second := b.Tenants.MarkResolving("blue"), b.Tenants.MarkResolving("blue")
	first()
	if got := report(); got != "[] [blue]" {
		t.Errorf("reported %s", got)
	}
	<-b.Tenants.Changed()
	second()
	if got := report(); got != "[] []" {
		t.Errorf("reported %s", got)
	}
	select {
	case <-b.Tenants.Changed(): // the next report no longer lists blue as resolving
	default:
		t.Error("no report follows")
	}
}

func TestSequenceGrowsOverRestarts(t *testing.T) {
	dir := t.TempDir()
	last := uint64(0)
	for range 3 {
		n, err := state.OpenNode(dir, "n1")
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			now := n.Sequence()
			if now <= last {
				t.Fatalf("%d after %d", now, last)
			}
			last = now
		}
	}
}

// The error of a node without free addresses under an id advises a key rotation, which gives new addresses.
func TestRotationGivesFreshAddresses(t *testing.T) {
	b := newBed(t)
	if err := statefile.Write(filepath.Join(b.Dir, "cursors", "1-1.json"),
		map[string]address.Index{"version": 1, "reserved": address.MaxIndex}, 0o600); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	if _, err := b.Add(t.Context(), b.Request("c1")); !errors.Is(err, refusal.ErrExhausted) ||
		!strings.Contains(err.Error(), "pilaster tenant rotate-key blue") {
		t.Errorf("without addresses: %v", err)
	}
	b.CheckClean()
	blue := b.Orchestrator.Tenants["blue"]
	blue.IDs = append(blue.IDs, tenant.ID{ID: 8, Key: address.Key{8}})
	b.Orchestrator.Tenants["blue"] = blue
	if r := b.MustAdd("c1"); r.TenantID != 8 {
		t.Errorf("allocated from id %d", r.TenantID)
	}
}

// Several reports may leave before the answer to the first arrives.
func TestAsksOnceForTheWhole(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	asked := func(newStream bool) []string {
		var r pilasterv1.FollowRequest
		b.Tenants.Report(&r, newStream)
		return r.IncompleteTenants
	}
	for i, c := range []struct {
		newStream bool
		want      []string
	}{{true, []string{"blue"}}, {false, nil}, {true, []string{"blue"}}, {false, nil}} {
		if got := asked(c.newStream); !slices.Equal(got, c.want) {
			t.Errorf("report %d asks for %v, want %v", i, got, c.want)
		}
	}
	b.Tenants.NoteRefused("blue", errors.New("full"))
	if got := asked(false); !slices.Equal(got, []string{"blue"}) {
		t.Errorf("after it refused the answer, the node asks for %v", got)
	}
}
