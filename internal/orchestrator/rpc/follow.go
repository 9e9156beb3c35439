package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

func (s *NodeService) Follow(
	ctx context.Context,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
) error {
	if err := s.registered(ctx); err != nil {
		return err
	}
	deadlines := admission.Controller(ctx)
	deadlines.SetReadDeadline(time.Now().Add(s.Timeout))
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	deadlines.SetReadDeadline(time.Time{})
	if err := checkHosted(first); err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	node, _ := admission.Caller(ctx)
	s.awaitPredecessor(ctx, node, admission.Instance(ctx))
	begun, err := s.Limiter.Begin(ctx)
	if err != nil {
		return err
	}
	defer begun()
	session := store.Session{Orchestrator: s.Cache.Self, Instance: admission.Instance(ctx), Stream: join.NewUUID()}
	defer func() {
		if !s.Cache.Stopped() { // Stop ends all sessions at once
			s.Later(func(ctx context.Context) { s.disconnect(ctx, node, session) })
		}
	}()
	err = s.connect(ctx, node, session)
	// connect has waited for the cache. Released earlier, the slot would let more streams start than the cache keeps
	// up with, and connect would time out.
	begun()
	if err != nil {
		return err
	}
	f := s.Cache.Subscribe(node, session, first, end)
	defer s.Cache.Unsubscribe(f)

	requests := make(chan *pilasterv1.FollowRequest)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		end(receive(ctx, stream, requests))
	}()
	defer func() {
		end(nil)
		deadlines.SetReadDeadline(time.Now()) // ends receive
		<-reading
	}()
	// Subscribe has queued the incomplete tenants already.
	again := proto.CloneOf(first)
	again.IncompleteTenants = nil
	if err := s.host(ctx, f, again); err != nil {
		return err
	}
	return s.writeStream(ctx, f, stream, requests)
}

// writeStream sends messages until the stream ends, and returns why it ended.
func (s *NodeService) writeStream(
	ctx context.Context,
	f *cache.Subscriber,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
	requests <-chan *pilasterv1.FollowRequest,
) error {
	heartbeat := time.NewTimer(s.Cache.HeartbeatEvery())
	defer heartbeat.Stop()
	var sent time.Time // when the last message except heartbeats was sent; it also has the revision
	for {
		var next *pilasterv1.FollowResponse
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, io.EOF) {
				return cause
			}
			return nil // the node closed its side
		case req := <-requests:
			if err := s.host(ctx, f, req); err != nil {
				return err
			}
			continue
		case <-f.Queue.Filled:
			next = f.Queue.Next()
		case <-heartbeat.C:
			every := s.Cache.HeartbeatEvery()
			if left := time.Until(sent.Add(every)); left > 0 {
				heartbeat.Reset(left)
				continue
			}
			next = s.Cache.Heartbeat(f)
			heartbeat.Reset(every)
		}
		if next == nil {
			continue
		}
		for _, part := range cache.Parts(next) {
			if err := s.send(ctx, f, stream, part); err != nil {
				return err
			}
		}
		if next.GetHeartbeat() == nil {
			sent = time.Now()
		}
	}
}

func (s *NodeService) send(
	ctx context.Context,
	f *cache.Subscriber,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
	r *pilasterv1.FollowResponse,
) error {
	if size := proto.Size(r); size > admission.MaxAnswer {
		return s.Limiter.Refuse(
			admission.LimitAnswer,
			connect.CodeResourceExhausted,
			"the state of this node's tenants is a message of %d bytes, and the maximum is %d; nothing was changed on "+
				"this node: host fewer tenants on it",
			size,
			admission.MaxAnswer,
		)
	}
	deadlines, began := admission.Controller(ctx), time.Now()
	deadlines.SetWriteDeadline(began.Add(s.Timeout))
	if err := stream.Send(r); err != nil {
		if time.Since(began) >= s.Timeout {
			s.Cache.Stalled(f, s.Timeout)
			s.Log.Warn(
				"a node reads nothing; its stream was ended, and its next stream sends what it missed",
				"node",
				f.Node.Name,
			)
			return context.Cause(ctx)
		}
		return err
	}
	deadlines.SetWriteDeadline(time.Time{})
	return nil
}

// host makes the stream follow these tenants and records in the store what the node reports about them.
func (s *NodeService) host(ctx context.Context, f *cache.Subscriber, req *pilasterv1.FollowRequest) error {
	if req.OnlySubscriptions {
		return s.Cache.ChangeSubscriptions(f, req)
	}
	add, remove := s.Cache.Rehost(f, req)
	ctx, cancel := context.WithTimeout(ctx, admission.CallTimeout)
	defer cancel()
	noted, err := s.Store.RecordHosting(ctx, f.Node, req.Sequence, add, remove)
	s.Cache.ForgetRecorded(f, noted.Overtaken)
	if err == nil && s.Cache.Refuse(f, add, noted.Refused) {
		s.Log.Warn(
			"part of a node's report about labels of its containers was refused; the node's status shows the reasons",
			"node",
			f.Node.Name,
		)
	}
	return err
}

func receive(
	ctx context.Context,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
	to chan<- *pilasterv1.FollowRequest,
) error {
	for {
		if err := admission.NextMessage(ctx); err != nil {
			return err
		}
		req, err := stream.Receive()
		if err != nil {
			return err
		}
		if err := checkHosted(req); err != nil {
			return err
		}
		select {
		case to <- req:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// checkHosted refuses messages that no valid agent sends.
func checkHosted(req *pilasterv1.FollowRequest) error {
	if !req.OnlySubscriptions && len(req.Subscribe)+len(req.Unsubscribe) > 0 {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("subscriptions need a message of their own"))
	}
	for _, name := range slices.Concat(req.HostedTenants, req.CarriedTenants) {
		if err := tenant.CheckName(name); err != nil {
			return connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	overrides := 0
	for _, h := range req.Hosting {
		if h.Unenforced = printable(h.Unenforced); h.Moving != nil {
			h.Moving.Problem = printable(h.Moving.Problem)
		}
		overrides += len(h.Overrides)
		if n := max(len(h.GetMoving().GetProblem()), len(h.Unenforced)); n > MaxProblem {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf(
					"the text of a problem has %d bytes, and the maximum is %d; nothing was changed",
					n,
					MaxProblem,
				),
			)
		}
		if len(h.Accepts) > tenant.MaxIDs || len(h.Holds) > tenant.MaxIDs {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf(
					"the node accepts %d ids of a tenant and holds %d, and a tenant has %d at most; nothing was "+
						"changed",
					len(h.Accepts),
					len(h.Holds),
					tenant.MaxIDs,
				),
			)
		}
	}
	for _, h := range req.Hosting {
		if n := len(h.KeepsApps); n > store.MaxRound {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf(
					"the node keeps %d retiring apps of a tenant, and there are %d at most; nothing was changed",
					n,
					store.MaxRound,
				),
			)
		}
	}
	if err := checkOffloaded(req.Hosting); err != nil {
		return err
	}
	if overrides > MaxOverrides {
		return connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf(
				"%d containers of the node have changed their labels since they started, and the maximum is %d; "+
					"nothing was changed: restart these containers",
				overrides,
				MaxOverrides,
			),
		)
	}
	return nil
}

// checkOffloaded refuses reports about offloads that frontends would not accept.
func checkOffloaded(reports []*pilasterv1.Hosting) error {
	addresses := 0
	for _, h := range reports {
		if _, err := tenant.ParseOffloaded(h.Offloaded); err != nil {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf("offloaded containers of tenant %s: %w; nothing was changed", h.Tenant, err),
			)
		}
		for _, e := range h.Offloaded {
			addresses += len(e.Addresses)
		}
		if n := max(len(h.LostFrontends), len(h.AnsweringFrontends)); n > tenant.MaxFrontends {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf(
					"the node reports %d frontends of an offload, and one has %d at most; nothing was changed",
					n,
					tenant.MaxFrontends,
				),
			)
		}
		for _, name := range slices.Concat(h.LostFrontends, h.AnsweringFrontends) {
			if err := store.CheckNodeName(name); err != nil {
				return err
			}
		}
	}
	if addresses > tenant.MaxOffloaded {
		return connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf(
				"the node has %d addresses of offloaded containers, and the maximum is %d; nothing was changed: stop "+
					"an offload",
				addresses,
				tenant.MaxOffloaded,
			),
		)
	}
	return nil
}
