package agent_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// A device that cannot be removed keeps its record and address until it can.
func TestFailedRemovalIsTakenUpAgain(t *testing.T) {
	again := map[string]func(b *bed) error{
		"by DEL":     func(b *bed) error { return b.Delete(b.T.Context(), "c1", "eth0") },
		"by restart": func(b *bed) error { return b.TryReopen() },
		"by GC": func(b *bed) error {
			_, err := b.CollectGarbage(b.T.Context(), "pilaster", func(string, string) bool { return false })
			return err
		},
	}
	for name, retry := range again {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			r := b.MustAdd("c1")
			b.Driver.Fail["Remove"] = agenttest.ErrFake
			if err := b.Delete(t.Context(), "c1", "eth0"); !errors.Is(err, agenttest.ErrFake) {
				t.Fatalf("DEL: %v", err)
			}
			if got, ok := b.Store.Get(r.ID); !ok || got.State != endpoint.Deleting {
				t.Fatalf("record is %+v, %v; want deleting", got, ok)
			}
			delete(b.Driver.Fail, "Remove")
			if err := retry(b); err != nil {
				t.Fatal(err)
			}
			b.CheckClean()
		})
	}
	t.Run("by ADD", func(t *testing.T) {
		b := newBed(t)
		old := b.MustAdd("c1")
		b.Driver.Fail["Remove"] = agenttest.ErrFake
		if err := b.Delete(t.Context(), "c1", "eth0"); err == nil {
			t.Fatal("DEL succeeded")
		}
		if _, err := b.Add(t.Context(), b.Request("c1")); !errors.Is(err, agenttest.ErrFake) {
			t.Fatalf("ADD over it: %v", err)
		}
		delete(b.Driver.Fail, "Remove")
		if r := b.MustAdd("c1"); r.Attachments[0].Plaintext == old.Attachments[0].Plaintext {
			t.Error("the address was given again at once")
		}
	})
}

// The agent crashes between two steps: a new process reads the disk and finds the kernel as the old one left it.
func TestCrashAtEachStep(t *testing.T) {
	for _, at := range []string{"PutTenant", "CreateDevice", "Attach", "Activate", "Deactivate", "Remove",
		"DeleteTenant"} {
		t.Run(at, func(t *testing.T) {
			b := newBed(t)
			// The image of the disk at the moment of the crash; the old process goes on with
			// the original, which is thrown away.
			image := t.TempDir()
			taken := false
			b.Driver.During = func(call string, _ endpoint.Record) {
				if call == at && !taken {
					taken = true
					if err := os.CopyFS(image, os.DirFS(b.Dir)); err != nil {
						t.Error(err)
					}
				}
			}
			r := b.MustAdd("c1")
			if at == "Deactivate" || at == "Remove" || at == "DeleteTenant" {
				if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
					t.Fatal(err)
				}
			}
			b.Driver.During, b.Dir = nil, image
			// Without a record the kernel holds no more than a device, with one it may hold everything.
			b.Driver.Devices, b.Driver.Active = map[endpoint.ID]endpoint.Record{}, map[endpoint.ID]endpoint.Record{}
			switch at {
			case "CreateDevice", "Remove":
				b.Driver.Devices[r.ID] = r
			case "Attach", "Activate", "Deactivate":
				b.Driver.Devices[r.ID], b.Driver.Active[r.ID] = r, r
			}
			b.Driver.Tenants["blue"] = b.Orchestrator.Tenants["blue"]
			b.Reopen()
			if at == "Attach" || at == "Activate" {
				// The runtime received no answer, and deletes such endpoints.
				if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
					t.Fatal(err)
				}
			}
			b.CheckClean()
			// Before the address was allocated, none can be reused.
			if again := b.MustAdd("c1"); again.Attachments[0].Plaintext == r.Attachments[0].Plaintext &&
				at != "PutTenant" {
				t.Errorf("address %v was given again after the crash", r.Attachments[0].Plaintext)
			}
		})
	}
}

// The agent does not start, and leaves the kernel unchanged, if a record cannot be from its network, or if this node
// lacks the network.
func TestRecordsAreTheirNetworks(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	path := b.Store.RecordPath(r.ID)
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for says, change := range map[string][2]string{
		"is not of tenant id 1 and app 2": {`"app": 1,`, `"app": 2,`},
		"is on network strange, which this node does not have\n  packets flow as before; start a build of the agent " +
			"that has it": {`"netpila"`, `"strange"`},
	} {
		changed := strings.Replace(string(sound), change[0], change[1], 1)
		if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
			t.Fatal(err)
		}
		before := len(b.Driver.Calls)
		if err := b.TryReopen(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q of\n%s", err, says, changed)
		}
		if len(b.Driver.Calls) != before {
			t.Errorf("the kernel was touched: %v", b.Driver.Calls[before:])
		}
	}
}

func TestRestartBringsActiveEndpointsBack(t *testing.T) {
	b := newBed(t)
	r1, r2 := b.MustAdd("c1"), b.MustAdd("c2")
	b.Driver.Devices[77] = endpoint.Record{ID: 77} // of no endpoint
	b.Driver.Active, b.Driver.Tenants = map[endpoint.ID]endpoint.Record{}, map[string]tenant.Tenant{}
	b.Driver.Calls = nil
	b.Reopen()
	if want := []string{"PutTenant", "RestorePolicies", "Restore", "Repair"}; !slices.Equal(b.Driver.Calls, want) {
		t.Errorf("calls %v, want %v", b.Driver.Calls, want)
	}
	if len(b.Driver.Active) != 2 || b.Driver.Active[r1.ID].Attachments[0].Address != r1.Attachments[0].Address {
		t.Errorf("active %v", b.Driver.Active)
	}
	if _, left := b.Driver.Devices[77]; left {
		t.Error("a device of no endpoint was kept")
	}
	if _, err := b.Add(t.Context(), b.Request("c2")); !errors.Is(err, refusal.ErrExists) {
		t.Errorf("ADD of %v after the restart: %v", r2.ID, err)
	}
	if r := b.MustAdd("c3"); r.ID == r1.ID || r.ID == r2.ID {
		t.Errorf("id %d is in use", r.ID)
	}
}

func TestOneLostDeviceDoesNotKeepTheOthersAway(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.Driver.Lost["c1"] = agenttest.ErrFake
	b.Reopen()
	if r, _ := b.Store.Find("c1", "eth0"); r.State != endpoint.Lost || !strings.Contains(b.LostProblem(), "c1") {
		t.Errorf("the endpoint is %s; said is %q", r.State, b.LostProblem())
	}
	delete(b.Driver.Lost, "c1")
	b.MustAdd("c2")
	b.Reopen()
	if r, _ := b.Store.Find("c1", "eth0"); r.State != endpoint.Active || b.LostProblem() != "" {
		t.Errorf("the endpoint is %s after its device came back; said is %q", r.State, b.LostProblem())
	}
	b.Driver.Lost["c1"] = agenttest.ErrFake
	b.Reopen()
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
}

// Endpoints of containers that ended while no agent ran, or with the machine, are removed.
func TestContainersWithoutNamespaceAreReaped(t *testing.T) {
	b := newBed(t)
	gone := b.MustAdd("c1")
	kept := b.MustAdd("c2")
	b.Driver.Lost["c1"] = fmt.Errorf("link pil1: %w", dpapi.ErrNoNamespace)
	b.Reopen()
	if records := b.Endpoints(); len(records) != 1 || records[0].ID != kept.ID {
		t.Fatalf("records %+v", records)
	}
	if _, left := b.Driver.Devices[gone.ID]; left {
		t.Error("its device is left")
	}
	if r := b.MustAdd("c1"); r.Attachments[0].Plaintext == gone.Attachments[0].Plaintext {
		t.Error("its address was given again at once")
	}
}

// A device that carries packets belongs to a container: without its record nothing is touched, not even
// the tenant of which it may be the last.
func TestLostRecordIsNamed(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	path := b.Store.RecordPath(r.ID)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	b.Driver.Calls = nil
	err := b.TryReopen()
	var corrupt *statefile.CorruptError
	if !errors.As(err, &corrupt) || corrupt.Path != path {
		t.Errorf("%v does not name %s", err, path)
	}
	if len(b.Driver.Calls) > 0 || len(b.Driver.Tenants) != 1 {
		t.Errorf("the kernel was touched: %v", b.Driver.Calls)
	}
}

func TestMissingKeysAreNamed(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	path := filepath.Join(b.Dir, "tenants", "blue.json")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func() error{
		"gone":    func() error { return os.Remove(path) },
		"cut off": func() error { return os.WriteFile(path, whole[:20], 0o600) },
		"other key": func() error {
			return os.WriteFile(path, []byte(strings.Replace(string(whole), `"01`, `"x1`, 1)), 0o600)
		},
		"other id": func() error {
			return os.WriteFile(path, []byte(strings.Replace(string(whole), `"id": 1`, `"id": 5`, 1)), 0o600)
		},
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		before := len(b.Driver.Calls)
		err := b.TryReopen()
		var corrupt *statefile.CorruptError
		if !errors.As(err, &corrupt) || corrupt.Path != path {
			t.Errorf("%s: %v does not name %s", name, err, path)
		}
		if len(b.Driver.Calls) != before {
			t.Errorf("%s: the kernel was touched: %v", name, b.Driver.Calls[before:])
		}
	}
}
