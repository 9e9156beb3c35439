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

// The files of a tenant id are removed when this node has neither the id nor a quarantined index of it.
func TestCursorsOfIDsThatAreGone(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	i := draw(t, s)
	if err := s.Put(record(1, i)); err != nil {
		t.Fatal(err)
	}
	stays := func(why string, has ...address.TenantID) {
		t.Helper()
		forget(t, s, has...)
		if next := draw(t, s); next == i {
			t.Fatalf("%s: index %d was given again", why, i)
		}
		if len(cursorFiles(t, dir)) == 0 {
			t.Fatalf("%s: the cursor is gone", why)
		}
	}
	c.advance(2 * MinQuarantine)
	stays("in use")
	if err := s.ReleaseIndex(key, i); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(1); err != nil {
		t.Fatal(err)
	}
	c.advance(MinQuarantine - 1)
	stays("just released")
	c.advance(2 * MinQuarantine)
	stays("the node has the id", key.Tenant)

	c.advance(2 * MinQuarantine)
	s = open(t, dir, c) // the allocated indexes are no longer known
	stays("just read")
	c.advance(MinQuarantine)
	forget(t, s)
	if left := cursorFiles(t, dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	s = open(t, dir, c)
	if again := draw(t, s); again != 1 {
		t.Errorf("from the beginning: %d", again)
	}
}

// A failed removal leaves readable files, which are removed later.
func TestForgottenHalf(t *testing.T) {
	for _, suffix := range []string{".released", ".json"} {
		dir, c := t.TempDir(), newClock()
		s := open(t, dir, c)
		if err := s.ReleaseIndex(key, draw(t, s)); err != nil {
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
			t.Fatalf("%s: no error", suffix)
		}
		os.RemoveAll(file)
		if err := os.Rename(file+".kept", file); err != nil {
			t.Fatal(err)
		}
		s = open(t, dir, c)
		c.advance(MinQuarantine)
		forget(t, s)
		if left := cursorFiles(t, dir); len(left) > 0 {
			t.Errorf("%s: left %v", suffix, left)
		}
	}
}

// Indexes that are allocated while their cursor is removed differ all the same.
func TestForgetMeanwhile(t *testing.T) {
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
			t.Fatalf("given twice: %v", indexes)
		}
		c.advance(1)
	}
}

// While one cursor is removed, which may wait for a slow disk, callers of other cursors do not wait.
func TestForgetLetsOthersGoOn(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	draw(t, s)
	c.advance(MinQuarantine)
	slow := s.lockCursor(key) // as a caller that waits for the disk holds it
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
		t.Error("others wait")
	}
	slow.mu.Unlock()
	<-forgotten
}
