package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// Session identifies a node's stream. A node has at most one session: the store refuses a second machine that has the
// same certificate on a copy of the disk.
type Session struct {
	Orchestrator string // id of the orchestrator process
	Instance     string // identifies the agent's machine from boot to shutdown
	Stream       string // unique per stream
}

// None reports that the node has no stream.
func (s Session) None() bool { return s == Session{} }

func (s Session) String() string {
	return fmt.Sprintf("%s %s %s", s.Orchestrator, s.Instance, s.Stream)
}

func parseSession(text string) (s Session) {
	s.Orchestrator, text, _ = strings.Cut(text, " ")
	s.Instance, s.Stream, _ = strings.Cut(text, " ")
	return s
}

// sessionTTL, in seconds, is how long nodes count as connected after their orchestrator crashed.
const sessionTTL = 15

// grant creates the lease of this orchestrator's sessions.
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

// KeepSessions keeps the lease alive until ctx ends. It calls lost if etcd lost the lease or did not answer within the
// lease's TTL: the sessions have then expired, and other machines may connect with the nodes' identities.
func (s *Store) KeepSessions(ctx context.Context, lost func()) {
	for {
		if alive, err := s.etcd.KeepAlive(ctx, clientv3.LeaseID(s.lease.Load())); err == nil {
			for range alive {
			}
		}
		if ctx.Err() != nil {
			return
		}
		s.log.Warn("the store lost the sessions of this orchestrator's nodes; the nodes reconnect")
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

// EndSessions ends all sessions of this orchestrator.
func (s *Store) EndSessions(ctx context.Context) error {
	_, err := s.etcd.Revoke(ctx, clientv3.LeaseID(s.lease.Load()))
	return err
}

// session returns the session of a node. It refuses a machine if another one is connected.
func (t *txn) session(node, instance string) (Session, error) {
	text, err := t.get(dirSessions + node)
	if err != nil || text == "" {
		return Session{}, err
	}
	is := parseSession(text)
	return is, is.Admit(node, instance)
}

// Admit refuses a machine that is not the one of the session.
func (s Session) Admit(node, instance string) error {
	if s.None() || s.Instance == instance {
		return nil
	}
	return refuse(
		Exists,
		"node %s is connected already, from another machine with the same identity; that one stays connected and this "+
			"one was refused: if its disk was copied, stop the agent here, run `pilaster node reset` and let it join "+
			"as a new node (a machine that has just lost power is accepted again within half a minute)",
		node,
	)
}

// Connect records the session of a registered node. It replaces an earlier session of the same machine.
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

// Disconnect deletes a session, unless another one has replaced it.
func (s *Store) Disconnect(ctx context.Context, node string, from Session) error {
	return s.changeQueued(ctx, func(t *txn) error {
		if is, err := t.get(dirSessions + node); err != nil || is != from.String() {
			return err
		}
		t.delete(dirSessions + node)
		return nil
	}, weight{writes: 1, compares: 1}, dirSessions+node)
}

// RecordLoad records what a connected node reports of its load. The record expires with this orchestrator; package
// cache drops it when the node's stream ends, so that the end of a stream writes nothing more. It does nothing for a
// machine that has no stream.
func (s *Store) RecordLoad(ctx context.Context, n pki.Node, instance string, load *pilasterv1.NodeLoad) error {
	value, err := protojson.Marshal(load)
	if err != nil {
		return fmt.Errorf("encode the load of node %s: %w", n.Name, err)
	}
	return s.changeQueued(ctx, func(t *txn) error {
		if _, err := t.member(n); err != nil {
			return err
		}
		is, err := t.session(n.Name, instance)
		if err != nil || is.None() {
			return err
		}
		key := dirLoads + n.Name
		t.write(key, clientv3.OpPut(key, string(value), clientv3.WithLease(clientv3.LeaseID(s.lease.Load()))))
		return nil
	}, weight{writes: 1, compares: 4}, nodeKeys(n)...)
}

// SetUnreachable records that a node does not answer, unless it has a session, or that it answers again, if it has one.
// It returns whether that is new.
func (s *Store) SetUnreachable(ctx context.Context, node string, unreachable bool) (changed bool, err error) {
	key, keys := dirUnreachable+node, []string{dirNodes + node, dirSessions + node, dirUnreachable + node}
	err = s.changeQueued(ctx, func(t *txn) error {
		changed = false
		if err := t.fetch(keys...); err != nil {
			return err
		}
		has := func(key string) bool { return t.readings[key].value != "" }
		switch {
		case has(dirSessions+node) == unreachable || has(key) == unreachable:
			return nil
		case !unreachable:
			t.delete(key)
		case !has(dirNodes + node): // it has been deleted
			return nil
		default:
			t.put(key, "1")
		}
		changed = true
		return nil
	}, weight{writes: 1, compares: len(keys)}, keys...)
	return changed && err == nil, err
}
