package statefile

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

type content struct {
	Version int `json:"version"`
	N       int `json:"n"`
}

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.json")
	for n := range 3 {
		if err := Write(path, content{1, n}, 0o600); err != nil {
			t.Fatal(err)
		}
		var c content
		if err := Read(path, 1, &c); err != nil || c.N != n {
			t.Fatalf("read %+v, %v; want n = %d", c, err, n)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("got mode %v, %v; want 0600", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("got files %v, want one", entries)
	}
}

func TestFailedWriteChangesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x.json")
	if err := Write(path, content{1, 1}, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, func() {}, 0o600); err == nil {
		t.Fatal("Write of a function succeeded, want an error")
	}
	// A file cannot replace a directory: only the rename at the end fails.
	taken := filepath.Join(dir, "taken")
	if err := os.MkdirAll(filepath.Join(taken, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(taken, content{1, 2}, 0o600); err == nil {
		t.Fatal("Write replaced a directory, want an error")
	}
	var c content
	if err := Read(path, 1, &c); err != nil || c.N != 1 {
		t.Fatalf("read %+v, %v; want the old file", c, err)
	}
	if names, err := Names(dir, ""); err != nil || !slices.Equal(names, []string{"x.json"}) {
		t.Errorf("got files %v, %v; want x.json only", names, err)
	}
}

func TestReadCorruptFile(t *testing.T) {
	for name, text := range map[string]string{
		"empty":      "",
		"cut off":    `{"version": 1, "n": 1`,
		"unknown":    `{"version": 1, "n": 1, "m": 2}`,
		"trailing":   `{"version": 1, "n": 1} {"n": 2}`,
		"not JSON":   "\x00\x00\x00",
		"wrong type": `{"version": 1, "n": "1"}`,
		"no version": `{"n": 1}`,
	} {
		path := filepath.Join(t.TempDir(), "x.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var c content
		err := Read(path, 1, &c)
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || corrupt.Path != path || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got error %v, want a CorruptError with %s", name, err, path)
		}
	}
}

// The error for a later version names the version, not the unknown fields that a later build may write.
func TestLaterVersion(t *testing.T) {
	err := DecodeVersion([]byte(`{"version": 2, "n": 1, "m": 2}`), 1, new(content))
	if err == nil || !strings.Contains(err.Error(), "a later build wrote it; start that one") {
		t.Errorf("got error %v, want one that names a later build", err)
	}
}

func TestNamesRemovesInterruptedWrites(t *testing.T) {
	dir := t.TempDir()
	for _, f := range []string{"b.json", "a.json", "other.txt", tempPrefix + "a.json-123"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	names, err := Names(dir, ".json")
	if err != nil || !slices.Equal(names, []string{"a", "b"}) {
		t.Fatalf("got names %v, %v; want a and b", names, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, tempPrefix+"*")); left != nil {
		t.Errorf("got files of interrupted writes %v, want none", left)
	}
}

func TestRemoveTwice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if err := WriteBytes(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLock(t *testing.T) {
	dir := t.TempDir()
	first, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Fatalf("a second Lock: got error %v, want one with %s", err, dir)
	}
	first.Close()
	second, err := Lock(dir)
	if err != nil {
		t.Fatalf("Lock after the first lock was closed: %v", err)
	}
	second.Close()
}
