package durable

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestFolder(t *testing.T) {
	f := NewFolder(t.TempDir())
	var all sync.WaitGroup
	for _, name := range []string{"a", "b", "c", "d"} {
		all.Go(func() {
			if err := f.Write(name, name, 0o600); err != nil {
				t.Error(err)
			}
			if name == "a" {
				return
			}
			if err := f.Rename(name, name+".gone"); err != nil {
				t.Error(err)
			}
			if err := f.Remove(name, name+".gone"); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	left, err := os.ReadDir(f.Path(""))
	if err != nil || len(left) != 1 || left[0].Name() != "a" {
		t.Errorf("left are %v, %v", left, err)
	}
	if text, err := os.ReadFile(f.Path("a")); err != nil || string(text) != "\"a\"\n" {
		t.Errorf("a is %q, %v", text, err)
	}
	if err := os.RemoveAll(f.Path("")); err != nil {
		t.Fatal(err)
	}
	if f.Remove("a") != nil || f.Write("a", 1, 0o600) == nil || f.Rename("a", "b") == nil {
		t.Error("a folder that is not there took changes, or has a file")
	}
}

// Who asks while a sync is on gets one of their own: the one that is on may have passed their change already.
func TestSyncThatIsOnServesNobodyNew(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "later")
	s := NewSyncer(missing)
	s.one.Lock() // as during a sync
	results := make(chan error)
	const askers = 5
	for range askers {
		go func() { results <- s.Sync() }()
	}
	for { // until the first has opened a round
		s.mu.Lock()
		open := s.next != nil
		s.mu.Unlock()
		if open {
			break
		}
	}
	if err := os.WriteFile(missing, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.one.Unlock()
	for range askers {
		if err := <-results; err != nil {
			t.Errorf("a sync before the file was there counted: %v", err)
		}
	}
	if err := os.Remove(missing); err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(); err == nil || !strings.Contains(err.Error(), "later") {
		t.Errorf("a sync of what is gone: %v", err)
	}
}
