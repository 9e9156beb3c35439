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

// A second machine with the node's name, UUID and certificate, at another orchestrator.
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
		t.Errorf("the first, after the second was refused: %v", err)
	}

	// By force, its session goes with it, and it does not come back.
	connect(t, s, 2)
	if err := other.DeleteNode(ctx, "n2", true); err != nil {
		t.Fatal(err)
	}
	refused(t, s.Connect(ctx, node(2), session(2)), store.Refused, "was node n2 until it was deleted")
	if left, err := etcd.Get(ctx, "/pilaster/1/sessions/n2"); err != nil || left.Count != 0 {
		t.Errorf("a session of nobody is left: %v", err)
	}

	// The same process comes back before its old stream has ended: that one ends nothing any more.
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
		t.Errorf("the other, when the first had gone: %v", err)
	}
}

func testSessionsLost(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	lost, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		s.KeepSessions(ctx, func() { lost <- struct{}{} })
	}()
	defer func() { cancel(); <-ended }()
	connect(t, s, 1)
	if err := s.EndSessions(ctx); err != nil { // as etcd does when an orchestrator was away too long
		t.Fatal(err)
	}
	select {
	case <-lost:
	case <-ctx.Done():
		t.Fatal("the orchestrator never noticed")
	}
	if got, err := etcd.Get(ctx, "/pilaster/1/sessions/", clientv3.WithPrefix()); err != nil || got.Count != 0 {
		t.Errorf("%d sessions are left, %v", got.Count, err)
	}
	for { // the streams are ended at once, before there is a lease for new ones
		err := s.Connect(ctx, node(1), session(1))
		if err == nil {
			break
		}
		refused(t, err, store.Unavailable, "nothing was changed: try again")
		if t.Failed() || ctx.Err() != nil {
			t.Fatalf("connecting anew: %v", err)
		}
	}
}

// A backup is of a cluster in which nodes are connected; in the restored one nobody is, and no lease
// would ever end such a session.
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
