package rpc

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// awaitPredecessor waits until no other instance has a stream with this node's identity. The other instance is this
// machine before a reboot, or a machine with a copy of its disk. Afterwards the store decides whether to refuse.
func (s *NodeService) awaitPredecessor(ctx context.Context, n pki.Node, instance string) {
	s.Cache.AwaitSession(ctx, n.Name, func(is store.Session) bool { return is.None() || is.Instance == instance })
}

// connect records the new stream in the store and returns when the cache has it. Any session that the cache receives
// afterwards has replaced this one.
func (s *NodeService) connect(ctx context.Context, n pki.Node, session store.Session) error {
	ctx, cancel := context.WithTimeout(ctx, admission.CallTimeout)
	defer cancel()
	if err := s.Store.Connect(ctx, n, session); err != nil {
		return err
	}
	if s.Cache.AwaitSession(ctx, n.Name, func(is store.Session) bool { return is == session }) != nil {
		return connect.NewError(
			connect.CodeAborted,
			errors.New("this stream was replaced before it began; follow again"),
		)
	}
	return nil
}

// disconnect retries until it succeeds: a node without a stream must not look connected.
func (s *NodeService) disconnect(ctx context.Context, n pki.Node, session store.Session) {
	for {
		once, cancel := context.WithTimeout(ctx, admission.CallTimeout)
		err := s.Store.Disconnect(once, n.Name, session)
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
