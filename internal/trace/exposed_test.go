package trace

import (
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

const (
	client, external = "2001:db8:f00d::2", "2001:db8:7::9"
	ingressPrefix    = "fd70:696c:6100:2::/64"
)

// ingress is the part of an ingress node.
func ingress() *pilasterv1.TraceResponse {
	return &pilasterv1.TraceResponse{
		Node: "n2", Prefix: ingressPrefix, Verdict: "sent", Next: "fd70:696c:6100:1::/64",
		Source:      &pilasterv1.TraceEnd{Address: client},
		Destination: &pilasterv1.TraceEnd{Address: seenB, Plaintext: plainB, Tenant: "blue"},
		Steps: []*pilasterv1.TraceStep{
			{Stage: "uplink", Source: client, Destination: external, Detail: "from outside", Entry: "pil_exposed"},
			{Stage: "service", Source: client, Destination: external, Detail: "web", Entry: "pil_svc"},
			{Stage: "maglev", Source: client, Destination: plainB, Detail: "to web", Entry: "pil_maglev: slot 3"},
			{Stage: "tunnel", Source: client, Destination: plainB, Detail: "to n1", Entry: "FIB"},
		},
		Sources: []string{client}, Destinations: []string{external, plainB},
		Backends: []*pilasterv1.TraceBackend{{Address: seenB, Plaintext: plainB, Port: 8080}},
		Answer:   []*pilasterv1.TraceStep{{Stage: "answer", Source: external, Destination: client, Detail: "by eth0"}},
	}
}

// target is the part of the endpoint's node.
func target() *pilasterv1.TraceResponse {
	p := receiver()
	p.Source, p.Steps = &pilasterv1.TraceEnd{Address: client}, append([]*pilasterv1.TraceStep{
		{Stage: "uplink", Source: client, Destination: plainB, Detail: "from the fabric"},
	}, p.Steps...)
	for _, s := range p.Steps {
		s.Source = client
	}
	p.Steps = append(p.Steps[:2], append([]*pilasterv1.TraceStep{{Stage: "target", Source: client, Destination: plainB,
		Detail: "exposed", Entry: "pil_extargets"}}, p.Steps[2:]...)...)
	p.Answer = []*pilasterv1.TraceStep{{Stage: "answer", Source: plainB, Destination: client, Detail: "to n2"}}
	return p
}

func stagesOf(t Trace) string {
	var all []string
	for _, s := range t.Steps {
		all = append(all, s.Node+" "+s.Stage)
	}
	return strings.TrimSpace(strings.Join(all, ", ") + ": " + t.Verdict + " " + t.Drop)
}

// TestExposed: a packet of a host outside is followed from its ingress node to the endpoint, and its answer back. A
// live trace has the stages that a program reports.
func TestExposed(t *testing.T) {
	const in = "n2 uplink, n2 service, n2 maglev, n2 tunnel"
	whole := Merge(ingress(), target())
	const want = in + ", n1 uplink, n1 endpoint, n1 target, n1 policy, n1 deliver, n1 answer, n2 answer: delivered"
	if got := stagesOf(whole); got != want || whole.Ingress != "n2" || whole.Service != external ||
		whole.Elsewhere != "" && whole.Source.Node != "" {
		t.Errorf("%s, %+v; want %s", got, whole, want)
	}
	lost := ingress()
	lost.Answer[0].Drop = "no-route"
	if got := Merge(lost, target()); got.Verdict != Dropped || got.Drop != "no-route" {
		t.Errorf("without a route for the answer: %s", stagesOf(got))
	}
	denied := target()
	if got := stagesOf(Merge(ingress(), dropped(denied, "policy-denied"))); strings.Contains(got, "answer") {
		t.Errorf("denied: %s", got)
	}
	alone := Merge(ingress())
	const how = "run the command there with the endpoint's address and port, with --ingress " + ingressPrefix
	if got := text(alone); stagesOf(alone) != in+": sent" || !strings.Contains(got, how) {
		t.Errorf("%s\n%s", stagesOf(alone), got)
	}

	at := func(node string, time, packet uint64, point, hook, to string) Observed {
		return Observed{node, &pilasterv1.PacketEvent{
			Time: time, Packet: packet, Point: point, Hook: hook, Device: "eth0", Source: client, Destination: to,
			SourcePort: 20_000, Cache: map[string]string{"enter": "miss"}[point],
		}}
	}
	leaves := func(o Observed, action, device, endpoint string) Observed {
		o.Action, o.ToDevice, o.ToEndpoint = action, device, endpoint
		return o
	}
	events := []Observed{
		at("n2", 1000, 1, "enter", "uplink-in", external),
		leaves(at("n2", 2000, 1, "leave", "uplink-in", plainB), "redirect", "eth0", ""),
		at("n2", 3000, 1, "enter", "uplink-out", plainB),
		leaves(at("n2", 3100, 1, "leave", "uplink-out", plainB), "pass", "", ""),
		at("n1", 4000, 1, "enter", "uplink-in", plainB),
		leaves(at("n1", 5000, 1, "leave", "uplink-in", seenB), "redirect", "pil7", "web"),
	}
	live := whole.FromEvents(events)
	if got, want := stagesOf(live), in+", n2 uplink, n1 uplink, n1 deliver: delivered"; got != want {
		t.Errorf("live: %s, want %s", got, want)
	}
	if got := text(live); strings.Contains(got, "flow cache") {
		t.Errorf("exposed ports have no flow cache:\n%s", got)
	}
	if got := text(whole.FromEvents(nil)); !strings.Contains(got, "none of "+client+" came in by node n2") {
		t.Errorf("no packet:\n%s", got)
	}

	stack := ingress()
	stack.Verdict, stack.Next, stack.Backends, stack.Answer = "passed", "", nil, nil
	stack.Steps = append(stack.Steps[:1], &pilasterv1.TraceStep{Stage: "node", Source: client, Destination: external,
		Detail: "to the stack"})
	passed := Merge(stack).FromEvents([]Observed{events[0],
		leaves(at("n2", 2000, 1, "leave", "uplink-in", external), "pass", "", "")})
	if got := stagesOf(passed); got != "n2 uplink, n2 node: passed" {
		t.Errorf("live, to the node's stack: %s", got)
	}
}
