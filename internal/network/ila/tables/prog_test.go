package tables

import (
	"bytes"
	"maps"
	"net"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/packet"
)

var (
	echo    = packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(1, 1), Payload: []byte("pilaster")}
	segment = packet.TCP{SourcePort: 1000, DestinationPort: 80, Flags: packet.SYN}
	gram    = packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("odd")}
	later   = packet.Raw{Proto: 17, Data: []byte("12345678")}

	noChecksum = packet.Raw{Proto: 17, Data: []byte{0, 1, 0, 2, 0, 8, 0, 0}}
)

// step is a packet, and what becomes of it.
type step struct {
	name   string
	frame  []byte
	reason string        // the drop's
	out    packet.Packet // as it leaves; with a reason: the ICMP error about it
}

func quoting(kind uint8, from, to netip.Addr) packet.ICMP {
	return packet.ICMP{Type: kind, Payload: packet.Packet{Source: from, Destination: to, Body: gram}.Marshal()}
}

// tooBig is a router's error about a packet that is longer than an MTU on its way.
func tooBig(from, to netip.Addr) packet.ICMP {
	p := quoting(packet.PacketTooBig, from, to)
	p.Rest = [4]byte{0, 0, 5, 0}
	return p
}

// gatewayAddress is the source of ICMP errors of the container's own node.
var gatewayAddress = netip.MustParseAddr("fe80::1")

// containerSteps are packets of own.
func containerSteps() []step {
	p := func(to netip.Addr, body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{Source: own, Destination: to, Body: body, Extensions: extensions}
	}
	across := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{
			Source: wire(own, 1), Destination: wire(far, 2), HopLimit: 63, Body: body, Extensions: extensions,
		}
	}
	from := func(source netip.Addr) packet.Packet {
		return packet.Packet{Source: source, Destination: far, Body: gram}
	}
	last := p(far, gram)
	last.HopLimit = 1
	long := p(far, packet.UDP{SourcePort: 1, DestinationPort: 2, Payload: make([]byte, 1500-40-8+1)})
	lastLong := long
	lastLong.HopLimit = 1
	longFirst, lastLongFirst := long, lastLong
	longFirst.Destination, lastLongFirst.Destination = cold, cold
	failed := func(kind uint8, rest [4]byte, of packet.Packet) packet.Packet {
		quoted := of.Marshal()
		return packet.Packet{
			Source: gatewayAddress, Destination: own,
			Body: packet.ICMP{Type: kind, Rest: rest, Payload: quoted[:min(len(quoted), 1280-48)]},
		}
	}
	ethernet := func(kind uint16) []byte {
		return packet.Frame(host.GatewayMAC, host.ContainerMAC, kind, make([]byte, 48))
	}
	short := p(far, packet.Raw{Proto: 6, Data: make([]byte, 12)})
	halfQuote := sent(p(far, quoting(packet.DestinationUnreachable, far, own)))
	halfQuote[14+5] = 16
	return []step{
		{name: "echo", frame: sent(p(far, echo)), out: across(echo)},
		{name: "TCP", frame: sent(p(far, segment)), out: across(segment)},
		{name: "UDP", frame: sent(p(far, gram)), out: across(gram)},
		{name: "UDP again, by a known flow", frame: sent(p(far, gram)), out: across(gram)},
		{name: "UDP without a checksum", frame: sent(p(far, noChecksum)), out: across(noChecksum)},
		{name: "first fragment", frame: sent(p(far, gram, packet.Fragment(0, true, 9))),
			out: across(gram, packet.Fragment(0, true, 9))},
		{name: "later fragment", frame: sent(p(far, later, packet.Fragment(64, false, 9))),
			out: across(later, packet.Fragment(64, false, 9))},
		{name: "to a container that moved", frame: sent(p(moved, gram)), out: packet.Packet{
			Source: wire(own, 1), Destination: wire(moved, 3), HopLimit: 63, Body: gram}},
		{name: "to a container here", frame: sent(p(beside, gram)), out: p(beside, gram)},
		{name: "error about a packet", frame: sent(p(far, quoting(packet.DestinationUnreachable, far, own))),
			out: across(quoting(packet.DestinationUnreachable, far, own))},
		{name: "error about a packet here",
			frame: sent(p(beside, quoting(packet.DestinationUnreachable, beside, own))),
			out:   p(beside, quoting(packet.DestinationUnreachable, beside, own))},

		{name: "IPv4", frame: ethernet(packet.EtherTypeIPv4), reason: "not-ip6"},
		{name: "ARP", frame: ethernet(packet.EtherTypeARP), reason: "not-ip6"},
		{name: "half a TCP header", frame: sent(short), reason: "malformed"},
		{name: "source of another container here", frame: sent(from(beside)), reason: "src-not-own"},
		{name: "source of another tenant's container here", frame: sent(from(other)), reason: "src-not-own"},
		{name: "source of a container elsewhere", frame: sent(from(far)), reason: "src-not-own"},
		{name: "source as on the fabric", frame: sent(from(wire(own, 1))), reason: "src-not-own"},
		{name: "own identifier of another prefix",
			frame: sent(from(withPrefix(own, netip.MustParseAddr("2001:db8::")))), reason: "src-not-own"},
		{name: "to the fabric's address", frame: sent(p(wire(far, 2), gram)), reason: "dst-not-private"},
		{name: "to an outside address", frame: sent(p(router, gram)), reason: "dst-not-private"},
		{name: "to another tenant here", frame: sent(p(other, gram)), reason: "tenant-mismatch"},
		{name: "to another tenant elsewhere", frame: sent(p(alien, gram)), reason: "tenant-mismatch"},
		{name: "to an unknown container", frame: sent(p(absent, gram)), reason: "no-mapping"},
		{name: "to many", frame: sent(p(netip.MustParseAddr("ff02::1"), gram)), reason: "multicast"},
		{name: "error about another's packet", frame: sent(p(far, quoting(packet.DestinationUnreachable, far, beside))),
			reason: "icmp-quote"},
		{name: "error about a packet to another",
			frame: sent(p(far, quoting(packet.DestinationUnreachable, beside, own))), reason: "icmp-quote"},
		{name: "error about a packet on the fabric",
			frame:  sent(p(far, quoting(packet.DestinationUnreachable, wire(far, 2), wire(own, 1)))),
			reason: "icmp-quote"},
		{name: "error with half a quote", frame: halfQuote, reason: "icmp-quote"},
		{name: "last hop", frame: sent(last), reason: "hop-limit", out: failed(packet.TimeExceeded, [4]byte{}, last)},
		{name: "too long", frame: sent(long), reason: "too-big",
			out: failed(packet.PacketTooBig, [4]byte{0, 0, 5, 220}, long)},
		{name: "too long on its last hop", frame: sent(lastLong), reason: "hop-limit",
			out: failed(packet.TimeExceeded, [4]byte{}, lastLong)},
		{name: "too long, without a flow", frame: sent(longFirst), reason: "too-big",
			out: failed(packet.PacketTooBig, [4]byte{0, 0, 5, 220}, longFirst)},
		{name: "too long on its last hop, without a flow", frame: sent(lastLongFirst), reason: "hop-limit",
			out: failed(packet.TimeExceeded, [4]byte{}, lastLongFirst)},
	}
}

// fabricSteps are packets to this node's locator.
func (b *bed) fabricSteps() []step {
	p := func(from, to netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return b.coming(packet.Packet{Source: from, Destination: to, Body: body, Extensions: extensions})
	}
	here, there := wire(own, 1), wire(far, 2)
	comes := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{Source: far, Destination: own, Body: body, Extensions: extensions}
	}
	return []step{
		{name: "UDP", frame: p(there, here, gram), out: comes(gram)},
		{name: "UDP again, by a known flow", frame: p(there, here, gram), out: comes(gram)},
		{name: "TCP", frame: p(there, here, segment), out: comes(segment)},
		{name: "later fragment", frame: p(there, here, later, packet.Fragment(64, false, 9)),
			out: comes(later, packet.Fragment(64, false, 9))},
		{name: "broadcast", frame: packet.Packet{Source: there, Destination: here, Body: gram}.
			Frame(net.HardwareAddr{255, 255, 255, 255, 255, 255}, fabricMAC), out: comes(gram)},
		{name: "from a former locator", frame: p(wire(moved, 2), here, gram),
			out: packet.Packet{Source: moved, Destination: own, Body: gram}},
		{name: "from the new locator", frame: p(wire(moved, 3), here, gram),
			out: packet.Packet{Source: moved, Destination: own, Body: gram}},
		{name: "to a container that has moved", frame: p(there, wire(gone, 1), gram), out: packet.Packet{
			Source: wire(far, 1), Destination: wire(gone, 3), HopLimit: 63, Body: gram}},
		{name: "TCP to a container that has moved", frame: p(there, wire(gone, 1), segment), out: packet.Packet{
			Source: wire(far, 1), Destination: wire(gone, 3), HopLimit: 63, Body: segment}},
		{name: "to a container that has moved, an error",
			frame: p(there, wire(gone, 1), quoting(packet.DestinationUnreachable, gone, far)), out: packet.Packet{
				Source: wire(far, 1), Destination: wire(gone, 3), HopLimit: 63,
				Body: quoting(packet.DestinationUnreachable, gone, far)}},
		{name: "to a container that has moved, a router's error",
			frame: p(router, wire(gone, 1), quoting(packet.DestinationUnreachable, wire(gone, 1), there)),
			out: packet.Packet{Source: wire(far, 1), Destination: wire(gone, 3), HopLimit: 63,
				Body: quoting(packet.DestinationUnreachable, gone, far)}},
		{name: "to a container that has moved, a router's smaller MTU",
			frame: p(router, wire(gone, 1), tooBig(wire(gone, 1), there)), out: packet.Packet{
				Source: wire(far, 1), Destination: wire(gone, 3), HopLimit: 63, Body: tooBig(gone, far)}},
		{name: "a router's smaller MTU, forwarded by the receiver's former node",
			frame: p(wire(far, 3), wire(guest, 1), tooBig(guest, far)),
			out:   packet.Packet{Source: far, Destination: guest, Body: tooBig(guest, far)}},
		{name: "forwarded by the receiver's former node", frame: p(wire(far, 3), wire(guest, 1), gram),
			out: packet.Packet{Source: far, Destination: guest, Body: gram}},
		{name: "to a container that came, from its sender's node", frame: p(there, wire(guest, 1), gram),
			out: packet.Packet{Source: far, Destination: guest, Body: gram}},
		{name: "error of a container", frame: p(there, here, quoting(packet.DestinationUnreachable, own, far)),
			out: comes(quoting(packet.DestinationUnreachable, own, far))},
		{name: "error of a container about the packet on the fabric",
			frame: p(there, here, quoting(packet.DestinationUnreachable, here, there)),
			out:   comes(quoting(packet.DestinationUnreachable, own, far))},
		{name: "to 0xffff", frame: p(there, wire(edge, 1), gram),
			out: packet.Packet{Source: far, Destination: edge, Body: gram}},
		{name: "error of a router", frame: p(router, here, quoting(packet.TimeExceeded, here, there)),
			out: comes(quoting(packet.TimeExceeded, own, far))},
		{name: "error of a router about a fragment", frame: p(router, here, packet.ICMP{
			Type: packet.TimeExceeded, Payload: packet.Packet{Source: here, Destination: there, Body: later,
				Extensions: []packet.Extension{packet.Fragment(64, false, 9)}}.Marshal()}),
			out: comes(packet.ICMP{Type: packet.TimeExceeded, Payload: packet.Packet{Source: own, Destination: far,
				Body: later, Extensions: []packet.Extension{packet.Fragment(64, false, 9)}}.Marshal()})},

		{name: "to a container that has moved, forwarded already", frame: p(wire(far, 3), wire(gone, 1), gram),
			reason: "locator-mismatch"},
		{name: "to a container that has moved, from the sender's former node",
			frame: p(wire(moved, 2), wire(gone, 1), gram), reason: "locator-mismatch"},
		{name: "to a container that has moved, from an unknown one", frame: p(wire(absent, 2), wire(gone, 1), gram),
			reason: "no-mapping"},
		{name: "to a container that has moved, from another tenant", frame: p(wire(alien, 2), wire(gone, 1), gram),
			reason: "no-endpoint"},
		{name: "to a container that has moved, on its last hop", frame: b.coming(packet.Packet{
			Source: there, Destination: wire(gone, 1), HopLimit: 1, Body: gram}), reason: "hop-limit"},
		{name: "to a container that has moved, a router's error about another's packet",
			frame:  p(router, wire(gone, 1), quoting(packet.PacketTooBig, wire(own, 1), there)),
			reason: "icmp-quote"},
		{name: "to a container that has moved, a router's error about a packet to another",
			frame:  p(router, wire(gone, 1), quoting(packet.PacketTooBig, wire(gone, 1), wire(moved, 2))),
			reason: "locator-mismatch"},
		{name: "to a container that has moved, an error of a container about another's packet",
			frame:  p(there, wire(gone, 1), quoting(packet.PacketTooBig, own, far)),
			reason: "icmp-quote"},
		{name: "to a container that was never here", frame: p(there, wire(cold, 1), gram), reason: "no-endpoint"},
		{name: "to a container that moved between other nodes", frame: p(there, wire(moved, 1), gram),
			reason: "no-endpoint"},
		{name: "to a container that came, from a third node", frame: p(wire(far, 4), wire(guest, 1), gram),
			reason: "locator-mismatch"},
		{name: "from another tenant by the receiver's former node", frame: p(wire(alien, 3), wire(guest, 1), gram),
			reason: "tenant-mismatch"},
		{name: "from an unknown container by the receiver's former node",
			frame: p(wire(absent, 3), wire(guest, 1), gram), reason: "no-mapping"},

		{name: "to an absent container", frame: p(there, wire(absent, 1), gram), reason: "no-endpoint"},
		{name: "without the C bit", frame: p(there, withPrefix(own, locator(1).Addr()), gram),
			reason: "no-endpoint"},
		{name: "with the C bit cleared", frame: p(there, withoutC(here), gram), reason: "no-endpoint"},
		{name: "to 0 instead of 0xffff", frame: p(there, withLast(here, 0), gram), reason: "no-endpoint"},
		{name: "from a host with a container's identifier",
			frame: p(use.ToWire(far, netip.MustParsePrefix("2001:db8::/64")), here, gram), reason: "tenant-mismatch"},
		{name: "from another node's locator", frame: p(wire(far, 3), here, gram), reason: "locator-mismatch"},
		{name: "from a host", frame: p(router, here, gram), reason: "tenant-mismatch"},
		{name: "from a node", frame: p(plan.Node(2).Addr().Next(), here, gram), reason: "tenant-mismatch"},
		{name: "from a netpila container", frame: p(netip.MustParseAddr("fd70:696c:6100:2:0:700:100:5"), here, gram),
			reason: "tenant-mismatch"},
		{name: "from an unknown container", frame: p(wire(absent, 2), here, gram), reason: "no-mapping"},
		{name: "from another tenant", frame: p(wire(alien, 2), here, gram), reason: "tenant-mismatch"},
		{name: "source without the C bit", frame: p(withPrefix(far, locator(2).Addr()), here, gram),
			reason: "tenant-mismatch"},
		{name: "from a container here", frame: p(wire(beside, 1), here, gram), reason: "own-source"},
		{name: "from an address that containers see", frame: p(far, here, gram), reason: "tenant-mismatch"},
		{name: "to a node from a container", frame: p(there, plan.Node(1).Addr().Next(), gram),
			reason: "tenant-to-node"},
		{name: "half a TCP header", frame: p(there, here, packet.Raw{Proto: 6, Data: make([]byte, 12)}),
			reason: "malformed"},
		{name: "error of a router about another's packet",
			frame: p(router, here, quoting(packet.TimeExceeded, wire(beside, 1), there)), reason: "icmp-quote"},
		{name: "error of a router about a packet within the node",
			frame: p(router, here, quoting(packet.TimeExceeded, here, wire(beside, 1))), reason: "icmp-quote"},
		{name: "error of a router about a packet to the wrong node",
			frame: p(router, here, quoting(packet.TimeExceeded, here, wire(far, 3))), reason: "locator-mismatch"},
		{name: "error of a container about another's packet",
			frame: p(there, here, quoting(packet.TimeExceeded, beside, far)), reason: "icmp-quote"},
		{name: "error of a container about a packet to another",
			frame: p(there, here, quoting(packet.TimeExceeded, own, moved)), reason: "icmp-quote"},
		{name: "error of a container about a packet to another on the fabric",
			frame: p(there, here, quoting(packet.TimeExceeded, here, wire(moved, 3))), reason: "icmp-quote"},
		{name: "error of a router with half a quote", frame: p(router, here, packet.ICMP{
			Type: packet.TimeExceeded, Payload: quoting(0, here, there).Payload[:32]}), reason: "icmp-quote"},
	}
}

// wrong returns the names of the steps that go wrong, and says how.
func (b *bed) wrong(t testing.TB) (names []string) {
	t.Helper()
	try := func(side string, s step, run func([]byte) (uint32, []byte, map[string]uint64)) {
		verdict, out, reasons := run(s.frame)
		want, expected := map[string]uint64{}, uint32(verdictRedirect)
		if s.reason != "" {
			want[s.reason] = 1
			if !s.out.Source.IsValid() {
				expected = verdictDrop
			}
		}
		ok := verdict == expected && maps.Equal(reasons, want) &&
			(expected == verdictDrop || bytes.Equal(out[14:], s.out.Marshal()))
		if !ok {
			got, err := packet.DecodeFrame(out)
			t.Logf("%s, %s: verdict %d, drops %v; want %d, %v\n got %+v, %v\nwant %+v", side, s.name, verdict, reasons,
				expected, want, got, err, s.out)
			names = append(names, side+", "+s.name)
		}
	}
	for _, s := range containerSteps() {
		try("out", s, func(f []byte) (uint32, []byte, map[string]uint64) { return b.fromContainer(t, own, f) })
	}
	for _, s := range b.fabricSteps() {
		try("in", s, func(f []byte) (uint32, []byte, map[string]uint64) { return b.fromFabric(t, f) })
	}
	if !b.formerEnds(t) {
		names = append(names, "in, from a former locator later")
	}
	if !b.forwardingEnds(t) {
		names = append(names, "in, to a container that has moved, later")
	}
	if !b.guestsFormerEnds(t) {
		names = append(names, "in, forwarded by the receiver's former node later")
	}
	return names
}

// TestPackets: what the programs do with packets of containers and with those from the fabric (ILA §4; issue J, IL1,
// IL3).
func TestPackets(t *testing.T) {
	b := newBed(t, nil)
	for _, name := range b.wrong(t) {
		t.Errorf("%s: see above", name)
	}
}

// ends sends a packet from the fabric before and after the time of a former locator ends. It reports whether the second
// one is dropped with a reason.
func (b *bed) ends(t testing.TB, p packet.Packet, reason string, end func(t testing.TB, a netip.Addr, until uint64),
	former netip.Addr) bool {
	t.Helper()
	frame := b.coming(p)
	b.fromFabric(t, frame)
	end(t, former, 1) // long ago
	verdict, _, why := b.fromFabric(t, frame)
	return verdict == verdictDrop && why[reason] == 1
}

// formerEnds reports whether packets from a former locator are accepted for a time, and then no more.
func (b *bed) formerEnds(t testing.TB) bool {
	t.Helper()
	p := packet.Packet{Source: wire(moved, 2), Destination: wire(own, 1), Body: gram}
	return b.ends(t, p, "locator-mismatch", b.peerUntil, moved)
}

// forwardingEnds reports whether packets to a container that has moved are forwarded for a time, and then no more.
func (b *bed) forwardingEnds(t testing.TB) bool {
	t.Helper()
	p := packet.Packet{Source: wire(far, 2), Destination: wire(gone, 1), Body: gram}
	return b.ends(t, p, "no-endpoint", b.peerUntil, gone)
}

// guestsFormerEnds reports whether packets from the receiver's former node are accepted for a time, and then no more.
func (b *bed) guestsFormerEnds(t testing.TB) bool {
	t.Helper()
	p := packet.Packet{Source: wire(far, 3), Destination: wire(guest, 1), Body: gram}
	return b.ends(t, p, "locator-mismatch", b.localUntil, guest)
}

// TestChangesAreInForce: no cached flow outlives a change of the tables.
func TestChangesAreInForce(t *testing.T) {
	b := newBed(t, nil)
	out := sent(packet.Packet{Source: own, Destination: far, Body: gram})
	in := b.coming(packet.Packet{Source: wire(far, 2), Destination: wire(own, 1), Body: gram})
	check := func(when string, wantOut, wantIn string) {
		t.Helper()
		for range 2 {
			_, _, why := b.fromContainer(t, own, out)
			if want := counts(wantOut); !maps.Equal(why, want) {
				t.Errorf("%s, out: %v, want %v", when, why, want)
			}
			_, _, why = b.fromFabric(t, in)
			if want := counts(wantIn); !maps.Equal(why, want) {
				t.Errorf("%s, in: %v, want %v", when, why, want)
			}
		}
	}
	check("at first", "", "")
	must(t, b.SetPeers(map[netip.Addr]ila.Peer{far: {Locator: locator(3), App: appFar}}, nil))
	check("after a move", "", "locator-mismatch")
	must(t, b.SetPeers(nil, []netip.Addr{far}))
	check("after its end", "no-mapping", "no-mapping")
	must(t, b.SetPeers(map[netip.Addr]ila.Peer{far: {Locator: locator(2), App: appFar}}, nil))
	check("again", "", "")
	must(t, b.SetLocal(own, nil))
	check("without the container", "src-not-own", "no-endpoint")
}

func counts(reason string) map[string]uint64 {
	if reason == "" {
		return map[string]uint64{}
	}
	return map[string]uint64{reason: 1}
}

// TestTables: what is written can be read, and a full table says so.
func TestTables(t *testing.T) {
	b := newBed(t, nil)
	locals, err := b.Locals()
	must(t, err)
	if want := (ila.Local{Device: b.device[beside], Endpoint: 2, App: appBeside}); len(locals) != 5 ||
		locals[beside] != want {
		t.Errorf("locals %+v", locals)
	}
	if want := (ila.Local{Device: b.device[guest], Endpoint: 5, App: appOwn + 4, Former: locator(3)}); locals[guest] !=
		want {
		t.Errorf("after a move: %+v, want %+v", locals[guest], want)
	}
	peers, err := b.Peers()
	must(t, err)
	if want := (ila.Peer{Locator: locator(3), Former: locator(2), App: appFar}); len(peers) != 5 ||
		peers[moved] != want {
		t.Errorf("peers %+v", peers)
	}
	many := map[netip.Addr]ila.Peer{}
	for i := range uint32(1000) {
		many[sir(gold, i<<16|1)] = ila.Peer{Locator: locator(2)}
	}
	if err := b.SetPeers(many, nil); err == nil {
		t.Error("1003 mappings in a table of 1000")
	}
	must(t, b.SetPeers(nil, []netip.Addr{absent})) // of none
	must(t, b.SetLocal(absent, nil))
}
