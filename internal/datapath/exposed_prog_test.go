package datapath

import (
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

var ping = packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(1, 1)}

var (
	exposedAt = netip.MustParseAddr("2001:db8:7::9")
	redAt     = netip.MustParseAddr("2001:db8:7::a")     // of red
	islander  = netip.MustParseAddr("2001:db8:1:0:1::1") // a host outside to which no route leads
)

// Further ports of exposedBench, by their backends.
const (
	lostPort   = 60 // on a node to which no route leads
	hiddenPort = 61 // the far node, but the port is not exposed
	drainPort  = 62
)

// exposedBench is a progBench whose blue tenant exposes ports at an external address and at an address of this node, as
// serviceBench has them at the address of a service.
type exposedBench struct {
	*serviceBench
	node netip.Addr
}

func newExposedBench(t testing.TB) *exposedBench {
	t.Helper()
	b := &exposedBench{serviceBench: newServiceBench(t)}
	b.node = b.underlay
	must(t, b.datapath.Netlink.RouteReplace(&netlink.Route{
		Dst: host.IPNet(netip.PrefixFrom(outsideHost, 48).Masked()), Gw: b.far.underlay.AsSlice(),
	}))
	for _, a := range []netip.Addr{exposedAt, b.node} {
		b.expose(t, a, farPort, b.atFar(atPort))
		b.expose(t, a, nearPort, backendAt(b.b2, atPort))
	}
	b.expose(t, exposedAt, noPort)
	must(t, b.datapath.Netlink.RouteReplace(hook.UnreachableRoute(netip.PrefixFrom(islander, 128))))
	return b
}

func (b *exposedBench) expose(t testing.TB, a netip.Addr, port uint16, backends ...dpapi.Backend) {
	t.Helper()
	b.exposeOf(t, b.of, a, port, backends)
}

// exposeOf gives a port that a tenant exposes some backends, for TCP and UDP.
func (b *exposedBench) exposeOf(t testing.TB, of tenant.Tenant, a netip.Addr, port uint16,
	backends []dpapi.Backend, draining ...dpapi.Backend) {
	t.Helper()
	for _, k := range frontends(a, port) {
		must(t, b.datapath.PutServices([]dpapi.Frontend{{
			FrontendKey: k, Exposed: dpapi.Exposed{Services: of.ServicesNumber, Node: a == b.node},
			Backends: backends, Draining: draining,
		}}))
	}
}

func (b *exposedBench) fromOutside(body packet.Body, extensions ...packet.Extension) []byte {
	return between(outsideHost, exposedAt, body, extensions...).Frame(b.uplinkMAC, host.ContainerMAC)
}

func (b *exposedBench) onWire(p packet.Packet) []byte { return p.Frame(b.uplinkMAC, host.ContainerMAC) }

// exposedTunnel is a packet of an exposed port in the tunnel between two nodes.
func exposedTunnel(from, to netip.Prefix, inner packet.Packet) packet.Packet {
	return packet.Packet{
		Source: tenant.ExposedTunnel(from), Destination: tenant.ExposedTunnel(to),
		Body: packet.Raw{Proto: 41, Data: inner.Marshal()},
	}
}

// inTunnel is a packet in the tunnel from another node, on the wire.
func (b *exposedBench) inTunnel(from netip.Prefix, inner packet.Packet) []byte {
	return b.onWire(exposedTunnel(from, b.prefix, inner))
}

// fromB2 is a packet of b2 to the client.
func (b *exposedBench) fromB2(body packet.Body) []byte {
	return b.frame(between(b.b2.seen(), outsideHost, body))
}

// toB2 is a packet of the client in the tunnel to b2.
func (b *exposedBench) toB2(body packet.Body) packet.Packet {
	return between(outsideHost, b.b2.plain(), body)
}

// atB2 is a packet of the client as b2 gets it.
func (b *exposedBench) atB2(body packet.Body) packet.Packet {
	return between(outsideHost, b.b2.seen(), body)
}

// connections returns blue's table of connections.
func (b *exposedBench) connections(t testing.TB) *ebpf.Map {
	t.Helper()
	var id uint32
	must(t, b.datapath.Objects.PilExconnsV1.Lookup(b.of.ServicesNumber, &id))
	m, err := ebpf.NewMapFromID(ebpf.MapID(id))
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// tcpKey is the key of a TCP connection of the client in the table: local is the exposed port, or the backend.
func tcpKey(local netip.Addr, port, client uint16) bpfobj.PilasterNatKey {
	return bpfobj.PilasterNatKey{
		Local: bpfobj.ToAddr(local), Remote: bpfobj.ToAddr(outsideHost),
		LocalPort: bigEndian(port), RemotePort: bigEndian(client), Proto: packet.ProtocolTCP,
	}
}

// toBackend is a packet of the client in the tunnel to its backend on the far node.
func (b *exposedBench) toBackend(body packet.Body) packet.Packet {
	return exposedTunnel(b.prefix, b.far.prefix, withHops(between(outsideHost, b.b3.Addr(), body), 63))
}

// withoutSum is a datagram without a checksum: errors quote the one of the packet before its translation.
func withoutSum(from, to uint16) packet.Raw {
	data := []byte{byte(from >> 8), byte(from), byte(to >> 8), byte(to), 0, 8, 0, 0}
	return packet.Raw{Proto: packet.ProtocolUDP, Data: data}
}

// TestExposedPackets: packets of a host outside at the ingress node.
func TestExposedPackets(t *testing.T) {
	b := newExposedBench(t)
	nowhere := b.b3
	nowhere.Node = lostNode
	lost := allocated(nowhere).Addr()
	b.expose(t, exposedAt, lostPort, dpapi.Backend{Plain: lost, Seen: sees(lost), Port: atPort})
	b.put(t, exposedAt, hiddenPort, b.atFar(atPort))
	tooBig := func(about packet.Packet) packet.ICMP {
		return errorAbout(packet.PacketTooBig, 1280, about.Marshal())
	}
	unreachable := func(port uint16) packet.ICMP {
		e := errorAbout(packet.DestinationUnreachable, 0, between(outsideHost, exposedAt, udp(5000, port)).Marshal())
		e.Code = 4
		return e
	}
	longAtFar := long(1460)
	longAtFar.DestinationPort = atPort
	tooLong := between(outsideHost, exposedAt, long(1461))
	opening, clamped := tcp(5004, farPort, packet.SYN), tcp(5004, atPort, packet.SYN)
	opening.Options, clamped.Options = []byte("\x02\x04\x05\xa0"), []byte("\x02\x04\x05\x78") // MSS 1,440 and 1,400
	container := sees(b.b3.Addr())
	for _, c := range []progCase{
		{name: "a datagram to a backend elsewhere", frame: b.fromOutside(udp(5000, farPort)),
			out: b.toBackend(udp(5000, atPort))},
		{name: "the same again", frame: b.fromOutside(udp(5000, farPort)), out: b.toBackend(udp(5000, atPort))},
		{name: "a SYN", frame: b.fromOutside(tcp(5000, farPort, packet.SYN)),
			out: b.toBackend(tcp(5000, atPort, packet.SYN))},
		{name: "a datagram to a backend here", frame: b.fromOutside(udp(5000, nearPort)),
			out: between(outsideHost, b.b2.seen(), udp(5000, atPort))},
		{name: "to a port of this node", frame: b.onWire(between(outsideHost, b.node, udp(5001, farPort))),
			out: b.toBackend(udp(5001, atPort))},
		{name: "to another port of this node", frame: b.onWire(between(outsideHost, b.node, udp(5001, otherOne))),
			next: true},
		{name: "ping of this node", frame: b.onWire(between(outsideHost, b.node, ping)), next: true},

		{name: "a SYN with segments that are too long for the tunnel", frame: b.fromOutside(opening),
			out: b.toBackend(clamped)},
		{name: "1,460 bytes", frame: b.fromOutside(long(1460)), out: b.toBackend(longAtFar)},
		{name: "1,461 bytes", frame: b.onWire(tooLong), reason: "too-big", out: between(exposedAt, outsideHost,
			errorAbout(packet.PacketTooBig, 1460, tooLong.Marshal()))},

		{name: "a port of a service that is not exposed", frame: b.fromOutside(udp(5000, hiddenPort)),
			reason: "no-service", out: between(exposedAt, outsideHost, unreachable(hiddenPort))},
		{name: "no route to the backend", frame: b.fromOutside(udp(5000, lostPort)), reason: "no-route"},
		{name: "a closed port", frame: b.fromOutside(udp(5000, otherOne)), reason: "no-service",
			out: packet.Packet{Source: exposedAt, Destination: outsideHost, Body: unreachable(otherOne)}},
		{name: "a SYN to a closed port", frame: b.fromOutside(acknowledging(tcp(5000, otherOne, packet.SYN), 1, 0)),
			reason: "no-service", out: between(exposedAt, outsideHost,
				acknowledging(tcp(otherOne, 5000, packet.RST|packet.ACK), 0, 2))},
		{name: "a SYN without a backend", frame: b.fromOutside(acknowledging(tcp(5000, noPort, packet.SYN), 1, 0)),
			reason: "no-backend", out: between(exposedAt, outsideHost,
				acknowledging(tcp(noPort, 5000, packet.RST|packet.ACK), 0, 2))},
		{name: "ping", frame: b.fromOutside(ping), reason: "service-protocol"},
		{name: "a fragment", frame: b.fromOutside(udp(5000, farPort), packet.Fragment(0, true, 9)),
			reason: "service-protocol"},
		{name: "half a TCP header", frame: b.fromOutside(halfTCP), reason: "malformed"},
		{name: "a hop limit of 1", reason: "hop-limit",
			frame: b.onWire(withHops(between(outsideHost, exposedAt, udp(5000, farPort)), 1))},
		{name: "from a node", frame: b.onWire(between(b.far.prefix.Addr().Next(), exposedAt, udp(5000, farPort))),
			reason: "exposed-source"},
		{name: "from a node to a port of this node", reason: "exposed-source",
			frame: b.onWire(between(b.far.prefix.Addr().Next(), b.node, udp(5000, farPort)))},
		{name: "from an egress address", reason: "exposed-source",
			frame: b.onWire(between(tenant.EgressAddress(b.far.prefix, 1<<16), exposedAt, udp(5000, farPort)))},
		{name: "from a container", frame: b.onWire(between(b.b3.Addr(), exposedAt, udp(5000, farPort))),
			reason: "tenant-to-node"},
		{name: "from a private address", frame: b.onWire(between(container, exposedAt, udp(5000, farPort))),
			reason: "private-outside"},
		{name: "an error about no connection", reason: "no-session", frame: b.onWire(between(outsideRouter, exposedAt,
			errorAbout(packet.PacketTooBig, 1280, between(exposedAt, outsideHost, udp(farPort, 5999)).Marshal())))},
		{name: "an error about a connection", frame: b.onWire(between(outsideRouter, exposedAt,
			tooBig(between(exposedAt, outsideHost, withoutSum(farPort, 5000))))),
			out: b.toBackend(tooBig(between(b.b3.Addr(), outsideHost, withoutSum(atPort, 5000))))},
	} {
		b.arrives(t, c)
	}
	counts, err := b.datapath.ServiceCounts()
	must(t, err)
	got := [2]dpapi.ServiceCounts{counts[frontends(exposedAt, nearPort)[1]], counts[frontends(exposedAt, noPort)[0]]}
	if want := [2]dpapi.ServiceCounts{{Flows: 1}, {Refused: 1}}; got != want {
		t.Errorf("counts: %+v, want %+v", got, want)
	}
}

// TestExposedAnswers: answers of a backend at its own node, which may be the ingress node, and in the tunnel.
func TestExposedAnswers(t *testing.T) {
	b := newExposedBench(t)
	b.arrives(t, progCase{name: "a client by this node", frame: b.fromOutside(udp(5000, nearPort)),
		out: between(outsideHost, b.b2.seen(), udp(5000, atPort))})
	b.fromContainer2(t, progCase{name: "an answer by this node", frame: b.fromB2(udp(atPort, 5000)),
		out: withHops(between(exposedAt, outsideHost, udp(nearPort, 5000)), 63)})

	fromB2, by, toB2 := b.fromB2, b.inTunnel, b.toB2
	b.arrives(t, progCase{name: "a client by another node", frame: by(b.far.prefix, toB2(udp(5001, atPort))),
		out: between(outsideHost, b.b2.seen(), udp(5001, atPort))})
	b.fromContainer2(t, progCase{name: "an answer by another node", frame: fromB2(udp(atPort, 5001)),
		out: exposedTunnel(b.prefix, b.far.prefix,
			withHops(between(b.b2.plain(), outsideHost, udp(atPort, 5001)), 63))})
	// The fabric has another ingress node: answers follow the packets of the client.
	b.arrives(t, progCase{name: "the client by this node", frame: b.fromOutside(udp(5001, nearPort)),
		out: between(outsideHost, b.b2.seen(), udp(5001, atPort))})
	b.fromContainer2(t, progCase{name: "an answer after a change of the fabric", frame: fromB2(udp(atPort, 5001)),
		out: withHops(between(exposedAt, outsideHost, udp(nearPort, 5001)), 63)})

	b.arrives(t, progCase{name: "a client of a backend elsewhere", frame: b.fromOutside(udp(5002, farPort)),
		out: b.toBackend(udp(5002, atPort))})
	answer := between(b.b3.Addr(), outsideHost, udp(atPort, 5002))
	b.arrives(t, progCase{name: "its answer", frame: by(b.far.prefix, answer),
		out: withHops(between(exposedAt, outsideHost, udp(farPort, 5002)), 63)})

	b.arrives(t, progCase{name: "a client without a route",
		frame: b.onWire(between(islander, exposedAt, udp(5002, farPort))),
		out:   exposedTunnel(b.prefix, b.far.prefix, withHops(between(islander, b.b3.Addr(), udp(5002, atPort)), 63))})

	b.arrives(t, progCase{name: "a client by a node without a route", frame: by(lostNode, toB2(udp(5004, atPort))),
		out: b.atB2(udp(5004, atPort))})
	b.fromContainer2(t, progCase{name: "an answer to a node without a route", frame: fromB2(udp(atPort, 5004)),
		reason: "no-route"})
	b.arrives(t, progCase{name: "a client by a tunnel", frame: by(b.far.prefix, toB2(udp(5005, atPort))),
		out: b.atB2(udp(5005, atPort))})
	large := func(bytes int) packet.Packet {
		return between(b.b2.seen(), outsideHost,
			packet.UDP{SourcePort: atPort, DestinationPort: 5005, Payload: make([]byte, bytes-48)})
	}
	inside := withHops(large(1460), 63)
	inside.Source = b.b2.plain()
	b.fromContainer2(t, progCase{name: "an answer of 1,460 bytes", frame: b.frame(large(1460)),
		out: exposedTunnel(b.prefix, b.far.prefix, inside)})
	b.fromContainer2(t, progCase{name: "an answer of 1,461 bytes", frame: b.frame(large(1461)), reason: "too-big",
		out: between(b.b2.gateway(t, blue), b.b2.seen(), errorAbout(packet.PacketTooBig, 1460, large(1461).Marshal()))})

	other := answer
	other.Body = udp(atPort, 5999)
	r3 := allocatedOf(red, address.Plain{Node: b.far.prefix, Tenant: 2, App: 1, Index: 77}).Addr()
	another := exposedTunnel(b.far.prefix, b.prefix, toB2(udp(5001, atPort)))
	another.Body = packet.Raw{Proto: 4, Data: toB2(udp(5001, atPort)).Marshal()}
	fromSource := func(source netip.Addr) []byte {
		return by(b.far.prefix, between(source, b.b2.plain(), udp(5001, atPort)))
	}
	for _, c := range []progCase{
		{name: "an answer without a connection", frame: by(b.far.prefix, other), reason: "no-session"},
		{name: "an answer by another node than the container's", reason: "gateway-denied",
			frame: by(thirdNode, answer)},
		{name: "an answer of a tenant without exposed ports", reason: "no-service",
			frame: by(b.far.prefix, between(r3, outsideHost, udp(atPort, 5002)))},
		{name: "an echo as an answer", reason: "service-protocol",
			frame: by(b.far.prefix, between(b.b3.Addr(), outsideHost, ping))},
		{name: "an answer to a client without a route", reason: "no-route",
			frame: by(b.far.prefix, between(b.b3.Addr(), islander, udp(atPort, 5002)))},
		{name: "another protocol in the tunnel", frame: b.onWire(another), reason: "gateway-denied"},
		{name: "to another node's container", reason: "gateway-denied", frame: by(b.far.prefix, between(outsideHost,
			changed(b.b2.plain(), func(p *address.Plain) { p.Node = thirdNode }), udp(5001, atPort)))},
		{name: "from a private address", frame: fromSource(sees(b.b3.Addr())), reason: "exposed-source"},
		{name: "from a service", frame: fromSource(b.address), reason: "exposed-source"},
		{name: "to a port that is not exposed", reason: "no-service",
			frame: by(b.far.prefix, toB2(udp(5001, otherOne)))},
		{name: "ping", frame: by(b.far.prefix, toB2(ping)), reason: "service-protocol"},
		{name: "to another tenant", frame: by(b.far.prefix, between(outsideHost, b.r1.plain(), udp(5001, atPort))),
			reason: "no-service"},
		{name: "to no container", reason: "no-endpoint", frame: by(b.far.prefix, between(outsideHost,
			changed(b.b2.plain(), func(p *address.Plain) { p.Index += 99 }), udp(5001, atPort)))},
		{name: "from a container", frame: by(thirdNode, between(b.b3.Addr(), b.b2.plain(), udp(5001, atPort))),
			reason: "exposed-source"},
		{name: "from a host outside", reason: "gateway-denied", frame: b.onWire(packet.Packet{Source: outsideHost,
			Destination: tenant.ExposedTunnel(b.prefix),
			Body:        packet.Raw{Proto: 41, Data: toB2(udp(5001, atPort)).Marshal()}})},
	} {
		b.arrives(t, c)
	}
	// Each tenant has a table of connections of its own.
	b.exposeOf(t, serving(red, 1<<23|7), redAt, nearPort, []dpapi.Backend{backendAt(b.r1, atPort)})
	b.arrives(t, progCase{name: "a client of another tenant",
		frame: b.onWire(between(outsideHost, redAt, udp(5000, nearPort))),
		out:   between(outsideHost, b.r1.seen(), udp(5000, atPort))})
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.r1.ifindex(), IngressIfindex: b.r1.ifindex()},
		progCase{name: "an answer of another tenant",
			frame: b.frame(between(b.r1.seen(), outsideHost, udp(atPort, 5000))),
			out:   withHops(between(redAt, outsideHost, udp(nearPort, 5000)), 63)})

	// What a container opens itself from a port that is exposed is not an answer: this tenant has no way out.
	b.fromContainer2(t, progCase{name: "a SYN of the container", frame: fromB2(tcp(atPort, 5001, packet.SYN)),
		reason: "dst-not-private"})
	b.arrives(t, progCase{name: "a client's SYN", frame: by(b.far.prefix, toB2(tcp(5003, atPort, packet.SYN))),
		out: b.atB2(tcp(5003, atPort, packet.SYN))})
	b.fromContainer2(t, progCase{name: "a SYN of the container on its ports", reason: "dst-not-private",
		frame: fromB2(tcp(atPort, 5003, packet.SYN))})
	b.fromContainer2(t, progCase{name: "its SYN-ACK", frame: fromB2(tcp(atPort, 5003, synAck)),
		out: exposedTunnel(b.prefix, b.far.prefix,
			withHops(between(b.b2.plain(), outsideHost, tcp(atPort, 5003, synAck)), 63))})
	b.fromContainer2(t, progCase{name: "a datagram to another host", reason: "dst-not-private",
		frame: b.frame(between(b.b2.seen(), outsideHost.Next(), udp(atPort, 5001)))})

	// A process of the node does not send with an external address, but does with the node's own.
	for _, c := range []progCase{
		{name: "an external address", frame: b.onWire(between(exposedAt, outsideHost, udp(1, 2))),
			reason: "host-claims-tenant"},
		{name: "an address of the node", frame: b.onWire(between(b.node, outsideHost, udp(1, 2))), next: true},
	} {
		b.check(t, b.datapath.Objects.PilUplinkOut, skb{Ifindex: b.uplinkIfindex()}, c)
		c.name += ", by another interface"
		b.check(t, b.datapath.Objects.PilEdgeOut, skb{Ifindex: b.uplinkIfindex()}, c)
	}

	for _, a := range []netip.Addr{exposedAt, b.node} {
		must(t, b.datapath.DeleteServices(frontends(a, nearPort)))
	}
	b.fromContainer2(t, progCase{name: "a port that is no longer exposed", frame: fromB2(udp(atPort, 5001)),
		reason: "dst-not-private"})
}

// TestExposedPolicy: policies decide about clients outside by their own address, and only about what clients open.
func TestExposedPolicy(t *testing.T) {
	b := newExposedBench(t)
	set := func(p policy.Tables) {
		t.Helper()
		must(t, b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "blue", IDs: []address.TenantID{1}, Tables: p}))
	}
	only := func(direction int) policy.Tables {
		p := policy.Isolating()
		subject := p.Subjects[policy.AnyApp]
		subject.Sets[1-direction] = 0
		p.Subjects[policy.AnyApp] = subject
		return p
	}
	const in, out = 0, 1
	client := func(name string, from uint16) progCase {
		return progCase{name: name, frame: b.fromOutside(udp(from, nearPort))}
	}
	answer := progCase{frame: b.fromB2(udp(atPort, 5000)),
		out: withHops(between(exposedAt, outsideHost, udp(nearPort, 5000)), 63)}

	set(only(in))
	c := client("a client that no policy allows", 5000)
	c.reason = "policy-denied"
	b.arrives(t, c)
	must(t, b.datapath.Objects.PolAdoptionsV1.Put(uint32(1), uint64(math.MaxInt64)))
	segment := acknowledging(tcp(5002, nearPort, packet.ACK), 1, 2)
	b.arrives(t, progCase{name: "a segment while sessions are adopted", frame: b.fromOutside(segment),
		reason: "policy-denied"})

	set(only(out))
	c = client("a client, of a container that may open nothing", 5000)
	c.out = b.atB2(udp(5000, atPort))
	b.arrives(t, c)
	answer.name = "an answer of such a container"
	b.fromContainer2(t, answer)

	must(t, b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "blue"}))
	c = client("without policies", 5001)
	c.out = b.atB2(udp(5001, atPort))
	b.arrives(t, c)
}

// TestExposedOwn: connections to exposed ports are apart from a container's own on the same ports.
func TestExposedOwn(t *testing.T) {
	b := newExposedBench(t)
	must(t, b.datapath.putTenant(leaving(b.of, everywhere)))
	b.leaves(t, b.b2)
	own := func(port uint16) packet.Packet {
		return withHops(between(b.b2.egress(), outsideHost, udp(atPort, port)), 63)
	}
	back := func(port uint16) []byte { return b.onWire(between(outsideHost, b.b2.egress(), udp(port, atPort))) }
	b.fromContainer2(t, progCase{name: "a datagram of the container", frame: b.fromB2(udp(atPort, 5000)),
		out: own(5000)})
	b.arrives(t, progCase{name: "its answer", frame: back(5000), out: b.atB2(udp(5000, atPort))})
	b.fromContainer2(t, progCase{name: "its next datagram", frame: b.fromB2(udp(atPort, 5000)), out: own(5000)})

	b.arrives(t, progCase{name: "a client", frame: b.fromOutside(udp(5001, nearPort)), out: b.atB2(udp(5001, atPort))})
	for _, name := range []string{"an answer", "an answer from the cache"} {
		b.fromContainer2(t, progCase{name: name, frame: b.fromB2(udp(atPort, 5001)),
			out: withHops(between(exposedAt, outsideHost, udp(nearPort, 5001)), 63)})
	}
	b.arrives(t, progCase{name: "the client to the container's own address", frame: back(5001), reason: "no-session"})
}

// TestExposedWithoutPrograms: packets that another program must translate are dropped if it is missing.
func TestExposedWithoutPrograms(t *testing.T) {
	b := newExposedBench(t)
	client, answer := b.fromOutside(udp(5000, nearPort)), b.fromB2(udp(atPort, 5000))
	b.arrives(t, progCase{name: "a client", frame: client, out: b.atB2(udp(5000, atPort))})
	programs := b.datapath.Objects.PilServicesV1
	const exposedIn, tunnel, exposedOut = uint32(2), uint32(3), uint32(4)
	must(t, programs.Delete(tunnel))
	b.arrives(t, progCase{name: "to a backend here", frame: client, reason: "no-program"})
	b.arrives(t, progCase{name: "from the tunnel", frame: b.inTunnel(b.far.prefix, b.toB2(udp(5000, atPort))),
		reason: "no-program"})
	b.fromContainer2(t, progCase{name: "an answer by this node", frame: answer, reason: "no-program"})
	must(t, programs.Delete(exposedIn))
	must(t, programs.Delete(exposedOut))
	b.arrives(t, progCase{name: "to an exposed address", frame: client, reason: "no-program"})
	b.fromContainer2(t, progCase{name: "an answer", frame: answer, reason: "no-program"})
}

// TestExposedMacvlan: with macvlans, the node sends what our programs have accepted with an exposed address, and no
// container does.
func TestExposedMacvlan(t *testing.T) {
	w := newLink(t)
	b := &progBench{testNode: w.nodes[0]}
	b.open(t, endpoint.Macvlan)
	of := serving(blue, 7)
	must(t, b.datapath.putTenant(of))
	must(t, b.datapath.PutServices([]dpapi.Frontend{{
		FrontendKey: frontends(exposedAt, nearPort)[0], Exposed: dpapi.Exposed{Services: of.ServicesNumber},
	}}))
	var accepted uint32
	must(t, b.datapath.Objects.AcceptMark.Get(&accepted))
	frame := between(exposedAt, outsideHost, udp(nearPort, 5000)).Frame(host.GatewayMAC, host.ContainerMAC)
	onUplink := skb{Ifindex: b.uplinkIfindex(), Mark: accepted}
	verdict, _, reasons := b.run(t, b.datapath.Objects.PilUplinkOut, frame, onUplink)
	if verdict != 0 || len(reasons) > 0 {
		t.Errorf("accepted: verdict %d, counted %v, want the packet sent", verdict, reasons)
	}
	b.check(t, b.datapath.Objects.PilUplinkOut, skb{Ifindex: b.uplinkIfindex()},
		progCase{name: "not accepted", frame: frame, reason: "host-claims-tenant"})
	b.ns = namespace(t, "other")
	const loopback = 1
	b.check(t, b.datapath.Objects.PilUplinkOut, skb{Ifindex: loopback, Mark: accepted},
		progCase{name: "from another namespace", frame: frame, reason: "src-not-own"})
}

// TestExposedPortIsFree: a connection that both ends have closed, or that one has reset, leaves its port at the backend
// to another connection of the client.
func TestExposedPortIsFree(t *testing.T) {
	b := newExposedBench(t)
	b.expose(t, exposedAt, sharedPort, b.atFar(atPort))
	answer := func(port uint16, flags packet.TCPFlags) {
		t.Helper()
		b.arrives(t, progCase{name: "an answer", frame: b.onWire(exposedTunnel(b.far.prefix, b.prefix,
			between(b.b3.Addr(), outsideHost, tcp(atPort, port, flags)))),
			out: withHops(between(exposedAt, outsideHost, tcp(farPort, port, flags)), 63)})
	}
	fin := packet.FIN | packet.ACK
	for _, c := range []struct {
		name            string
		port            uint16
		client, backend packet.TCPFlags
		free            bool
	}{
		{"an open connection", 5000, packet.ACK, packet.ACK, false},
		{"half closed by the client", 5001, fin, packet.ACK, false},
		{"half closed by the backend", 5002, packet.ACK, fin, false},
		{"closed", 5003, fin, fin, true},
		{"reset by the client", 5004, packet.RST, packet.ACK, true},
		{"reset by the backend", 5005, packet.ACK, packet.RST, true},
	} {
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK} {
			b.arrives(t, progCase{name: c.name, frame: b.fromOutside(tcp(c.port, farPort, flags)),
				out: b.toBackend(tcp(c.port, atPort, flags))})
		}
		b.arrives(t, progCase{name: c.name, frame: b.fromOutside(tcp(c.port, farPort, c.client)),
			out: b.toBackend(tcp(c.port, atPort, c.client))})
		answer(c.port, c.backend)
		next := progCase{name: "another connection, after one that is " + c.name,
			frame: b.fromOutside(acknowledging(tcp(c.port, sharedPort, packet.SYN), 1, 0))}
		if c.free {
			next.out = b.toBackend(acknowledging(tcp(c.port, atPort, packet.SYN), 1, 0))
		} else {
			next.reason, next.out = "gateway-full", between(exposedAt, outsideHost,
				acknowledging(tcp(sharedPort, c.port, packet.RST|packet.ACK), 0, 2))
		}
		b.arrives(t, next)
	}
	must(t, b.datapath.DeleteServices(frontends(exposedAt, farPort)))
	b.arrives(t, progCase{name: "an answer of a port that is no longer exposed", reason: "no-service",
		frame: b.onWire(exposedTunnel(b.far.prefix, b.prefix,
			between(b.b3.Addr(), outsideHost, tcp(atPort, 5000, packet.ACK))))})
}

// TestExposedGone: what happens to connections whose backend is gone, and to two of a client that need the same port of
// a backend.
func TestExposedGone(t *testing.T) {
	b := newExposedBench(t)
	b.arrives(t, progCase{name: "a SYN", frame: b.fromOutside(tcp(5000, farPort, packet.SYN)),
		out: b.toBackend(tcp(5000, atPort, packet.SYN))})
	b.expose(t, exposedAt, sharedPort, b.atFar(atPort))
	b.arrives(t, progCase{name: "a port in use at the backend", reason: "gateway-full",
		frame: b.fromOutside(acknowledging(tcp(5000, sharedPort, packet.SYN), 1, 0)),
		out:   between(exposedAt, outsideHost, acknowledging(tcp(sharedPort, 5000, packet.RST|packet.ACK), 0, 2))})
	b.arrives(t, progCase{name: "another port of the client", frame: b.fromOutside(tcp(5001, sharedPort, packet.SYN)),
		out: b.toBackend(tcp(5001, atPort, packet.SYN))})

	// The entries of a connection are evicted one by one.
	inUse, taken := tcpKey(exposedAt, farPort, 5000), tcpKey(b.b3.Addr(), atPort, 5000)
	must(t, b.connections(t).Delete(inUse))
	b.arrives(t, progCase{name: "a port that no packet of the client confirms",
		frame: b.fromOutside(tcp(5000, sharedPort, packet.SYN)), out: b.toBackend(tcp(5000, atPort, packet.SYN))})
	must(t, b.connections(t).Delete(taken))
	b.arrives(t, progCase{name: "a SYN on the port that is free again",
		frame: b.fromOutside(tcp(5000, farPort, packet.SYN)), out: b.toBackend(tcp(5000, atPort, packet.SYN))})
	b.arrives(t, progCase{name: "a connection whose port at the backend is another's", reason: "gateway-full",
		frame: b.fromOutside(acknowledging(tcp(5000, sharedPort, packet.ACK), 1, 2)),
		out:   between(exposedAt, outsideHost, acknowledging(tcp(sharedPort, 5000, packet.RST), 2, 0))})

	was, is := b.atFar(atPort+2), b.atFar(atPort+3)
	b.expose(t, exposedAt, drainPort, was)
	opens, goesOn, gram := tcp(5000, drainPort, packet.SYN), tcp(5000, drainPort, packet.ACK), udp(5000, drainPort)
	for _, c := range []progCase{
		{name: "a SYN", frame: b.fromOutside(opens), out: b.toBackend(tcp(5000, was.Port, packet.SYN))},
		{name: "a datagram", frame: b.fromOutside(gram), out: b.toBackend(udp(5000, was.Port))},
	} {
		b.arrives(t, c)
	}
	b.exposeOf(t, b.of, exposedAt, drainPort, []dpapi.Backend{is}, was)
	for _, c := range []progCase{
		{name: "a segment to a backend that drains", frame: b.fromOutside(goesOn),
			out: b.toBackend(tcp(5000, was.Port, packet.ACK))},
		{name: "a datagram to a backend that drains", frame: b.fromOutside(gram),
			out: b.toBackend(udp(5000, was.Port))},
		{name: "a SYN on the ports of a connection whose backend drains", frame: b.fromOutside(opens),
			out: b.toBackend(tcp(5000, is.Port, packet.SYN))},
	} {
		b.arrives(t, c)
	}
	b.expose(t, exposedAt, drainPort, is)
	b.arrives(t, progCase{name: "a datagram whose backend is gone", frame: b.fromOutside(gram),
		out: b.toBackend(udp(5000, is.Port))})

	other := b.atFar(atPort + 1)
	b.expose(t, exposedAt, farPort, other)
	request := acknowledging(tcp(5000, farPort, packet.ACK), 1, 2)
	b.arrives(t, progCase{name: "a connection whose backend is gone", frame: b.fromOutside(request),
		reason: "no-backend",
		out:    between(exposedAt, outsideHost, acknowledging(tcp(farPort, 5000, packet.RST), 2, 0))})
	b.arrives(t, progCase{name: "a SYN on its ports", frame: b.fromOutside(tcp(5000, farPort, packet.SYN)),
		out: b.toBackend(tcp(5000, atPort+1, packet.SYN))})

	for _, a := range []netip.Addr{exposedAt, b.node} {
		for _, port := range []uint16{farPort, nearPort, noPort, sharedPort, drainPort} {
			must(t, b.datapath.DeleteServices(frontends(a, port)))
		}
	}
	b.arrives(t, progCase{name: "an address without services", frame: b.fromOutside(request), next: true})
	for _, m := range []interface {
		NextKey(key, nextKeyOut any) error
	}{b.datapath.Objects.PilExposedV1, b.datapath.Objects.PilExtargetsV1, b.datapath.Objects.PilExconnsV1,
		b.datapath.Objects.PilMaglevV1} {
		var next [24]byte
		if err := m.NextKey(nil, next[:]); err == nil {
			t.Errorf("%v has an entry without exposed ports", m)
		}
	}
}

// TestExposedErrorLimit: errors about the ports of an external address take none from those of another.
func TestExposedErrorLimit(t *testing.T) {
	b := newExposedBench(t)
	b.exposeOf(t, serving(red, 1<<23|7), redAt, nearPort, nil)
	syn := acknowledging(tcp(5000, otherOne, packet.SYN), 1, 0)
	const burst = 32
	verdict := uint32(verdictRedirect)
	for i := 0; verdict == verdictRedirect; i++ {
		if i > 10*burst {
			t.Fatal("no limit of errors")
		}
		verdict, _, _ = b.run(t, b.datapath.Objects.PilUplinkIn, b.fromOutside(syn), skb{Ifindex: b.uplinkIfindex()})
	}
	b.arrives(t, progCase{name: "another address", frame: b.onWire(between(outsideHost, redAt, syn)),
		reason: "no-service", out: between(redAt, outsideHost,
			acknowledging(tcp(otherOne, 5000, packet.RST|packet.ACK), 0, 2))})
}

// TestChooseBackend: the tables say before a connection which endpoint the program gives it, and afterwards that it
// keeps this one. With affinity, the client's port does not count.
func TestChooseBackend(t *testing.T) {
	b := newExposedBench(t)
	key := dpapi.FrontendKey{Address: netip.AddrPortFrom(exposedAt, 90), Protocol: packet.ProtocolTCP}
	expose := func(affinity time.Duration, backends ...dpapi.Backend) {
		t.Helper()
		must(t, b.datapath.PutServices([]dpapi.Frontend{{
			FrontendKey: key, Exposed: dpapi.Exposed{Services: b.of.ServicesNumber}, Affinity: affinity,
			Backends: backends,
		}}))
	}
	choose := func(port uint16) dpapi.Choice {
		t.Helper()
		c, ok, err := b.datapath.ChooseBackend(key, netip.AddrPortFrom(outsideHost, port))
		if err != nil || !ok {
			t.Fatalf("no endpoint for port %d: %v", port, err)
		}
		return c
	}
	expose(0)
	if _, ok, err := b.datapath.ChooseBackend(key, netip.AddrPortFrom(outsideHost, 1)); ok || err != nil {
		t.Errorf("without endpoints: %v, %v", ok, err)
	}
	for _, affinity := range []time.Duration{0, time.Hour} {
		expose(affinity, b.atFar(atPort), b.atFar(farPort), backendAt(b.b2, atPort))
		seen := map[dpapi.Backend]bool{}
		for port := 6000 + uint16(affinity/time.Hour)*100; len(seen) < 3 && port%100 < 60; port++ {
			first := choose(port)
			seen[first.Backend] = true
			b.run(t, b.datapath.Objects.PilUplinkIn, b.fromOutside(tcp(port, 90, packet.SYN)),
				skb{Ifindex: b.uplinkIfindex()})
			var got bpfobj.PilasterNatEntry
			must(t, b.connections(t).Lookup(tcpKey(exposedAt, 90, port), &got))
			if got.Address.Addr() != first.Plain || got.Port != bigEndian(first.Port) || first.Connected {
				t.Errorf("port %d, affinity %v: %v, and the program chose %v port %d", port, affinity, first,
					got.Address.Addr(), bigEndian(got.Port))
			}
			if then := choose(port); then.Backend != first.Backend || !then.Connected {
				t.Errorf("port %d, connected: %v, before %v", port, then, first)
			}
		}
		if n := map[bool]int{true: 1, false: 3}[affinity != 0]; len(seen) != n {
			t.Errorf("affinity %v: %d endpoints, want %d", affinity, len(seen), n)
		}
	}
	// A new connection from a port does not get an endpoint that drains.
	must(t, b.datapath.PutServices([]dpapi.Frontend{{
		FrontendKey: key, Exposed: dpapi.Exposed{Services: b.of.ServicesNumber},
		Backends: []dpapi.Backend{backendAt(b.b2, atPort)},
		Draining: []dpapi.Backend{b.atFar(atPort), b.atFar(farPort)},
	}}))
	for port := uint16(6000); port < 6004; port++ {
		if c := choose(port); c.Plain != b.b2.plain() {
			t.Errorf("port %d gets %v, which drains", port, c)
		}
	}
	for a, want := range map[netip.Addr][2]bool{
		exposedAt: {false, true}, b.node: {true, true}, outsideHost: {false, false},
	} {
		if node, found, err := b.datapath.LookupExposed(a); err != nil || [2]bool{node, found} != want {
			t.Errorf("%v: of the node %v, exposed %v, %v", a, node, found, err)
		}
	}
	for port, want := range map[uint16]bool{atPort: true, 22: false} {
		is, err := b.datapath.LookupTarget(netip.AddrPortFrom(b.b2.seen(), port), packet.ProtocolTCP)
		if err != nil || is != want {
			t.Errorf("port %d of an endpoint: exposed %v, %v", port, is, err)
		}
	}
}
