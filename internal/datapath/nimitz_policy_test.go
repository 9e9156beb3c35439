package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// Apps of tenant 7, whose containers have packettest's addresses: own's, beside's, and what far says that it is.
const (
	appOwn    = 70
	appBeside = 72

	appFree    = 71 // no policy selects it
	appSilent  = 73 // may open no connection
	appShut    = 74 // accepts no connection
	appUnknown = 75
)

// Numbers of these tests' rules, beside those of police_test.go.
const (
	ruleSilent = iota + 10
	ruleShut
	ruleMail
)

// overlayFamily has the addresses of one family.
type overlayFamily struct {
	name                                               string
	own, beside, far, service, storage, virtual, leads netip.Addr
	gateway, gateway2, abroad                          netip.Addr
	ping, pong                                         uint8
	tooBig                                             packet.ICMP
}

func overlayFamilies() []overlayFamily {
	a := netip.MustParseAddr
	return []overlayFamily{
		{
			"IPv4",
			own4,
			beside4,
			far4,
			service4,
			a("192.0.2.9"),
			a("100.64.1.2"),
			a("100.64.1.3"),
			a("100.64.1.1"),
			a("100.64.2.1"),
			a("10.1.3.4"),
			packet.EchoRequest4,
			packet.EchoReply4,
			packet.ICMP{Type: packet.Unreachable4, Code: packet.FragmentationNeeded, Rest: [4]byte{0, 0, 5, 20}},
		},
		{
			"IPv6",
			own6,
			a("fd10:0:0:1::4"),
			far6,
			service6,
			a("2001:db8:9::9"),
			a("fd64:0:0:1::2"),
			a("fd64:0:0:1::3"),
			a("fd64:0:0:1::1"),
			a("fd64:0:0:2::1"),
			a("fd11::3:4"),
			packet.EchoRequest,
			packet.EchoReply,
			packet.ICMP{Type: packet.PacketTooBig, Rest: [4]byte{0, 0, 5, 20}},
		},
	}
}

// overlayStep is a packet and the rule by which it is dropped, if it is.
type overlayStep struct {
	name     string
	from, to netip.Addr
	body     packet.Body
	part     []packet.Extension
	by       pipeline.Port // it comes from; 0: from far, in a tunnel
	identity uint16        // that the tunnel says
	why      dropreason.Reason
	rule     uint32
}

// policedNimitz returns a bench where the policies of own allow TCP to port 80 in, and all but TCP port 25 out. The
// policies of the other apps are as their names say.
func policedNimitz(t *testing.T) (*nimitzBench, pipeline.Table) {
	b := newNimitzBench(t)
	entries := packettest.Entries()
	for i, e := range entries {
		if s, ok := e.(pipeline.Sender); ok && s.Port == 4 {
			s.Identity = appBeside
			entries[i] = s
		}
	}
	must(t, b.nimitz.Apply(t.Context(), nil, entries))
	b.says(t, 10, 1, denies|ruleNothing, 80, accepts|ruleWeb)
	b.says(t, 20, 1, accepts|ruleWeb, 25, denies|ruleMail)
	b.says(t, 30, 1, denies|ruleSilent, 0, 0)
	b.says(t, 40, 1, denies|ruleShut, 0, 0)
	o := &b.datapath.Objects
	for app, s := range map[uint32]bpfobj.PilasterPolTarget{
		appOwn: {Sets: [2]uint64{20, 10}}, appSilent: {Sets: [2]uint64{30, 0}}, appShut: {Sets: [2]uint64{0, 40}},
		appFree: {}, appBeside: {},
		appAny: {Sets: [2]uint64{30, 0}}, // as if a policy selected everyone
	} {
		must(t, o.PolSubjectsV1.Put(bpfobj.PilasterPolTargetKey{Tenant: 7, App: app}, s))
	}
	for _, rule := range []uint32{ruleNothing, ruleSilent, ruleShut, ruleMail} {
		must(t, o.PolHitsV1.Put(rule, make([]uint64, len(b.counts(t)))))
	}
	b.voidVerdicts(t)
	return b, pipeline.Table{Region: packettest.Region, Entries: entries}
}

func (b *nimitzBench) police(t *testing.T, table pipeline.Table, w overlayFamily, steps []overlayStep) {
	t.Helper()
	for _, s := range steps {
		c := packettest.Case{
			Name:   s.name + ", " + w.name,
			Table:  table,
			From:   s.by,
			Packet: packet.Packet{Source: s.from, Destination: s.to, Body: s.body, Extensions: s.part},
		}
		switch s.by {
		case 0:
			c.From, c.Outer, c.VNI, c.Identity = pipeline.VXLAN, pipeline.VTEP(packettest.There), 7, s.identity
		case pipeline.VXLAN:
			c.Outer, c.VNI, c.Identity = pipeline.VTEP(packettest.Abroad), 8, 99
		}
		before, hits := b.drops(t), b.ruleHits(t)
		b.send(t, c)
		if s.why == 0 {
			b.leaves(t, c.Name, before, c.Want())
			continue
		}
		b.dropped(t, c.Name, before, s.why)
		if s.rule != 0 && b.ruleHits(t)[s.rule] != hits[s.rule]+1 {
			t.Errorf("%s: rule %d has not dropped it: %v before, %v now", c.Name, s.rule, hits, b.ruleHits(t))
		}
	}
}

func (b *nimitzBench) ruleHits(t *testing.T) map[uint32]uint64 {
	t.Helper()
	hits, err := b.datapath.RuleHits()
	must(t, err)
	return hits
}

// TestNimitzPolice: the rules of both ends apply, to packets into tunnels and out of them, and sessions allow answers.
func TestNimitzPolice(t *testing.T) {
	b, table := policedNimitz(t)
	const denied = dropreason.PolicyDenied
	part := func(offset uint16, more bool, id uint32) []packet.Extension {
		return []packet.Extension{packet.Fragment(offset, more, id)}
	}
	tail := packet.Raw{Proto: packet.ProtocolUDP, Data: []byte("12345678")}
	for _, w := range overlayFamilies() {
		echo := func(kind uint8, id uint16) packet.ICMP {
			return packet.ICMP{Type: kind, Rest: packet.Echo(id, 1), Payload: []byte("odd")}
		}
		about := func(source, destination netip.Addr, body packet.Body, part ...packet.Extension) packet.ICMP {
			e := w.tooBig
			e.Payload = packet.Packet{Source: source, Destination: destination, Body: body, Extensions: part}.Marshal()
			return e
		}
		in := func(name string, identity uint16, body packet.Body, why dropreason.Reason, rule uint32) overlayStep {
			return overlayStep{name: name, from: w.far, to: w.own, body: body, identity: identity, why: why, rule: rule}
		}
		out := func(name string, body packet.Body) overlayStep {
			return overlayStep{name: name, by: 2, from: w.own, to: w.far, body: body}
		}
		of := func(s overlayStep, e []packet.Extension) overlayStep { s.part = e; return s }

		b.police(t, table, w, []overlayStep{
			in("to the open port", appFree, tcp(7, 80, packet.SYN), 0, 0),
			out("its answer", tcp(80, 7, synAck)),
			in("the answer's answer", appFree, tcp(7, 80, packet.ACK), 0, 0),
			in("established", appFree, tcp(7, 80, packet.ACK), 0, 0),
			out("from the cache", tcp(80, 7, packet.ACK)),
			in("established, and now another's", appSilent, tcp(7, 80, packet.ACK), denied, ruleSilent),
			in("to another port", appFree, tcp(7, 81, packet.SYN), denied, ruleNothing),
			in("of who may begin nothing", appSilent, tcp(8, 80, packet.SYN), denied, ruleSilent),
			in("of who is not known", appUnknown, tcp(9, 80, packet.SYN), denied, ruleSilent),
			in("of no app", 0, tcp(10, 80, packet.SYN), 0, 0),
			in("echo", appFree, echo(w.ping, 3), denied, ruleNothing),

			out("asked from here", udp(53, 9)),
			in("answered from there", appFree, udp(9, 53), 0, 0),
			in("answered by who may begin nothing", appSilent, udp(9, 53), 0, 0),
			in("answered by who may not be asked", appShut, udp(9, 53), denied, ruleShut),
			in("from another port", appFree, udp(10, 53), denied, ruleNothing),
			out("echo from here", echo(w.ping, 1)),
			in("echoed", appFree, echo(w.pong, 1), 0, 0),
			in("another echo's answer", appFree, echo(w.pong, 2), denied, ruleNothing),
			out("mail, to which the other end applies policy", tcp(9, 25, packet.SYN)),
			in("mail's answer", appFree, tcp(25, 9, synAck), denied, ruleMail),

			in("an error about what was asked", appFree, about(w.own, w.far, udp(53, 9)), 0, 0),
			in("an error about what was not", appFree, about(w.own, w.far, udp(53, 11)), denied, ruleNothing),
			out("an error of ours", about(w.far, w.own, udp(9, 53))),

			of(
				in("a later fragment before the first", appFree, tail, dropreason.FragmentUnknown, 0),
				part(16, false, 5),
			),
			of(in("a first fragment", appFree, udp(9, 53), 0, 0), part(0, true, 5)),
			of(in("a later fragment", appFree, tail, 0, 0), part(16, false, 5)),
			of(in("of another packet", appFree, tail, dropreason.FragmentUnknown, 0), part(16, false, 6)),
			of(in("a first fragment that may not", appFree, udp(10, 53), denied, ruleNothing), part(0, true, 7)),
			of(in("what follows it", appFree, tail, dropreason.FragmentUnknown, 0), part(16, false, 7)),
			of(out("a fragment of ours", udp(53, 9)), part(0, true, 5)),
			of(out("its rest", tail), part(16, false, 5)),
			in("an error about its rest", appFree, about(w.own, w.far, tail, part(16, false, 5)...), 0, 0),
			in(
				"an error about a rest of nothing",
				appFree,
				about(w.own, w.far, tail, part(16, false, 6)...),
				dropreason.FragmentUnknown,
				0,
			),
		})
		b.police(t, table, w, []overlayStep{
			{name: "on one node", by: 4, from: w.beside, to: w.own, body: tcp(7, 80, packet.SYN)},
			{name: "its answer on one node", by: 2, from: w.own, to: w.beside, body: tcp(80, 7, synAck)},
			{
				name: "to another port on one node",
				by:   4,
				from: w.beside,
				to:   w.own,
				body: tcp(7, 81, packet.SYN),
				why:  denied,
				rule: ruleNothing,
			},
			{
				name: "mail on one node",
				by:   2,
				from: w.own,
				to:   w.beside,
				body: tcp(7, 25, packet.SYN),
				why:  denied,
				rule: ruleMail,
			},
		})
		b.police(t, table, w, []overlayStep{
			{name: "to the service", by: 2, from: w.own, to: w.service, body: udp(53, 9)},
			{name: "the service's answer", by: pipeline.Gateway, from: w.storage, to: w.virtual, body: udp(9, 53)},
			{
				name: "of the service",
				by:   pipeline.Gateway,
				from: w.storage,
				to:   w.virtual,
				body: udp(10, 53),
				why:  denied,
				rule: ruleNothing,
			},
			{
				name: "mail to the service",
				by:   2,
				from: w.own,
				to:   w.service,
				body: tcp(9, 25, packet.SYN),
				why:  denied,
				rule: ruleMail,
			},
			{name: "from outside", by: pipeline.Gateway, from: w.gateway, to: w.virtual, body: tcp(9, 80, packet.SYN)},
			{name: "the answer outside", by: 2, from: w.own, to: w.gateway, body: tcp(80, 9, synAck)},

			{name: "outside by another node", by: 2, from: w.own, to: w.gateway2, body: udp(54, 9)},
			{name: "its answer by another node", from: w.gateway2, to: w.own, body: udp(9, 54)},
			{
				name: "mail outside by another node",
				by:   2,
				from: w.own,
				to:   w.gateway2,
				body: tcp(9, 25, packet.SYN),
				why:  denied,
				rule: ruleMail,
			},
			{
				name: "from outside by another node",
				from: w.gateway2,
				to:   w.own,
				body: tcp(9, 81, packet.SYN),
				why:  denied,
				rule: ruleNothing,
			},
			{name: "to another region", by: 2, from: w.own, to: w.abroad, body: udp(55, 9)},
			{
				name: "mail to another region",
				by:   2,
				from: w.own,
				to:   w.abroad,
				body: tcp(9, 25, packet.SYN),
				why:  denied,
				rule: ruleMail,
			},
			{
				name: "from another region to a container here",
				by:   pipeline.VXLAN,
				from: w.abroad,
				to:   w.own,
				body: tcp(9, 81, packet.SYN),
				why:  denied,
				rule: ruleNothing,
			},
			{name: "another region's answer", by: pipeline.VXLAN, from: w.abroad, to: w.own, body: udp(9, 55)},
		})
		// Nodes in transit apply no policy: the nodes at both ends do.
		carried := b.sessions(t).Created
		b.police(t, table, w, []overlayStep{
			{
				name: "from outside to another node",
				by:   pipeline.Gateway,
				from: w.gateway,
				to:   w.leads,
				body: tcp(9, 81, packet.SYN),
			},
			{
				name:     "another node's outside",
				identity: appSilent,
				from:     w.far,
				to:       w.gateway,
				body:     tcp(82, 9, packet.SYN),
			},
			{
				name: "from another region to another node",
				by:   pipeline.VXLAN,
				from: w.abroad,
				to:   w.far,
				body: tcp(9, 81, packet.SYN),
			},
			{
				name:     "another node's, to another region",
				identity: appSilent,
				from:     w.far,
				to:       w.abroad,
				body:     tcp(82, 9, packet.SYN),
			},
		})
		if n := b.sessions(t).Created; n != carried {
			t.Errorf("%s: %d sessions of what was only carried", w.name, n-carried)
		}
	}
	// A change takes effect with the next packet.
	b.says(t, 11, 1, denies|ruleNothing, 0, 0)
	must(
		t,
		b.datapath.Objects.PolSubjectsV1.Put(
			bpfobj.PilasterPolTargetKey{Tenant: 7, App: appOwn},
			bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 11}},
		),
	)
	b.voidVerdicts(t)
	for _, w := range overlayFamilies() {
		b.police(t, table, w, []overlayStep{
			{
				name:     "to the port that was open",
				identity: appFree,
				from:     w.far,
				to:       w.own,
				body:     tcp(7, 80, packet.ACK),
				why:      denied,
				rule:     ruleNothing,
			},
			{name: "answered as before", identity: appFree, from: w.far, to: w.own, body: udp(9, 53)},
		})
	}
	// A container without a Sender entry is just starting or ending, so its app is unknown.
	for _, w := range overlayFamilies() {
		gone := slices.DeleteFunc(slices.Clone(table.Entries), func(e pipeline.Entry) bool {
			s, is := e.(pipeline.Sender)
			return !is || s.Address != w.own || s.Port != 2
		})
		must(t, b.nimitz.Apply(t.Context(), gone, nil))
		b.police(
			t,
			table,
			w,
			[]overlayStep{
				{
					name:     "to who is just going",
					identity: appFree,
					from:     w.far,
					to:       w.own,
					body:     udp(9, 53),
					why:      dropreason.NoEndpoint,
				},
			},
		)
	}
}

// TestNimitzOthersAreFree: a tenant without policies has no sessions, even if another tenant here has policies.
func TestNimitzOthersAreFree(t *testing.T) {
	b, table := policedNimitz(t)
	for _, c := range slices.DeleteFunc(packettest.Cases(), func(c packettest.Case) bool {
		return c.From != 3 ||
			c.Want().Drop != 0
	}) {
		c.Table = table
		before := b.drops(t)
		b.send(t, c)
		b.leaves(t, c.Name, before, c.Want())
	}
	if n := b.sessions(t); n.Created != 0 {
		t.Errorf("a tenant without policies has %d sessions", n.Created)
	}
}
