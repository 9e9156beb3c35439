package endpoint

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
)

func forget(t *testing.T, s *Store, has ...address.TenantID) {
	t.Helper()
	if err := s.Forget(func(id address.TenantID) bool { return slices.Contains(has, id) }); err != nil {
		t.Fatal(err)
	}
}

func cursorFiles(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, cursorsFolder, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// Forget removes the files of a tenant id if this node has neither the id nor quarantined indexes of the id.
func TestForget(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	i := allocate(t, s)
	if err := s.Put(record(1, i)); err != nil {
		t.Fatal(err)
	}
	wantKept := func(why string, has ...address.TenantID) {
		t.Helper()
		forget(t, s, has...)
		if next := allocate(t, s); next == i {
			t.Fatalf("%s: index %d was allocated again", why, i)
		}
		if len(cursorFiles(t, dir)) == 0 {
			t.Fatalf("%s: the cursor was removed", why)
		}
	}
	c.advance(2 * MinQuarantine)
	wantKept("in use")
	if err := s.ReleaseIndex(key, i); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(1); err != nil {
		t.Fatal(err)
	}
	c.advance(MinQuarantine - 1)
	wantKept("just released")
	c.advance(2 * MinQuarantine)
	wantKept("the node has the id", key.Tenant)

	c.advance(2 * MinQuarantine)
	s = open(t, dir, c) // the allocated indexes are no longer known
	wantKept("just read")
	c.advance(MinQuarantine)
	forget(t, s)
	if left := cursorFiles(t, dir); len(left) > 0 {
		t.Errorf("got files %v, want none", left)
	}
	s = open(t, dir, c)
	if again := allocate(t, s); again != 1 {
		t.Errorf("allocated %d, want 1 from a new cursor", again)
	}
}

// A failed removal leaves valid files, which a later Forget removes.
func TestForgetFails(t *testing.T) {
	for _, suffix := range []string{".released", ".json"} {
		dir, c := t.TempDir(), newClock()
		s := open(t, dir, c)
		if err := s.ReleaseIndex(key, allocate(t, s)); err != nil {
			t.Fatal(err)
		}
		c.advance(MinQuarantine)
		// A folder that is not empty cannot be removed.
		file := filepath.Join(dir, cursorsFolder, key.String()+suffix)
		if err := os.Rename(file, file+".kept"); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(file, "x"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := s.Forget(func(address.TenantID) bool { return false }); err == nil {
			t.Fatalf("%s: Forget succeeded, want an error", suffix)
		}
		os.RemoveAll(file)
		if err := os.Rename(file+".kept", file); err != nil {
			t.Fatal(err)
		}
		s = open(t, dir, c)
		c.advance(MinQuarantine)
		forget(t, s)
		if left := cursorFiles(t, dir); len(left) > 0 {
			t.Errorf("%s: got files %v, want none", suffix, left)
		}
	}
}

// No index is allocated twice while Forget removes its cursor.
func TestForgetDuringAllocations(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s, err := OpenStore(StoreConfig{Dir: dir, Now: c.now, Quarantine: 1}) // every quarantine ends at once
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		var allocated sync.WaitGroup
		var indexes [4]address.Index
		for n := range indexes {
			allocated.Go(func() {
				var err error
				if indexes[n], err = s.AllocateIndex(key, every); err != nil && !errors.Is(err, ErrExhausted) {
					t.Error(err)
				}
			})
		}
		forget(t, s)
		allocated.Wait()
		slices.Sort(indexes[:])
		if len(slices.Compact(slices.Clone(indexes[:]))) < len(indexes) {
			t.Fatalf("an index was allocated twice: %v", indexes)
		}
		c.advance(1)
	}
}

// While Forget waits for the disk, callers that use other cursors do not wait.
func TestForgetBlocksNoOtherCursors(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	allocate(t, s)
	c.advance(MinQuarantine)
	slow := s.lockCursor(key) // as during a slow write
	forgotten := make(chan struct{})
	go func() { defer close(forgotten); forget(t, s) }()
	others := make(chan error, 1)
	go func() {
		_, err := s.AllocateIndex(CursorKey{Tenant: key.Tenant + 1, App: key.App}, every)
		others <- errors.Join(err, s.Put(record(7, 7)))
	}()
	select {
	case err := <-others:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("callers of another cursor still wait after 20 s")
	}
	slow.mu.Unlock()
	<-forgotten
}
