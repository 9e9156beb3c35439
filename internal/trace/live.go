package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Observed is an event on a node.
type Observed struct {
	Node string
	*pilasterv1.PacketEvent
}

// Outcome returns what became of a packet by one event; empty if the event does not say.
func (o Observed) Outcome() string {
	switch {
	case o.Point == "drop":
		return Dropped
	case o.Point != "leave" || o.Action == "drop":
		return ""
	case o.ToEndpoint != "" || o.ToDevice == pipeline.GatewayDevice:
		return Delivered
	case o.Hook == "uplink-in" && o.Action == "pass": // to the node's own stack
		return Delivered
	case o.Hook == "uplink-out" || o.Hook == "container" && o.Action == "redirect":
		return Sent
	}
	return ""
}

// Collector collects the events of one packet from all nodes: of the first one with the source port of the first one
// that is seen on the sender's node, as FromEvents shows it.
type Collector struct {
	Seen   []Observed        // of the packet, and of others before it was selected
	alone  bool              // only one node is asked
	sender string            // the sender's node; empty if it is not asked
	ends   []string          // nodes at which packets leave the cluster
	port   uint32            // of the source; 0 until a packet with ports is seen
	fates  map[uint32]string // of packets, by source port
}

// NewCollector returns a collector of events of some nodes.
func (t Trace) NewCollector(nodes []string) *Collector {
	c := &Collector{alone: len(nodes) == 1, ends: t.Ends, fates: map[uint32]string{}}
	if slices.Contains(nodes, t.Source.Node) {
		c.sender = t.Source.Node
	}
	return c
}

// Add adds an event. It returns what became of the packet: Delivered, Dropped, or Sent if no node that is asked sees
// the rest of its way; empty if that is not known yet.
func (c *Collector) Add(e Observed) (fate string) {
	if c.port != 0 && e.SourcePort != 0 && e.SourcePort != c.port {
		return c.fate()
	}
	c.Seen = append(c.Seen, e)
	if c.port == 0 && (c.sender == "" || c.sender == e.Node) {
		c.port = e.SourcePort
	}
	fate = e.Outcome()
	if fate == Sent && !c.alone && !(e.Hook == "uplink-out" && slices.Contains(c.ends, e.Node)) {
		fate = "" // other nodes see the packet, too
	}
	if c.fates[e.SourcePort] == "" {
		c.fates[e.SourcePort] = fate
	}
	return c.fate()
}

func (c *Collector) fate() string { return cmp.Or(c.fates[c.port], c.fates[0]) }

// ordered returns events in the order of time, with the source port of the packet to show.
func (t Trace) ordered(events []Observed) ([]Observed, uint32) {
	events = slices.Clone(events)
	slices.SortStableFunc(events, func(a, b Observed) int { return cmp.Compare(a.Time, b.Time) })
	return events, t.sourcePort(events)
}

// Backend returns the address of the backend that the observed packet to a service has got, empty if none was seen, and
// whether the packet path has translated it: else it has entered with the address of the backend.
func (t Trace) Backend(events []Observed) (to string, translated bool) {
	events, port := t.ordered(events)
	for _, e := range events {
		switch {
		case e.SourcePort != port || e.Destination == "":
		case e.Destination == t.Service:
			translated = true
		default:
			to = e.Destination
		}
	}
	return to, translated
}

// FromEvents replaces the steps of a trace by those of a packet that was observed: the first one on each node. The
// events may be in any order.
func (t Trace) FromEvents(events []Observed) Trace {
	tables, fate, last := slices.Concat(t.Steps, t.others), t.Verdict, Observed{PacketEvent: &pilasterv1.PacketEvent{}}
	t.Live, t.Steps, t.Verdict, t.Drop = true, []Step{}, NotSeen, ""
	events, port := t.ordered(events)
	l := live{
		tables: tables, passes: fate == Passed,
		packets: map[string]uint64{}, entered: map[string]uint64{}, hooks: map[string]bool{},
	}
	for _, e := range events {
		t.LostEvents = max(t.LostEvents, e.LostEvents)
		if e.SourcePort != 0 && e.SourcePort != port {
			continue
		}
		at := e.Node
		if e.Hook == "switch" {
			at += " " + e.Hook // Open vSwitch delivers a copy
		}
		if first, seen := l.packets[at]; seen && first != e.Packet {
			continue
		}
		if e.Point == "leave" && e.Hook == "container" && l.entered[e.Node] == 0 && t.LostEvents == 0 {
			continue // it has entered before the trace began
		}
		l.packets[at] = e.Packet
		if by := at + " " + e.Hook; e.Point == "enter" && l.hooks[by] {
			l.packets[at] = 0 // a later packet, which has the number of one that is gone
			continue
		} else if e.Point == "enter" {
			l.hooks[by] = true
		}
		if l.began == 0 {
			l.began = e.Time
		}
		if step, shown := l.step(e); shown {
			t.Steps = append(t.Steps, step)
			// else the socket has got its backend when it connected
			if e.Point == "enter" && t.Service != "" && e.Destination == t.Service {
				t.Steps = append(t.Steps, l.service(step)...)
			}
			if t.Verdict == NotSeen {
				t.Verdict = Unknown
			}
		}
		outcome := e.Outcome()
		if outcome == "" {
			continue
		}
		last = e
		t.Verdict, t.Drop, t.ElapsedUs = outcome, e.Drop, micros(e.Time-l.began)
		if outcome != Sent {
			break
		}
	}
	// the sender's node is a gateway, and did not translate the packet: it is in the tunnel to the other gateway
	toOther := t.gateway != "" && last.Node == t.Source.Node && last.Source == t.Source.Plaintext
	if t.Verdict == Delivered && fate == Passed && last.ToEndpoint == "" {
		t.Verdict = fate
	}
	if t.Verdict == Sent && slices.Contains(t.Ends, last.Node) && !toOther {
		t.Verdict = fate
	} else if t.Verdict == Sent && toOther {
		t.Elsewhere = t.gateway
	}
	if t.Verdict != Sent && t.Source.Node != "" {
		t.Elsewhere = ""
	}
	return t
}

// sourcePort returns the source port of the packet to show: of the first one at the sender's node, if that was asked.
// Other connections may have the same ends. Without ports it is 0.
func (t Trace) sourcePort(events []Observed) uint32 {
	i := slices.IndexFunc(events, func(e Observed) bool { return e.SourcePort != 0 && e.Node == t.Source.Node })
	if i < 0 {
		i = slices.IndexFunc(events, func(e Observed) bool { return e.SourcePort != 0 })
	}
	if i < 0 {
		return 0
	}
	return events[i].SourcePort
}

// live turns events into steps.
type live struct {
	tables  []Step            // of the same packet without a packet
	began   uint64            // time of the first event
	packets map[string]uint64 // by node, and by node and switch
	entered map[string]uint64 // time at which a node's present program began
	hooks   map[string]bool   // where the packet has entered, by node and hook
	passes  bool              // by the tables, no program takes the packet
	staged  bool              // the pipeline of network nimitz has the packet
	denied  string            // the reason of a denial by policy
}

func micros(ns uint64) float64 { return float64(ns) / 1000 }

// hookStages are stages by hook where a packet enters.
var hookStages = map[string]string{
	"container": "container", "uplink-in": "uplink", "uplink-out": "uplink", "tunnel": "decap",
	"switch": "switch", "node": "node",
}

// step returns the step of an event; false if it adds nothing to those before it.
func (l *live) step(e Observed) (Step, bool) {
	at := micros(e.Time - l.began)
	s := Step{Node: e.Node, AtUs: &at, Drop: e.Drop}
	s.Source, _ = netip.ParseAddr(e.Source)
	s.Destination, _ = netip.ParseAddr(e.Destination)
	switch e.Point {
	case "enter":
		l.enter(&s, e)
		l.entered[e.Node] = e.Time
	case "policy":
		l.policy(&s, e)
	case "pipeline":
		l.staged = true
		s.Stage, s.Detail, s.Entry = "forwarding", fmt.Sprintf("VNI %d", e.Vni), l.both(e.Node, "forwarding")
	case "leave":
		return s, l.leave(&s, e)
	case "drop":
		if e.Drop == l.denied {
			return s, false // the step before says so
		}
		s.Stage = "drop"
		s.Detail, s.Entry = l.why(e)
	}
	return s, true
}

// service returns the steps in which a packet that enters gets its backend.
func (l *live) service(s Step) (all []Step) {
	for _, of := range l.tables {
		if of.Node == s.Node && (of.Stage == "service" || of.Stage == "maglev") {
			of.AtUs = s.AtUs
			all = append(all, of)
		}
	}
	return all
}

// why says why a packet was dropped, as the tables do.
func (l *live) why(e Observed) (detail, entry string) {
	i := slices.IndexFunc(l.tables, func(s Step) bool { return s.Node == e.Node && s.Drop == e.Drop })
	if i >= 0 {
		detail, entry = l.tables[i].Detail, l.tables[i].Entry
	} else {
		detail = dropreason.Named(e.Drop).Text()
	}
	if e.Rule != nil {
		entry = e.Rule.Rule
	}
	return detail, entry
}

func (l *live) enter(s *Step, e Observed) {
	s.Stage = hookStages[e.Hook]
	_, inside := l.entered[e.Node]
	ofNode := l.first(e.Node) == "node"               // from the node's own stack
	if e.Hook == "uplink-out" && !inside && !ofNode { // from behind a macvlan
		s.Stage = "container"
	}
	switch {
	case s.Stage == "container":
		s.Detail, s.Entry = "from "+e.Device, cmp.Or(l.entry(e.Node, "container"), l.both(e.Node, "register"))
	case e.Hook == "uplink-in":
		s.Detail = "in by " + e.Device
		s.Entry = cmp.Or(l.entry(e.Node, "uplink"), l.entry(e.Node, "endpoint"))
	case e.Hook == "uplink-out":
		s.Detail, s.Entry = "out by "+e.Device, cmp.Or(l.entry(e.Node, "next hop"), l.entry(e.Node, "tunnel"))
	case e.Hook == "switch":
		s.Detail, s.Entry = "from Open vSwitch, at "+e.Device, l.both(e.Node, "forwarding")
	default:
		s.Detail, s.Entry = "at "+e.Device, l.entry(e.Node, s.Stage)
	}
	exposed := l.entry(e.Node, "uplink") != "" || l.entry(e.Node, "target") != "" // has no flow cache
	if e.Cache != "" && !inside && !exposed && l.entry(e.Node, "register") == "" && !(ofNode && s.Stage == "uplink") {
		s.Detail += ", flow cache " + e.Cache
	}
}

func (l *live) policy(s *Step, e Observed) {
	verdict := "allowed"
	if !e.Allowed {
		verdict = "denied"
	}
	s.Stage, s.Detail = "policy", e.Direction+" "+verdict
	l.denied = e.Drop
	switch {
	case e.Rule != nil:
		s.Entry = e.Rule.Rule
	case e.Cache == "hit":
		s.Entry = "established session, in the verdict cache"
	default:
		s.Entry = cmp.Or(l.policyEntry(e.Node, e.Direction), l.both(e.Node, "policy"))
	}
}

// leave reports whether the step shows anything.
func (l *live) leave(s *Step, e Observed) bool {
	took := fmt.Sprintf("in %.1f µs", micros(e.Time-l.entered[e.Node]))
	switch {
	case e.ToEndpoint != "":
		s.Stage, s.Detail = "deliver", fmt.Sprintf("to %s by %s, %s", e.ToEndpoint, e.ToDevice, took)
		s.Entry = cmp.Or(l.entry(e.Node, "translate"), l.entry(e.Node, "deliver"))
		return true
	case e.Hook == "uplink-in" && e.Action == "pass" && l.passes:
		s.Stage, s.Detail, s.Entry = "node", l.find(e.Node, "node").Detail+", "+took, l.entry(e.Node, "node")
		return true
	case e.Hook == "uplink-in" && e.Action == "pass":
		s.Stage, s.Detail = "deliver", "to this node, "+took
		return true
	case e.ToDevice == pipeline.GatewayDevice:
		s.Stage, s.Detail, s.Entry = "deliver", "to this node's gateway, "+took, l.both(e.Node, "nat")
		return true
	case e.Action == "redirect" && l.staged:
		s.Stage, s.Detail, s.Entry = "encap", fmt.Sprintf("to %s, %s", e.ToDevice, took), l.entry(e.Node, "encap")
		return true
	case e.Action == "redirect" && l.entry(e.Node, "tunnel") != "":
		s.Stage, s.Detail, s.Entry = "tunnel", fmt.Sprintf("to %s, %s", e.ToDevice, took), l.both(e.Node, "tunnel")
		return true
	case e.Action == "redirect" && (e.Hook == "uplink-in" || l.entry(e.Node, "rule") != ""):
		s.Stage, s.Detail = "egress address", fmt.Sprintf("to %s, %s", e.ToDevice, took)
		if s.Entry = l.both(e.Node, "rule"); e.Hook == "uplink-in" || l.entry(e.Node, "gateway") != "" {
			s.Stage = "gateway"
		}
		return true
	case e.Action == "redirect":
		s.Stage, s.Detail = "translate", fmt.Sprintf("to %s, %s", e.ToDevice, took)
		s.Entry = l.entry(e.Node, "translate")
		return true
	case e.Action == "drop" && e.Hook == "container" && l.entry(e.Node, "register") != "":
		s.Stage, s.Detail, s.Source, s.Destination = "switch", "Open vSwitch has the packet", netip.Addr{}, netip.Addr{}
		s.Entry = "--dry-run shows its flows"
		return true
	}
	return false
}

// first returns the first stage of a node, from the tables.
func (l *live) first(node string) string {
	i := slices.IndexFunc(l.tables, func(s Step) bool { return s.Node == node })
	if i < 0 {
		return ""
	}
	return l.tables[i].Stage
}

// find returns the step of a stage, from the tables; without a stage if they have none.
func (l *live) find(node, stage string) Step {
	i := slices.IndexFunc(l.tables, func(s Step) bool { return s.Node == node && s.Stage == stage })
	if i < 0 {
		return Step{}
	}
	return l.tables[i]
}

// entry returns the entry of a stage, from the tables.
func (l *live) entry(node, stage string) string { return l.find(node, stage).Entry }

// both returns the entry of a stage with what it says, from the tables.
func (l *live) both(node, stage string) string {
	s := l.find(node, stage)
	if s.Stage == "" {
		return ""
	}
	return s.Entry + ": " + s.Detail
}

// policyEntry returns what decided, from the tables.
func (l *live) policyEntry(node, direction string) string {
	for _, s := range l.tables {
		if s.Node == node && s.Stage == "policy" && len(s.Detail) > len(direction) &&
			s.Detail[:len(direction)] == direction {
			return s.Entry
		}
	}
	return ""
}
