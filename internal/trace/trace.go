package trace

import (
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Trace is the way of one packet.
type Trace struct {
	Source      End    `json:"source"`
	Destination End    `json:"destination"`
	Protocol    uint8  `json:"protocol"`
	Port        uint16 `json:"port,omitempty"`
	Network     string `json:"network,omitempty"`
	Service     string `json:"service,omitempty"` // that the packet is sent to; the destination is one of its endpoints
	Ingress     string `json:"ingress,omitempty"` // node by which a packet of a host outside comes in, if it was asked
	Live        bool   `json:"live"`              // the steps are observations of a packet; otherwise they follow from the tables
	Steps       []Step `json:"steps"`
	Verdict     string `json:"verdict"`        // what became of the packet
	Drop        string `json:"drop,omitempty"` // reason, if dropped
	// from the first to the last step, live
	ElapsedUs float64 `json:"elapsedUs,omitempty"`
	Answer    *Answer `json:"answer,omitempty"` // to the probe; nil if none was sent
	// the /64 of a node that has another part of the way and was not asked
	Elsewhere     string `json:"elsewhere,omitempty"`
	ElsewhereName string `json:"elsewhereNode,omitempty"` // the name of this node, if known
	Note          string `json:"note,omitempty"`          // what the steps do not say
	// nodes that were asked and at which such packets leave the cluster, or are delivered to the node itself
	Ends []string `json:"-"`
	// steps of nodes on another way, such as the second gateway of an egress rule
	others []Step
	// the /64 of another gateway that the packet may leave by, if the sender's node is one too
	gateway string
	ingress string // the /64 of Ingress
	// events that did not fit into a node's ring buffer
	LostEvents uint64 `json:"lostEvents,omitempty"`
}

// Verdicts of a packet.
const (
	Delivered = "delivered"
	Sent      = "sent" // to a node that was not asked, or that did not see the packet
	Left      = "left" // the cluster, for a host outside
	Dropped   = "dropped"
	Passed    = "passed"   // to a node's own stack: no program takes the packet of a host outside
	NotHere   = "not-here" // no node that was asked has a part of the way
	NotSeen   = "not-seen" // live: no packet
	Unknown   = "unknown"  // live: the packet was seen, and not how it left
)

// End is a container or a node, as far as the nodes that were asked know it.
type End struct {
	IsNode    bool              `json:"isNode,omitempty"`
	Name      string            `json:"name,omitempty"`
	Node      string            `json:"node,omitempty"`
	Tenant    string            `json:"tenant,omitempty"`
	App       uint32            `json:"app,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
	Address   string            `json:"address"`             // as containers of the tenant see it
	Plaintext string            `json:"plaintext,omitempty"` // on the fabric
}

// Step is one stage on one node.
type Step struct {
	Node        string     `json:"node"`
	Stage       string     `json:"stage"`
	Source      netip.Addr `json:"source,omitzero"` // after the stage
	Destination netip.Addr `json:"destination,omitzero"`
	Detail      string     `json:"detail"`
	Entry       string     `json:"entry,omitempty"` // the table entry that was hit, or what decided
	Drop        string     `json:"drop,omitempty"`  // reason, if the packet ended here
	AtUs        *float64   `json:"atUs,omitempty"`  // since the first step; live
}

// Answer is the answer to a probe.
type Answer struct {
	Answered bool    `json:"answered"`
	Kind     string  `json:"kind,omitempty"` // echo reply, connected, refused, datagram
	RttUs    float64 `json:"rttUs,omitempty"`
}

// Merge puts the parts of nodes together, the sender's first.
func Merge(parts ...*pilasterv1.TraceResponse) Trace {
	t := Trace{Steps: []Step{}, Verdict: NotHere, Service: ServiceOf(parts), Ingress: ingressOf(parts)}
	if t.Ingress != "" {
		t.ingress = parts[0].Prefix
	}
	if len(parts) > 0 && len(parts[0].Gateways) > 0 && parts[0].Verdict == Left {
		t.gateway = parts[0].Gateways[0]
	}
	for _, p := range parts {
		if p.Verdict == Left || p.Verdict == Delivered && p.Destination.GetEndpointId() == 0 {
			t.Ends = append(t.Ends, p.Node)
		}
	}
	for i, p := range parts {
		if len(p.Steps) > 0 {
			t.Verdict, t.Drop = p.Verdict, p.Drop
		}
		t.Source.add(p.Source, p.Node)
		t.Destination.add(p.Destination, p.Node)
		if t.Network == "" {
			t.Network = p.Network
		}
		t.Elsewhere = p.Next
		t.Steps = append(t.Steps, stepsOf(p)...)
		if p.Verdict == Dropped || p.Verdict == Delivered || p.Verdict == Left {
			t.Elsewhere = ""
			t.addAnswer(parts[:i+1])
			for _, other := range parts[i+1:] {
				t.others = append(t.others, stepsOf(other)...)
			}
			break
		}
	}
	// A receiver that was asked alone knows of the sender's node.
	if (t.Verdict == Delivered || t.Verdict == Left) && t.Source.Node == "" {
		t.Elsewhere = parts[len(parts)-1].Next
	}
	return t
}

// ServiceOf returns the address of the service that a packet is sent to; empty if it is sent to none.
func ServiceOf(parts []*pilasterv1.TraceResponse) string {
	if len(parts) == 0 || len(parts[0].Backends) == 0 {
		return ""
	}
	return parts[0].Steps[0].Destination // at the container
}

// ingressOf returns the node by which a packet of a host outside comes in; empty if no node was asked as this one.
func ingressOf(parts []*pilasterv1.TraceResponse) string {
	if len(parts) == 0 || len(parts[0].Steps) == 0 || parts[0].Steps[0].Stage != "uplink" {
		return ""
	}
	of := parts[0]
	if of.Source.GetPlaintext() != "" || of.Source.GetTenant() != "" || of.Next != "" && len(of.Backends) == 0 {
		return ""
	}
	return of.Node
}

// IsExposed reports whether the packet of a host outside goes to an exposed port, by the node that was asked first.
func IsExposed(parts []*pilasterv1.TraceResponse) bool {
	return ingressOf(parts) != "" && len(parts[0].Backends) > 0
}

// addAnswer adds the way of the answer to a packet that was delivered to its endpoint.
func (t *Trace) addAnswer(parts []*pilasterv1.TraceResponse) {
	if t.Verdict != Delivered {
		return
	}
	for _, p := range slices.Backward(parts) {
		for _, s := range steps(p.Node, p.Answer) {
			if t.Steps = append(t.Steps, s); s.Drop != "" {
				t.Verdict, t.Drop = Dropped, s.Drop
				return
			}
		}
	}
}

// stepsOf returns the steps of a node's part.
func stepsOf(p *pilasterv1.TraceResponse) []Step { return steps(p.Node, p.Steps) }

func steps(node string, of []*pilasterv1.TraceStep) (all []Step) {
	for _, s := range of {
		step := Step{Node: node, Stage: s.Stage, Detail: s.Detail, Entry: s.Entry, Drop: s.Drop}
		step.Source, _ = netip.ParseAddr(s.Source)
		step.Destination, _ = netip.ParseAddr(s.Destination)
		all = append(all, step)
	}
	return all
}

// add adds what a node knows of an end. The node with the container knows most.
func (e *End) add(part *pilasterv1.TraceEnd, node string) {
	if part == nil || e.Node != "" {
		return
	}
	here := part.EndpointId != 0 || part.IsNode
	if e.Address != "" && !here {
		return
	}
	*e = End{Name: part.Endpoint, Tenant: part.Tenant, App: part.App, Labels: part.Labels, Address: part.Address,
		Plaintext: part.Plaintext, IsNode: part.IsNode}
	if here {
		e.Node = node
	}
}

// Addresses returns all source and destination addresses that the packet has on its way, for a FollowPacketsRequest.
func Addresses(parts ...*pilasterv1.TraceResponse) (sources, destinations []string) {
	for _, p := range parts {
		sources, destinations = append(sources, p.Sources...), append(destinations, p.Destinations...)
	}
	slices.Sort(sources)
	slices.Sort(destinations)
	return slices.Compact(sources), slices.Compact(destinations)
}
