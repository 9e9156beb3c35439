package store_test

import (
	"log/slog"
	"path/filepath"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A restored store allocates no app id that may have been allocated since the backup, and ignores reports about rounds
// from before the restore.
func TestRestoreOfApps(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	b := newAppsTest(t, e.Client, 1)
	for i := range 12 {
		b.resolve(1, i)
	}
	b.begin()
	b.confirm(1)
	b.reconcile()
	b.confirm(1) // the last confirmation, without a Reconcile after it
	file, again := filepath.Join(t.TempDir(), "backup"), t.TempDir()
	if _, err := store.Backup(t.Context(), dir, file, log); err != nil {
		t.Fatal(err)
	}
	e.Close()
	if _, err := store.Restore(t.Context(), file, again, 100, log); err != nil {
		t.Fatal(err)
	}
	if e, err = store.Embed(t.Context(), again, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	b.Store, b.etcd = open(t, e.Client, address.Plan{}), e.Client
	b.want(false)
	b.reconcile()
	if b.count("apps") != 12 {
		t.Errorf("%d apps, want 12", b.count("apps"))
	}
	if got := b.resolve(1, 20); got != 113 {
		t.Errorf("the next app is %d, want 113", got)
	}
	b.LimitApps(16)
	b.begin()
	b.reconcile()
	if b.round().GetForgotten() {
		t.Error("a confirmation from before the backup counts for a round after the restore")
	}
}
