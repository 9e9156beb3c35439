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

// When etcd has reached its size limit, the store refuses changes with an advice and still serves reads. After a
// restart it has all acknowledged changes and accepts new ones.
func TestSizeLimitOfTheStore(t *testing.T) {
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
	for err == nil { // write old revisions until etcd, which checks its size ten times a second, refuses
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
		t.Errorf("log %s, want a message about the size limit", log.String())
	}
	s = open(t, e.Client, address.Plan{})
	if tenant, app, err := s.Resolve(t.Context(), node(1), 1, "blue", web); err != nil || tenant.Ids[0].Id != 1 ||
		app.Id != 1 {
		t.Errorf("after the restart: %v, %v, %v; want tenant id 1 and app 1", tenant, app, err)
	}
	for i := range 20 {
		if _, err := s.CreateTenant(t.Context(), fmt.Sprint("t", i), 0); err != nil {
			t.Fatal(err)
		}
	}
}
