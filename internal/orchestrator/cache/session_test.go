package cache

import (
	"context"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A stream lasts as long as its session in the store.
func TestSessionsOfOthers(t *testing.T) {
	m, ended := newTestModel()
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
		t.Error("its own session ended the stream")
	}
	session(13, store.Session{})
	if ended["restart"] != 1 || m.Node("n1").Connected {
		t.Errorf("the store may let another machine in; ended %v", ended)
	}
	session(13, mine)
	m.Subscribe(testNode(1), mine, &pilasterv1.FollowRequest{}, end)
	session(14, store.Session{Orchestrator: "other", Instance: "i", Stream: "2"})
	if ended["replaced"] != 1 || !m.Node("n1").Connected {
		t.Errorf("ended %v", ended)
	}
	session(15, store.Session{})
	if m.Node("n1").Connected {
		t.Error("connected to nobody")
	}
	session(16, store.Session{Orchestrator: "self", Instance: "i", Stream: "3"}) // of a stream that has ended here
	if m.Node("n1").Connected {
		t.Error("this orchestrator knows that it has no such stream")
	}
	of := m.Subscribe(testNode(1), mine, &pilasterv1.FollowRequest{}, end)
	if m.Node("n1").Connected || of.Queue.Len() != 0 || ended["replaced"] != 2 {
		t.Errorf("a stream that was replaced before it began; ended %v", ended)
	}
	if len(m.history) != 0 {
		t.Error("sessions are remembered for streams that resume")
	}
}
