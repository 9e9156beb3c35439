package cache

import (
	"context"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A stream ends when the store no longer has its session.
func TestSessionsOfOthers(t *testing.T) {
	m, ended := newTestCache()
	mine := store.Session{Orchestrator: "self", Instance: "i", Stream: "1"}
	session := func(revision int64, s store.Session) {
		m.Apply(
			store.Batch{
				Revision: revision,
				Events:   []store.Event{{Session: &store.NodeSession{Node: "n1", Session: s}}},
			},
		)
	}
	session(11, mine)
	_, end := context.WithCancelCause(t.Context())
	m.Subscribe(testNode(1), mine, &pilasterv1.FollowRequest{}, end)
	session(12, mine)
	if !m.Node("n1").Connected || ended["replaced"] != 0 {
		t.Error("the stream's own session ended the stream")
	}
	session(13, store.Session{})
	if ended["restart"] != 1 || m.Node("n1").Connected {
		t.Errorf("the session has ended: connected %v, ended %v; want false, restart:1", m.Node("n1").Connected, ended)
	}
	session(13, mine)
	m.Subscribe(testNode(1), mine, &pilasterv1.FollowRequest{}, end)
	session(14, store.Session{Orchestrator: "other", Instance: "i", Stream: "2"})
	if ended["replaced"] != 1 || !m.Node("n1").Connected {
		t.Errorf("session elsewhere: connected %v, ended %v; want true, replaced:1", m.Node("n1").Connected, ended)
	}
	session(15, store.Session{})
	if m.Node("n1").Connected {
		t.Error("the node has no session but is connected")
	}
	session(16, store.Session{Orchestrator: "self", Instance: "i", Stream: "3"}) // of a stream that has ended here
	if m.Node("n1").Connected {
		t.Error("the node is connected by a session of this orchestrator, which has no such stream")
	}
	of := m.Subscribe(testNode(1), mine, &pilasterv1.FollowRequest{}, end)
	if m.Node("n1").Connected || of.Queue.Len() != 0 || ended["replaced"] != 2 {
		t.Errorf("a stream whose session was replaced before it began: ended %v, want replaced:2", ended)
	}
	if len(m.history) != 0 {
		t.Errorf("the history has %d batches of sessions, want none", len(m.history))
	}
}
