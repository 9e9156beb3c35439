package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// A device that cannot be removed keeps its record and address until it can.
func TestFailedRemovalIsTakenUpAgain(t *testing.T) {
	again := map[string]func(b *bed) error{
		"by DEL":     func(b *bed) error { return b.Delete(b.t.Context(), "c1", "eth0") },
		"by restart": func(b *bed) error { return b.tryReopen() },
		"by GC": func(b *bed) error {
			_, err := b.CollectGarbage(b.t.Context(), "pilaster", func(string, string) bool { return false })
			return err
		},
	}
	for name, retry := range again {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			r := b.add("c1")
			b.driver.fail["Remove"] = errFake
			if err := b.Delete(t.Context(), "c1", "eth0"); !errors.Is(err, errFake) {
				t.Fatalf("DEL: %v", err)
			}
			if got, ok := b.store.Get(r.ID); !ok || got.State != endpoint.Deleting {
				t.Fatalf("record is %+v, %v; want deleting", got, ok)
			}
			delete(b.driver.fail, "Remove")
			if err := retry(b); err != nil {
				t.Fatal(err)
			}
			b.clean()
		})
	}
	t.Run("by ADD", func(t *testing.T) {
		b := newBed(t)
		old := b.add("c1")
		b.driver.fail["Remove"] = errFake
		if err := b.Delete(t.Context(), "c1", "eth0"); err == nil {
			t.Fatal("DEL succeeded")
		}
		if _, err := b.Add(t.Context(), b.request("c1")); !errors.Is(err, errFake) {
			t.Fatalf("ADD over it: %v", err)
		}
		delete(b.driver.fail, "Remove")
		if r := b.add("c1"); r.Attachments[0].Plaintext == old.Attachments[0].Plaintext {
			t.Error("the address was given again at once")
		}
	})
}

// Crash between steps: a new process knows the disk and finds the kernel as the old one left it.
func TestCrashAtEachStep(t *testing.T) {
	for _, at := range []string{"PutTenant", "CreateDevice", "Attach", "Activate", "Deactivate", "Remove",
		"DeleteTenant"} {
		t.Run(at, func(t *testing.T) {
			b := newBed(t)
			// The image of the disk at the moment of the crash; the old process goes on with
			// the original, which is thrown away.
			image := t.TempDir()
			taken := false
			b.driver.during = func(call string, _ endpoint.Record) {
				if call == at && !taken {
					taken = true
					if err := os.CopyFS(image, os.DirFS(b.dir)); err != nil {
						t.Error(err)
					}
				}
			}
			r := b.add("c1")
			if at == "Deactivate" || at == "Remove" || at == "DeleteTenant" {
				if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
					t.Fatal(err)
				}
			}
			b.driver.during, b.dir = nil, image
			// Without a record the kernel holds no more than a device, with one it may hold everything.
			b.driver.devices, b.driver.active = map[endpoint.ID]endpoint.Record{}, map[endpoint.ID]endpoint.Record{}
			switch at {
			case "CreateDevice", "Remove":
				b.driver.devices[r.ID] = r
			case "Attach", "Activate", "Deactivate":
				b.driver.devices[r.ID], b.driver.active[r.ID] = r, r
			}
			b.driver.tenants["blue"] = b.orchestrator.tenants["blue"]
			b.reopen()
			if at == "Attach" || at == "Activate" {
				// The runtime received no answer, and deletes such endpoints.
				if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
					t.Fatal(err)
				}
			}
			b.clean()
			// Before the address was allocated, none can be reused.
			if again := b.add("c1"); again.Attachments[0].Plaintext == r.Attachments[0].Plaintext && at != "PutTenant" {
				t.Errorf("address %v was given again after the crash", r.Attachments[0].Plaintext)
			}
		})
	}
}

// What no network can have made is refused by it, and what is on a network that this node does not have is left alone.
func TestRecordsAreTheirNetworks(t *testing.T) {
	b := newBed(t)
	r := b.add("c1")
	path := b.store.RecordPath(r.ID)
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
		before := len(b.driver.calls)
		if err := b.tryReopen(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q of\n%s", err, says, changed)
		}
		if len(b.driver.calls) != before {
			t.Errorf("the kernel was touched: %v", b.driver.calls[before:])
		}
	}
}

func TestRestartBringsActiveEndpointsBack(t *testing.T) {
	b := newBed(t)
	r1, r2 := b.add("c1"), b.add("c2")
	b.driver.devices[77] = endpoint.Record{ID: 77} // of no endpoint
	b.driver.active, b.driver.tenants = map[endpoint.ID]endpoint.Record{}, map[string]tenant.Tenant{}
	b.driver.calls = nil
	b.reopen()
	if want := []string{"PutTenant", "RestorePolicies", "Restore", "Repair"}; !slices.Equal(b.driver.calls, want) {
		t.Errorf("calls %v, want %v", b.driver.calls, want)
	}
	if len(b.driver.active) != 2 || b.driver.active[r1.ID].Attachments[0].Address != r1.Attachments[0].Address {
		t.Errorf("active %v", b.driver.active)
	}
	if _, left := b.driver.devices[77]; left {
		t.Error("a device of no endpoint was kept")
	}
	if _, err := b.Add(t.Context(), b.request("c2")); !errors.Is(err, refusal.ErrExists) {
		t.Errorf("ADD of %v after the restart: %v", r2.ID, err)
	}
	if r := b.add("c3"); r.ID == r1.ID || r.ID == r2.ID {
		t.Errorf("id %d is in use", r.ID)
	}
}

func TestOneLostDeviceDoesNotKeepTheOthersAway(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.driver.lost["c1"] = errFake
	b.reopen()
	if r, _ := b.store.Find("c1", "eth0"); r.State != endpoint.Lost || !strings.Contains(b.lostProblem(), "c1") {
		t.Errorf("the endpoint is %s; said is %q", r.State, b.lostProblem())
	}
	delete(b.driver.lost, "c1")
	b.add("c2")
	b.reopen()
	if r, _ := b.store.Find("c1", "eth0"); r.State != endpoint.Active || b.lostProblem() != "" {
		t.Errorf("the endpoint is %s after its device came back; said is %q", r.State, b.lostProblem())
	}
	b.driver.lost["c1"] = errFake
	b.reopen()
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
}

// Endpoints of containers that ended while no agent ran, or with the machine, are removed.
func TestContainersWithoutNamespaceAreReaped(t *testing.T) {
	b := newBed(t)
	gone := b.add("c1")
	kept := b.add("c2")
	b.driver.lost["c1"] = fmt.Errorf("link pil1: %w", dpapi.ErrNoNamespace)
	b.reopen()
	if records := b.Endpoints(); len(records) != 1 || records[0].ID != kept.ID {
		t.Fatalf("records %+v", records)
	}
	if _, left := b.driver.devices[gone.ID]; left {
		t.Error("its device is left")
	}
	if r := b.add("c1"); r.Attachments[0].Plaintext == gone.Attachments[0].Plaintext {
		t.Error("its address was given again at once")
	}
}

// A device that carries packets belongs to a container: without its record nothing is touched, not even
// the tenant of which it may be the last.
func TestLostRecordIsNamed(t *testing.T) {
	b := newBed(t)
	r := b.add("c1")
	path := b.store.RecordPath(r.ID)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	b.driver.calls = nil
	err := b.tryReopen()
	var corrupt *statefile.CorruptError
	if !errors.As(err, &corrupt) || corrupt.Path != path {
		t.Errorf("%v does not name %s", err, path)
	}
	if len(b.driver.calls) > 0 || len(b.driver.tenants) != 1 {
		t.Errorf("the kernel was touched: %v", b.driver.calls)
	}
}

func TestMissingKeysAreNamed(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	path := filepath.Join(b.dir, "tenants", "blue.json")
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
		before := len(b.driver.calls)
		err := b.tryReopen()
		var corrupt *statefile.CorruptError
		if !errors.As(err, &corrupt) || corrupt.Path != path {
			t.Errorf("%s: %v does not name %s", name, err, path)
		}
		if len(b.driver.calls) != before {
			t.Errorf("%s: the kernel was touched: %v", name, b.driver.calls[before:])
		}
	}
}
