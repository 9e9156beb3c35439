package store_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Restore refuses a damaged backup and a file of another program, and changes nothing.
func TestRestoreRefuses(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	whole := someBackup(t)
	sealed := func(text string) string { // with the right checksum
		body := text[:strings.LastIndex(strings.TrimSuffix(text, "\n"), "\n")+1]
		return fmt.Sprintf("%ssha256 %x\n", body, sha256.Sum256([]byte(body)))
	}
	lines := strings.SplitAfter(whole, "\n")
	cases := map[string]struct{ text, want string }{
		"empty":            {"", "is not a backup"},
		"something else":   {"{}\n", "is not a backup"},
		"newer":            {sealed(strings.Replace(whole, `"version":1`, `"version":2`, 1)), "version 2"},
		"a key changed":    {strings.Replace(whole, "caKey", "caKez", 1), "checksum"},
		"a line missing":   {strings.Join(append(lines[:2:2], lines[3:]...), ""), "checksum"},
		"a record missing": {sealed(strings.Join(append(lines[:2:2], lines[3:]...), "")), "records of"},
		"not ours": {
			sealed(strings.Replace(whole, "/pilaster/1/cluster", "/elsewhere/cluster", 1)),
			"not an orchestrator's",
		},
	}
	for _, at := range []int{1, len(lines[0]), len(whole) / 2, len(whole) - 70, len(whole) - 1} {
		cases[fmt.Sprintf("cut off after %d bytes", at)] = struct{ text, want string }{whole[:at], "cannot be restored"}
	}
	for name, c := range cases {
		dir := t.TempDir()
		file, data := filepath.Join(dir, "backup"), filepath.Join(dir, "data")
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := store.Restore(t.Context(), file, data, 1, log)
		if err == nil || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("%s: got %v, want %q and that nothing was changed", name, err, c.want)
		}
		if _, err := os.Stat(data); !os.IsNotExist(err) {
			t.Errorf("%s: Restore created the data directory", name)
		}
	}

	dir := t.TempDir()
	file := filepath.Join(dir, "backup")
	if err := os.WriteFile(file, []byte(whole), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := store.Restore(t.Context(), file, dir, 1, log)
	if err == nil || !strings.Contains(err.Error(), "is not empty: it has backup") {
		t.Errorf("into a folder with a file: got %v, want a refusal", err)
	}
	// The base prefix has 16,777,216 nodes.
	_, err = store.Restore(t.Context(), file, filepath.Join(dir, "data"), 1<<24, log)
	if err == nil || !strings.Contains(err.Error(), "none would be left") {
		t.Errorf("skipping all numbers: got %v, want a refusal", err)
	}
	// Restore removes the files of an interrupted restore.
	data := filepath.Join(dir, "data")
	if err := os.MkdirAll(filepath.Join(data, ".restoring", "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Restore(t.Context(), file, data, 1, log); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(data); err != nil || len(entries) != 1 || entries[0].Name() != "etcd" {
		t.Errorf("the restored data directory has %v, %v; want only etcd", entries, err)
	}
}

func someBackup(t *testing.T) string {
	t.Helper()
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s := open(t, e.Client, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "backup")
	header, err := store.Backup(t.Context(), dir, file, log)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil || bytes.Count(text, []byte("\n")) != header.Records+2 || header.Cluster != s.Cluster().UUID {
		t.Fatalf("%+v in %d bytes, %v", header, len(text), err)
	}
	return string(text)
}

// Restore restores all policies, also if they are too large for one transaction.
func TestRestoreOfPolicies(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	from, file, to := filepath.Join(dir, "from"), filepath.Join(dir, "backup"), filepath.Join(dir, "to")
	records := func(data string, work func(*store.Store)) map[string]int64 {
		e, err := store.Embed(t.Context(), data, log)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		work(open(t, e.Client, address.Plan{}))
		return revisions(t, e.Client, "policies/")
	}
	was := records(from, func(s *store.Store) {
		for _, name := range []string{"red", "blue"} {
			if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
				t.Fatal(err)
			}
			for i := range 4 {
				var names []string
				for j := range 15 {
					names = append(names, fmt.Sprintf("p%d-%d", i, j))
				}
				applied(t, s, name, policies(strings.Repeat("x", 64<<10), names...), false)
			}
		}
	})
	if _, err := store.Backup(t.Context(), from, file, log); err != nil {
		t.Fatal(err)
	}
	r, err := store.Restore(t.Context(), file, to, 1, log)
	if err != nil || fmt.Sprint(r.WithPolicies) != "[blue red]" {
		t.Fatalf("restored %+v, %v; want policies of blue and red", r, err)
	}
	is := records(to, func(*store.Store) {})
	for key := range was {
		if is[key] == 0 {
			t.Errorf("%s is missing", key)
		}
	}
	if len(was) != 120 || len(is) != len(was) {
		t.Errorf("%d policies before and %d after the restore, want 120", len(was), len(is))
	}
}
