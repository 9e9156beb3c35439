package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/trace"
)

// traceAgent is an agent with the sender, the receiver, or neither.
type traceAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	part   *pilasterv1.TraceResponse
	events []*pilasterv1.PacketEvent
	after  time.Duration // of the events, since it has answered FollowPackets
	clock  uint64        // of the node, in its first response
	answer string
	refuse error
	dies   bool // after its first answer to FollowPackets
}

func (a traceAgent) Trace(
	context.Context, *connect.Request[pilasterv1.TraceRequest],
) (*connect.Response[pilasterv1.TraceResponse], error) {
	if a.refuse != nil {
		return nil, a.refuse
	}
	return connect.NewResponse(a.part), nil
}

func (a traceAgent) FollowPackets(ctx context.Context, _ *connect.Request[pilasterv1.FollowPacketsRequest],
	stream *connect.ServerStream[pilasterv1.FollowPacketsResponse]) error {
	if err := stream.Send(&pilasterv1.FollowPacketsResponse{Time: a.clock}); err != nil {
		return err
	}
	time.Sleep(a.after)
	for _, e := range a.events {
		if err := stream.Send(&pilasterv1.FollowPacketsResponse{Event: e}); err != nil {
			return err
		}
	}
	if a.dies {
		panic(http.ErrAbortHandler)
	}
	<-ctx.Done()
	return nil
}

func (a traceAgent) SendProbe(
	context.Context, *connect.Request[pilasterv1.SendProbeRequest],
) (*connect.Response[pilasterv1.SendProbeResponse], error) {
	answer := &pilasterv1.SendProbeResponse{Answered: a.answer != "", Answer: a.answer, Rtt: 5000}
	return connect.NewResponse(answer), nil
}

const (
	tracedFrom = "fcb1:d3c7:9c0e:1f2a:8b14:7c55:3e90:77a2"
	tracedTo   = "fc4f:63a1:5d20:e07b:11c8:92f4:aa31:91d2"
)

// partOf returns the sender's part of a trace.
func partOf(verdict string) *pilasterv1.TraceResponse {
	return &pilasterv1.TraceResponse{
		Node: "n1", Network: "netpila", Verdict: verdict,
		Source:      &pilasterv1.TraceEnd{Address: tracedFrom, Tenant: "blue", EndpointId: 1, Endpoint: "front"},
		Destination: &pilasterv1.TraceEnd{Address: tracedTo, Tenant: "blue"},
		Steps: []*pilasterv1.TraceStep{{Stage: "container", Source: tracedFrom, Destination: tracedTo,
			Detail: "from pil1"}},
		Sources: []string{tracedFrom}, Destinations: []string{tracedTo},
	}
}

func TestTrace(t *testing.T) {
	entered := &pilasterv1.PacketEvent{Time: 1000, Packet: 1, Point: "enter", Hook: "container", Device: "pil1",
		Source: tracedFrom, Destination: tracedTo}
	leaves := func(endpoint string) *pilasterv1.PacketEvent {
		return &pilasterv1.PacketEvent{Time: 3000, Packet: 1, Point: "leave", Hook: "container", Action: "redirect",
			ToDevice: "pil2", ToEndpoint: endpoint, Source: tracedFrom, Destination: tracedTo}
	}
	drop := &pilasterv1.PacketEvent{Time: 2000, Packet: 1, Point: "drop", Hook: "container", Drop: "no-route",
		Source: tracedFrom, Destination: tracedTo}
	others := &pilasterv1.PacketEvent{Time: 500, Packet: 9, Point: "drop", Hook: "container", Drop: "no-route",
		Source: tracedFrom, Destination: tracedTo, SourcePort: 40_000, DestinationPort: 80}
	sent := partOf("sent")
	sent.Next = "fd70:696c:6100:2::/64"
	for name, c := range map[string]struct {
		agent traceAgent
		args  string
		code  int
		want  string // a part of the output
	}{
		"from the tables":  {traceAgent{part: partOf("delivered")}, "--dry-run", ExitDone, "\ndelivered\n"},
		"dropped, by them": {traceAgent{part: partOf("dropped")}, "--dry-run", ExitFailed, "\ndropped: \n"},
		"sent to another node": {traceAgent{part: sent}, "udp/53 --dry-run", ExitDone,
			"on node fd70:696c:6100:2::/64: run"},
		"leaves the cluster": {traceAgent{part: partOf("left")}, "--dry-run", ExitDone, "\nleaves the cluster\n"},
		"left the cluster": {traceAgent{part: partOf("left"), events: []*pilasterv1.PacketEvent{entered, leaves("")}},
			"", ExitDone, "left the cluster 2.0 µs after the first step; no answer"},
		"delivered": {traceAgent{part: partOf("delivered"), events: []*pilasterv1.PacketEvent{entered, leaves("web")},
			answer: "echo reply"}, "", ExitDone,
			"delivered 2.0 µs after the first step; answer (echo reply) after 5 µs"},
		"delivered, no answer": {traceAgent{part: partOf("delivered"),
			events: []*pilasterv1.PacketEvent{entered, leaves("web")}}, "", ExitDone,
			"delivered 2.0 µs after the first step; no answer"},
		"beside another connection": {traceAgent{part: partOf("delivered"), events: []*pilasterv1.PacketEvent{others,
			entered, leaves("web")}, answer: "connected"}, "tcp/80", ExitDone, "delivered 2.0 µs after the first step"},
		"of an own packet": {traceAgent{part: partOf("delivered"), events: []*pilasterv1.PacketEvent{entered,
			leaves("web")}, after: time.Second}, "tcp/80 --wait 10s", ExitDone,
			"delivered 2.0 µs after the first step\n"},
		"of a packet before it is ready": {traceAgent{part: partOf("delivered"), events: []*pilasterv1.PacketEvent{
			entered, leaves("web")}, after: time.Second, clock: 1 << 40}, "tcp/80 --wait 2s", ExitFailed,
			"no packet was seen"},
		"dropped": {traceAgent{part: partOf("delivered"), events: []*pilasterv1.PacketEvent{entered, drop}}, "",
			ExitFailed, "dropped: no-route"},
		"no packet":           {traceAgent{part: partOf("delivered")}, "--wait 10ms", ExitFailed, "no packet was seen"},
		"its agent is killed": {traceAgent{part: partOf("delivered"), dies: true}, "--wait 10s", ExitUnreachable, ""},
		"by the name ping":    {traceAgent{part: partOf("delivered")}, "ping --dry-run", ExitDone, "ICMPv6"},
		"elsewhere": {traceAgent{part: &pilasterv1.TraceResponse{Node: "n3"}}, "", ExitFailed,
			"neither end is a container on this node"},
	} {
		args := append([]string{"trace", "--agent-socket", serve(t, c.agent), tracedFrom, tracedTo},
			strings.Fields(c.args)...)
		if code, stdout, stderr := run(t, "", args...); code != c.code || !strings.Contains(stdout, c.want) {
			t.Errorf("%s: exit %d, want %d\n%s%s\nwant %s", name, code, c.code, stdout, stderr, c.want)
		}
	}
}

func TestTraceJSON(t *testing.T) {
	socket := serve(t, traceAgent{part: partOf("delivered")})
	_, stdout, _ := run(t, "", "trace", "--agent-socket", socket, tracedFrom, tracedTo, "--dry-run", "-o", "json")
	var shown trace.Trace
	if err := json.Unmarshal([]byte(stdout), &shown); err != nil || shown.Verdict != trace.Delivered ||
		shown.Protocol != 58 || shown.Steps[0].Destination.String() != tracedTo {
		t.Errorf("%v: %s", err, stdout)
	}
}

func TestTraceRefuses(t *testing.T) {
	socket := serve(t, traceAgent{refuse: connect.NewError(connect.CodeFailedPrecondition, context.Canceled)})
	for line, want := range map[string]int{
		"":                         ExitUsage,
		"fc00::1":                  ExitUsage,
		"fc00::1 fc00::2 tcp":      ExitUsage,
		"fc00::1 fc00::2 tcp/0":    ExitUsage,
		"fc00::1 fc00::2 nonsense": ExitUsage,
		"fc00::1 fc00::2 icmp":     ExitUsage, "10.0.0.1 10.0.0.2 icmpv6": ExitUsage,
		"fc00::1 10.0.0.1":                            ExitUsage,
		"fc00::1 fc00::1":                             ExitUsage,
		"fc00::1 fc00::2 --wait 1s --dry-run":         ExitUsage,
		"fc00::1 fc00::2 --wait x":                    ExitUsage,
		"fc00::1 fc00::2 --wait -1s":                  ExitUsage,
		"fc00::1 fc00::2 -o xml":                      ExitUsage,
		"fc00::1 fc00::2 udp/53 more":                 ExitUsage,
		"fc00::1 fc00::2":                             ExitFailed,
		"fc00::1 fc00::2 --agent-socket /nonexistent": ExitUnreachable,
	} {
		args := append([]string{"trace", "--agent-socket", socket}, strings.Fields(line)...)
		if code, stdout, _ := run(t, "", args...); code != want || stdout != "" {
			t.Errorf("trace %s: exit %d, want %d; stdout %q", line, code, want, stdout)
		}
	}
	for line, want := range map[string]int{
		"b1": ExitUsage, "b1 b2 tcp/80 more": ExitUsage, "b1 b2": ExitFailed,
	} {
		none := filepath.Join(t.TempDir(), "none")
		args := append([]string{"lab", "trace", "--lab-root", none}, strings.Fields(line)...)
		if code, stdout, _ := run(t, "", args...); code != want || stdout != "" {
			t.Errorf("lab trace %s: exit %d, want %d; stdout %q", line, code, want, stdout)
		}
	}
}

// serviceAgent is the agent of a client's node. Its tables lead to the backend that is asked for, or to the first one.
type serviceAgent struct {
	traceAgent
	backends []*pilasterv1.TraceBackend
	followed *pilasterv1.FollowPacketsRequest
	probed   *pilasterv1.SendProbeRequest
}

const tracedService = "fd70:696c:7300:5::1"

func (a *serviceAgent) Trace(
	_ context.Context, r *connect.Request[pilasterv1.TraceRequest],
) (*connect.Response[pilasterv1.TraceResponse], error) {
	to := a.backends[0]
	for _, b := range a.backends {
		if b.Address == r.Msg.Backend || b.Plaintext == r.Msg.Backend {
			to = b
		}
	}
	part := partOf("sent")
	part.Source.Plaintext, part.Destination.Address = "fd70:696c:6100:1:0:100:100:7", to.Address
	part.Destination.Plaintext, part.Next = to.Plaintext, "fd70:696c:6100:2::/64"
	if part.Steps[0].Destination = r.Msg.Destination; r.Msg.Destination == tracedService {
		part.Steps = append(part.Steps, &pilasterv1.TraceStep{Stage: "service", Source: tracedFrom,
			Destination: to.Address, Detail: "it has endpoints", Entry: "services"})
		part.Backends = a.backends
	}
	return connect.NewResponse(part), nil
}

func (a *serviceAgent) FollowPackets(ctx context.Context, r *connect.Request[pilasterv1.FollowPacketsRequest],
	stream *connect.ServerStream[pilasterv1.FollowPacketsResponse]) error {
	a.followed = r.Msg
	return a.traceAgent.FollowPackets(ctx, r, stream)
}

func (a *serviceAgent) SendProbe(
	ctx context.Context, r *connect.Request[pilasterv1.SendProbeRequest],
) (*connect.Response[pilasterv1.SendProbeResponse], error) {
	a.probed = r.Msg
	return a.traceAgent.SendProbe(ctx, r)
}

// TestTraceService: a trace to a service goes on to the backend that the packet has got, and says which. A live one
// selects packets by the addresses of the service and of its backends.
func TestTraceService(t *testing.T) {
	all := []*pilasterv1.TraceBackend{
		{Address: "fc00::11", Plaintext: "fd70:696c:6100:2:0:100:100:1", Port: 8080},
		{Address: "fc00::12", Plaintext: "fd70:696c:6100:3:0:100:100:2", Port: 8080},
		{Address: "fc00::13", Plaintext: "fd70:696c:6100:1:0:100:100:3", Port: 8080},
		{Address: "fc00::14", Plaintext: "fd70:696c:6100:1:0:100:100:4", Port: 8080},
	}
	event := func(at uint64, point, to string, port uint32) *pilasterv1.PacketEvent {
		e := &pilasterv1.PacketEvent{Time: at, Packet: 1, Point: point, Hook: "container", Device: "pil1",
			Source: tracedFrom, Destination: to, DestinationPort: port}
		if point == "leave" {
			e.Action, e.ToDevice = "redirect", "eth0"
		}
		return e
	}
	other := event(900, "enter", "fc00::12", 22) // another connection
	for name, c := range map[string]struct {
		backends []*pilasterv1.TraceBackend
		args     string
		events   []*pilasterv1.PacketEvent
		code     int
		says     []string
		follows  string // addresses
	}{
		"by the tables": {all, "tcp/80 --dry-run --backend fc00::12", nil, ExitDone,
			[]string{"→ service " + tracedService + " at fc00::12 ", "  service ", "sent to node"}, ""},
		"live": {all[:3], "tcp/80", []*pilasterv1.PacketEvent{other, event(1000, "enter", tracedService, 80),
			event(3000, "leave", all[1].Plaintext, 8080)}, ExitDone,
			[]string{"→ service " + tracedService + " at fc00::12 ", "  service ", "it has endpoints"},
			tracedService + " fc00::11 fc00::12 fc00::13"},
		"by a socket": {all[:2], "tcp/80", []*pilasterv1.PacketEvent{event(1000, "enter", "fc00::12", 8080),
			event(3000, "leave", all[1].Plaintext, 8080)}, ExitDone,
			[]string{"→ service " + tracedService + " at fc00::12 ", "container  "},
			tracedService + " fc00::11 fc00::12 " + all[0].Plaintext},
		"over UDP": {all, "udp/80", []*pilasterv1.PacketEvent{event(1000, "enter", tracedService, 80),
			event(3000, "leave", all[1].Plaintext, 8080)}, ExitDone, []string{" at fc00::12 "},
			tracedService + " " + all[0].Plaintext + " " + all[1].Plaintext},
		"to too many": {all, "tcp/80", nil, ExitFailed,
			[]string{"nothing was sent: use --dry-run, with --backend"}, ""},
		"live, to a given": {all, "tcp/80 --backend fc00::12", nil, ExitUsage,
			[]string{"--backend needs --dry-run"}, ""},
	} {
		a := &serviceAgent{traceAgent: traceAgent{events: c.events, answer: "connected"}, backends: c.backends}
		args := append([]string{"trace", "--agent-socket", serve(t, a), tracedFrom, tracedService},
			strings.Fields(c.args)...)
		code, stdout, stderr := run(t, "", args...)
		if code != c.code {
			t.Errorf("%s: exit %d, want %d", name, code, c.code)
		}
		for _, says := range c.says {
			if !strings.Contains(stdout+stderr, says) {
				t.Errorf("%s: %q is missing in\n%s%s", name, says, stdout, stderr)
			}
		}
		if is := strings.Join(a.followed.GetDestinations(), " "); is != c.follows || a.followed.GetPort() != 0 {
			t.Errorf("%s: follows %s port %d, want %s", name, is, a.followed.GetPort(), c.follows)
		}
		if to := a.probed.GetDestination(); c.follows != "" && to != tracedService {
			t.Errorf("%s: the probe goes to %s", name, to)
		}
	}
}
