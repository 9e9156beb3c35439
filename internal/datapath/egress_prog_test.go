package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// Hosts outside, by what the rules of egressBench say of them.
var (
	outsideHost   = netip.MustParseAddr("2001:db8:1::1") // any container reaches it with its egress address
	deniedHost    = netip.MustParseAddr("2001:db8:2::1")
	farHost       = netip.MustParseAddr("2001:db8:3::1")    // by a gateway on the far node
	ownHost       = netip.MustParseAddr("2001:db8:4::1")    // by a gateway on this node
	lostHost      = netip.MustParseAddr("2001:db8:5::1")    // by a gateway to which no route leads
	twoHost       = netip.MustParseAddr("2001:db8:6::1")    // by one of two gateways
	unroutedHost  = netip.MustParseAddr("2001:db8:4:99::1") // by a gateway on this node, without a route
	privateByOwn  = netip.MustParseAddr("64:ff9b::a00:1")   // protected, by a gateway on this node
	privateByFar  = netip.MustParseAddr("64:ff9b::ac10:1")  // protected, by a gateway on the far node
	privateDirect = netip.MustParseAddr("64:ff9b::c0a8:1")  // protected
	outsideRouter = netip.MustParseAddr("2001:db8:99::1")
	lostNode      = netip.MustParsePrefix("fd70:696c:6100:99::/64")
	thirdNode     = netip.MustParsePrefix("fd70:696c:6100:3::/64")
)

// egressBench is a progBench whose blue containers may leave. b1 has an egress address, and this node is a gateway.
type egressBench struct {
	*progBench
	of      tenant.Tenant
	gateway netip.Addr // of this node, as hosts outside see it
}

func newEgressBench(t testing.TB) *egressBench {
	t.Helper()
	b := &egressBench{progBench: newProgBench(t)}
	b.gateway = tenant.EgressAddress(b.prefix, tenant.FirstGatewayIndex)
	b.of = leaving(blue, everywhere, tenant.EgressRule{To: netip.PrefixFrom(deniedHost, 48)},
		b.via(farHost, 48, b.far.prefix), b.via(ownHost, 48, b.prefix), b.via(lostHost, 48, lostNode),
		b.via(twoHost, 48, b.far.prefix, thirdNode), b.via(privateByOwn, 104, b.prefix),
		b.via(privateByFar, 108, b.far.prefix))
	must(t, b.datapath.putTenant(b.of))
	b.leaves(t, b.b1)
	b.route(t, netlink.Route{Dst: host.IPNet(everywhere.To), Gw: b.far.underlay.AsSlice()})
	b.route(t, netlink.Route{Dst: host.IPNet(thirdNode), Gw: b.far.underlay.AsSlice()})
	for _, p := range []netip.Prefix{lostNode, netip.PrefixFrom(unroutedHost, 128)} {
		b.route(t, *hook.UnreachableRoute(p))
	}
	return b
}

func (b *egressBench) route(t testing.TB, r netlink.Route) {
	t.Helper()
	must(t, b.datapath.Netlink.RouteReplace(&r))
}

// leaves gives a container an egress address.
func (b *progBench) leaves(t testing.TB, c *testContainer) {
	t.Helper()
	c.record.Attachments[0].Egress = tenant.EgressAddress(b.datapath.egressPrefix(),
		tenant.FirstEgressIndex+address.Index(c.record.ID))
	must(t, b.datapath.activate(c.record))
}

// via returns a rule by the gateways on some nodes.
func (b *progBench) via(to netip.Addr, bits int, nodes ...netip.Prefix) tenant.EgressRule {
	r := tenant.EgressRule{To: netip.PrefixFrom(to, bits).Masked(), Allow: true}
	for _, n := range nodes {
		r.Via = append(r.Via, tenant.EgressGateway{
			Node: n.String(), Prefix: n, Address: tenant.EgressAddress(n, tenant.FirstGatewayIndex),
		})
	}
	return r
}

// fromB1 runs a packet of b1 as the container sends it.
func (b *egressBench) fromB1(t *testing.T, c progCase) {
	t.Helper()
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, c)
}

// arrives runs a packet from the fabric.
func (b *egressBench) arrives(t *testing.T, c progCase) {
	t.Helper()
	b.check(t, b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()}, c)
}

func (b *egressBench) onWire(p packet.Packet) []byte { return p.Frame(b.uplinkMAC, host.ContainerMAC) }

// tunnelled is a packet in the tunnel between two nodes.
func tunnelled(from, to netip.Prefix, inner packet.Packet) packet.Packet {
	return packet.Packet{
		Source: tenant.EgressTunnel(from), Destination: tenant.EgressTunnel(to),
		Body: packet.Raw{Proto: 41, Data: inner.Marshal()},
	}
}

func between(from, to netip.Addr, body packet.Body, extensions ...packet.Extension) packet.Packet {
	return packet.Packet{Source: from, Destination: to, Body: body, Extensions: extensions}
}

// highPort is long, from a port that a gateway keeps.
func highPort(bytes int) packet.UDP { u := long(bytes); u.SourcePort = 5000; return u }

func withHops(p packet.Packet, hops uint8) packet.Packet { p.HopLimit = hops; return p }

// prohibited is the error that b1 gets about a packet that egress rules deny.
func (b *egressBench) prohibited(about packet.Packet) packet.Packet {
	e := errorAbout(packet.DestinationUnreachable, 0, about.Marshal())
	e.Code = 1
	return packet.Packet{Source: b.b1Gateway, Destination: b.b1.seen(), Body: e}
}

var (
	halfTCP  = packet.Raw{Proto: packet.ProtocolTCP, Data: make([]byte, 12)}
	sctp     = packet.Raw{Proto: 132, Data: make([]byte, 12)}
	oneByte  = packet.Raw{Proto: packet.ProtocolUDP, Data: []byte{1}}
	restOf   = packet.Raw{Proto: packet.ProtocolUDP, Data: []byte("12345678")}
	question = udp(5000, 53)
	noSum    = packet.Raw{Proto: packet.ProtocolUDP, Data: []byte{5000 >> 8, 5000 & 0xff, 0, 53, 0, 8, 0, 0}}
	answers  = udp(53, 5000)
)

// TestEgressPackets: packets of containers to hosts outside.
func TestEgressPackets(t *testing.T) {
	b := newEgressBench(t)
	direct := func(body packet.Body) packet.Packet {
		return withHops(between(b.b1.egress(), outsideHost, body), 63)
	}
	byFar := func(body packet.Body) packet.Packet {
		return tunnelled(b.prefix, b.far.prefix, withHops(between(b.b1.plain(), farHost, body), 63))
	}
	last, lastByFar := withHops(b.sent(outsideHost, question), 1), withHops(b.sent(farHost, question), 1)
	tooLong, tooLongByFar := b.sent(outsideHost, long(1501)), b.sent(farHost, long(1461))
	tooFar, tooLongByOwn := withHops(tooLong, 1), b.sent(ownHost, highPort(1501))
	for _, c := range []progCase{
		{name: "UDP", frame: b.frame(b.sent(outsideHost, question)), out: direct(question)},
		{name: "UDP from the cache", frame: b.frame(b.sent(outsideHost, question)), out: direct(question)},
		{name: "an echo", frame: b.frame(b.sent(outsideHost, echo)), out: direct(echo)},
		{name: "SCTP", frame: b.frame(b.sent(outsideHost, sctp)), out: direct(sctp)},
		{name: "1,500 bytes", frame: b.frame(b.sent(outsideHost, long(1500))), out: direct(long(1500))},
		{name: "by a gateway", frame: b.frame(b.sent(farHost, question)), out: byFar(question)},
		{name: "by a gateway, from the cache", frame: b.frame(b.sent(farHost, question)), out: byFar(question)},
		{name: "1,460 bytes by a gateway", frame: b.frame(b.sent(farHost, long(1460))), out: byFar(long(1460))},

		{name: "by this node", frame: b.frame(b.sent(ownHost, question)),
			out: withHops(between(b.gateway, ownHost, question), 63)},
		{name: "1,500 bytes by this node", frame: b.frame(b.sent(ownHost, highPort(1500))),
			out: withHops(between(b.gateway, ownHost, highPort(1500)), 63)},

		{name: "denied", frame: b.frame(b.sent(deniedHost, question)), reason: "egress-denied",
			out: b.prohibited(b.sent(deniedHost, question))},
		{name: "protected", frame: b.frame(b.sent(privateDirect, question)), reason: "egress-denied",
			out: b.prohibited(b.sent(privateDirect, question))},
		{name: "protected, by a gateway", frame: b.frame(b.sent(privateByFar, question)), reason: "egress-denied",
			out: b.prohibited(b.sent(privateByFar, question))},
		{name: "a hop limit of 1", frame: b.frame(last), reason: "hop-limit",
			out: b.icmpFromNode(packet.TimeExceeded, 0, last)},
		{name: "a hop limit of 1 by a gateway", frame: b.frame(lastByFar), reason: "hop-limit",
			out: b.icmpFromNode(packet.TimeExceeded, 0, lastByFar)},
		{name: "1,501 bytes", frame: b.frame(tooLong), reason: "too-big",
			out: b.icmpFromNode(packet.PacketTooBig, 1500, tooLong)},
		{name: "1,501 bytes and a hop limit of 1", frame: b.frame(tooFar), reason: "hop-limit",
			out: b.icmpFromNode(packet.TimeExceeded, 0, tooFar)},
		{name: "1,461 bytes by a gateway", frame: b.frame(tooLongByFar), reason: "too-big",
			out: b.icmpFromNode(packet.PacketTooBig, 1460, tooLongByFar)},
		{name: "1,501 bytes by this node", frame: b.frame(tooLongByOwn), reason: "too-big",
			out: b.icmpFromNode(packet.PacketTooBig, 1500, tooLongByOwn)},
		{name: "no route to the gateway", frame: b.frame(b.sent(lostHost, question)), reason: "no-route"},
		{name: "a fragment by a gateway", frame: b.frame(b.sent(farHost, question, packet.Fragment(0, true, 9))),
			reason: "gateway-protocol"},
		{name: "a later fragment by a gateway", frame: b.frame(b.sent(farHost, restOf, packet.Fragment(64, false, 9))),
			reason: "gateway-protocol"},
		{name: "SCTP by a gateway", frame: b.frame(b.sent(farHost, sctp)), reason: "gateway-protocol"},
		{name: "an error by a gateway", frame: b.frame(b.sent(farHost, packet.ICMP{
			Type:    packet.DestinationUnreachable,
			Payload: between(farHost, b.b1.seen(), answers).Marshal(),
		})), reason: "gateway-protocol"},
	} {
		b.fromB1(t, c)
	}
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b2.ifindex()}, progCase{
		name: "without an egress address", frame: b.frame(between(b.b2.seen(), outsideHost, question)),
		reason: "no-egress-address",
	})
	nodes := b.of
	nodes.Nodes = []netip.Prefix{netip.MustParsePrefix("2001:db8:7::/48")}
	must(t, b.datapath.putTenant(nodes))
	to := netip.MustParseAddr("2001:db8:7::1")
	b.fromB1(t, progCase{name: "a prefix of nodes", frame: b.frame(b.sent(to, question)), reason: "egress-denied",
		out: b.prohibited(b.sent(to, question))})
}

// TestEgressStaysAtItsGateway: a session keeps its gateway while both answer. One of datagrams leaves a silent one.
func TestEgressStaysAtItsGateway(t *testing.T) {
	b := newEgressBench(t)
	alive := func(n netip.Prefix, alive bool) { must(t, b.datapath.SetGatewayAlive(n, alive)) }
	by := func(n netip.Prefix, body packet.Body) packet.Packet {
		return tunnelled(b.prefix, n, withHops(between(b.b1.plain(), twoHost, body), 63))
	}
	nodes := [2]netip.Prefix{b.far.prefix, thirdNode}
	for i := range 16 { // a gateway that is chosen at random is the right one half of the time
		n, other := nodes[i%2], nodes[1-i%2]
		alive(other, false)
		body := udp(6000+uint16(i), 53)
		b.fromB1(t, progCase{name: "the gateway that answers", frame: b.frame(b.sent(twoHost, body)), out: by(n, body)})
		alive(other, true)
		b.fromB1(t, progCase{name: "a session that has a gateway", frame: b.frame(b.sent(twoHost, body)),
			out: by(n, body)})
		alive(n, false)
		b.fromB1(t, progCase{name: "a session whose gateway is silent", frame: b.frame(b.sent(twoHost, body)),
			out: by(other, body)})
		alive(n, true)
		b.fromB1(t, progCase{name: "a session that has left its gateway", frame: b.frame(b.sent(twoHost, body)),
			out: by(other, body)})
	}
}

// TestEgressArrives: packets of hosts outside to containers, and errors of routers.
func TestEgressArrives(t *testing.T) {
	b := newEgressBench(t)
	from := func(source netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return b.onWire(between(source, b.b1.egress(), body, extensions...))
	}
	inside := func(source netip.Addr, body packet.Body) packet.Packet { return between(source, b.b1.seen(), body) }
	about := func(source, destination netip.Addr, body packet.Body) packet.ICMP {
		return errorAbout(packet.PacketTooBig, 1280, between(source, destination, body).Marshal())
	}
	begin := func() {
		t.Helper()
		for _, to := range []netip.Addr{outsideHost, farHost} {
			if verdict, _, reasons := b.run(t, b.datapath.Objects.PilContainer, b.frame(b.sent(to, question)),
				skb{Ifindex: b.b1.ifindex()}); verdict != verdictRedirect {
				t.Fatalf("begin a session: verdict %d, counted %v", verdict, reasons)
			}
		}
	}
	begin()
	b.run(t, b.datapath.Objects.PilContainer, b.frame(b.sent(outsideHost, echo)), skb{Ifindex: b.b1.ifindex()})
	absent := tenant.EgressAddress(b.prefix, tenant.FirstEgressIndex+999)
	for _, c := range []progCase{
		{name: "an answer", frame: from(outsideHost, answers), out: inside(outsideHost, answers)},
		{name: "an answer from the cache", frame: from(outsideHost, answers), out: inside(outsideHost, answers)},
		{name: "a router's error", frame: from(outsideRouter, about(b.b1.egress(), outsideHost, question)),
			out: inside(outsideRouter, about(b.b1.seen(), outsideHost, question))},

		{name: "another port", frame: from(outsideHost, udp(53, 5001)), reason: "no-session"},
		{name: "another host", frame: from(outsideHost.Next(), answers), reason: "no-session"},
		{name: "a SYN", frame: from(outsideHost, tcp(80, 5000, packet.SYN)), reason: "no-session"},
		{name: "an echo with the container's identifier", frame: from(outsideHost, echo), reason: "no-session"},
		{name: "an answer past the gateway", frame: from(farHost, answers), reason: "no-session"},
		{name: "no such address", frame: b.onWire(between(outsideHost, absent, answers)), reason: "no-endpoint"},
		{name: "half a TCP header", frame: from(outsideHost, halfTCP), reason: "malformed"},
		{name: "an error about another container's packet", reason: "icmp-quote",
			frame: from(outsideRouter, about(absent, outsideHost, question))},
		{name: "an error about no session", reason: "no-session",
			frame: from(outsideRouter, about(b.b1.egress(), outsideHost, udp(5001, 53)))},
		{name: "an error without a quote", frame: from(outsideRouter, errorAbout(packet.PacketTooBig, 1280, nil)),
			reason: "icmp-quote"},
		{name: "an error about local traffic", frame: from(outsideRouter, about(b.b1.egress(), b.b2.plain(), question)),
			reason: "icmp-quote"},
	} {
		b.arrives(t, c)
	}

	b.check(t, b.datapath.Objects.PilEgressIn, skb{Ifindex: b.uplinkIfindex()}, progCase{
		name: "the address on another node", reason: "no-endpoint",
		frame: b.onWire(between(outsideHost, changed(b.b1.egress(), func(p *address.Plain) { p.Node = thirdNode }),
			answers)),
	})

	// A packet in the middle of a connection may be older than the session table, but not if it comes from outside.
	must(t, b.datapath.Objects.PolAdoptionsV1.Put(uint32(1), uint64(math.MaxInt64)))
	b.arrives(t, progCase{name: "a segment while sessions are adopted", reason: "no-session",
		frame: from(outsideHost, tcp(80, 7000, packet.ACK))})

	// What the rules say now counts, not what they said when the session began.
	denied := b.of
	denied.Egress = append([]tenant.EgressRule{{To: netip.PrefixFrom(outsideHost, 128)}}, denied.Egress...)
	must(t, b.datapath.putTenant(denied))
	b.arrives(t, progCase{name: "an answer after a denial", frame: from(outsideHost, answers), reason: "no-session"})
	must(t, b.datapath.putTenant(b.of))
	b.arrives(t, progCase{name: "an answer after permission", frame: from(outsideHost, answers),
		out: inside(outsideHost, answers)})
	must(t, b.datapath.SetOwnAddresses([]netip.Addr{outsideHost}))
	b.arrives(t, progCase{name: "an answer of a protected host", frame: from(outsideHost, answers),
		reason: "no-session"})
}

// TestGatewayOut: packets that a gateway gets in the tunnel, and what it sends to hosts outside.
func TestGatewayOut(t *testing.T) {
	b := newEgressBench(t)
	b3 := b.b3.Addr()
	sent := func(to netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return b.onWire(tunnelled(b.far.prefix, b.prefix, between(b3, to, body, extensions...)))
	}
	outside := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return withHops(between(b.gateway, ownHost, body, extensions...), 63)
	}
	options := func(flags packet.TCPFlags, options ...byte) packet.TCP {
		s := tcp(5000, 80, flags)
		s.Options = options
		return s
	}
	const mss, most = "\x02\x04\x05\xa0", "\x02\x04\x05\x78" // 1,440 and 1,400 bytes
	syn := func(o string) packet.TCP { return options(packet.SYN, []byte(o)...) }
	tunnel := tunnelled(b.far.prefix, b.prefix, between(b3, ownHost, question))
	fromHost, otherProtocol, cut := tunnel, tunnel, tunnel
	fromHost.Source = b.far.address()
	otherProtocol.Body = packet.Raw{Proto: 4, Data: between(b3, ownHost, question).Marshal()}
	cut.Body = packet.Raw{Proto: 41, Data: between(b3, ownHost, question).Marshal()[:39]}
	for _, c := range []progCase{
		{name: "UDP", frame: sent(ownHost, question), out: outside(question)},
		{name: "UDP of a known connection", frame: sent(ownHost, question), out: outside(question)},
		{name: "TCP", frame: sent(ownHost, tcp(5000, 80, packet.SYN)), out: outside(tcp(5000, 80, packet.SYN))},

		{name: "segments that are too long for the tunnel", frame: sent(ownHost, syn(mss)), out: outside(syn(most))},
		{name: "segments that fit", frame: sent(ownHost, syn("\x02\x04\x05\x14")),
			out: outside(syn("\x02\x04\x05\x14"))},
		{name: "at an odd offset", frame: sent(ownHost, syn("\x01"+mss+"\x01\x01\x01")),
			out: outside(syn("\x01" + most + "\x01\x01\x01"))},
		{name: "after other options", frame: sent(ownHost, syn("\x01\x01\x08\x0a12345678\x03\x03\x07"+mss+"\x00")),
			out: outside(syn("\x01\x01\x08\x0a12345678\x03\x03\x07" + most + "\x00"))},
		{name: "after 36 bytes", frame: sent(ownHost, syn(strings.Repeat("\x01", 36)+mss)),
			out: outside(syn(strings.Repeat("\x01", 36) + most))},
		{name: "behind an extension header", frame: sent(ownHost, syn(mss), padding(packet.DestinationOptions)),
			out: outside(syn(most), padding(packet.DestinationOptions))},
		{name: "with ECN", frame: sent(ownHost, options(packet.SYN|0xc0, []byte(mss)...)),
			out: outside(options(packet.SYN|0xc0, []byte(most)...))},
		{name: "not in a SYN", frame: sent(ownHost, options(packet.ACK, []byte(mss)...)),
			out: outside(options(packet.ACK, []byte(mss)...))},
		{name: "after the last option", frame: sent(ownHost, syn("\x00\x04\x00\x00"+mss)),
			out: outside(syn("\x00\x04\x00\x00" + mss))},
		{name: "in another option", frame: sent(ownHost, syn("\xfe\x08\x02\x04\x02\x04\x05\xa0")),
			out: outside(syn("\xfe\x08\x02\x04\x02\x04\x05\xa0"))},
		{name: "after an option without a length", frame: sent(ownHost, syn("\x08\x01"+mss+"\x00\x00")),
			out: outside(syn("\x08\x01" + mss + "\x00\x00"))},
		{name: "of a wrong length", frame: sent(ownHost, syn("\x02\x06\x05\xa0\x00\x00\x00\x00")),
			out: outside(syn("\x02\x06\x05\xa0\x00\x00\x00\x00"))},

		{name: "from no tunnel address", frame: b.onWire(fromHost), reason: "gateway-denied"},
		{name: "another protocol in the tunnel", frame: b.onWire(otherProtocol), reason: "gateway-denied"},
		{name: "half a header in the tunnel", frame: b.onWire(cut), reason: "gateway-denied"},
		{name: "a container of another node", reason: "gateway-denied",
			frame: b.onWire(tunnelled(thirdNode, b.prefix, between(b3, ownHost, question)))},
		{name: "from a node", reason: "gateway-denied",
			frame: b.onWire(tunnelled(b.far.prefix, b.prefix, between(b.far.address(), ownHost, question)))},
		{name: "another tenant", reason: "gateway-denied", frame: b.onWire(tunnelled(b.far.prefix, b.prefix,
			between(changed(b3, func(p *address.Plain) { p.Tenant = 2 }), ownHost, question)))},
		{name: "a destination without a gateway", frame: sent(outsideHost, question), reason: "gateway-denied"},
		{name: "a destination by another gateway", frame: sent(farHost, question), reason: "gateway-denied"},
		{name: "a protected destination", frame: sent(privateByOwn, question), reason: "gateway-denied"},
		{name: "a fragment", frame: sent(ownHost, question, packet.Fragment(0, true, 9)), reason: "gateway-protocol"},
		{name: "SCTP", frame: sent(ownHost, sctp), reason: "gateway-protocol"},
		{name: "half a TCP header", frame: sent(ownHost, halfTCP), reason: "malformed"},
		{name: "no route", frame: sent(unroutedHost, question), reason: "no-route"},
		{name: "a hop limit of 1", reason: "hop-limit",
			frame: b.onWire(tunnelled(b.far.prefix, b.prefix, withHops(between(b3, ownHost, question), 1)))},
	} {
		b.arrives(t, c)
	}

	// All ports to one host are in use.
	o := &b.datapath.Objects
	full, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 40, ValueSize: 24, MaxEntries: 1 << 18})
	must(t, err)
	defer full.Close()
	keys, values := make([]bpfobj.PilasterNatKey, 0, 1<<16), make([]bpfobj.PilasterNatEntry, 1<<16-1024)
	for port := 1024; port < 1<<16; port++ {
		keys = append(keys, bpfobj.PilasterNatKey{
			Local: bpfobj.ToAddr(b.gateway), Remote: bpfobj.ToAddr(ownHost), LocalPort: bigEndian(uint16(port)),
			RemotePort: bigEndian(99), Proto: packet.ProtocolUDP,
		})
	}
	_, err = full.BatchUpdate(keys, values, nil)
	must(t, err)
	must(t, o.PilGwnatV1.Put(bpfobj.ToAddr(b.gateway), full))
	b.arrives(t, progCase{name: "no free port", frame: sent(ownHost, udp(5000, 99)), reason: "gateway-full"})

	must(t, o.PilGwnatV1.Delete(bpfobj.ToAddr(b.gateway)))
	b.arrives(t, progCase{name: "no table of connections", frame: sent(ownHost, question), reason: "gateway-denied"})
	must(t, o.PilGwtenantsV1.Delete(uint32(1)))
	b.arrives(t, progCase{name: "no gateway of this tenant", frame: sent(ownHost, question), reason: "gateway-denied"})
	b.fromB1(t, progCase{name: "no gateway of this container's tenant", frame: b.frame(b.sent(ownHost, question)),
		reason: "gateway-denied"})
}

// TestGatewayBack: packets of hosts outside to a gateway, and errors about packets of the gateway.
func TestGatewayBack(t *testing.T) {
	b := newEgressBench(t)
	b3 := b.b3.Addr()
	begin := func(node netip.Prefix, source netip.Addr, body packet.Body) {
		t.Helper()
		frame := b.onWire(tunnelled(node, b.prefix, between(source, ownHost, body)))
		if verdict, _, reasons := b.run(t, b.datapath.Objects.PilUplinkIn, frame,
			skb{Ifindex: b.uplinkIfindex()}); verdict != verdictRedirect {
			t.Fatalf("begin a connection: verdict %d, counted %v", verdict, reasons)
		}
	}
	begin(b.far.prefix, b3, question)
	b.fromB1(t, progCase{name: "a connection of a container here", frame: b.frame(b.sent(ownHost, udp(5003, 53))),
		out: withHops(between(b.gateway, ownHost, udp(5003, 53)), 63)})
	begin(lostNode, changed(b3, func(p *address.Plain) { p.Node = lostNode }), udp(5001, 53))
	from := func(source netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return b.onWire(between(source, b.gateway, body, extensions...))
	}
	back := func(body packet.Body) packet.Packet {
		return tunnelled(b.prefix, b.far.prefix, withHops(between(ownHost, b3, body), 63))
	}
	about := func(source, destination netip.Addr, body packet.Body, extensions ...packet.Extension) packet.ICMP {
		return errorAbout(packet.PacketTooBig, 1280, between(source, destination, body, extensions...).Marshal())
	}
	big := between(ownHost, b.gateway, packet.UDP{SourcePort: 53, DestinationPort: 5000, Payload: make([]byte, 1413)})
	tooBig := between(b.gateway, ownHost, errorAbout(packet.PacketTooBig, 1460, big.Marshal()))
	for _, c := range []progCase{
		{name: "an answer", frame: from(ownHost, answers), out: back(answers)},
		{name: "an answer from the cache", frame: from(ownHost, answers), out: back(answers)},
		{name: "a router's error", frame: from(outsideRouter, about(b.gateway, ownHost, noSum)),
			out: back(about(b3, ownHost, noSum))},
		{name: "an answer to a container here", frame: from(ownHost, udp(53, 5003)),
			out: between(ownHost, b.b1.seen(), udp(53, 5003))},

		{name: "another port", frame: from(ownHost, udp(53, 5002)), reason: "no-session"},
		{name: "another host", frame: from(ownHost.Next(), answers), reason: "no-session"},
		{name: "a fragment", frame: from(ownHost, answers, packet.Fragment(0, true, 9)), reason: "gateway-protocol"},
		{name: "SCTP", frame: from(ownHost, sctp), reason: "gateway-protocol"},
		{name: "half a TCP header", frame: from(ownHost, halfTCP), reason: "malformed"},
		{name: "no route to the node", frame: from(ownHost, udp(53, 5001)), reason: "no-route"},
		{name: "a hop limit of 1", frame: b.onWire(withHops(between(ownHost, b.gateway, answers), 1)),
			reason: "hop-limit"},
		{name: "1,461 bytes", frame: b.onWire(big), reason: "too-big", out: tooBig},
		{name: "an error without a quote", frame: from(outsideRouter, errorAbout(packet.PacketTooBig, 1280, nil)),
			reason: "icmp-quote"},
		{name: "an error about a packet of others", reason: "icmp-quote",
			frame: from(outsideRouter, about(b.gateway.Next(), ownHost, question))},
		{name: "an error about a fragment", reason: "icmp-quote",
			frame: from(outsideRouter, about(b.gateway, ownHost, restOf, packet.Fragment(64, false, 9)))},
		{name: "an error about half a header", reason: "icmp-quote",
			frame: from(outsideRouter, about(b.gateway, ownHost, oneByte))},
		{name: "an error about no connection", reason: "no-session",
			frame: from(outsideRouter, about(b.gateway, ownHost, udp(5002, 53)))},
	} {
		b.arrives(t, c)
	}
	// The table evicts entries one by one. Without that for answers, the next packet makes another one.
	connections := b.connections(t)
	defer connections.Close()
	must(t, connections.Delete(bpfobj.PilasterNatKey{
		Local: bpfobj.ToAddr(b.gateway), Remote: bpfobj.ToAddr(ownHost), LocalPort: bigEndian(5000),
		RemotePort: bigEndian(53), Proto: packet.ProtocolUDP,
	}))
	begin(b.far.prefix, b3, question)
	b.arrives(t, progCase{name: "an answer after its entry was evicted", frame: from(ownHost, answers),
		out: back(answers)})
}

// connections opens the table of this gateway's connections.
func (b *egressBench) connections(t *testing.T) *ebpf.Map {
	t.Helper()
	var id ebpf.MapID
	must(t, b.datapath.Objects.PilGwnatV1.Lookup(bpfobj.ToAddr(b.gateway), &id))
	m, err := ebpf.NewMapFromID(id)
	must(t, err)
	return m
}

// TestGatewayAnswers: packets in the tunnel from a gateway to a container of this node.
func TestGatewayAnswers(t *testing.T) {
	b := newEgressBench(t)
	for _, to := range []netip.Addr{farHost, outsideHost} {
		b.run(t, b.datapath.Objects.PilContainer, b.frame(b.sent(to, question)), skb{Ifindex: b.b1.ifindex()})
	}
	by := func(node netip.Prefix, source netip.Addr, to netip.Addr, body packet.Body) []byte {
		return b.onWire(tunnelled(node, b.prefix, between(source, to, body)))
	}
	b1 := b.b1.plain()
	for _, c := range []progCase{
		{name: "an answer", frame: by(b.far.prefix, farHost, b1, answers), out: between(farHost, b.b1.seen(), answers)},

		{name: "without a session", frame: by(b.far.prefix, farHost, b1, udp(53, 5001)), reason: "no-session"},
		{name: "by another gateway", frame: by(thirdNode, farHost, b1, answers), reason: "gateway-denied"},
		{name: "of a host without a gateway", frame: by(b.far.prefix, outsideHost, b1, answers),
			reason: "gateway-denied"},
		{name: "of a denied host", frame: by(b.far.prefix, deniedHost, b1, answers), reason: "gateway-denied"},
		{name: "of a protected host", frame: by(b.far.prefix, privateByFar, b1, answers), reason: "gateway-denied"},
		{name: "to another node's container", reason: "gateway-denied",
			frame: by(b.far.prefix, farHost, changed(b1, func(p *address.Plain) { p.Node = thirdNode }), answers)},
		{name: "to this node", frame: by(b.far.prefix, farHost, b.address(), answers), reason: "gateway-denied"},
		{name: "to another tenant", frame: by(b.far.prefix, farHost, b.r1.plain(), answers), reason: "gateway-denied"},
		{name: "to no container", reason: "no-endpoint",
			frame: by(b.far.prefix, farHost, changed(b1, func(p *address.Plain) { p.Index++ }), answers)},
		{name: "half a TCP header", frame: by(b.far.prefix, farHost, b1, halfTCP), reason: "malformed"},
	} {
		b.arrives(t, c)
	}

	// The container's own node is the gateway.
	b.run(t, b.datapath.Objects.PilContainer, b.frame(b.sent(ownHost, question)), skb{Ifindex: b.b1.ifindex()})
	answer := b.onWire(between(ownHost, b.gateway, answers))
	b.arrives(t, progCase{name: "an answer by this node", frame: answer, out: between(ownHost, b.b1.seen(), answers)})
	denied := b.of
	denied.Egress = append([]tenant.EgressRule{{To: netip.PrefixFrom(ownHost.Next(), 128)}}, denied.Egress...)
	for i, r := range denied.Egress {
		if r.To.Contains(ownHost) && r.To.Bits() > 0 {
			denied.Egress[i] = tenant.EgressRule{To: r.To}
			denied.Egress = append(denied.Egress, tenant.EgressRule{To: netip.MustParsePrefix("2001:db8:ffff::/48"),
				Allow: true, Via: r.Via})
			break
		}
	}
	must(t, b.datapath.putTenant(denied))
	b.arrives(t, progCase{name: "an answer by this node after a denial", frame: answer, reason: "gateway-denied"})
}

// TestGatewayAddressIsNoHosts: no process of the host sends with the address that an operator gave to a gateway.
func TestGatewayAddressIsNoHosts(t *testing.T) {
	b := newEgressBench(t)
	own := netip.MustParseAddr("2001:db8:7::9")
	of := b.of
	of.Egress = []tenant.EgressRule{{To: netip.MustParsePrefix("::/0"), Allow: true, Via: []tenant.EgressGateway{
		{Node: "n1", Prefix: b.prefix, Address: own},
	}}}
	must(t, b.datapath.putTenant(of))
	c := progCase{name: "a process with a gateway's address", frame: b.onWire(between(own, outsideHost, question)),
		reason: "host-claims-tenant"}
	b.check(t, b.datapath.Objects.PilUplinkOut, skb{Ifindex: b.uplinkIfindex()}, c)
	c.name += ", by another interface"
	b.check(t, b.datapath.Objects.PilEdgeOut, skb{Ifindex: b.uplinkIfindex()}, c)
}

// TestGatewayConnectionsStay: after an upgrade to a build that knows no tenant's gateway yet, the tenants come one
// after another, and each keeps the connections that the gateway has for it.
func TestGatewayConnectionsStay(t *testing.T) {
	b := newEgressBench(t)
	tables := func(of ...tenant.Tenant) (ids []uint32) {
		for i, g := range of {
			ids = append(ids, 0)
			must(t, b.datapath.Objects.PilGwnatV1.Lookup(bpfobj.ToAddr(g.Egress[0].Via[0].Address), &ids[i]))
		}
		return ids
	}
	at := func(of tenant.Tenant, address string) tenant.Tenant {
		of.Egress = []tenant.EgressRule{{To: netip.MustParsePrefix("::/0"), Allow: true, Via: []tenant.EgressGateway{
			{Node: "n1", Prefix: b.prefix, Address: netip.MustParseAddr(address)},
		}}}
		return of
	}
	both := []tenant.Tenant{at(blue, "2001:db8:7::8"), at(red, "2001:db8:7::9")}
	put := func() {
		for _, of := range both {
			must(t, b.datapath.putTenant(of))
		}
	}
	put()
	before := tables(both...)
	for _, of := range both {
		must(t, b.datapath.Objects.PilGwtenantsV1.Delete(uint32(of.Current().ID)))
	}
	put()
	if after := tables(both...); !slices.Equal(before, after) {
		t.Errorf("tables of connections %v, want %v as before", after, before)
	}
	must(t, b.datapath.putTenant(at(blue, "2001:db8:7::a")))
	if err := b.datapath.Objects.PilGwnatV1.Lookup(bpfobj.ToAddr(both[0].Egress[0].Via[0].Address),
		new(uint32)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("the connections of an address that no tenant has: %v", err)
	}
}

// TestGatewayProbes: a gateway answers probes, and a node notes answers.
func TestGatewayProbes(t *testing.T) {
	b := newEgressBench(t)
	probe := func(magic uint32, kind byte, from netip.Prefix) packet.Packet {
		data := append(binary.BigEndian.AppendUint32(nil, magic), kind, 0, 0, 0)
		return packet.Packet{
			Source: tenant.EgressTunnel(from), Destination: tenant.EgressTunnel(b.prefix),
			Body: packet.Raw{Proto: 59, Data: data},
		}
	}
	const magic = 0x50475750
	question := probe(magic, 1, b.far.prefix)
	answer := probe(magic, 2, b.far.prefix)
	answer.Source, answer.Destination = answer.Destination, answer.Source
	short := question
	short.Body = packet.Raw{Proto: 59, Data: make([]byte, 7)}
	fromHost := question
	fromHost.Source = b.far.address()
	for _, c := range []progCase{
		{name: "a probe", frame: b.onWire(question), out: answer},
		{name: "another magic", frame: b.onWire(probe(magic+1, 1, b.far.prefix)), reason: "gateway-denied"},
		{name: "another kind", frame: b.onWire(probe(magic, 3, b.far.prefix)), reason: "gateway-denied"},
		{name: "a short probe", frame: b.onWire(short), reason: "gateway-denied"},
		{name: "a probe from no tunnel address", frame: b.onWire(fromHost), reason: "gateway-denied"},
	} {
		b.arrives(t, c)
	}
	// Routers' errors about probes are no drops; other errors are no packets in a tunnel.
	errorTo := func(p packet.Packet) []byte {
		about := errorAbout(packet.DestinationUnreachable, 0, p.Marshal())
		return b.onWire(between(outsideRouter, tenant.EgressTunnel(b.prefix), about))
	}
	sent := question
	sent.Source, sent.Destination = question.Destination, question.Source
	verdict, _, reasons := b.run(t, b.datapath.Objects.PilUplinkIn, errorTo(sent), skb{Ifindex: b.uplinkIfindex()})
	if verdict != verdictDrop || len(reasons) > 0 {
		t.Errorf("an error about a probe: verdict %d, counted %v", verdict, reasons)
	}
	echoReply := between(outsideRouter, tenant.EgressTunnel(b.prefix), packet.ICMP{
		Type: packet.EchoReply, Payload: sent.Marshal(),
	})
	for _, c := range []progCase{
		{name: "an error about another node's probe", frame: errorTo(question), reason: "gateway-denied"},
		{name: "an error about a packet in a tunnel", reason: "gateway-denied",
			frame: errorTo(tunnelled(b.prefix, b.far.prefix, between(b.b1.plain(), farHost, udp(5000, 53))))},
		{name: "an echo with a quote", frame: b.onWire(echoReply), reason: "gateway-denied"},
	} {
		b.arrives(t, c)
	}

	if _, ok, err := b.datapath.GatewayAnswered(b.far.prefix); ok || err != nil {
		t.Errorf("before an answer: %v, %v", ok, err)
	}
	verdict, _, reasons = b.run(t, b.datapath.Objects.PilUplinkIn, b.onWire(probe(magic, 2, b.far.prefix)),
		skb{Ifindex: b.uplinkIfindex()})
	if _, ok, err := b.datapath.GatewayAnswered(b.far.prefix); !ok || err != nil || verdict != verdictDrop ||
		len(reasons) > 0 {
		t.Errorf("an answer: verdict %d, counted %v, noted %v, %v", verdict, reasons, ok, err)
	}
}

// egressOf is an egress address of a node.
func egressOf(node netip.Prefix) netip.Addr {
	return tenant.EgressAddress(node, tenant.FirstEgressIndex)
}

// TestEgressPrefix: egress addresses of a prefix of their own are the containers' alone, too.
func TestEgressPrefix(t *testing.T) {
	b := newEgressBench(t)
	config := b.datapath.config
	config.Plan.Egress = netip.MustParsePrefix("2001:db8:e000::/48")
	b.reopen(t, config)
	b.restore(t, b.b1, b.b2, b.r1)
	must(t, b.datapath.putTenant(b.of))
	b.leaves(t, b.b1)
	own, other := egressOf(netip.MustParsePrefix("2001:db8:e000:1::/64")),
		egressOf(netip.MustParsePrefix("2001:db8:e000:2::/64"))
	b.fromB1(t, progCase{name: "to a host outside", frame: b.frame(b.sent(outsideHost, question)),
		out: withHops(between(b.b1.egress(), outsideHost, question), 63)})
	b.arrives(t, progCase{name: "an answer", frame: b.onWire(between(outsideHost, b.b1.egress(), answers)),
		out: between(outsideHost, b.b1.seen(), answers)})
	b.arrives(t, progCase{name: "an own address from the fabric", reason: "own-source",
		frame: b.onWire(between(own, b.underlay, question))})
	b.arrives(t, progCase{name: "to a gateway", frame: b.onWire(tunnelled(b.far.prefix, b.prefix,
		between(b.b3.Addr(), ownHost, question))), out: withHops(between(b.gateway, ownHost, question), 63)})
	edge := skb{Ifindex: b.edgeDevices(t)["eth1"]}
	for _, c := range []struct {
		name, in string
		source   netip.Addr
	}{
		{"an own address", "own-source", own},
		{"another node's", "tenant-to-node", other},
	} {
		frame := between(c.source, outsideHost, question).Frame(broadcastMAC, host.ContainerMAC)
		b.check(t, b.datapath.Objects.PilEdgeIn, edge, progCase{name: c.name + " comes in", frame: frame, reason: c.in})
		b.check(t, b.datapath.Objects.PilEdgeOut, edge, progCase{name: c.name + " goes out", frame: frame,
			reason: "host-claims-tenant"})
	}
}

// TestOutsideHasNoApp: the address of a host outside says no app, whatever its bits are.
func TestOutsideHasNoApp(t *testing.T) {
	b := newEgressBench(t)
	const toApp2, nothing = 20, 21
	b.says(t, nothing, 1, accepts|ruleWeb, 0, 0)
	b.says(t, toApp2, 1, denies|ruleNothing, 0, 0)
	must(t, b.datapath.Objects.PolAppsV1.Put(bpfobj.PilasterAppKey{Set: toApp2, App: 2},
		bpfobj.PilasterAppRules{Table: nothing}))
	policed(t, b.progBench, bpfobj.PilasterPolTarget{Sets: [2]uint64{toApp2, toApp2}})
	app2 := allocated(address.Plain{Node: b.far.prefix, Tenant: 1, App: 2, Index: 5})
	b.fromB1(t, progCase{name: "to the app", frame: b.frame(b.sent(sees(app2.Addr()), question)),
		out: withHops(between(b.b1.plain(), app2.Addr(), question), 63)})
	app2.Node = netip.MustParsePrefix("2001:db8:1::/64")
	b.fromB1(t, progCase{name: "to a host whose address reads like the app's", reason: "policy-denied",
		frame: b.frame(b.sent(app2.Addr(), question))})
}

// TestEgressWithoutPrograms: packets that another program must check are dropped if it is missing.
func TestEgressWithoutPrograms(t *testing.T) {
	b := newEgressBench(t)
	other := netip.MustParseAddr("2001:db8:aa::1") // of the gateway, in a prefix that the fabric routes here
	of := b.of
	of.Egress = nil
	for _, r := range b.of.Egress {
		for i := range r.Via {
			if r.Via[i].Prefix == b.prefix {
				r.Via = append([]tenant.EgressGateway{}, r.Via...)
				r.Via[i].Address = other
			}
		}
		of.Egress = append(of.Egress, r)
	}
	must(t, b.datapath.putTenant(of))
	answer := b.onWire(between(ownHost, other, answers))
	b.arrives(t, progCase{name: "to a gateway's address without a connection", frame: answer, reason: "no-session"})
	tunnel := b.onWire(tunnelled(b.far.prefix, b.prefix, between(b.b3.Addr(), ownHost, question)))
	b.arrives(t, progCase{name: "to the gateway", frame: tunnel,
		out: withHops(between(other, ownHost, question), 63)})
	must(t, b.datapath.Objects.PilUplinksV1.Delete(hook.ProgramEgressGateway))
	b.fromB1(t, progCase{name: "by this node, without a program", reason: "no-program",
		frame: b.frame(b.sent(ownHost, question))})
	must(t, b.datapath.Objects.PilUplinksV1.Delete(hook.ProgramEgressOut))
	b.fromB1(t, progCase{name: "to a host outside, without a program", reason: "no-program",
		frame: b.frame(b.sent(outsideHost, question))})
	b.arrives(t, progCase{name: "to the gateway, without a program", frame: tunnel, reason: "no-program"})
	b.arrives(t, progCase{name: "to its address, without a program", frame: answer, reason: "no-program"})
}

// TestOutsideScan: a container that sends to many hosts outside evicts no flow and no verdict of packets between other
// containers.
func TestOutsideScan(t *testing.T) {
	b := newEgressBench(t)
	b.knowsTheRouter(t)
	o := &b.datapath.Objects
	b.says(t, 20, 1, accepts|ruleWeb, 0, 0)
	policed(t, b.progBench, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 20}})
	const flows, packets, scan, bound = 64, 1000, 100_000, 10
	var frames [flows][]byte
	keys := map[bpfobj.PilasterAddr]int{} // by ciphertext and by plaintext
	for i := range frames {
		to := allocated(address.Plain{Node: b.far.prefix, Tenant: 1, App: 1, Index: address.Index(1000 * (i + 1))})
		frames[i] = b.frame(between(b.b2.seen(), sees(to.Addr()), question))
		keys[bpfobj.ToAddr(sees(to.Addr()))], keys[bpfobj.ToAddr(to.Addr())] = i, i
	}
	send := func(c *testContainer, frame []byte) error {
		_, err := o.PilContainer.Run(&ebpf.RunOptions{Data: frame, Context: skb{Ifindex: c.ifindex()}})
		return err
	}
	probe := b.frame(b.sent(outsideHost, question))
	scanned := uint32(0)
	must(t, b.ns.Do(func() error {
		if err := onFirstCPU(); err != nil {
			return err
		}
		for _, f := range frames {
			if err := send(b.b2, f); err != nil {
				return err
			}
		}
		// Where the flows and verdicts are that are in their slots now.
		flow, verdict := map[int]uint32{}, map[int]uint32{}
		for slot := range o.PilFlows.MaxEntries() {
			var f bpfobj.PilasterFlow
			if err := o.PilFlows.Lookup(slot, &f); err != nil {
				return err
			}
			if i, ok := keys[f.Key.Dst]; ok && f.Key.Src == bpfobj.ToAddr(b.b2.seen()) {
				flow[i] = slot
			}
			var v bpfobj.PilasterVerdict
			if err := o.PilVerdicts.Lookup(slot, &v); err != nil {
				return err
			}
			if i, ok := keys[v.Key.Remote]; ok && v.Key.Local == bpfobj.ToAddr(b.b2.plain()) {
				verdict[i] = slot
			}
		}
		var kept []int // without those that evict each other
		for i := range frames {
			_, hasFlow := flow[i]
			_, hasVerdict := verdict[i]
			if hasFlow && hasVerdict {
				kept = append(kept, i)
			}
		}
		if len(kept) < flows/2 {
			return fmt.Errorf("of %d flows and %d verdicts in the caches, %d are of one packet", len(flow),
				len(verdict), len(kept))
		}
		misses := func(between int) (flowMisses, verdictMisses int, err error) {
			for n := range packets {
				for range between {
					scanned++
					binary.BigEndian.PutUint32(probe[14+8+16+12:], scanned*0x9e3779b1)
					if err := send(b.b1, probe); err != nil {
						return 0, 0, err
					}
				}
				var f bpfobj.PilasterFlow
				var v bpfobj.PilasterVerdict
				i := kept[n%len(kept)]
				err = errors.Join(o.PilFlows.Lookup(flow[i], &f), o.PilVerdicts.Lookup(verdict[i], &v))
				if err != nil {
					return 0, 0, err
				}
				if keys[f.Key.Dst] != i || f.Key.Src != bpfobj.ToAddr(b.b2.seen()) {
					flowMisses++
				}
				if keys[v.Key.Remote] != i || v.Key.Local != bpfobj.ToAddr(b.b2.plain()) {
					verdictMisses++
				}
				if err := send(b.b2, frames[i]); err != nil {
					return 0, 0, err
				}
			}
			return flowMisses, verdictMisses, nil
		}
		for _, when := range []struct {
			name    string
			between int
		}{{"before the scan", 0}, {"during the scan", scan / packets}} {
			ofFlows, ofVerdicts, err := misses(when.between)
			if err != nil {
				return err
			}
			if ofFlows > bound {
				t.Errorf("flows %s: %d misses in %d packets; want %d at most", when.name, ofFlows, packets, bound)
			}
			if ofVerdicts > bound {
				t.Errorf("verdicts %s: %d misses in %d packets; want %d at most", when.name, ofVerdicts, packets, bound)
			}
		}
		return nil
	}))
	if c := b.sessions(t); scanned != scan || c.Created < scan/10 {
		t.Errorf("the scan: %d packets and %d sessions", scanned, c.Created)
	}
}
