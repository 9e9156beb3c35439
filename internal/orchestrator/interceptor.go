package orchestrator

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// callTimeout bounds every call that is not a stream.
const callTimeout = 10 * time.Second

// fastGzip compresses answers at the fastest level: pages of mappings take a quarter of the usual one's time, and are
// no longer.
func fastGzip() connect.HandlerOption {
	return connect.WithCompression(
		"gzip",
		func() connect.Decompressor { return new(gzip.Reader) },
		func() connect.Compressor {
			w, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // the level is one that there is
			return w
		},
	)
}

// calls gives every call a deadline, its refusals a code, and counts it and its messages.
type calls struct {
	count   func(procedure, code string)
	message func(procedure, direction, event string, bytes int)
}

// Directions of messages, and what those of streams carry; a call's carry what its procedure says, but for those of
// ListMappings.
const (
	received       = "in"
	sent           = "out"
	eventReport    = "report" // what a node says of itself
	eventSnapshot  = "snapshot"
	eventDelta     = "delta"
	eventHeartbeat = "heartbeat"
	eventChanges   = "changes" // of mappings, where a list of them is the other answer
)

func (c calls) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		procedure := req.Spec().Procedure
		event := eventOfCall(req.Any())
		c.message(procedure, received, event, sizeOf(req.Any()))
		resp, err := next(ctx, req)
		err = refusal(err)
		if err == nil {
			c.message(procedure, sent, event, sizeOf(resp.Any()))
		}
		c.done(procedure, err)
		return resp, err
	}
}

func (c calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := refusal(next(ctx, counted{conn, c}))
		c.done(conn.Spec().Procedure, err)
		return err
	}
}

// counted counts the messages of a stream.
type counted struct {
	connect.StreamingHandlerConn
	calls
}

func (c counted) Receive(m any) error {
	err := c.StreamingHandlerConn.Receive(m)
	if err == nil {
		c.message(c.Spec().Procedure, received, eventReport, sizeOf(m))
	}
	return err
}

func (c counted) Send(m any) error {
	err := c.StreamingHandlerConn.Send(m)
	if r, ok := m.(*pilasterv1.FollowResponse); ok && err == nil {
		c.message(c.Spec().Procedure, sent, eventOf(r), sizeOf(m))
	}
	return err
}

func eventOfCall(m any) string {
	if list, ok := m.(*pilasterv1.ListMappingsRequest); ok && list.AfterRevision != 0 {
		return eventChanges
	}
	return ""
}

// eventOf is what a message to a node carries.
func eventOf(r *pilasterv1.FollowResponse) string {
	switch r.Event.(type) {
	case *pilasterv1.FollowResponse_Snapshot:
		return eventSnapshot
	case *pilasterv1.FollowResponse_Delta:
		return eventDelta
	}
	return eventHeartbeat
}

// sizeOf is how long a message is in bytes, without framing.
func sizeOf(m any) int {
	if m, ok := m.(proto.Message); ok {
		return proto.Size(m)
	}
	return 0
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
