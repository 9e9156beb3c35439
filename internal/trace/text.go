package trace

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/tenant"
)

var protocols = map[uint8]string{1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 132: "SCTP"}

// Text writes the trace to a writer that aligns columns after tabs.
func (t Trace) Text(w io.Writer) {
	protocol := cmp.Or(protocols[t.Protocol], fmt.Sprintf("protocol %d", t.Protocol))
	if t.Port != 0 {
		protocol += fmt.Sprintf(" %d", t.Port)
	}
	how := "from the tables, no packet was sent"
	if t.Live {
		how = "live"
	}
	to := t.Destination.String()
	if t.Service != "" {
		to = "service " + t.Service + " at " + to
	}
	fmt.Fprintf(w, "%s → %s   %s   %s\n", t.Source, to, protocol, how)
	for i, e := range []End{t.Source, t.Destination} {
		if e.Plaintext != "" && e.Plaintext != e.Address {
			end := [2]string{"the source", "the destination"}[i]
			fmt.Fprintf(w, "  %s is %s, on the fabric %s\n", cmp.Or(e.Name, end), e.Address, e.Plaintext)
		}
	}
	for _, s := range t.Steps {
		t.step(w, s)
	}
	fmt.Fprintln(w, t.conclusion())
	if t.LostEvents > 0 {
		fmt.Fprintf(w, "%d events were lost, because the ring buffer was full\n", t.LostEvents)
	}
}

func (t Trace) step(w io.Writer, s Step) {
	addresses := ""
	if s.Source.IsValid() {
		addresses = t.short(s.Source) + " → " + t.short(s.Destination)
	}
	fmt.Fprintf(w, "  %s\t%s\t%s\t", s.Node, s.Stage, addresses)
	if t.Live {
		fmt.Fprintf(w, "%.1f µs\t", *s.AtUs)
	}
	detail := s.Detail
	if s.Drop != "" && s.Drop != detail {
		detail += " (" + s.Drop + ")"
	}
	fmt.Fprintf(w, "%s\t%s\n", detail, s.Entry)
}

// String returns an end as "name (tenant, labels, node)".
func (e End) String() string {
	var about []string
	for _, s := range []string{e.Tenant, tenant.Canonical(e.Labels), e.Node} {
		if s != "" {
			about = append(about, s)
		}
	}
	name := cmp.Or(e.Name, e.Address)
	if len(about) == 0 {
		return name
	}
	return name + " (" + strings.Join(about, ", ") + ")"
}

func (t Trace) conclusion() string {
	s := t.verdict()
	if t.Answer != nil && t.Answer.Answered {
		s += fmt.Sprintf("; answer (%s) after %.0f µs", t.Answer.Kind, t.Answer.RttUs)
	} else if t.Answer != nil && (t.Verdict == Delivered || t.Verdict == Left) {
		s += "; no answer"
	}
	if t.Elsewhere != "" {
		s += "\nthe other part of the way is on node " + t.elsewhere() + ": " + t.goOn()
	}
	if t.Note != "" {
		s += "\n" + t.Note
	}
	return s
}

// elsewhere names the node with the other part of the way.
func (t Trace) elsewhere() string {
	if t.ElsewhereName == "" {
		return t.Elsewhere
	}
	return t.ElsewhereName + " (" + t.Elsewhere + ")"
}

// goOn says how to see the other part of the way.
func (t Trace) goOn() string {
	switch {
	case t.Service != "":
		how := "run the command there with the endpoint's address and port"
		if t.Ingress != "" {
			how += ", with --ingress " + t.ingress
		}
		return how + map[bool]string{true: " and --wait 1m, then repeat it here"}[t.Live]
	case t.Live && t.Verdict == Sent:
		return "start the command there with --wait 1m, then repeat it here"
	case t.Live && t.Source.Node == "":
		return "run the command there while this one waits"
	}
	return "run the command there too"
}

func (t Trace) verdict() string {
	switch t.Verdict {
	case Delivered:
		if t.Live {
			return fmt.Sprintf("delivered %.1f µs after the first step", t.ElapsedUs)
		}
		return "delivered"
	case Dropped:
		return "dropped: " + t.Drop
	case Left:
		if t.Live {
			return fmt.Sprintf("left the cluster %.1f µs after the first step", t.ElapsedUs)
		}
		return "leaves the cluster"
	case Passed:
		return "not for a service: the packet goes to the node's own stack"
	case Sent:
		switch {
		case t.Elsewhere != "":
			return "sent to node " + t.elsewhere()
		case t.Live:
			return "sent, and not seen again"
		}
		return "sent to another node, in whose tables it has no step"
	case NotSeen:
		return "no packet was seen: " + t.unseen() + "\nwith --dry-run the command shows what would become of a packet"
	case Unknown:
		return "not seen after the last step: no program delivered, sent or dropped it"
	}
	return "neither end is a container on this node: run the command on the node of one;\n" +
		"pilaster explain shows the node of an address"
}

// unseen says what to check if no packet was seen.
func (t Trace) unseen() string {
	if t.Ingress != "" {
		return fmt.Sprintf("none of %s came in by node %s in the time of --wait\ncheck that the fabric routes the "+
			"address to this node", cmp.Or(t.Source.Name, t.Source.Address), t.Ingress)
	}
	if t.Source.Node == "" {
		return "none arrived from the source's node in the time of --wait"
	}
	if t.Source.IsNode {
		return fmt.Sprintf("none left node %s with the source %s\ncheck its route to the destination and the source "+
			"of this route (ip -6 route get);\nwith --wait, that a process sent such a packet in this time",
			t.Source.Node, t.Source.Address)
	}
	return fmt.Sprintf("none reached node %s by the device of %s\n"+
		"check in the container that the device is up (ip link) and that it has a route to the destination "+
		"(ip route get);\nwith --wait, that it sent such a packet in this time",
		t.Source.Node, cmp.Or(t.Source.Name, t.Source.Address))
}

// shown are the characters that an address may have without being shortened.
const shown = 21

// short shortens an IPv6 address: a plaintext address to its last groups, which have node, tenant, app and index; that
// of an end to the first and the last group. Others are shown in full: they begin with a locator, or come from NAT.
func (t Trace) short(a netip.Addr) string {
	text := a.String()
	if a.Is4() || len(text) <= shown {
		return text
	}
	ends := []string{t.Source.Address, t.Source.Plaintext, t.Destination.Address, t.Destination.Plaintext}
	if !slices.Contains(ends, text) {
		return text
	}
	groups := strings.Split(text, ":")
	if (text == t.Source.Plaintext || text == t.Destination.Plaintext) && len(groups) > 5 {
		return "…:" + strings.Join(groups[len(groups)-5:], ":")
	}
	return groups[0] + ":…:" + groups[len(groups)-1]
}
