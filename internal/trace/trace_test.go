package trace

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

const (
	seenA, seenB   = "fcb1:d3c7:9c0e:1f2a:8b14:7c55:3e90:77a2", "fc4f:63a1:5d20:e07b:11c8:92f4:aa31:91d2"
	plainA, plainB = "fd70:696c:6100:2:0:100:100:2a", "fd70:696c:6100:1:0:100:200:13"
)

// sender and receiver are the parts of two nodes.
func sender() *pilasterv1.TraceResponse {
	return &pilasterv1.TraceResponse{
		Node: "n2", Network: "netpila", Verdict: "sent", Next: "fd70:696c:6100:1::/64",
		Source: &pilasterv1.TraceEnd{Address: seenA, Plaintext: plainA, Tenant: "blue", App: 1,
			Labels: map[string]string{"app": "front"}, EndpointId: 3, Endpoint: "front"},
		Destination: &pilasterv1.TraceEnd{Address: seenB, Plaintext: plainB, Tenant: "blue", App: 2},
		Steps: []*pilasterv1.TraceStep{
			{Stage: "container", Source: seenA, Destination: seenB, Detail: "from pil3",
				Entry: "pil_sources: endpoint 3"},
			{Stage: "translate", Source: plainA, Destination: plainB, Detail: "decrypted", Entry: "pil_keys: 1"},
			{Stage: "next hop", Source: plainA, Destination: plainB, Detail: "fe80::1 on eth0", Entry: "FIB"},
			{Stage: "policy", Source: plainA, Destination: plainB, Detail: "egress allowed", Entry: "no policies"},
		},
		Sources: []string{seenA, plainA}, Destinations: []string{seenB, plainB},
	}
}

func receiver() *pilasterv1.TraceResponse {
	return &pilasterv1.TraceResponse{
		Node: "n1", Network: "netpila", Verdict: "delivered", Next: "fd70:696c:6100:2::/64",
		Source: &pilasterv1.TraceEnd{Address: seenA, Plaintext: plainA, Tenant: "blue", App: 1},
		Destination: &pilasterv1.TraceEnd{Address: seenB, Plaintext: plainB, Tenant: "blue", App: 2,
			Labels: map[string]string{"app": "web"}, EndpointId: 7, Endpoint: "web"},
		Steps: []*pilasterv1.TraceStep{
			{Stage: "endpoint", Source: plainA, Destination: plainB, Detail: "is web", Entry: "pil_locals: endpoint 7"},
			{Stage: "policy", Source: plainA, Destination: plainB, Detail: "ingress allowed", Entry: "web ingress[0]"},
			{Stage: "deliver", Source: seenA, Destination: seenB, Detail: "to web by pil7",
				Entry: "pil_locals: endpoint 7"},
		},
		Sources: []string{plainA, seenA}, Destinations: []string{plainB, seenB},
	}
}

func dropped(p *pilasterv1.TraceResponse, reason string) *pilasterv1.TraceResponse {
	p.Verdict, p.Drop = "dropped", reason
	p.Steps = p.Steps[:2]
	p.Steps[1].Drop = reason
	return p
}

// leaving makes a part one of a packet that leaves the cluster at the node.
func leaving(p *pilasterv1.TraceResponse, node string) *pilasterv1.TraceResponse {
	p.Verdict, p.Node, p.Next = "left", node, ""
	p.Steps = append(p.Steps[:1], &pilasterv1.TraceStep{Stage: "rule", Source: plainA, Destination: plainB,
		Detail: "rule", Entry: "pil_access: ::/0"})
	return p
}

// delivering makes a part one of a packet that its node itself gets.
func delivering(p *pilasterv1.TraceResponse) *pilasterv1.TraceResponse {
	p.Verdict, p.Next, p.Destination.EndpointId = "delivered", "", 0
	return p
}

func text(t Trace) string {
	var s strings.Builder
	w := tabwriter.NewWriter(&s, 0, 8, 3, ' ', 0)
	t.Text(w)
	w.Flush()
	var lines []string
	for line := range strings.Lines(s.String()) {
		lines = append(lines, strings.TrimRight(line, " \n"))
	}
	return strings.Join(lines, "\n")
}

func TestMerge(t *testing.T) {
	for name, c := range map[string]struct {
		parts []*pilasterv1.TraceResponse
		want  string
	}{
		"both nodes": {[]*pilasterv1.TraceResponse{sender(), receiver()}, `
front (blue, app=front, n2) → web (blue, app=web, n1)   TCP 80   from the tables, no packet was sent
  front is ` + seenA + `, on the fabric ` + plainA + `
  web is ` + seenB + `, on the fabric ` + plainB + `
  n2   container   fcb1:…:77a2 → fc4f:…:91d2           from pil3         pil_sources: endpoint 3
  n2   translate   …:2:0:100:100:2a → …:1:0:100:200:13   decrypted         pil_keys: 1
  n2   next hop    …:2:0:100:100:2a → …:1:0:100:200:13   fe80::1 on eth0   FIB
  n2   policy      …:2:0:100:100:2a → …:1:0:100:200:13   egress allowed    no policies
  n1   endpoint    …:2:0:100:100:2a → …:1:0:100:200:13   is web            pil_locals: endpoint 7
  n1   policy      …:2:0:100:100:2a → …:1:0:100:200:13   ingress allowed   web ingress[0]
  n1   deliver     fcb1:…:77a2 → fc4f:…:91d2           to web by pil7    pil_locals: endpoint 7
delivered`},
		"the sender's node": {[]*pilasterv1.TraceResponse{sender()}, `
front (blue, app=front, n2) → ` + seenB + ` (blue)   TCP 80   from the tables, no packet was sent
…
sent to node fd70:696c:6100:1::/64
the other part of the way is on node fd70:696c:6100:1::/64: run the command there too`},
		"the receiver's node": {[]*pilasterv1.TraceResponse{receiver()}, `
` + seenA + ` (blue) → web (blue, app=web, n1)   TCP 80   from the tables, no packet was sent
…
delivered
the other part of the way is on node fd70:696c:6100:2::/64: run the command there too`},
		"dropped at its sender": {[]*pilasterv1.TraceResponse{dropped(sender(), "dst-undecryptable"), receiver()}, `
…
  n2   translate   …:2:0:100:100:2a → …:1:0:100:200:13   decrypted (dst-undecryptable)   pil_keys: 1
dropped: dst-undecryptable`},
		"dropped at its receiver": {[]*pilasterv1.TraceResponse{sender(), dropped(receiver(), "policy-denied")}, `
…
  n1   policy      …:2:0:100:100:2a → …:1:0:100:200:13   ingress allowed (policy-denied)   web ingress[0]
dropped: policy-denied`},
		"to a host outside": {[]*pilasterv1.TraceResponse{leaving(sender(), "n2")}, `
…
leaves the cluster`},
		"by a gateway": {[]*pilasterv1.TraceResponse{sender(), leaving(receiver(), "n1")}, `
…
leaves the cluster`},
		"neither": {[]*pilasterv1.TraceResponse{{Node: "n3"}}, `
 →    TCP 80   from the tables, no packet was sent
neither end is a container on this node: run the command on the node of one;
pilaster explain shows the node of an address`},
		"the receiver's node has no step": {[]*pilasterv1.TraceResponse{sender(), {Node: "n1"}}, `
…
sent to another node, in whose tables it has no step`},
	} {
		got := Merge(c.parts...)
		got.Protocol, got.Port = 6, 80
		if !fits(text(got), c.want) {
			t.Errorf("%s:\n%s\nwant%s", name, text(got), c.want)
		}
	}
}

// fits compares a text with one in which a line "…" stands for any lines, and runs of spaces for one.
func fits(got, want string) bool {
	single := func(s string) string {
		var lines []string
		for line := range strings.Lines(strings.TrimPrefix(s, "\n")) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return strings.Join(lines, "\n")
	}
	rest := single(got)
	parts := strings.Split(single(want), "…\n")
	// An address may contain the sign too, but not at the end of a line.
	if !strings.HasPrefix(rest, parts[0]) {
		return false
	}
	last := parts[len(parts)-1]
	return strings.HasSuffix(rest, last) && (len(parts) > 1 || rest == last)
}

func TestAddresses(t *testing.T) {
	from, to := Addresses(sender(), receiver())
	if strings.Join(from, " ") != seenA+" "+plainA || strings.Join(to, " ") != seenB+" "+plainB {
		t.Errorf("sources %v, destinations %v", from, to)
	}
}

// observed are the events of one packet on both nodes, in no order, and of a later one.
func observed() []Observed {
	at := func(node string, e *pilasterv1.PacketEvent) Observed { return Observed{node, e} }
	return []Observed{
		at("n1", &pilasterv1.PacketEvent{Time: 6000, Packet: 1, Point: "enter", Hook: "uplink-in", Device: "eth0",
			Source: plainA, Destination: plainB, Cache: "hit"}),
		at("n1", &pilasterv1.PacketEvent{Time: 7000, Packet: 1, Point: "policy", Hook: "uplink-in",
			Direction: "ingress", Allowed: true, Source: plainA, Destination: plainB, Cache: "miss"}),
		at("n1", &pilasterv1.PacketEvent{Time: 8500, Packet: 1, Point: "leave", Hook: "uplink-in", Action: "redirect",
			ToDevice: "pil7", ToEndpoint: "web", Source: seenA, Destination: seenB}),
		at("n2", &pilasterv1.PacketEvent{Time: 1000, Packet: 1, Point: "enter", Hook: "container", Device: "pil3",
			Source: seenA, Destination: seenB, Cache: "miss"}),
		at("n2", &pilasterv1.PacketEvent{Time: 3000, Packet: 1, Point: "leave", Hook: "container", Action: "redirect",
			ToDevice: "eth0", Source: plainA, Destination: plainB}),
		at("n2", &pilasterv1.PacketEvent{Time: 4000, Packet: 1, Point: "enter", Hook: "uplink-out", Device: "eth0",
			Source: plainA, Destination: plainB}),
		at("n2", &pilasterv1.PacketEvent{Time: 4100, Packet: 1, Point: "leave", Hook: "uplink-out", Action: "pass",
			Source: plainA, Destination: plainB}),
		at("n2", &pilasterv1.PacketEvent{Time: 2500, Packet: 2, Point: "enter", Hook: "container", Device: "pil3",
			Source: seenA, Destination: seenB, Cache: "miss"}),
		at("n1", &pilasterv1.PacketEvent{Time: 9000, Packet: 1, Point: "enter", Hook: "uplink-in", Source: plainA,
			Destination: plainB}),
	}
}

func TestFromEvents(t *testing.T) {
	tables := Merge(sender(), receiver())
	tables.Protocol, tables.Port = 6, 80
	delivered := tables.FromEvents(observed())
	delivered.Answer = &Answer{Answered: true, Kind: "connected", RttUs: 41}
	want := `
…
  n2   container   fcb1:…:77a2 → fc4f:…:91d2           0.0 µs   from pil3, flow cache miss   pil_sources: endpoint 3
  n2   translate   …:2:0:100:100:2a → …:1:0:100:200:13   2.0 µs   to eth0, in 2.0 µs           pil_keys: 1
  n2   uplink      …:2:0:100:100:2a → …:1:0:100:200:13   3.0 µs   out by eth0                  FIB
  n1   uplink      …:2:0:100:100:2a → …:1:0:100:200:13   5.0 µs   in by eth0, flow cache hit   pil_locals: endpoint 7
  n1   policy      …:2:0:100:100:2a → …:1:0:100:200:13   6.0 µs   ingress allowed              web ingress[0]
  n1   deliver     fcb1:…:77a2 → fc4f:…:91d2           7.5 µs   to web by pil7, in 2.5 µs    pil_locals: endpoint 7
delivered 7.5 µs after the first step; answer (connected) after 41 µs`
	if !fits(text(delivered), want) {
		t.Errorf("delivered:\n%s\nwant%s", text(delivered), want)
	}
	for name, c := range map[string]struct {
		events []Observed
		want   string
	}{
		"nothing seen": {nil, `
…
no packet was seen: none reached node n2 by the device of front
check in the container that the device is up (ip link) and that it has a route to the destination (ip route get);
with --wait, that it sent such a packet in this time
with --dry-run the command shows what would become of a packet`},
		"not seen after the first program": {observed()[3:4],
			"…\nnot seen after the last step: no program delivered, sent or dropped it"},
		"dropped, which the tables do not say": {append(observed()[3:4], Observed{"n2", &pilasterv1.PacketEvent{
			Time: 2000, Packet: 1, Point: "drop", Hook: "container", Drop: "multicast"}}), `
…
  n2   drop   1.0 µs   The destination is multicast. Containers have no multicast. (multicast)
dropped: multicast`},
		"lost on the fabric": {observed()[3:7], "…\nsent, and not seen again"},
		"denied": {append(observed()[:1], Observed{"n1", &pilasterv1.PacketEvent{Time: 7000, Packet: 1, Point: "policy",
			Direction: "ingress", Drop: "policy-denied", Rule: &pilasterv1.RuleName{Rule: "web isolates"},
			Cache: "miss"}},
			Observed{"n1", &pilasterv1.PacketEvent{Time: 7100, Packet: 1, Point: "drop", Hook: "uplink-in",
				Drop: "policy-denied", Rule: &pilasterv1.RuleName{Rule: "web isolates"}, LostEvents: 3}}), `
…
  n1   policy   1.0 µs   ingress denied (policy-denied)   web isolates
dropped: policy-denied
3 events were lost, because the ring buffer was full`},
	} {
		got := tables.FromEvents(c.events)
		got.Elsewhere = ""
		if !fits(text(got), c.want) {
			t.Errorf("%s:\n%s\nwant%s", name, text(got), c.want)
		}
	}
}

// TestLeaving: a packet that is sent by the node from which the tables say it leaves has left the cluster.
func TestLeaving(t *testing.T) {
	for name, c := range map[string]struct {
		tables Trace
		events []Observed
		want   string
	}{
		"at the sender's node": {Merge(leaving(sender(), "n2")), observed()[3:7], `
…
  n2   egress address   …:2:0:100:100:2a → …:1:0:100:200:13   2.0 µs   to eth0, in 2.0 µs   pil_access: ::/0: rule
…
left the cluster 3.1 µs after the first step`},
		"at a gateway": {Merge(sender(), leaving(receiver(), "n1")), append(observed()[3:7], Observed{"n1",
			&pilasterv1.PacketEvent{Time: 7000, Packet: 1, Point: "leave", Hook: "uplink-out", Action: "pass",
				Source: plainA, Destination: plainB}}), `
…
left the cluster 6.0 µs after the first step`},
		"at the other gateway": {Merge(sender(), leaving(receiver(), "n1"), leaving(receiver(), "n4")),
			append(observed()[3:7],
				Observed{"n4", &pilasterv1.PacketEvent{Time: 6500, Packet: 1, Point: "leave", Hook: "uplink-in",
					Action: "redirect", ToDevice: "eth0", Source: plainA, Destination: plainB}},
				Observed{"n4", &pilasterv1.PacketEvent{Time: 7000, Packet: 1, Point: "leave", Hook: "uplink-out",
					Action: "pass", Source: plainA, Destination: plainB}}), `
…
  n4   gateway   …:2:0:100:100:2a → …:1:0:100:200:13   5.5 µs   to eth0, in 6.5 µs   pil_access: ::/0: rule
left the cluster 6.0 µs after the first step`},
		"to a node": {Merge(sender(), delivering(receiver())), append(observed()[3:7], Observed{"n1",
			&pilasterv1.PacketEvent{Time: 7000, Packet: 1, Point: "leave", Hook: "uplink-in", Action: "pass",
				Source: plainA, Destination: plainB}}), `
…
delivered 6.0 µs after the first step`},
		"to the own node": {Merge(delivering(sender())), observed()[3:5], `
…
delivered 2.0 µs after the first step`},
		"not at the gateway": {Merge(sender(), leaving(receiver(), "n1")), observed()[3:7], `
…
sent, and not seen again`},
	} {
		if got := c.tables.FromEvents(c.events); !fits(text(got), c.want) {
			t.Errorf("%s:\n%s\nwant%s", name, text(got), c.want)
		}
	}
}

// TestOtherConnections: packets of other connections between the same ends are not shown, also if the receiver's node
// has one first.
func TestOtherConnections(t *testing.T) {
	tables := Merge(sender(), receiver())
	mine, others := observed(), observed()
	for i := range mine {
		probe, other := proto.CloneOf(mine[i].PacketEvent), proto.CloneOf(others[i].PacketEvent)
		probe.SourcePort, other.SourcePort = 20_001, 40_000
		other.Packet += 100
		if other.Time -= 4000; others[i].Node != tables.Source.Node {
			other.Time -= 1000
		}
		mine[i].PacketEvent, others[i].PacketEvent = probe, other
	}
	want := text(tables.FromEvents(mine))
	early := slices.DeleteFunc(others, func(o Observed) bool { return o.Node == tables.Source.Node })
	if got := text(tables.FromEvents(append(early, mine...))); got != want {
		t.Errorf("with another connection:\n%s\nwant\n%s", got, want)
	}
}

// TestShort: addresses that are not those of the ends are shown in full, because they begin with a locator.
func TestShort(t *testing.T) {
	tables := Merge(sender(), receiver())
	const located = "fd70:696c:6100:12:3456:789a:bcde:f012"
	for address, want := range map[string]string{seenA: "fcb1:…:77a2", plainA: "…:2:0:100:100:2a", located: located} {
		if got := tables.short(netip.MustParseAddr(address)); got != want {
			t.Errorf("%s is shown as %s, want %s", address, got, want)
		}
	}
}

// TestDropWords: a live trace says why a packet was dropped in the words of the tables.
func TestDropWords(t *testing.T) {
	tables := Merge(dropped(sender(), "dst-undecryptable"))
	got := tables.FromEvents(append(observed()[3:4], Observed{"n2", &pilasterv1.PacketEvent{Time: 2000, Packet: 1,
		Point: "drop", Hook: "container", Drop: "dst-undecryptable"}}))
	last, want := got.Steps[len(got.Steps)-1], tables.Steps[len(tables.Steps)-1]
	if last.Detail == "" || last.Detail != want.Detail || last.Entry != want.Entry || last.Drop != want.Drop {
		t.Errorf("got %+v, want the words of %+v", last, want)
	}
}

func TestJSON(t *testing.T) {
	b, err := json.Marshal(Merge(sender(), receiver()))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{`"verdict":"delivered"`, `"stage":"translate","source":"` + plainA, `"live":false`,
		`"node":"n1"`} {
		if !strings.Contains(string(b), part) {
			t.Errorf("JSON lacks %s: %s", part, b)
		}
	}
}
