package agent_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/statefile"
)

// restartDamaged cuts files off and starts the core again. The problems must name each of them.
func restartDamaged(t *testing.T, b *bed, files ...string) {
	t.Helper()
	b.Damages = statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), nil)
	for _, file := range files {
		if err := os.Truncate(filepath.Join(b.Dir, file), 20); err != nil {
			t.Fatal(err)
		}
	}
	b.Reopen()
	for _, file := range files {
		checkProblem(t, b, file, true)
		if aside, _ := filepath.Glob(filepath.Join(b.Dir, file) + ".damaged-*"); len(aside) != 1 {
			t.Errorf("%s: got %v, want one file that was set aside", file, aside)
		}
	}
}

func checkProblem(t *testing.T, b *bed, file string, want bool) {
	t.Helper()
	if got := strings.Join(b.Problems(), "\n"); strings.Contains(got, file+" is ") != want {
		t.Errorf("got problems %q, want one of %s: %v", got, file, want)
	}
}

// Without its file, a tenant keeps its keys and policies in the kernel. An ADD with the orchestrator restores the file.
func TestDamagedTenant(t *testing.T) {
	for _, files := range [][]string{{"tenants/blue.json"}, {"tenants/blue.json", "policies/blue.json"}} {
		b := newBed(t)
		b.MustAdd("c1")
		b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
		want := b.Driver.Policies["blue"].Tables
		restartDamaged(t, b, files...)
		b.Damages = statefile.NewDamages(statefile.Disk{}, slog.New(slog.DiscardHandler), nil)
		b.Reopen() // the files are missing now
		checkProblem(t, b, "tenants/blue.json", true)
		if got := b.Driver.Policies["blue"].Tables; len(got.Subjects) == 0 || len(got.Subjects) != len(want.Subjects) {
			t.Errorf("got policies %+v in the kernel, want %+v", got, want)
		}
		if ids := b.Driver.IDs("blue"); len(ids) != 1 || ids[0].Key != agenttest.BlueKey {
			t.Errorf("got ids %v in the kernel, want one with its key", ids)
		}
		if _, err := os.Stat(filepath.Join(b.Dir, "tenants/blue.json")); err == nil {
			t.Error("the file of a tenant without keys was written")
		}
		b.Orchestrator.Err = agenttest.ErrFake
		_, err := b.Add(t.Context(), b.Request("c2"))
		if err == nil || !strings.Contains(err.Error(), "tenants/blue.json") {
			t.Errorf("ADD without the orchestrator: got %v, want an error with the file", err)
		}
		b.Orchestrator.Err = nil
		if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: b.Orchestrator.Tenants["blue"], Whole: true}},
			nil); err != nil {
			t.Fatal(err)
		}
		b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
		b.MustAdd("c2")
		checkProblem(t, b, "tenants/blue.json", false)
		b.Damages = nil
		b.Reopen()
	}
}

// Policies in the kernel stay in force, and no container is added, until all policies were received.
func TestDamagedPolicies(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	deny := agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll))
	b.MustApplyPolicies(deny)
	restartDamaged(t, b, "policies/blue.json")
	if !b.Driver.Policies["blue"].Restricts() {
		t.Error("the policies in the kernel are gone")
	}
	some := deny
	some.Whole = false
	if err := b.ApplyPolicies(t.Context(), some); err != nil {
		t.Fatal(err)
	}
	checkProblem(t, b, "policies/blue.json", true)
	b.MustApplyPolicies(deny)
	checkProblem(t, b, "policies/blue.json", false)
	b.MustAdd("c2")
	b.Damages = nil
	b.Reopen()
}

// Only the endpoint of a damaged record is removed. Its DEL succeeds.
func TestDamagedRecord(t *testing.T) {
	b := newBed(t)
	gone, kept := b.MustAdd("c1"), b.MustAdd("c2")
	b.Driver.Calls = nil
	restartDamaged(t, b, "endpoints/1.json")
	// It is unknown which policies apply to it.
	removed, enforced := slices.Index(b.Driver.Calls, "Remove"), slices.Index(b.Driver.Calls, "RestorePolicies")
	if removed < 0 || removed > enforced {
		t.Errorf("calls %v: the device is not removed before policies are restored", b.Driver.Calls)
	}
	if _, left := b.Driver.Devices[gone.ID]; left || b.Driver.Active[kept.ID].ID != kept.ID {
		t.Errorf("got devices %v, want only that of endpoint %d", b.Driver.Devices, kept.ID)
	}
	if err := b.Delete(t.Context(), gone.ContainerID, gone.Interface); err != nil {
		t.Errorf("DEL of the endpoint without a record: %v", err)
	}
	if r := b.MustAdd("c1"); r.Attachments[0].Plaintext == gone.Attachments[0].Plaintext {
		t.Errorf("address %v was allocated twice", gone.Attachments[0].Plaintext)
	}
}

// A record was damaged, and later another record with the same number is lost: the start still reports the lost record.
func TestDamagedRecordOfAnotherTime(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	restartDamaged(t, b, "endpoints/1.json")
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.Max = 1 // so that the next endpoint has number 1 again
	b.Reopen()
	b.MustAdd("c2")
	if err := os.Remove(filepath.Join(b.Dir, "endpoints", "1.json")); err != nil {
		t.Fatal(err)
	}
	if err := b.TryReopen(); err == nil || !strings.Contains(err.Error(), "it is missing") {
		t.Errorf("a start without the record of a living endpoint: %v; want it refused", err)
	}
}
