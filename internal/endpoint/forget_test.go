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

// What is kept of an id goes when this node has neither the id nor an index that has not rested.
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
	c.advance(2 * MinRest)
	stays("in use")
	if err := s.ReleaseIndex(key, i); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(1); err != nil {
		t.Fatal(err)
	}
	c.advance(MinRest - 1)
	stays("just released")
	c.advance(2 * MinRest)
	stays("the node has the id", key.Tenant)

	c.advance(2 * MinRest)
	s = open(t, dir, c) // nobody knows what was drawn before
	stays("just read")
	c.advance(MinRest)
	forget(t, s)
	if left := cursorFiles(t, dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	s = open(t, dir, c)
	if again := draw(t, s); again != 1 {
		t.Errorf("from the beginning: %d", again)
	}
}

// What cannot be removed leaves what can be read, and goes later.
func TestForgottenHalf(t *testing.T) {
	for _, suffix := range []string{".released", ".json"} {
		dir, c := t.TempDir(), newClock()
		s := open(t, dir, c)
		if err := s.ReleaseIndex(key, draw(t, s)); err != nil {
			t.Fatal(err)
		}
		c.advance(MinRest)
		// A folder that holds something cannot be removed.
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
		c.advance(MinRest)
		forget(t, s)
		if left := cursorFiles(t, dir); len(left) > 0 {
			t.Errorf("%s: left %v", suffix, left)
		}
	}
}

// Indexes that are drawn while their cursor is forgotten are different all the same.
func TestForgetMeanwhile(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s, err := OpenStore(StoreConfig{Dir: dir, Now: c.now, Rest: 1}) // all is rested soon
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		var drawn sync.WaitGroup
		var indexes [4]address.Index
		for n := range indexes {
			drawn.Go(func() {
				var err error
				if indexes[n], err = s.DrawIndex(key, every); err != nil && !errors.Is(err, ErrExhausted) {
					t.Error(err)
				}
			})
		}
		forget(t, s)
		drawn.Wait()
		slices.Sort(indexes[:])
		if len(slices.Compact(slices.Clone(indexes[:]))) < len(indexes) {
			t.Fatalf("given twice: %v", indexes)
		}
		c.advance(1)
	}
}

// While one cursor is forgotten, which may wait for a slow disk, nobody else waits.
func TestForgetLetsOthersGoOn(t *testing.T) {
	dir, c := t.TempDir(), newClock()
	s := open(t, dir, c)
	draw(t, s)
	c.advance(MinRest)
	slow := s.lockCursor(key) // as the one who waits for the disk has it
	forgotten := make(chan struct{})
	go func() { defer close(forgotten); forget(t, s) }()
	others := make(chan error, 1)
	go func() {
		_, err := s.DrawIndex(CursorKey{Tenant: key.Tenant + 1, App: key.App}, every)
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
