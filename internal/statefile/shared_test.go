package statefile

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
		t.Errorf("got files %v, %v; want a only", left, err)
	}
	if text, err := os.ReadFile(f.Path("a")); err != nil || string(text) != "\"a\"\n" {
		t.Errorf("got %q, %v in file a", text, err)
	}
	if err := os.RemoveAll(f.Path("")); err != nil {
		t.Fatal(err)
	}
	if f.Remove("a") != nil || f.Write("a", 1, 0o600) == nil || f.Rename("a", "b") == nil {
		t.Error("in a folder that does not exist: Remove failed, or Write or Rename did not")
	}
}

func TestSyncOfMissingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	s := Disk{}.NewSyncer(path)
	if err := s.Sync(); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("sync of a missing file: got error %v, want one with %s", err, path)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(); err != nil {
		t.Error(err)
	}
}
