package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// Session is a node's stream to an orchestrator. A node has one at most: a second machine with the
// same certificate, from a copied disk, finds it taken.
type Session struct {
	Orchestrator string // process that has the stream
	Instance     string // of the agent's machine, until it boots
	Stream       string // another one for each stream
}

// None is that of a node that is away.
func (s Session) None() bool { return s == Session{} }

func (s Session) String() string {
	return fmt.Sprintf("%s %s %s", s.Orchestrator, s.Instance, s.Stream)
}

func parseSession(text string) (s Session) {
	s.Orchestrator, text, _ = strings.Cut(text, " ")
	s.Instance, s.Stream, _ = strings.Cut(text, " ")
	return s
}

// sessionTTL, in seconds, is how long nodes still count as connected when their orchestrator has died.
const sessionTTL = 15

// grant makes the lease that this orchestrator's sessions live under.
func (s *Store) grant(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	granted, err := s.etcd.Grant(ctx, sessionTTL)
	if err != nil {
		return unavailable(err)
	}
	s.lease.Store(int64(granted.ID))
	return nil
}

// KeepSessions keeps the lease alive until ctx ends. When the store has not kept it, or has not answered for as long
// as it lasts, lost is called: the store forgets the sessions from before and lets other machines in.
func (s *Store) KeepSessions(ctx context.Context, lost func()) {
	for {
		if alive, err := s.etcd.KeepAlive(ctx, clientv3.LeaseID(s.lease.Load())); err == nil {
			for range alive {
			}
		}
		if ctx.Err() != nil {
			return
		}
		s.log.Warn("the store forgets which nodes are connected here; they connect anew")
		lost()
		for s.grant(ctx) != nil {
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return
			}
		}
	}
}

// EndSessions ends all of this orchestrator, which stops.
func (s *Store) EndSessions(ctx context.Context) error {
	_, err := s.etcd.Revoke(ctx, clientv3.LeaseID(s.lease.Load()))
	return err
}

// session refuses a process of a node when another one is connected.
func (t *txn) session(node, instance string) (Session, error) {
	text, err := t.get(dirSessions + node)
	if err != nil || text == "" {
		return Session{}, err
	}
	is := parseSession(text)
	return is, is.Admit(node, instance)
}

// Admit refuses a process of the node that is not the session's.
func (s Session) Admit(node, instance string) error {
	if s.None() || s.Instance == instance {
		return nil
	}
	return refuse(
		Exists,
		"node %s is connected already, from another machine with the same identity; that one goes on and this one was refused: "+
			"if its disk was copied, stop the agent here, run `pilaster node reset` and let it join as a new node (a machine that has just lost power is let in again within half a minute)",
		node,
	)
}

// Connect notes that a registered node has a stream, in place of one that the same machine had before.
func (s *Store) Connect(ctx context.Context, n pki.Node, to Session) error {
	return s.changeQueued(ctx, func(t *txn) error {
		if _, err := t.member(n); err != nil {
			return err
		}
		if _, err := t.session(n.Name, to.Instance); err != nil {
			return err
		}
		key := dirSessions + n.Name
		t.write(key, clientv3.OpPut(key, to.String(), clientv3.WithLease(clientv3.LeaseID(s.lease.Load()))))
		return nil
	}, weight{writes: 1, compares: 4}, nodeKeys(n)...)
}

// Disconnect notes that the stream has ended, unless another one took its place.
func (s *Store) Disconnect(ctx context.Context, node string, from Session) error {
	return s.changeQueued(ctx, func(t *txn) error {
		if is, err := t.get(dirSessions + node); err != nil || is != from.String() {
			return err
		}
		t.delete(dirSessions + node)
		return nil
	}, weight{writes: 1, compares: 1}, dirSessions+node)
}
