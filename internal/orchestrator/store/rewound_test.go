package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// etcd is restored from an old snapshot during a watch. The watch reports the whole restored state and then further
// changes, even while etcd's revision is lower than before the restore.
func TestRestoredWhileWatched(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir, snapshot := t.TempDir(), filepath.Join(t.TempDir(), "etcd")
	e, err := Embed(ctx, dir, discard)
	must(t, err)
	defer func() { e.Close() }()
	restart := func(between ...error) {
		t.Helper()
		if e, err = Embed(ctx, dir, discard); errors.Join(append(between, err)...) != nil {
			t.Fatal(between, err)
		}
	}
	client, err := newClient([]string{"unix://" + socketIn(dir)}, nil) // a client that remains open across restarts
	must(t, err)
	defer client.Close()
	s, err := Open(ctx, client, noPlan, discard)
	must(t, err)
	create := func(name string) {
		t.Helper()
		for { // the client may not have reconnected to etcd yet
			_, err := s.CreateTenant(ctx, name, 0)
			if refusal := new(Error); err == nil || errors.As(err, &refusal) && refusal.Reason == Exists {
				return
			}
			if ctx.Err() != nil {
				t.Fatal(err)
			}
		}
	}
	create("blue")
	e.Close()
	restart(os.CopyFS(snapshot, os.DirFS(filepath.Join(dir, "etcd"))))

	batches, ended := make(chan Batch, 100), make(chan struct{})
	go func() {
		defer close(ended)
		s.Watch(ctx, func(b Batch) { batches <- b })
	}()
	defer func() { cancel(); <-ended }()
	next := func(is func(Batch) bool) Batch {
		t.Helper()
		for {
			select {
			case b := <-batches:
				if is(b) {
					return b
				}
			case <-time.After(100 * time.Millisecond):
				s.Ping(ctx)
			case <-ctx.Done():
				t.Fatal("the watch did not report the expected batch")
			}
		}
	}
	whole := func(b Batch) bool { return b.Whole }
	tenant := func(name string) func(Batch) bool {
		return func(b Batch) bool { return !b.Whole && b.Events[0].Tenant.GetName() == name }
	}
	next(whole)
	for i := range 20 {
		create(fmt.Sprint("lost-", i))
	}
	last := next(tenant("lost-19"))

	e.Close()
	restart(os.RemoveAll(filepath.Join(dir, "etcd")), os.CopyFS(filepath.Join(dir, "etcd"), os.DirFS(snapshot)))
	if b := next(whole); len(b.Events) != 1 || b.Events[0].Tenant.GetName() != "blue" || b.Revision >= last.Revision {
		t.Errorf("got %d events at revision %d, want tenant blue at a revision below %d",
			len(b.Events), b.Revision, last.Revision)
	}
	create("red")
	next(tenant("red"))
}
