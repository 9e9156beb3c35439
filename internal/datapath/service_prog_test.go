package datapath

import (
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// Ports of the service of serviceBench, by where its one backend is.
const (
	farPort    = 53
	nearPort   = 54 // b2
	noPort     = 55 // there is none
	ownPort    = 56 // b1 itself
	otherOne   = 57 // the service does not have this port
	sharedPort = 58 // of the same backend as farPort
	atPort     = 8053
)

// serviceBench is a progBench whose blue tenant has a service, and so has red.
type serviceBench struct {
	*progBench
	of                   tenant.Tenant
	address, reds, alias netip.Addr // alias: of a container that is its own backend
}

func newServiceBench(t testing.TB) *serviceBench {
	t.Helper()
	b := &serviceBench{progBench: newProgBench(t), of: serving(blue, 7)}
	b.serve(t)
	return b
}

// serve writes the services.
func (b *serviceBench) serve(t testing.TB) {
	t.Helper()
	other := serving(red, 1<<23|7)
	must(t, b.datapath.putTenant(b.of))
	must(t, b.datapath.putTenant(other))
	b.pinned = true
	b.address, b.reds, b.alias = serviceAddress(t, b.of, 1), serviceAddress(t, other, 1), serviceAddress(t, b.of, 0)
	b.put(t, b.address, farPort, b.atFar(atPort))
	b.put(t, b.address, nearPort, backendAt(b.b2, atPort))
	b.put(t, b.address, noPort)
	b.put(t, b.address, ownPort, backendAt(b.b1, atPort))
	b.put(t, b.reds, farPort, backendAt(b.r1, atPort))
}

func (b *serviceBench) atFar(port uint16) dpapi.Backend {
	return dpapi.Backend{Plain: b.b3.Addr(), Seen: sees(b.b3.Addr()), Port: port}
}

func frontends(a netip.Addr, port uint16) (keys []dpapi.FrontendKey) {
	for _, protocol := range []uint8{packet.ProtocolTCP, packet.ProtocolUDP} {
		keys = append(keys, dpapi.FrontendKey{Address: netip.AddrPortFrom(a, port), Protocol: protocol})
	}
	return keys
}

// put gives a port of a service these backends, for TCP and UDP.
func (b *serviceBench) put(t testing.TB, a netip.Addr, port uint16, backends ...dpapi.Backend) {
	t.Helper()
	for _, k := range frontends(a, port) {
		must(t, b.datapath.PutServices([]dpapi.Frontend{{FrontendKey: k, Backends: backends}}))
	}
}

func (b *serviceBench) remove(t testing.TB, port uint16) {
	t.Helper()
	must(t, b.datapath.DeleteServices(frontends(b.address, port)))
}

// sends runs a packet of b1 to the service.
func (b *serviceBench) sends(t *testing.T, name string, body packet.Body, out packet.Packet) {
	t.Helper()
	b.fromContainer1(t, progCase{name: name, frame: b.frame(b.sent(b.address, body)), out: out})
}

func (b *serviceBench) fromContainer1(t *testing.T, c progCase) {
	t.Helper()
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex(), IngressIfindex: b.b1.ifindex()}, c)
}

// fromContainer2 runs a packet of b2 to b1.
func (b *serviceBench) fromContainer2(t *testing.T, c progCase) {
	t.Helper()
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b2.ifindex(), IngressIfindex: b.b2.ifindex()}, c)
}

// arrives runs a packet from the fabric.
func (b *serviceBench) arrives(t *testing.T, c progCase) {
	t.Helper()
	b.check(t, b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex(), IngressIfindex: b.uplinkIfindex()}, c)
}

// toFar is a packet of b1 as it leaves the node to its backend there.
func (b *serviceBench) toFar(body packet.Body, extensions ...packet.Extension) packet.Packet {
	return withHops(between(b.b1.plain(), b.b3.Addr(), body, extensions...), 63)
}

func (b *serviceBench) toNear(body packet.Body, extensions ...packet.Extension) packet.Packet {
	return between(b.b1.seen(), b.b2.seen(), body, extensions...)
}

// toClient is a packet of the service as b1 gets it.
func (b *serviceBench) toClient(body packet.Body, extensions ...packet.Extension) packet.Packet {
	return between(b.address, b.b1.seen(), body, extensions...)
}

// fromFar is a packet of the backend on the far node, on the wire.
func (b *serviceBench) fromFar(body packet.Body, extensions ...packet.Extension) []byte {
	p := between(b.b3.Addr(), b.b1.plain(), body, extensions...)
	return p.Frame(b.uplinkMAC, host.ContainerMAC)
}

func (b *serviceBench) fromNear(body packet.Body, extensions ...packet.Extension) []byte {
	return b.frame(between(b.b2.seen(), b.b1.seen(), body, extensions...))
}

// noDatagram is the error about a datagram that no backend receives.
func (b *serviceBench) noDatagram(about packet.Packet) packet.Packet {
	e := errorAbout(packet.DestinationUnreachable, 0, about.Marshal())
	e.Code = 4
	return packet.Packet{Source: b.b1Gateway, Destination: b.b1.seen(), Body: e}
}

func acknowledging(s packet.TCP, sequence, acknowledgment uint32) packet.TCP {
	s.Sequence, s.Acknowledgment = sequence, acknowledgment
	return s
}

// TestServicePackets: packets of a container to services.
func TestServicePackets(t *testing.T) {
	b := newServiceBench(t)
	service := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return b.sent(b.address, body, extensions...)
	}
	syn := func(port uint16) packet.TCP { return tcp(5000, port, packet.SYN) }
	withoutSum := packet.Raw{Proto: packet.ProtocolUDP, Data: []byte{5000 >> 8, 5000 & 0xff, 0, farPort, 0, 8, 0, 0}}
	withoutSumAtFar := packet.Raw{Proto: packet.ProtocolUDP, Data: slices.Clone(withoutSum.Data)}
	withoutSumAtFar.Data[2], withoutSumAtFar.Data[3] = atPort>>8, atPort&0xff
	options := padding(packet.DestinationOptions)
	first, later, unknown := packet.Fragment(0, true, 9), packet.Fragment(16, false, 9), packet.Fragment(16, false, 10)
	longAtFar := func(bytes int) packet.UDP { u := long(bytes); u.DestinationPort = atPort; return u }
	longAtNear := func(bytes int) packet.UDP { u := long(bytes); u.DestinationPort = nearPort; return u }
	last, tooLong := withHops(service(question), 1), service(long(1501))
	tooFar := withHops(tooLong, 1)
	request := acknowledging(tcp(5001, noPort, packet.ACK), 100, 200)
	data := acknowledging(tcp(5001, noPort, packet.SYN), 100, 0)
	data.Payload = []byte("12345")
	ofOther := func(body packet.Body) packet.Packet { return between(b.reds, b.b1.seen(), body) }
	for _, c := range []progCase{
		{name: "TCP", frame: b.frame(service(syn(farPort))), out: b.toFar(syn(atPort))},
		{name: "TCP again", frame: b.frame(service(syn(farPort))), out: b.toFar(syn(atPort))},
		{name: "UDP", frame: b.frame(service(question)), out: b.toFar(udp(5000, atPort))},
		{name: "UDP without a checksum", frame: b.frame(service(withoutSum)), out: b.toFar(withoutSumAtFar)},
		{name: "UDP behind options", frame: b.frame(service(question, options)),
			out: b.toFar(udp(5000, atPort), options)},
		{name: "TCP to this node", frame: b.frame(service(syn(nearPort))), out: b.toNear(syn(atPort))},
		{name: "UDP to this node", frame: b.frame(service(udp(5000, nearPort))), out: b.toNear(udp(5000, atPort))},
		{name: "1,500 bytes", frame: b.frame(service(long(1500))), out: b.toFar(longAtFar(1500))},
		{name: "1,501 bytes to this node", frame: b.frame(service(longAtNear(1501))), out: b.toNear(longAtFar(1501))},
		{name: "a hop limit of 1 to this node", frame: b.frame(withHops(service(udp(5000, nearPort)), 1)),
			out: withHops(b.toNear(udp(5000, atPort)), 1)},

		{name: "a fragment", frame: b.frame(service(question, first)), out: b.toFar(udp(5000, atPort), first)},
		{name: "a later fragment", frame: b.frame(service(restOf, later)), out: b.toFar(restOf, later)},
		{name: "a later fragment without a first one", frame: b.frame(service(restOf, unknown)),
			reason: "fragment-unknown"},
		{name: "a later fragment to another tenant's service", frame: b.frame(b.sent(b.reds, restOf, later)),
			reason: "no-service"},

		{name: "a hop limit of 1", frame: b.frame(last), reason: "hop-limit",
			out: b.icmpFromNode(packet.TimeExceeded, 0, last)},
		{name: "1,501 bytes", frame: b.frame(tooLong), reason: "too-big",
			out: b.icmpFromNode(packet.PacketTooBig, 1500, tooLong)},
		{name: "1,501 bytes and a hop limit of 1", frame: b.frame(tooFar), reason: "hop-limit",
			out: b.icmpFromNode(packet.TimeExceeded, 0, tooFar)},

		{name: "TCP to another tenant's service", frame: b.frame(b.sent(b.reds, syn(farPort))), reason: "no-service",
			out: ofOther(acknowledging(tcp(farPort, 5000, packet.RST|packet.ACK), 0, 1))},
		{name: "UDP to another tenant's service", frame: b.frame(b.sent(b.reds, question)), reason: "no-service",
			out: b.noDatagram(b.sent(b.reds, question))},
		{name: "TCP to another port", frame: b.frame(service(syn(otherOne))), reason: "no-service",
			out: b.toClient(acknowledging(tcp(otherOne, 5000, packet.RST|packet.ACK), 0, 1))},
		{name: "UDP to another port", frame: b.frame(service(udp(5000, otherOne))), reason: "no-service",
			out: b.noDatagram(service(udp(5000, otherOne)))},
		{name: "TCP without a backend", frame: b.frame(service(data)), reason: "no-backend",
			out: b.toClient(acknowledging(tcp(noPort, 5001, packet.RST|packet.ACK), 0, 106))},
		{name: "TCP behind options without a backend", frame: b.frame(service(data, options)), reason: "no-backend",
			out: b.toClient(acknowledging(tcp(noPort, 5001, packet.RST|packet.ACK), 0, 106))},
		{name: "a segment without a backend", frame: b.frame(service(request)), reason: "no-backend",
			out: b.toClient(acknowledging(tcp(noPort, 5001, packet.RST), 200, 0))},
		{name: "a reset without a backend", frame: b.frame(service(tcp(5001, noPort, packet.RST))),
			reason: "no-backend"},
		{name: "UDP without a backend", frame: b.frame(service(udp(5000, noPort))), reason: "no-backend",
			out: b.noDatagram(service(udp(5000, noPort)))},
		{name: "a FIN of no session", frame: b.frame(service(tcp(5002, farPort, packet.FIN|packet.ACK))),
			reason: "no-session"},
		{name: "a reset of no session", frame: b.frame(service(tcp(5002, farPort, packet.RST))), reason: "no-session"},
		{name: "an echo", frame: b.frame(service(echo)), reason: "service-protocol"},
		{name: "SCTP", frame: b.frame(service(sctp)), reason: "service-protocol"},
		{name: "another source", frame: b.frame(between(b.b2.seen(), b.address, question)), reason: "src-not-own"},
	} {
		b.fromContainer1(t, c)
	}
	b.fromContainer2(t, progCase{name: "another source, from a session", frame: b.frame(service(question)),
		reason: "src-not-own"})
}

// TestServiceSpoofedClients: a container sends with its own address only, also if the caches have the flow that it
// claims. So no backend answers a victim, and no victim gets an answer that its service has not sent.
func TestServiceSpoofedClients(t *testing.T) {
	b := newServiceBench(t)
	for range 2 { // the second one is in the cache
		b.sends(t, "a datagram", question, b.toFar(udp(5000, atPort)))
		b.arrives(t, progCase{name: "its answer", frame: b.fromFar(udp(atPort, 5000)),
			out: b.toClient(udp(farPort, 5000))})
	}
	b.sends(t, "a datagram to this node", udp(5000, nearPort), b.toNear(udp(5000, atPort)))
	for _, c := range []struct {
		name string
		sent packet.Packet
	}{
		{"another client's flow", b.sent(b.address, udp(5000, nearPort))},
		{"another client's flow, from the cache", b.sent(b.address, question)},
		{"another client", b.sent(b.address, udp(5001, farPort))},
		{"a client on another node", between(sees(b.b3.Addr()), b.address, question)},
		{"a client of another tenant", between(b.r1.seen(), b.address, question)},
		{"a client of another tenant, to its service", between(b.r1.seen(), b.reds, question)},
		{"the service, to its client", between(b.address, b.b1.seen(), udp(farPort, 5000))},
		{"the service, to itself", between(b.address, b.address, question)},
		{"a container that is its own client", between(b.alias, b.b1.seen(), udp(5000, atPort))},
		{"a container that is its own client, to a service", between(b.alias, b.address, question)},
	} {
		b.fromContainer2(t, progCase{name: c.name, frame: b.frame(c.sent), reason: "src-not-own"})
	}
}

// TestServiceRoutes: a backend's node may have no route, and the route may be narrow.
func TestServiceRoutes(t *testing.T) {
	b := newServiceBench(t)
	nowhere := b.b3
	nowhere.Node = lostNode
	lost := allocated(nowhere).Addr()
	b.put(t, b.address, otherOne, dpapi.Backend{Plain: lost, Seen: sees(lost), Port: atPort})
	b.fromContainer1(t, progCase{name: "no route to the backend", reason: "no-route",
		frame: b.frame(b.sent(b.address, udp(5000, otherOne)))})
	absent := changed(b.b2.plain(), func(p *address.Plain) { p.Index++ })
	b.put(t, b.address, otherOne, dpapi.Backend{Plain: absent, Seen: sees(absent), Port: atPort})
	b.fromContainer1(t, progCase{name: "a backend that has left this node", reason: "no-endpoint",
		frame: b.frame(b.sent(b.address, udp(5000, otherOne)))})
}

// TestServiceAnswers: packets to a client, from the fabric and from a container of the node.
func TestServiceAnswers(t *testing.T) {
	b := newServiceBench(t)
	options := padding(packet.DestinationOptions)
	first, later, unknown := packet.Fragment(0, true, 9), packet.Fragment(16, false, 9), packet.Fragment(16, false, 10)
	withoutSum := func(port uint16) packet.Raw {
		return packet.Raw{Proto: packet.ProtocolUDP, Data: []byte{byte(port >> 8), byte(port), 5000 >> 8, 5000 & 0xff,
			0, 8, 0, 0}}
	}
	about := func(p packet.Packet) packet.ICMP {
		return errorAbout(packet.PacketTooBig, 1280, p.Marshal())
	}
	halfQuote := func(p packet.Packet) packet.ICMP {
		return packet.ICMP{Type: packet.DestinationUnreachable, Payload: p.Marshal()[:40+2]}
	}
	for _, side := range []struct {
		name         string
		port         uint16
		run          func(*testing.T, progCase)
		from         func(packet.Body, ...packet.Extension) []byte
		client, peer netip.Addr // of the backend's packets, before this node
		sent         func(packet.Body, ...packet.Extension) packet.Packet
		seen         netip.Addr // the backend, as the client sees it
	}{
		{"from the fabric", farPort, b.arrives, b.fromFar, b.b1.plain(), b.b3.Addr(), b.toFar, sees(b.b3.Addr())},
		{"from this node", nearPort, b.fromContainer2, b.fromNear, b.b1.seen(), b.b2.seen(), b.toNear, b.b2.seen()},
	} {
		b.sends(t, "a datagram", udp(5000, side.port), side.sent(udp(5000, atPort)))
		side.run(t, progCase{name: "an error before any connection, " + side.name,
			frame: side.from(about(between(side.client, side.peer, udp(5000, atPort)))),
			out:   b.toClient(about(b.sent(b.address, udp(5000, side.port))))})
		b.sends(t, "a SYN", tcp(5000, side.port, packet.SYN), side.sent(tcp(5000, atPort, packet.SYN)))
		stays := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
			return between(side.seen, b.b1.seen(), body, extensions...)
		}
		packetOf := func(body packet.Body) packet.Packet { return between(side.client, side.peer, body) }
		asSent := func(body packet.Body) packet.Packet { return b.sent(b.address, body) }
		plainly := func(body packet.Body) packet.Packet { return b.sent(side.seen, body) }
		cases := []progCase{
			{name: "a SYN-ACK", frame: side.from(tcp(atPort, 5000, synAck)),
				out: b.toClient(tcp(side.port, 5000, synAck))},
			{name: "an answer", frame: side.from(udp(atPort, 5000)), out: b.toClient(udp(side.port, 5000))},
			{name: "an answer from the cache", frame: side.from(udp(atPort, 5000)),
				out: b.toClient(udp(side.port, 5000))},
			{name: "an answer without a checksum", frame: side.from(withoutSum(atPort)),
				out: b.toClient(withoutSum(side.port))},
			{name: "an answer behind options", frame: side.from(udp(atPort, 5000), options),
				out: b.toClient(udp(side.port, 5000), options)},
			{name: "a fragment", frame: side.from(udp(atPort, 5000), first),
				out: b.toClient(udp(side.port, 5000), first)},
			{name: "a later fragment", frame: side.from(restOf, later), out: b.toClient(restOf, later)},
			{name: "a later fragment of another packet", frame: side.from(restOf, unknown),
				out: stays(restOf, unknown)},

			{name: "from another port", frame: side.from(udp(atPort+1, 5000)), out: stays(udp(atPort+1, 5000))},
			{name: "to another port", frame: side.from(udp(atPort, 5001)), out: stays(udp(atPort, 5001))},
			{name: "an echo", frame: side.from(echo), out: stays(echo)},

			{name: "an error about a datagram", frame: side.from(about(packetOf(udp(5000, atPort)))),
				out: b.toClient(about(asSent(udp(5000, side.port))))},
			{name: "an error about a segment", frame: side.from(about(packetOf(tcp(5000, atPort, packet.SYN)))),
				out: b.toClient(about(asSent(tcp(5000, side.port, packet.SYN))))},
			{name: "an error about a packet to the backend", frame: side.from(about(packetOf(udp(5000, 9)))),
				out: stays(about(plainly(udp(5000, 9))))},
			{name: "an error about an echo", frame: side.from(about(packetOf(echo))), out: stays(about(plainly(echo)))},
			{name: "an error with half a quote", frame: side.from(halfQuote(packetOf(udp(5000, atPort)))),
				out: stays(halfQuote(plainly(udp(5000, atPort))))},
		}
		for _, c := range cases {
			c.name += ", " + side.name
			side.run(t, c)
		}
		if side.port == farPort {
			p := between(outsideRouter, b.b1.plain(), about(packetOf(udp(5000, atPort))))
			side.run(t, progCase{name: "an error of a router", frame: p.Frame(b.uplinkMAC, host.ContainerMAC),
				out: b.toClient(about(asSent(udp(5000, side.port))))})
		}
		b.remove(t, side.port)
		// A datagram would find its verdict in the cache for up to a second.
		side.run(t, progCase{name: "an answer without the service, " + side.name,
			frame: side.from(tcp(atPort, 5000, synAck)), out: stays(tcp(atPort, 5000, synAck))})
	}
}

// TestServiceGone: established connections end if their service or their backend is gone; other flows get another
// backend.
func TestServiceGone(t *testing.T) {
	b := newServiceBench(t)
	other := b.atFar(atPort + 1)
	establish := func(from uint16) {
		t.Helper()
		b.sends(t, "a SYN", tcp(from, farPort, packet.SYN), b.toFar(tcp(from, atPort, packet.SYN)))
		b.arrives(t, progCase{name: "its answer", frame: b.fromFar(tcp(atPort, from, synAck)),
			out: b.toClient(tcp(farPort, from, synAck))})
		b.sends(t, "the third segment", tcp(from, farPort, packet.ACK), b.toFar(tcp(from, atPort, packet.ACK)))
		b.sends(t, "a segment", tcp(from, farPort, packet.ACK), b.toFar(tcp(from, atPort, packet.ACK)))
	}
	establish(5000)
	establish(5001)
	establish(5004)
	if s, err := b.datapath.Sessions(); err != nil || s.Used != 6 || s.HalfOpen != 0 {
		t.Errorf("sessions of established connections: %+v, %v; want 6, none half open", s, err)
	}
	fin := packet.FIN | packet.ACK
	b.sends(t, "the end of a connection", tcp(5004, farPort, fin), b.toFar(tcp(5004, atPort, fin)))
	b.arrives(t, progCase{name: "its other end", frame: b.fromFar(tcp(atPort, 5004, fin)),
		out: b.toClient(tcp(farPort, 5004, fin))})
	b.sends(t, "a datagram", question, b.toFar(udp(5000, atPort)))
	b.arrives(t, progCase{name: "its answer", frame: b.fromFar(udp(atPort, 5000)), out: b.toClient(udp(farPort, 5000))})
	b.sends(t, "a half-open connection", tcp(5002, farPort, packet.SYN), b.toFar(tcp(5002, atPort, packet.SYN)))

	establish(5005)
	b.sends(t, "the end of another connection", tcp(5005, farPort, fin), b.toFar(tcp(5005, atPort, fin)))
	b.arrives(t, progCase{name: "its other end", frame: b.fromFar(tcp(atPort, 5005, fin)),
		out: b.toClient(tcp(farPort, 5005, fin))})
	for _, k := range frontends(b.address, farPort) {
		must(t, b.datapath.PutServices([]dpapi.Frontend{{
			FrontendKey: k, Backends: []dpapi.Backend{other}, Draining: []dpapi.Backend{b.atFar(atPort)},
		}}))
	}
	b.sends(t, "a segment to a draining backend", tcp(5000, farPort, packet.ACK),
		b.toFar(tcp(5000, atPort, packet.ACK)))
	b.sends(t, "a SYN after a connection to a draining backend", tcp(5005, farPort, packet.SYN),
		b.toFar(tcp(5005, atPort+1, packet.SYN)))

	request := acknowledging(tcp(5000, farPort, packet.ACK), 1, 2)
	b.put(t, b.address, farPort, other)
	b.fromContainer1(t, progCase{name: "a connection whose backend is gone", frame: b.frame(b.sent(b.address, request)),
		reason: "no-backend", out: b.toClient(acknowledging(tcp(farPort, 5000, packet.RST), 2, 0))})
	b.sends(t, "a SYN after a connection", tcp(5004, farPort, packet.SYN), b.toFar(tcp(5004, atPort+1, packet.SYN)))
	b.sends(t, "a datagram whose backend is gone", question, b.toFar(udp(5000, atPort+1)))
	b.sends(t, "a SYN whose backend is gone", tcp(5002, farPort, packet.SYN),
		b.toFar(tcp(5002, atPort+1, packet.SYN)))
	b.arrives(t, progCase{name: "an answer of another backend", frame: b.fromFar(tcp(atPort+1, 5002, synAck)),
		out: b.toClient(tcp(farPort, 5002, synAck))})

	// Two services with one backend cannot share a connection's ports.
	b.put(t, b.address, sharedPort, b.atFar(atPort+1))
	shared := acknowledging(tcp(5002, sharedPort, packet.SYN), 1, 0)
	b.fromContainer1(t, progCase{name: "a port in use at the backend", frame: b.frame(b.sent(b.address, shared)),
		reason: "no-backend", out: b.toClient(acknowledging(tcp(sharedPort, 5002, packet.RST|packet.ACK), 0, 2))})

	// A backend that opens a connection to its client is no part of the service.
	b.sends(t, "a SYN", tcp(5003, farPort, packet.SYN), b.toFar(tcp(5003, atPort+1, packet.SYN)))
	b.arrives(t, progCase{name: "a reset", frame: b.fromFar(tcp(atPort+1, 5003, packet.RST)),
		out: b.toClient(tcp(farPort, 5003, packet.RST))})
	b.arrives(t, progCase{name: "a SYN of the backend", frame: b.fromFar(tcp(atPort+1, 5003, packet.SYN)),
		out: between(sees(b.b3.Addr()), b.b1.seen(), tcp(atPort+1, 5003, packet.SYN))})
	b.sends(t, "a SYN after that of the backend", tcp(5003, farPort, packet.SYN),
		b.toFar(tcp(5003, atPort+1, packet.SYN)))

	b.remove(t, farPort)
	request.SourcePort = 5001
	b.fromContainer1(t, progCase{name: "a connection whose service is gone", frame: b.frame(b.sent(b.address, request)),
		reason: "no-service", out: b.toClient(acknowledging(tcp(farPort, 5001, packet.RST), 2, 0))})
	b.fromContainer1(t, progCase{name: "a datagram whose service is gone", frame: b.frame(b.sent(b.address, question)),
		reason: "no-service", out: b.noDatagram(b.sent(b.address, question))})

	b.put(t, b.address, farPort, b.atFar(atPort))
	b.sends(t, "a datagram whose service is back", question, b.toFar(udp(5000, atPort)))
	for range 2 {
		b.arrives(t, progCase{name: "an answer of a service that is back", frame: b.fromFar(udp(atPort, 5000)),
			out: b.toClient(udp(farPort, 5000))})
	}
	b.put(t, b.address, sharedPort, b.atFar(atPort))
	b.remove(t, farPort)
	b.sends(t, "a datagram to another service with the backend", udp(5000, sharedPort), b.toFar(udp(5000, atPort)))
	for range 2 {
		b.arrives(t, progCase{name: "an answer of another service", frame: b.fromFar(udp(atPort, 5000)),
			out: b.toClient(udp(sharedPort, 5000))})
	}
}

// TestServiceSessionEvicted: a flow whose session has been evicted gets another one. The next answer establishes it, so
// that it does not stay half open, although the answer's own session was established before.
func TestServiceSessionEvicted(t *testing.T) {
	b := newServiceBench(t)
	halfOpen := func(when string, want int) {
		t.Helper()
		if s, err := b.datapath.Sessions(); err != nil || s.HalfOpen != want {
			t.Errorf("sessions %s: %+v, %v; want %d half open", when, s, err, want)
		}
	}
	asks := func() { b.sends(t, "a datagram", question, b.toFar(udp(5000, atPort))) }
	answers := func() {
		b.arrives(t, progCase{name: "its answer", frame: b.fromFar(udp(atPort, 5000)),
			out: b.toClient(udp(farPort, 5000))})
	}
	asks()
	answers()
	halfOpen("of an established flow", 0)
	b.forEachSession(t, func(s *bpfobj.PilasterSession) {
		if bigEndian(s.Key.RemotePort) == farPort {
			s.Until = 0
		}
	})
	must(t, b.datapath.InvalidateFlows()) // of the verdict for answers
	asks()
	halfOpen("after the eviction", 1)
	answers()
	halfOpen("after the next answer", 0)
}

// TestServiceToItself: a container that is its own backend sees both ends of the connection at different addresses.
func TestServiceToItself(t *testing.T) {
	b := newServiceBench(t)
	first, later := packet.Fragment(0, true, 9), packet.Fragment(16, false, 9)
	self := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return between(b.alias, b.b1.seen(), body, extensions...)
	}
	back := func(body packet.Body, extensions ...packet.Extension) []byte {
		return b.frame(b.sent(b.alias, body, extensions...))
	}
	for _, c := range []progCase{
		{name: "an answer before a question", frame: back(udp(atPort, 5000)), reason: "no-session"},
		{name: "a SYN", frame: b.frame(b.sent(b.address, tcp(5000, ownPort, packet.SYN))),
			out: self(tcp(5000, atPort, packet.SYN))},
		{name: "its answer", frame: back(tcp(atPort, 5000, synAck)), out: b.toClient(tcp(ownPort, 5000, synAck))},
		{name: "the third segment", frame: b.frame(b.sent(b.address, tcp(5000, ownPort, packet.ACK))),
			out: self(tcp(5000, atPort, packet.ACK))},
		{name: "a segment of the cache", frame: b.frame(b.sent(b.address, tcp(5000, ownPort, packet.ACK))),
			out: self(tcp(5000, atPort, packet.ACK))},
		{name: "a datagram", frame: b.frame(b.sent(b.address, udp(5000, ownPort))), out: self(udp(5000, atPort))},
		{name: "an answer", frame: back(udp(atPort, 5000)), out: b.toClient(udp(ownPort, 5000))},
		{name: "another datagram", frame: b.frame(b.sent(b.address, udp(5000, ownPort))), out: self(udp(5000, atPort))},
		{name: "a datagram of the cache", frame: b.frame(b.sent(b.address, udp(5000, ownPort))),
			out: self(udp(5000, atPort))},
		{name: "a fragment", frame: b.frame(b.sent(b.address, udp(5000, ownPort), first)),
			out: self(udp(5000, atPort), first)},
		{name: "a later fragment", frame: b.frame(b.sent(b.address, restOf, later)), out: self(restOf, later)},
		{name: "a fragment of an answer", frame: back(udp(atPort, 5000), first),
			out: b.toClient(udp(ownPort, 5000), first)},
		{name: "a later fragment of an answer", frame: back(restOf, later), out: b.toClient(restOf, later)},
		{name: "an answer of another port", frame: back(udp(atPort+1, 5000)), reason: "no-session"},
		{name: "a later fragment of nothing", frame: back(restOf, packet.Fragment(16, false, 10)),
			reason: "no-session"},
	} {
		b.fromContainer1(t, c)
	}
}

// TestServiceWithoutPrograms: packets that another program must translate are dropped if it is missing.
func TestServiceWithoutPrograms(t *testing.T) {
	b := newServiceBench(t)
	for index := range b.datapath.Objects.PilServicesV1.MaxEntries() {
		must(t, b.datapath.Objects.PilServicesV1.Delete(index))
	}
	b.fromContainer1(t, progCase{name: "to a service", frame: b.frame(b.sent(b.address, question)),
		reason: "no-program"})
	direct := between(sees(b.b3.Addr()), b.b1.seen(), udp(atPort, 5000))
	b.arrives(t, progCase{name: "from a backend without a session", frame: b.fromFar(udp(atPort, 5000)), out: direct})
	pairs := b.datapath.Objects.PilSvcpairsV1
	for i := range pairs.MaxEntries() { // every client has a session with every backend
		must(t, pairs.Put(i, uint32(math.MaxUint32)))
	}
	b.fromContainer2(t, progCase{name: "from a backend of this node", frame: b.fromNear(udp(atPort, 5000)),
		reason: "no-program"})
	b.arrives(t, progCase{name: "from a backend", frame: b.fromFar(udp(atPort, 5000)), reason: "no-program"})
	other := b.b3
	other.Index++
	other = allocated(other)
	b.arrives(t, progCase{name: "from no backend", out: between(sees(other.Addr()), b.b1.seen(), answers),
		frame: between(other.Addr(), b.b1.plain(), answers).Frame(b.uplinkMAC, host.ContainerMAC)})
	r3 := allocatedOf(red, address.Plain{Node: b.far.prefix, Tenant: 2, App: 1, Index: 77}).Addr()
	b.put(t, b.reds, otherOne, dpapi.Backend{Plain: r3, Seen: r3, Port: atPort})
	must(t, b.datapath.putTenant(red)) // without a prefix for services
	b.arrives(t, progCase{name: "to a tenant without services", out: between(
		address.NewCipher(red.Current().Key).Encrypt(r3), b.r1.seen(), answers),
		frame: between(r3, b.r1.plain(), answers).Frame(b.uplinkMAC, host.ContainerMAC)})
}

// TestServiceOfClearTenant: packets of a clear tenant have plaintext addresses, with which its policies have sessions
// of their own.
func TestServiceOfClearTenant(t *testing.T) {
	b := newServiceBench(t)
	of := serving(plain, 8)
	client := b.add(t, of, 1)
	far := address.Plain{Node: b.far.prefix, Tenant: of.Current().ID, App: 1, Index: 5}.Addr()
	service := serviceAddress(t, of, 1)
	b.put(t, service, farPort, dpapi.Backend{Plain: far, Seen: far, Port: atPort})
	o := &b.datapath.Objects
	denied := uint64(20)
	b.says(t, denied, 1, denies|ruleNothing, 0, 0)
	subject := func(app uint32, sets ...uint64) {
		t.Helper()
		var target bpfobj.PilasterPolTarget
		copy(target.Sets[:], sets)
		must(t, o.PolSubjectsV1.Put(bpfobj.PilasterPolTargetKey{Tenant: uint32(of.Current().ID), App: app}, target))
	}
	subject(appAny)
	must(t, b.datapath.InvalidateFlows())
	must(t, o.PolGenerationV1.Put(uint32(0), uint32(math.MaxUint32))) // the next is 0
	out := func(c progCase) {
		t.Helper()
		b.check(t, o.PilContainer, skb{Ifindex: client.ifindex(), IngressIfindex: client.ifindex()}, c)
	}
	sent := func(to netip.Addr, body packet.Body) []byte { return b.frame(between(client.seen(), to, body)) }
	toFar := func(body packet.Body) packet.Packet { return withHops(between(client.seen(), far, body), 63) }
	back := between(far, client.seen(), udp(atPort, 5000)).Frame(b.uplinkMAC, host.ContainerMAC)
	answer := between(service, client.seen(), udp(farPort, 5000))
	out(progCase{name: "to the backend itself", frame: sent(far, udp(5000, atPort)), out: toFar(udp(5000, atPort))})
	out(progCase{name: "to the service", frame: sent(service, question), out: toFar(udp(5000, atPort))})
	b.arrives(t, progCase{name: "an answer", frame: back, out: answer})
	b.arrives(t, progCase{name: "an answer from the cache", frame: back, out: answer})
	subject(1, denied, denied)
	b.generation(t)
	b.arrives(t, progCase{name: "an answer after a denial", frame: back, reason: "policy-denied"})
	out(progCase{name: "to the service after a denial", frame: sent(service, question), reason: "policy-denied"})
}

// TestServiceSessionLimit: a connection to a service has room for both of its sessions, or is refused.
func TestServiceSessionLimit(t *testing.T) {
	const sessions = 16 * slotsPerBucket
	b := &serviceBench{progBench: newSessionBench(t, sessions), of: serving(blue, 7)}
	must(t, b.datapath.Objects.PolSubjectsV1.Delete(bpfobj.PilasterPolTargetKey{Tenant: 1, App: appAny}))
	b.serve(t)
	refused := 0
	send := func(from uint16, flags packet.TCPFlags) bool {
		t.Helper()
		verdict, out, reasons := b.run(t, b.datapath.Objects.PilContainer,
			b.frame(b.sent(b.address, tcp(from, farPort, flags))), skb{Ifindex: b.b1.ifindex()})
		if verdict == verdictRedirect && slices.Equal(out[14:], b.toFar(tcp(from, atPort, flags)).Marshal()) {
			return true
		}
		if verdict != verdictDrop || reasons["session-limit"] != 1 || len(reasons) != 1 {
			t.Errorf("no room: verdict %d, counted %v", verdict, reasons)
		}
		refused++
		return false
	}
	for _, from := range ports(1000, 2*sessions) {
		if !send(from, packet.SYN) {
			continue
		}
		b.arrives(t, progCase{name: "an answer", frame: b.fromFar(tcp(atPort, from, synAck)),
			out: b.toClient(tcp(farPort, from, synAck))})
		send(from, packet.ACK)
	}
	if refused == 0 {
		t.Error("none was refused")
	}
}

// TestServiceChecksumsLeftToADevice: a checksum that a device is still to complete covers the backend's port; that of a
// datagram in which another one is left to a device is complete.
func TestServiceChecksumsLeftToADevice(t *testing.T) {
	w := newWire(t)
	of := serving(blue, 7)
	a, b := w.nodes[0].addClient(t, of, 1), w.nodes[1].addClient(t, of, 1)
	service := serviceAddress(t, of, 1)
	for _, k := range frontends(service, farPort) {
		must(t, w.nodes[0].datapath.PutServices([]dpapi.Frontend{{
			FrontendKey: k, Backends: []dpapi.Backend{backendAt(b, atPort)},
		}}))
	}
	socket, wire := newOffloadSocket(t, a), capture(t, w.nodes[1].ns)
	options := padding(packet.DestinationOptions)
	tunnel := func(port uint16) packet.UDP {
		return packet.UDP{SourcePort: 5000, DestinationPort: port, Payload: make([]byte, 100)}
	}
	for _, c := range []struct {
		name            string
		body, atBackend packet.Body
		extensions      []packet.Extension
		start, offset   int // of the checksum that the device fills in
		unfinished      int // offset of the outer header if its checksum is incomplete
	}{
		{"UDP", udp(5000, farPort), udp(5000, atPort), nil, l4, 6, l4},
		{"TCP", tcp(5000, farPort, packet.SYN), tcp(5000, atPort, packet.SYN), nil, l4, 16, l4},
		{"UDP behind options", udp(5000, farPort), udp(5000, atPort), []packet.Extension{options}, l4 + 8, 6, l4 + 8},
		{"UDP in a tunnel", tunnel(farPort), tunnel(atPort), nil, l4 + 8 + 50, 6, 0},
	} {
		must(t, socket.send(leftToDevice(between(a.seen(), service, c.body, c.extensions...), c.unfinished), c.start,
			c.offset))
		want := withHops(between(a.plain(), b.plain(), c.atBackend, c.extensions...), 63)
		wantOnWire(t, wire, c.name, want, c.unfinished)
	}
}

// TestServiceSumOfTheWholePacket: what services change in a packet cancels out in the sum that a device has of it.
func TestServiceSumOfTheWholePacket(t *testing.T) {
	const completeChecksum = 1 << 2 // as in TestSumOfTheWholePacketStaysRight
	b := newServiceBench(t)
	first, later := packet.Fragment(0, true, 9), packet.Fragment(16, false, 9)
	quoted := between(b.b3.Addr(), b.b1.plain(), packet.ICMP{
		Type: packet.DestinationUnreachable, Payload: between(b.b1.plain(), b.b3.Addr(), udp(5000, atPort)).Marshal(),
	})
	container := skb{Ifindex: b.b1.ifindex(), IngressIfindex: b.b1.ifindex()}
	uplink := skb{Ifindex: b.uplinkIfindex(), IngressIfindex: b.uplinkIfindex()}
	o := &b.datapath.Objects
	b.sends(t, "a datagram to the far node", question, b.toFar(udp(5000, atPort))) // its hop limit changes, and the sum
	for _, c := range []struct {
		name    string
		program *ebpf.Program
		ctx     skb
		frame   []byte
	}{
		{"a fragment", o.PilContainer, container, b.frame(b.sent(b.address, udp(5000, nearPort), first))},
		{"a later fragment", o.PilContainer, container, b.frame(b.sent(b.address, restOf, later))},
		{"TCP", o.PilContainer, container, b.frame(b.sent(b.address, tcp(5000, nearPort, packet.SYN)))},
		{"an answer", o.PilUplinkIn, uplink, b.fromFar(udp(atPort, 5000))},
		{"a fragment of an answer", o.PilUplinkIn, uplink, b.fromFar(udp(atPort, 5000), first)},
		{"a later fragment of an answer", o.PilUplinkIn, uplink, b.fromFar(restOf, later)},
		{"an error", o.PilUplinkIn, uplink, quoted.Frame(b.uplinkMAC, host.ContainerMAC)},
	} {
		must(t, b.ns.Do(func() error {
			verdict, err := c.program.Run(&ebpf.RunOptions{Data: c.frame, Context: c.ctx, Flags: completeChecksum})
			if err != nil || verdict != verdictRedirect {
				t.Errorf("%s: verdict %d, %v", c.name, verdict, err)
			}
			return nil
		}))
	}
}
