package datapath

import (
	"net"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// fromNode returns packets of the node's stack to containers, with the verdicts on them.
func (b *progBench) fromNode(t testing.TB) []progCase {
	node, gateway := b.address(), b.gateway(t, blue)
	frame := func(source, destination netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return packet.Packet{
			Source:      source,
			Destination: destination,
			Body:        body,
			Extensions:  extensions,
		}.Frame(
			host.ContainerMAC,
			host.ContainerMAC,
		)
	}
	inside := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{Source: gateway, Destination: b.b1.seen(), Body: body, Extensions: extensions}
	}
	about := func(from, to netip.Addr) packet.ICMP {
		return packet.ICMP{
			Type:    packet.DestinationUnreachable,
			Code:    4,
			Payload: packet.Packet{Source: from, Destination: to, Body: gram}.Marshal(),
		}
	}
	later := packet.Raw{Proto: 17, Data: []byte("12345678")}
	return []progCase{
		{name: "echo", frame: frame(node, b.b1.seen(), echo), out: inside(echo)},
		{name: "echo from the cache", frame: frame(node, b.b1.seen(), echo), out: inside(echo)},
		{name: "TCP", frame: frame(node, b.b1.seen(), segment), out: inside(segment)},
		{name: "UDP", frame: frame(node, b.b1.seen(), gram), out: inside(gram)},
		{
			name:  "later fragment",
			frame: frame(node, b.b1.seen(), later, packet.Fragment(64, false, 9)),
			out:   inside(later, packet.Fragment(64, false, 9)),
		},
		{
			name:  "error about a container's packet",
			frame: frame(node, b.b1.seen(), about(b.b1.seen(), node)),
			out:   inside(about(b.b1.seen(), gateway)),
		},
		{
			name:  "to red",
			frame: frame(node, b.r1.seen(), gram),
			out:   packet.Packet{Source: b.gateway(t, red), Destination: b.r1.seen(), Body: gram},
		},

		{
			name:   "IPv4",
			frame:  packet.Frame(host.ContainerMAC, host.ContainerMAC, packet.EtherTypeIPv4, make([]byte, 40)),
			reason: "not-ip6",
		},
		{
			name:   "half a TCP header",
			frame:  frame(node, b.b1.seen(), packet.Raw{Proto: 6, Data: make([]byte, 12)}),
			reason: "malformed",
		},
		{
			name:   "routing header",
			frame:  frame(node, b.b1.seen(), gram, packet.Extension{Type: packet.Routing, Data: make([]byte, 6)}),
			reason: "routing-header",
		},
		{
			name:   "error about a packet of others",
			frame:  frame(node, b.b1.seen(), about(b.b2.seen(), node)),
			reason: "icmp-quote",
		},
		{name: "underlay address", frame: frame(b.underlay, b.b1.seen(), gram), reason: "src-not-own"},
		{name: "address of a container", frame: frame(b.b2.seen(), b.b1.seen(), gram), reason: "src-not-own"},
		{name: "gateway", frame: frame(gateway, b.b1.seen(), gram), reason: "src-not-own"},
		{name: "another of the node", frame: frame(node.Next(), b.b1.seen(), gram), reason: "src-not-own"},
		{name: "container of another node", frame: frame(node, sees(b.b3.Addr()), gram), reason: "no-endpoint"},
		{name: "plaintext address", frame: frame(node, b.b1.plain(), gram), reason: "no-endpoint"},
		{name: "gateway as destination", frame: frame(node, gateway, gram), reason: "no-endpoint"},
	}
}

// TestFromNode: only the node's own stack reaches the containers here with their gateway's address.
func TestFromNode(t *testing.T) {
	b := newProgBench(t)
	program, ctx := b.datapath.Objects.PilNode, skb{Ifindex: uint32(b.datapath.NodeNear)}
	for _, c := range b.fromNode(t) {
		b.check(t, program, ctx, c)
	}
	ping := packet.Packet{
		Source:      b.address(),
		Destination: b.b1.seen(),
		Body:        echo,
	}.Frame(
		host.ContainerMAC,
		host.ContainerMAC,
	)
	ctx.IngressIfindex = b.uplinkIfindex()
	b.check(t, program, ctx, progCase{name: "forwarded", frame: ping, reason: "src-not-own"})
	must(t, b.datapath.Objects.PilTenantsV2.Delete(uint32(1)))
	must(t, b.datapath.InvalidateFlows())
	b.check(
		t,
		program,
		skb{Ifindex: uint32(b.datapath.NodeNear)},
		progCase{name: "without its tenant", frame: ping, reason: "no-key"},
	)
}

// TestToNode: containers may answer their node, and may open no connection to it.
func TestToNode(t *testing.T) {
	b := newProgBench(t)
	node, gateway := b.address(), b.gateway(t, blue)
	tcp, tcpInside := b.connect(t, "tcp6", b.b1)
	udp, udpInside := b.connect(t, "udp6", b.b1)
	var listener net.Listener
	var open net.PacketConn
	must(t, b.ns.Do(func() (err error) {
		if listener, err = net.Listen("tcp6", "[::]:0"); err == nil {
			open, err = net.ListenPacket("udp6", "[::]:0")
		}
		return err
	}))
	defer listener.Close()
	defer open.Close()

	port := func(a net.Addr) uint16 { return addrPort(a).Port() }
	stream := func(from, to uint16, flags packet.TCPFlags) packet.TCP {
		return packet.TCP{SourcePort: from, DestinationPort: to, Flags: flags}
	}
	datagram := func(from, to uint16) packet.UDP {
		return packet.UDP{SourcePort: from, DestinationPort: to, Payload: []byte("odd")}
	}
	reply := packet.ICMP{Type: packet.EchoReply, Rest: packet.Echo(1, 1), Payload: []byte("pilaster")}
	about := func(from, to netip.Addr) packet.ICMP {
		return packet.ICMP{
			Type:    packet.DestinationUnreachable,
			Code:    4,
			Payload: packet.Packet{Source: from, Destination: to, Body: gram}.Marshal(),
		}
	}
	frame := func(body packet.Body, extensions ...packet.Extension) []byte {
		return b.frame(b.sent(gateway, body, extensions...))
	}
	outside := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{Source: b.b1.seen(), Destination: node, Body: body, Extensions: extensions}
	}
	mine, its := port(tcp.LocalAddr()), port(tcpInside.LocalAddr())
	asker, service := port(udp.LocalAddr()), port(udpInside.LocalAddr())
	ack, answer := stream(its, mine, packet.ACK), datagram(service, asker)
	for _, c := range []progCase{
		{name: "echo reply", frame: frame(reply), out: outside(reply)},
		{name: "segment of a connection of the node", frame: frame(ack), out: outside(ack)},
		{name: "segment behind options", frame: frame(ack, padding(packet.DestinationOptions)), out: outside(ack,
			padding(packet.DestinationOptions))},
		{name: "answer to a connected socket", frame: frame(answer), out: outside(answer)},
		{name: "error about the node's packet", frame: frame(about(gateway, b.b1.seen())), out: outside(about(node,
			b.b1.seen()))},

		{name: "echo", frame: frame(echo), reason: "to-node"},
		{name: "connection", frame: frame(stream(1000, port(listener.Addr()), packet.SYN)), reason: "to-node"},
		{name: "connection where one is", frame: frame(stream(its, mine, packet.SYN)), reason: "to-node"},
		{name: "segment for a listener", frame: frame(stream(1000, port(listener.Addr()), packet.ACK)),
			reason: "to-node"},
		{name: "segment of no connection", frame: frame(stream(its+1, mine, packet.ACK)), reason: "to-node"},
		{name: "datagram to an open socket", frame: frame(datagram(1000, port(open.LocalAddr()))), reason: "to-node"},
		{name: "datagram to a connected socket, from another port", frame: frame(datagram(service+1, asker)),
			reason: "to-node"},
		{name: "datagram without a socket", frame: frame(gram), reason: "to-node"},
		{name: "later fragment", frame: frame(packet.Raw{Proto: 17, Data: []byte("12345678")}, packet.Fragment(64,
			false, 9)), reason: "to-node"},
		{name: "first fragment of a reply", frame: frame(reply, packet.Fragment(0, true, 9)), reason: "to-node"},
		{name: "first fragment with identification 0", frame: frame(reply, packet.Fragment(0, true, 0)),
			reason: "to-node"},
		{name: "first fragment of an answer", frame: frame(answer, packet.Fragment(0, true, 9)), reason: "to-node"},
		{name: "first fragment of an error", frame: frame(about(gateway, b.b1.seen()), packet.Fragment(0, true, 9)),
			reason: "to-node"},
		{name: "another protocol", frame: frame(packet.Raw{Proto: 132, Data: make([]byte, 12)}), reason: "to-node"},
		{name: "error about a packet of others", frame: frame(about(b.b2.seen(), b.b1.seen())), reason: "icmp-quote"},
		{name: "neighbour solicitation", frame: frame(packet.ICMP{Type: packet.NeighborSolicitation}),
			reason: "nd-ignored"},
		{name: "another tenant's gateway", frame: b.frame(b.sent(b.gateway(t, red), reply)),
			reason: "dst-undecryptable"},
		{name: "source of another", frame: b.frame(packet.Packet{Source: b.b2.seen(), Destination: gateway,
			Body: reply}), reason: "src-not-own"},
	} {
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, c)
	}
	// Another container of the tenant may not answer a packet that the node sent to b1.
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b2.ifindex()}, progCase{
		name: "answer of a container that was not asked", reason: "to-node",
		frame: b.frame(packet.Packet{Source: b.b2.seen(), Destination: gateway, Body: answer}),
	})
}

// TestNodesAllowed: what containers and nodes send each other if the tenant may reach some nodes.
func TestNodesAllowed(t *testing.T) {
	b := newProgBench(t)
	clear := b.add(t, plain, 1)
	alias := func(of tenant.Tenant, node netip.Prefix) netip.Addr {
		a, err := of.Gateway(address.DefaultPlan(), node, of.Current())
		must(t, err)
		return a.Address
	}
	reaching := func(nodes ...netip.Prefix) {
		for _, of := range []tenant.Tenant{blue, plain} {
			of.Network, of.Nodes = tenant.Netpila, nodes
			must(t, b.datapath.putTenant(of))
		}
	}
	type end struct {
		of tenant.Tenant
		c  *testContainer
	}
	ends := map[string]end{"encrypted": {blue, b.b1}, "clear": {plain, clear}}
	sends := func(e end, name string, to netip.Addr, out packet.Packet, reason string, parts ...packet.Extension) {
		t.Helper()
		frame := b.frame(packet.Packet{Source: e.c.seen(), Destination: to, Body: gram, Extensions: parts})
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: e.c.ifindex()},
			progCase{name: name + ", " + e.of.Name, frame: frame, reason: reason, out: out})
	}
	arrives := func(e end, name string, from netip.Addr, out packet.Packet, reason string) {
		t.Helper()
		frame := packet.Packet{Source: from, Destination: e.c.plain(), Body: gram}.Frame(b.uplinkMAC, host.ContainerMAC)
		b.check(t, b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()},
			progCase{name: name + ", " + e.of.Name, frame: frame, reason: reason, out: out})
	}
	third := netip.MustParsePrefix("fd70:696c:6100:3::/64")
	none := packet.Packet{}
	reaching(b.far.prefix)
	for _, e := range ends {
		far := alias(e.of, b.far.prefix)
		sends(e, "to a node", far, packet.Packet{Source: e.c.plain(), Destination: b.far.address(), HopLimit: 63,
			Body: gram}, "")
		sends(e, "to its own node, which is not allowed", e.c.gateway(t, e.of), none, "to-node")
		sends(e, "to a node that is not allowed", alias(e.of, third), none, "to-node")
		arrives(e, "from a node", b.far.address(), packet.Packet{Source: far, Destination: e.c.seen(), Body: gram}, "")
		arrives(e, "from a node, from the cache", b.far.address(), packet.Packet{Source: far, Destination: e.c.seen(),
			Body: gram}, "")
		arrives(e, "from a node that is not allowed", third.Addr().Next(), none, "tenant-mismatch")
		arrives(e, "from another address of a node", b.far.address().Next(), none, "tenant-mismatch")
	}
	// To another address of the node no alias leads.
	sends(ends["clear"], "to another address of a node", b.far.address().Next(), none, "to-node")
	reaching(b.prefix)
	for _, e := range ends {
		own := e.c.gateway(t, e.of)
		sends(e, "to its own node", own, packet.Packet{Source: e.c.seen(), Destination: b.address(), Body: gram}, "")
		sends(e, "a fragment to its own node", own, none, "to-node", packet.Fragment(0, true, 9))
		sends(e, "to another node", alias(e.of, b.far.prefix), none, "to-node")
	}
}
