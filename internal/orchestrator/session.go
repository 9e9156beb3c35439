package orchestrator

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// maxLag is how long the end of a stream may take to be seen by every orchestrator; for so long nobody
// identify refused because of it.
const maxLag = 5 * time.Second

func (m *cache) session(node string) store.Session {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.sessions[node]
}

// awaitSession waits a moment until the session of a node is as it should be.
func (m *cache) awaitSession(ctx context.Context, node string, should func(store.Session) bool) error {
	ctx, cancel := context.WithTimeout(ctx, m.lag)
	defer cancel()
	return m.awaitNode(ctx, node, func() bool { return should(m.sessions[node]) })
}

// awaitPredecessor gives the stream of a machine before it booted, or was copied, the time to end. What is
// then so is for the store to judge.
func (s *nodeService) awaitPredecessor(ctx context.Context, n pki.Node, instance string) {
	s.cache.awaitSession(ctx, n.Name, func(is store.Session) bool { return is.None() || is.Instance == instance })
}

// connect notes the caller's new stream in the store, and returns when the model knows of it: whatever session it hears
// of afterwards has replaced this one.
func (s *nodeService) connect(ctx context.Context, n pki.Node, session store.Session) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := s.store.Connect(ctx, n, session); err != nil {
		return err
	}
	if s.cache.awaitSession(ctx, n.Name, func(is store.Session) bool { return is == session }) != nil {
		return connect.NewError(
			connect.CodeAborted,
			errors.New("this stream was replaced before it began; follow again"),
		)
	}
	return nil
}

// disconnect tries until it is done: a node that nobody serves must not look connected.
func (s *nodeService) disconnect(ctx context.Context, n pki.Node, session store.Session) {
	for {
		once, cancel := context.WithTimeout(ctx, callTimeout)
		err := s.store.Disconnect(once, n.Name, session)
		cancel()
		if err == nil || ctx.Err() != nil {
			return
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return
		}
	}
}
