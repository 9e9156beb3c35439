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

// awaitPredecessor gives the stream of a machine before it booted, or was copied, the time to end. What is
// then so is for the store to judge.
func (s *NodeService) awaitPredecessor(ctx context.Context, n pki.Node, instance string) {
	s.Cache.AwaitSession(ctx, n.Name, func(is store.Session) bool { return is.None() || is.Instance == instance })
}

// connect notes the caller's new stream in the store, and returns when the model knows of it: whatever session it hears
// Of afterwards has replaced this one.
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

// disconnect tries until it is done: a node that nobody serves must not look connected.
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
