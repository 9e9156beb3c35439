package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/trace"
)

const (
	probeWait  = 2 * time.Second        // for a probe to arrive
	answerWait = 500 * time.Millisecond // for its answer, after it has arrived or left the only node that is asked
	settleWait = 100 * time.Millisecond // for events of other nodes, after the last one of a packet
)

// live follows a packet on all nodes.
func (j *traceJob) live(ctx context.Context, t trace.Trace, parts []*pilasterv1.TraceResponse) (trace.Trace, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	events := make(chan trace.Observed)
	var followers sync.WaitGroup
	defer func() {
		cancel(nil)
		for range events {
		}
	}()
	ready := make(chan error, len(j.nodes))
	probes := j.wait == 0 && (parts[0].Source.GetEndpointId() != 0 || parts[0].Source.GetIsNode())
	if probes && j.ask.Port != 0 {
		j.sourcePort = 20_000 + rand.Uint32N(10_000) // kernels choose higher ones for connections
	}
	sources, destinations := trace.Addresses(parts...)
	for i, n := range j.nodes {
		followers.Go(func() {
			j.follow(ctx, n, parts[i].Node, &pilasterv1.FollowPacketsRequest{
				Sources: sources, Destinations: destinations, Protocol: uint32(j.ask.Protocol),
				Port: uint32(j.ask.Port), Tenant: t.Source.Tenant, Vni: parts[i].Vni,
			}, events, ready, cancel)
		})
	}
	go func() { followers.Wait(); close(events) }()
	var errs []error
	for range j.nodes {
		errs = append(errs, <-ready)
	}
	if err := errors.Join(errs...); err != nil {
		return t, err
	}
	answers, wait := make(chan probed, 1), time.Duration(j.wait)
	if probes {
		wait = probeWait
		go func() { answers <- j.probe(ctx, t, parts[0].Destination.GetAddress()) }()
	} else {
		wait = cmp.Or(wait, 10*time.Second)
		answers = nil
	}
	seen, answer, err := j.collect(ctx, wait, events, answers, t.Ends)
	if err != nil {
		return t, err
	}
	t = t.FromEvents(seen)
	t.Answer = answer
	return t, nil
}

// follow delivers the events of a node. It reports to ready once, when no later packet is missed. If the node ends the
// stream before ctx ends, it calls ended with the reason.
func (j *traceJob) follow(ctx context.Context, n traceNode, node string, ask *pilasterv1.FollowPacketsRequest,
	events chan<- trace.Observed, ready chan<- error, ended context.CancelCauseFunc) {
	stream, err := n.client.FollowPackets(ctx, connect.NewRequest(ask))
	if err != nil {
		if code := connect.CodeOf(err); code != connect.CodeUnavailable && !connect.IsWireError(err) {
			err = lostStream(node, err) // cut off before the agent has answered
		}
		ready <- err
		return
	}
	defer stream.Close()
	if !stream.Receive() {
		ready <- lostStream(node, cmp.Or(stream.Err(), io.ErrUnexpectedEOF))
		return
	}
	ready <- nil
	for stream.Receive() {
		if p := stream.Msg().Event.GetSourcePort(); j.sourcePort != 0 && p != 0 && p != j.sourcePort {
			continue // another connection's
		}
		select {
		case events <- trace.Observed{Node: node, PacketEvent: stream.Msg().Event}:
		case <-ctx.Done():
			return
		}
	}
	if ctx.Err() == nil {
		ended(lostStream(node, cmp.Or(stream.Err(), io.EOF)))
	}
}

// lostStream describes the early end of a stream. What the agent did not say itself is that it is gone.
func lostStream(node string, err error) error {
	if connect.IsWireError(err) {
		return fmt.Errorf("node %s ended the trace: %w; packets are not affected; try again", node, err)
	}
	return &exitError{ExitUnreachable, fmt.Errorf("the agent of node %s ended during the trace; packets are not "+
		"affected; try again when it runs again", node)}
}

// probed is the result of a probe.
type probed struct {
	answer trace.Answer
	err    error
}

// probe sends a packet to the address at which the sender sees the destination.
func (j *traceJob) probe(ctx context.Context, t trace.Trace, to string) (p probed) {
	resp, err := j.nodes[0].client.SendProbe(ctx, connect.NewRequest(&pilasterv1.SendProbeRequest{
		Source: t.Source.Address, Destination: cmp.Or(to, t.Destination.Address), Protocol: uint32(j.ask.Protocol),
		Port: uint32(j.ask.Port), Tenant: t.Source.Tenant, SourcePort: j.sourcePort,
	}))
	if connect.CodeOf(err) == connect.CodeUnavailable && !connect.IsWireError(err) {
		err = lostStream(t.Source.Node, err)
	}
	if err != nil {
		return probed{err: err}
	}
	p.answer = trace.Answer{
		Answered: resp.Msg.Answered, Kind: resp.Msg.Answer, RttUs: float64(resp.Msg.Rtt) / 1000,
	}
	return p
}

// collect returns the events of a packet, and the answer to the probe if answers is not nil. It ends when the packet's
// fate is known and the probe is answered, or when the time is over.
func (j *traceJob) collect(ctx context.Context, wait time.Duration, events <-chan trace.Observed,
	answers <-chan probed, ends []string) (seen []trace.Observed, answer *trace.Answer, err error) {
	if answers != nil {
		answer = &trace.Answer{}
	}
	over, known, sent, waitsForAnswer := time.After(wait), false, false, answers != nil
	for settling := false; ; {
		if known && !waitsForAnswer && !settling {
			over, settling = time.After(settleWait), true
		}
		select {
		case e, more := <-events:
			if !more { // all nodes have ended the trace
				return seen, answer, context.Cause(ctx)
			}
			seen = append(seen, e)
			if known || sent { // later packets
				continue
			}
			switch e.Outcome() {
			case trace.Dropped:
				known, waitsForAnswer = true, false
			case trace.Delivered:
				known, over = true, time.After(answerWait)
			case trace.Sent:
				if len(j.nodes) == 1 || e.Hook == "uplink-out" && slices.Contains(ends, e.Node) {
					sent, over = true, time.After(answerWait)
				}
			}
		case p := <-answers:
			if p.err != nil {
				return seen, nil, p.err
			}
			answer, answers, waitsForAnswer = &p.answer, nil, false
		case <-over:
			return seen, answer, nil
		case <-ctx.Done():
			return seen, answer, context.Cause(ctx)
		}
	}
}
