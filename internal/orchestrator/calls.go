package orchestrator

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// callTimeout bounds every call that is not a stream.
const callTimeout = 10 * time.Second

// calls gives every call a deadline, its refusals a code, and counts it.
type calls struct {
	count func(procedure, code string)
}

func (c calls) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		resp, err := next(ctx, req)
		err = refusal(err)
		c.done(req.Spec().Procedure, err)
		return resp, err
	}
}

func (c calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := refusal(next(ctx, conn))
		c.done(conn.Spec().Procedure, err)
		return err
	}
}

func (c calls) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (c calls) done(procedure string, err error) {
	code := "ok"
	if err != nil {
		code = connect.CodeOf(err).String()
	}
	c.count(procedure, code)
}

// refusal gives a refusal of the store its code.
func refusal(err error) error {
	var e *store.Error
	if !errors.As(err, &e) {
		return err
	}
	codes := map[store.Reason]connect.Code{
		store.Invalid:     connect.CodeInvalidArgument,
		store.NotFound:    connect.CodeNotFound,
		store.Exists:      connect.CodeAlreadyExists,
		store.Refused:     connect.CodeFailedPrecondition,
		store.Full:        connect.CodeResourceExhausted,
		store.Stale:       connect.CodeAborted,
		store.Unavailable: connect.CodeUnavailable,
	}
	return connect.NewError(codes[e.Reason], e)
}
