package store_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// An etcd that has reached its size refuses changes and says what to do, answers questions, loses nothing, and
// takes changes again after a restart.
func TestStoreReachesItsSize(t *testing.T) {
	var log bytes.Buffer
	dir := t.TempDir()
	e, err := store.EmbedWith(t.Context(), dir, 2<<20, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, e.Client, address.Plan{})
	register(t, s, 1)
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	web := map[string]string{"app": "web"}
	if _, _, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil {
		t.Fatal(err)
	}
	for err == nil { // revisions that nobody needs; etcd looks at its size ten times a second
		_, err = e.Client.Put(t.Context(), "/filler", strings.Repeat("x", 300<<10))
	}
	_, err = s.CreateTenant(t.Context(), "red", 0)
	refused(t, err, store.Full, "nothing was changed", "restart the orchestrator")
	if _, _, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil {
		t.Errorf("a call that only reads: %v", err)
	}
	e.Close()

	if e, err = store.EmbedWith(t.Context(), dir, 2<<20, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if !strings.Contains(log.String(), "had reached its size") {
		t.Errorf("log: %s", log.String())
	}
	s = open(t, e.Client, address.Plan{})
	if tenant, app, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil || tenant.Ids[0].Id != 1 ||
		app.Id != 1 {
		t.Errorf("what was acknowledged before: %v, %v, %v", tenant, app, err)
	}
	for i := range 20 {
		if _, err := s.CreateTenant(t.Context(), fmt.Sprint("t", i), 0); err != nil {
			t.Fatal(err)
		}
	}
}
