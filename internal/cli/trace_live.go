package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/trace"
)

const (
	probeWait  = 2 * time.Second        // for a probe to arrive
	answerWait = 500 * time.Millisecond // for its answer, after it has arrived or left the only node that is asked
	settleWait = 100 * time.Millisecond // for events of other nodes, after the last one of a packet
	// of a host outside, for an answer; as agents have it
	longestProbe = 10 * time.Second
)

// live follows a packet on all nodes. It writes to progress when it waits for a packet.
func (j *traceJob) live(
	ctx context.Context, progress io.Writer, t trace.Trace, parts []*pilasterv1.TraceResponse,
) (trace.Trace, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	events := make(chan trace.Observed)
	var followers sync.WaitGroup
	defer func() {
		cancel(nil)
		for range events {
		}
	}()
	all, err := j.followed(t, parts)
	if err != nil {
		close(events)
		return t, err
	}
	ready := make(chan error, len(all))
	var began *beginning // nil: no other packet has the probe's source port
	probes := j.wait == 0 && (j.probeBy != nil || parts[0].Source.GetEndpointId() != 0 || parts[0].Source.GetIsNode())
	if probes && j.ask.Port != 0 && j.ask.SourcePort == 0 {
		j.ask.SourcePort = probePort()
	}
	if !probes {
		began = new(beginning)
	}
	for _, f := range all {
		followers.Go(func() { j.follow(ctx, f, events, ready, began, cancel) })
	}
	go func() { followers.Wait(); close(events) }()
	var errs []error
	for range all {
		errs = append(errs, <-ready)
	}
	if err := errors.Join(errs...); err != nil {
		return t, err
	}
	to := cmp.Or(trace.ServiceOf(parts), parts[0].Destination.GetAddress())
	answers, wait := make(chan probed, 1), time.Duration(j.wait)
	if probes {
		wait = probeWait
		go func() { answers <- j.probe(ctx, t, to) }()
	} else {
		wait = cmp.Or(wait, 10*time.Second)
		answers = nil
		began.set(time.Now().Add(settleWait)) // by then the clocks that nodes have sent have arrived
		select {
		case <-time.After(settleWait):
		case <-ctx.Done():
			return t, context.Cause(ctx)
		}
		fmt.Fprintf(progress, "ready: waiting %v for a packet\n", wait)
	}
	names := make([]string, len(all))
	for i, f := range all {
		names[i] = f.name
	}
	seen, answer, err := collect(ctx, t.NewCollector(names), wait, events, answers)
	if err != nil {
		return t, err
	}
	if t.Service != "" {
		if t, err = j.toBackend(ctx, t, parts[0], seen); err != nil {
			return t, err
		}
	}
	t = t.FromEvents(seen)
	t.Answer = answer
	return t, nil
}

// followed is a node on which packets are followed.
type followed struct {
	node  traceNode
	name  string
	ask   *pilasterv1.FollowPacketsRequest
	ports []uint32 // of the destination; nil: any
}

// followed returns the nodes on which the job follows packets.
func (j *traceJob) followed(t trace.Trace, parts []*pilasterv1.TraceResponse) (all []followed, err error) {
	sources, destinations := trace.Addresses(parts...)
	if t.Service != "" {
		return j.followedToService(t, parts, sources)
	}
	for i, n := range j.nodes {
		all = append(all, followed{node: n, name: parts[i].Node, ask: &pilasterv1.FollowPacketsRequest{
			Sources: sources, Destinations: destinations, Protocol: uint32(j.ask.Protocol),
			Port: uint32(j.ask.Port), Tenant: t.Source.Tenant, Vni: parts[i].Vni,
		}})
	}
	return all, nil
}

// beginning is when all nodes have begun to follow packets.
type beginning struct{ at atomic.Pointer[time.Time] }

func (b *beginning) set(at time.Time) { b.at.Store(&at) }

// before reports whether an event is of a packet before the beginning, which other nodes may have missed. Streams lag
// behind the packets, each by another time, so the node's clock decides: it showed clock at a time of this machine.
func (b *beginning) before(e *pilasterv1.PacketEvent, clock uint64, at time.Time) bool {
	began := b.at.Load()
	return began == nil || clock != 0 && e.Time < clock+uint64(began.Sub(at))
}

// follow delivers the events of a node; if it waits for a packet, those since the beginning. It reports to ready once,
// when no later packet is missed. If the node ends the stream before ctx ends, it calls ended with the reason.
func (j *traceJob) follow(ctx context.Context, f followed, events chan<- trace.Observed, ready chan<- error,
	began *beginning, ended context.CancelCauseFunc) {
	node := f.name
	stream, err := f.node.client.FollowPackets(ctx, connect.NewRequest(f.ask))
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
	clock, at := stream.Msg().Time, time.Now()
	ready <- nil
	for stream.Receive() {
		e := stream.Msg().Event
		if began != nil && began.before(e, clock, at) {
			continue
		}
		if p := e.GetSourcePort(); j.ask.SourcePort != 0 && p != 0 && p != uint32(j.ask.SourcePort) {
			continue // another connection's
		}
		if p := e.GetDestinationPort(); f.ports != nil && !slices.Contains(f.ports, p) {
			continue
		}
		select {
		case events <- trace.Observed{Node: node, PacketEvent: e}:
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
	if j.probeBy != nil {
		ctx, cancel := context.WithTimeout(ctx, longestProbe)
		defer cancel()
		got, err := j.probeBy(ctx)
		p.answer = trace.Answer{Answered: got.Kind != "", Kind: got.Kind, RttUs: float64(got.RTT) / 1000}
		p.err = err
		return p
	}
	resp, err := j.nodes[0].client.SendProbe(ctx, connect.NewRequest(&pilasterv1.SendProbeRequest{
		Source: t.Source.Address, Destination: cmp.Or(to, t.Destination.Address), Protocol: uint32(j.ask.Protocol),
		Port: uint32(j.ask.Port), Tenant: t.Source.Tenant, SourcePort: uint32(j.ask.SourcePort),
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
func collect(
	ctx context.Context, c *trace.Collector, wait time.Duration, events <-chan trace.Observed, answers <-chan probed,
) (seen []trace.Observed, answer *trace.Answer, err error) {
	if answers != nil {
		answer = &trace.Answer{}
	}
	over, fate, waitsForAnswer := time.After(wait), "", answers != nil
	for settling := false; ; {
		if (fate == trace.Dropped || fate == trace.Delivered) && !waitsForAnswer && !settling {
			over, settling = time.After(settleWait), true
		}
		select {
		case e, more := <-events:
			if !more { // all nodes have ended the trace
				return c.Seen, answer, context.Cause(ctx)
			}
			before := fate
			if fate = c.Add(e); fate == before {
				continue
			}
			if fate == trace.Dropped {
				waitsForAnswer = false
			} else {
				over = time.After(answerWait)
			}
		case p := <-answers:
			if p.err != nil {
				return c.Seen, nil, p.err
			}
			answer, answers, waitsForAnswer = &p.answer, nil, false
		case <-over:
			return c.Seen, answer, nil
		case <-ctx.Done():
			return c.Seen, answer, context.Cause(ctx)
		}
	}
}

// followedToService returns the node of the client, or the ingress node, and those of the backends. A packet enters
// with the address of the service or, if the socket has chosen the backend when it connected, with that of a backend.
// It leaves the node with the backend's address on the fabric.
func (j *traceJob) followedToService(
	t trace.Trace, parts []*pilasterv1.TraceResponse, sources []string,
) (all []followed, err error) {
	client, isExposed := parts[0], trace.IsExposed(parts)
	port := client.Backends[0].Port
	request := func(port uint32, destinations ...string) *pilasterv1.FollowPacketsRequest {
		return &pilasterv1.FollowPacketsRequest{
			Sources: sources, Destinations: destinations, Protocol: uint32(j.ask.Protocol), Port: port,
			Tenant: t.Source.Tenant,
		}
	}
	first := followed{node: j.nodes[0], name: client.Node, ask: request(0, t.Service),
		ports: []uint32{uint32(j.ask.Port), port}}
	add := func(to *pilasterv1.FollowPacketsRequest, addr string) error {
		if slices.Contains(to.Destinations, addr) {
			return nil
		}
		if len(to.Destinations) == dpapi.MaxTraced {
			return fmt.Errorf("service %s has so many endpoints that a live trace cannot follow its packets, which "+
				"may go to each of them; nothing was sent: use --dry-run, with --backend for one of them", t.Service)
		}
		to.Destinations = append(to.Destinations, addr)
		return nil
	}
	here, err := netip.ParseAddr(cmp.Or(client.Source.GetPlaintext(), strings.TrimSuffix(client.Prefix, "/64")))
	if err != nil {
		return nil, fmt.Errorf("the prefix of node %s: %w", client.Node, err)
	}
	own := address.Split(here).Node
	others := map[netip.Prefix]*followed{}
	var order []netip.Prefix
	var away []string
	for _, b := range client.Backends {
		plain, err := netip.ParseAddr(b.Plaintext)
		if err != nil {
			return nil, fmt.Errorf("an endpoint's address on the fabric: %w", err)
		}
		if service.Protocol(j.ask.Protocol) == service.TCP && !isExposed {
			if err := add(first.ask, b.Address); err != nil {
				return nil, err
			}
		}
		at := address.Split(plain).Node
		if at == own {
			continue
		}
		if away = append(away, b.Plaintext); j.nodeAt == nil {
			continue
		}
		if others[at] == nil {
			others[at] = &followed{node: j.nodeAt(at.String()), name: j.nodeWith(at.String()), ask: request(b.Port)}
			order = append(order, at)
		}
		if err := add(others[at].ask, b.Plaintext); err != nil {
			return nil, err
		}
	}
	// to see the packet leave the node, if there is room
	first.ask.Destinations = append(first.ask.Destinations, away[:min(len(away),
		dpapi.MaxTraced-len(first.ask.Destinations))]...)
	all = []followed{first}
	for _, at := range order {
		all = append(all, *others[at])
	}
	return all, nil
}

// toBackend returns the trace by the tables to the backend that the packet has got.
func (j *traceJob) toBackend(
	ctx context.Context, t trace.Trace, client *pilasterv1.TraceResponse, seen []trace.Observed,
) (trace.Trace, error) {
	to, translated := t.Backend(seen)
	if first := client.Backends[0]; to == "" || t.Ingress != "" && (to == first.Plaintext || to == first.Address) {
		return t, nil // as the tables said before the packet
	}
	k, flags := *j, *j.traceFlags
	k.traceFlags, k.nodes, flags.backend = &flags, j.nodes[:1:1], to
	if !translated { // the socket has chosen the backend when it connected
		var err error
		if k.ask.Destination, err = netip.ParseAddr(to); err != nil {
			return t, err
		}
		k.ask.Port = uint16(client.Backends[0].Port)
	}
	parts, err := k.parts(ctx)
	if err != nil {
		return t, nil // it is gone; the events say what has become of the packet
	}
	is := k.merge(parts)
	is.Service, is.Port, j.whole = t.Service, j.ask.Port, j.whole || k.whole
	return is, nil
}
