package store_test

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A second machine with the node's name, UUID and certificate connects to another orchestrator, and is refused.
func testSessions(t *testing.T, etcd *clientv3.Client) {
	ctx, s, other := t.Context(), open(t, etcd, address.Plan{}), open(t, etcd, address.Plan{})
	refused(t, s.Connect(ctx, node(1), session(1)), store.Refused, "not registered")
	connect(t, s, 1)
	clone := session(1)
	clone.Instance, clone.Stream = "clone", "its"
	refused(
		t,
		other.Connect(ctx, node(1), clone),
		store.Exists,
		"node n1 is connected already",
		"disk was copied",
		"node reset",
	)
	_, err := other.Register(ctx, store.Registration{Node: node(1), Instance: "clone", Version: "its"})
	refused(t, err, store.Exists, "n1")
	refused(t, other.DeleteNode(ctx, "n1", false), store.Refused, "n1 is connected")
	if _, err := s.Register(ctx, store.Registration{Node: node(1), Instance: "i1"}); err != nil {
		t.Errorf("register the first machine after the second was refused: %v", err)
	}

	// The deletion of a connected node with force deletes its session, and the node cannot connect again.
	connect(t, s, 2)
	if err := other.DeleteNode(ctx, "n2", true); err != nil {
		t.Fatal(err)
	}
	refused(t, s.Connect(ctx, node(2), session(2)), store.Refused, "was node n2 until it was deleted")
	if left, err := etcd.Get(ctx, "/pilaster/1/sessions/n2"); err != nil || left.Count != 0 {
		t.Errorf("the session of the deleted node remains: %v, %v", left, err)
	}

	// The machine connects again before its old stream has ended. The end of the old stream does not delete the new
	// session.
	again := session(1)
	again.Orchestrator, again.Stream = "other", "s1 again"
	if err := other.Connect(ctx, node(1), again); err != nil {
		t.Fatal(err)
	}
	if err := s.Disconnect(ctx, "n1", session(1)); err != nil {
		t.Fatal(err)
	}
	refused(t, other.Connect(ctx, node(1), clone), store.Exists, "n1")
	if err := errors.Join(other.Disconnect(ctx, "n1", again), other.Connect(ctx, node(1), clone)); err != nil {
		t.Errorf("connect the second machine after the first has disconnected: %v", err)
	}
}

// A node without a session can be marked as unreachable, and the mark of one with a session can be removed.
func testUnreachable(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	set := func(unreachable, want bool, marks int64) {
		t.Helper()
		changed, err := s.SetUnreachable(ctx, "n1", unreachable)
		left, failed := etcd.Get(ctx, "/pilaster/1/unreachable/n1")
		if err := errors.Join(err, failed); err != nil || changed != want || left.Count != marks {
			t.Errorf("unreachable %v: changed %v, %v, %d marks; want %v, %d", unreachable, changed, err, left.Count,
				want, marks)
		}
	}
	set(true, false, 0) // it is not registered
	connect(t, s, 1)
	set(true, false, 0)
	if err := s.Disconnect(ctx, "n1", session(1)); err != nil {
		t.Fatal(err)
	}
	set(false, false, 0)
	set(true, true, 1)
	set(true, false, 1)
	set(false, false, 1)
	connect(t, s, 1)
	set(false, true, 0)
	if err := s.Disconnect(ctx, "n1", session(1)); err != nil {
		t.Fatal(err)
	}
	set(true, true, 1)
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	set(false, false, 0)
}

// When etcd loses the lease of the sessions, the orchestrator receives a notification and gets a new lease.
func testLostSessions(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	lost, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		s.KeepSessions(ctx, func() { lost <- struct{}{} })
	}()
	defer func() { cancel(); <-ended }()
	connect(t, s, 1)
	if err := s.EndSessions(ctx); err != nil { // as if the lease expired
		t.Fatal(err)
	}
	select {
	case <-lost:
	case <-ctx.Done():
		t.Fatal("KeepSessions did not call lost")
	}
	if got, err := etcd.Get(ctx, "/pilaster/1/sessions/", clientv3.WithPrefix()); err != nil || got.Count != 0 {
		t.Errorf("%d sessions remain, %v; want none", got.Count, err)
	}
	for { // KeepSessions calls lost before it has a new lease
		err := s.Connect(ctx, node(1), session(1))
		if err == nil {
			break
		}
		refused(t, err, store.Unavailable, "nothing was changed: try again")
		if t.Failed() || ctx.Err() != nil {
			t.Fatalf("connect again: %v", err)
		}
	}
}

// A restored cluster has no sessions from the backup: without a lease they would never expire.
func TestRestoreHasNoSessions(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	connect(t, open(t, e.Client, address.Plan{}), 1)
	file, data := filepath.Join(t.TempDir(), "backup"), t.TempDir()
	_, err = store.Backup(t.Context(), dir, file, log)
	e.Close()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Restore(t.Context(), file, data, 1, log); err != nil {
		t.Fatal(err)
	}
	if e, err = store.Embed(t.Context(), data, log); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := open(t, e.Client, address.Plan{}).DeleteNode(t.Context(), "n1", false); err != nil {
		t.Error(err)
	}
}
