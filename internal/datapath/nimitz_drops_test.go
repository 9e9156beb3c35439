package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// The source and destination addresses of port 2 of the bench.
var (
	own4, far4, beside4 = netip.MustParseAddr(
		"10.0.1.2",
	), netip.MustParseAddr(
		"10.0.2.2",
	), netip.MustParseAddr(
		"10.0.1.4",
	)
	own6, far6 = netip.MustParseAddr("fd10:0:0:1::2"), netip.MustParseAddr("fd10:0:0:2::2")
	service4   = netip.MustParseAddr("10.9.9.9")
	service6   = netip.MustParseAddr("fd10:9::9")
)

// around4 makes an IPv4 frame, changes its header, and updates the header's checksum.
func around4(p packet.Packet, change func(header []byte)) []byte {
	frame := p.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
	change(frame[14:])
	return frame
}

// TestNimitzDrops: drops for reasons that do not depend on an entry.
func TestNimitzDrops(t *testing.T) {
	b := newNimitzBench(t)
	gram4 := packet.Packet{Source: own4, Destination: far4, Body: gram}
	gram6 := packet.Packet{Source: own6, Destination: far6, Body: gram}
	to := func(p packet.Packet, destination netip.Addr, body packet.Body) packet.Packet {
		p.Destination, p.Body = destination, body
		return p
	}
	sent := func(p packet.Packet) []byte { return p.Frame(pipeline.OutsideMAC, pipeline.InsideMAC) }
	icmp := func(kind uint8, payload []byte) packet.ICMP { return packet.ICMP{Type: kind, Payload: payload} }
	quote := func(source, destination netip.Addr) []byte {
		return packet.Packet{Source: source, Destination: destination, Body: gram}.Marshal()
	}
	quote4, quote6 := quote(far4, own4), quote(far6, own6)
	for _, c := range []struct {
		name  string
		frame []byte
		why   dropreason.Reason // 0: it leaves in a tunnel
	}{
		{"version 5", around4(gram4, func(h []byte) { h[0] = 0x55 }), dropreason.Malformed},
		{"a header of 16 bytes", around4(gram4, func(h []byte) { h[0] = 0x44 }), dropreason.Malformed},
		{"options", around4(gram4, func(h []byte) { h[0] = 0x46 }), dropreason.RoutingHeader},
		{"less data than the header says", around4(gram4, func(h []byte) { h[3]++ }), dropreason.Malformed},
		{"a length within the header", around4(gram4, func(h []byte) { h[3] = 19 }), dropreason.Malformed},
		{"a length of 0, not of segments", around4(gram4, func(h []byte) { h[3] = 0 }), dropreason.Malformed},
		{"half a UDP header", sent(to(gram4, far4, packet.Raw{Proto: 17, Data: make([]byte, 4)})),
			dropreason.Malformed},
		{"half a TCP header", sent(to(gram4, far4, packet.Raw{Proto: 6, Data: make([]byte, 12)})),
			dropreason.Malformed},
		{"half an ICMP header", sent(to(gram4, far4, packet.Raw{Proto: 1, Data: []byte{8, 0, 0, 0}})),
			dropreason.Malformed},
		{"an ICMP redirect", sent(to(gram4, far4, icmp(5, quote4))), dropreason.NdForbidden},
		{"an ICMP router advertisement", sent(to(gram4, far4, icmp(9, nil))), dropreason.NdForbidden},
		{"a tag", tag(sent(gram4)), dropreason.NotIp6},
		{"a frame shorter than a header", packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC, packet.EtherTypeIPv4,
			make([]byte, 10)), dropreason.Malformed},
		{"a frame of neither family", packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC, 0x88b5, make([]byte, 60)),
			dropreason.NotIp6},
		{"an IPv6 routing header", sent(packet.Packet{Source: own6, Destination: far6, Body: gram,
			Extensions: []packet.Extension{{Type: packet.Routing, Data: make([]byte, 6)}}}), dropreason.RoutingHeader},
		{"port unreachable, IPv4", sent(to(gram4, far4, icmp(packet.Unreachable4, quote4))), 0},
		{"port unreachable, IPv6", sent(to(gram6, far6, icmp(packet.DestinationUnreachable, quote6))), 0},
		{"an error about another sender's packet, IPv4", sent(to(gram4, far4, icmp(packet.Unreachable4, quote(beside4,
			own4)))), dropreason.IcmpQuote},
		{"an error about a packet for another receiver, IPv4", sent(to(gram4, far4, icmp(packet.TimeExceeded4,
			quote(far4, beside4)))), dropreason.IcmpQuote},
		{"an error about another sender's packet, IPv6", sent(to(gram6, far6, icmp(packet.TimeExceeded,
			quote(own6, own6)))), dropreason.IcmpQuote},
		{"an error that quotes nothing, IPv4", sent(to(gram4, far4, icmp(packet.Unreachable4, nil))),
			dropreason.IcmpQuote},
		{"an error that quotes nothing, IPv6", sent(to(gram6, far6, icmp(packet.PacketTooBig, nil))),
			dropreason.IcmpQuote},
		{"as long as may be", sent(to(gram4, far4, packet.UDP{Payload: make([]byte, 1430-28)})), 0},
		{"longer than a tunnel takes, IPv4", sent(to(gram4, far4, packet.UDP{Payload: make([]byte, 1431-28)})),
			dropreason.TooBig},
		{"longer than a tunnel takes, IPv6", sent(to(gram6, far6, packet.UDP{Payload: make([]byte, 1431-48)})),
			dropreason.TooBig},
	} {
		before := b.drops(t)
		must(t, b.inject[2].Send(c.frame))
		if c.why != 0 {
			b.dropped(t, c.name, before, c.why)
			continue
		}
		want := packettest.Result{Frame: bytes.Clone(c.frame)}
		want.To, want.VTEP, want.VNI, want.Identity = pipeline.VXLAN, pipeline.VTEP(packettest.There), 7, 70
		copy(want.Frame, append(bytes.Clone(pipeline.InsideMAC), pipeline.OutsideMAC...))
		if h := want.Frame[14:]; h[0]>>4 == 6 {
			h[7]--
		} else {
			h[8]--
			binary.BigEndian.PutUint16(h[10:], binary.BigEndian.Uint16(h[10:])+0x100)
		}
		b.leaves(t, c.name, before, want)
	}
}

// TestNimitzErrors: ICMP errors are translated together with their quotes. A router's error arrives with the source
// address of the peer that the router could not reach.
func TestNimitzErrors(t *testing.T) {
	b := newNimitzBench(t)
	for _, w := range []struct {
		family                                         string
		own, service, storage, virtual, router, beside netip.Addr
		error                                          packet.ICMP
		checksum                                       int // of the quoted UDP header
	}{
		{"IPv4", own4, service4, netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("100.64.1.2"),
			netip.MustParseAddr("203.0.113.1"), beside4,
			packet.ICMP{Type: packet.Unreachable4, Code: packet.FragmentationNeeded, Rest: [4]byte{0, 0, 5, 20}},
			20 + 6},
		{"IPv6", own6, service6, netip.MustParseAddr("2001:db8:9::9"), netip.MustParseAddr("fd64:0:0:1::2"),
			netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("fd10:0:0:1::4"),
			packet.ICMP{Type: packet.PacketTooBig, Rest: [4]byte{0, 0, 5, 20}}, 40 + 6},
	} {
		quote := func(source, destination netip.Addr) []byte {
			return packet.Packet{Source: source, Destination: destination, Body: gram}.Marshal()
		}
		about := func(source, destination netip.Addr, quoted []byte) packet.Packet {
			e := w.error
			e.Payload = quoted
			return packet.Packet{Source: source, Destination: destination, Body: e}
		}
		// The checksum in the quote stays that of the packet as it was.
		told := func(source, destination netip.Addr, was []byte) packet.Packet {
			quoted := quote(destination, source)
			copy(quoted[w.checksum:w.checksum+2], was[w.checksum:])
			return about(source, destination, quoted)
		}
		inward, outward := quote(w.service, w.own), quote(w.virtual, w.storage)
		for _, c := range []struct {
			name string
			from pipeline.Port
			in   packet.Packet
			to   pipeline.Port // 0: dropped
			out  packet.Packet
		}{
			{"of a container, " + w.family, 2, about(w.own, w.service, inward), pipeline.Gateway, told(w.virtual,
				w.storage, inward)},
			{"of a service, " + w.family, pipeline.Gateway, about(w.storage, w.virtual, outward), 2, told(w.service,
				w.own, outward)},
			{"of a router, " + w.family, pipeline.Gateway, about(w.router, w.virtual, outward), 2, told(w.service,
				w.own, outward)},
			{"of a router about another sender's packet, " + w.family, pipeline.Gateway, about(w.router, w.virtual,
				quote(w.beside, w.storage)), 0, packet.Packet{}},
			{"of a container for another receiver, " + w.family, 2, about(w.own, w.service, quote(w.storage, w.own)),
				0, packet.Packet{}},
			{"of a container to another one, " + w.family, 2, about(w.own, w.service, quote(w.service, w.virtual)),
				0, packet.Packet{}},
		} {
			before := b.drops(t)
			must(t, b.inject[c.from].Send(c.in.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
			if c.to == 0 {
				b.dropped(t, c.name, before, dropreason.IcmpQuote)
				continue
			}
			want := packettest.Result{Frame: c.out.Frame(pipeline.InsideMAC, pipeline.OutsideMAC)}
			want.To = c.to
			b.leaves(t, c.name, before, want)
		}
	}
}

// TestNimitzTunnels: who may send to a node's tunnel address, and as it.
func TestNimitzTunnels(t *testing.T) {
	b := newNimitzBench(t)
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	here4, there4 := netip.MustParseAddr("192.168.70.1"), netip.MustParseAddr("192.168.70.2")
	must(t, h.AddrAdd(eth0, &netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(here4, 24))}))
	second := b.addEdge(t)
	out, err := packet.NewInjector(b.ns, "second")
	must(t, err)
	defer out.Close()
	must(t, b.datapath.GuardInterfaces(nil))

	inner := packet.Packet{Source: far4, Destination: own4, Body: gram}.Frame(pipeline.InsideMAC, pipeline.OutsideMAC)
	self, peer := pipeline.VTEP(b.prefix), pipeline.VTEP(packettest.There)
	stranger, abroad := pipeline.VTEP(packettest.Stranger), pipeline.VTEP(packettest.Abroad)
	right := outer{peer, self, pipeline.UDPPort, 7, 70, 0}
	arrives := packettest.Result{Frame: inner}
	arrives.To = 2
	frame4 := packet.Packet{Source: there4, Destination: here4, Body: packet.UDP{DestinationPort: pipeline.UDPPort,
		Payload: append([]byte{8, 0, 0, 0, 0, 0, 7, 0}, inner...)}}.Frame(b.hereMAC, b.farMAC)
	with := func(change func(*outer)) []byte {
		o := right
		change(&o)
		return o.frame(b.hereMAC, b.farMAC, inner)
	}
	for _, c := range []struct {
		name  string
		by    *packet.Injector
		frame []byte
		why   dropreason.Reason
	}{
		{"a node", b.inject[pipeline.VXLAN], with(func(*outer) {}), 0},
		{"a node, with no identity", b.inject[pipeline.VXLAN], with(func(o *outer) { o.identity = 0 }), 0},
		{"to another address of this node", b.inject[pipeline.VXLAN],
			with(func(o *outer) { o.to = b.prefix.Addr().Next() }), dropreason.PeerUnknown},
		{"over IPv4", b.inject[pipeline.VXLAN], frame4, dropreason.PeerUnknown},
		{"as this node", b.inject[pipeline.VXLAN], with(func(o *outer) { o.from = self }), dropreason.OwnSource},
		{"half an IPv6 header", b.inject[pipeline.Gateway], packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC,
			packet.EtherTypeIPv6, make([]byte, 30)), dropreason.Malformed},
		{"as a node, out by another interface", out, with(func(*outer) {}), dropreason.TunnelForged},
		{"a node, by another interface", second, with(func(*outer) {}), dropreason.PeerUnknown},
		{"from an unknown address to a node, out by another interface", out, with(func(o *outer) {
			o.from,
				o.to = stranger, peer
		}), dropreason.TunnelForged},
		{"another region, by another interface", second, with(func(o *outer) { o.from = abroad }),
			dropreason.PeerUnknown},
	} {
		before := b.drops(t)
		// the sender gets an error for a drop on the way out
		if err := c.by.Send(c.frame); !errors.Is(err, unix.ENOBUFS) {
			must(t, err)
		}
		if c.why != 0 {
			b.dropped(t, c.name, before, c.why)
		} else {
			b.leaves(t, c.name, before, arrives)
		}
	}

	// A process of the node without any rights, which has the tunnel address like any other of the node.
	send := func(from netip.Addr, to netip.AddrPort, n, mark int) {
		must(t, b.ns.Do(func() error {
			anySource := net.Dialer{
				LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
				Control: func(_, _ string, raw syscall.RawConn) (err error) {
					return errors.Join(raw.Control(func(fd uintptr) {
						err = errors.Join(
							unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1),
							unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark),
						)
					}), err)
				},
			}
			conn, err := anySource.Dial("udp6", to.String())
			if err != nil {
				return err
			}
			defer conn.Close()
			payload := append([]byte{0x08, 0, 0, 0, 0, 0, 7, 0}, inner...)
			_, err = conn.Write(append(payload, make([]byte, n)...))
			return err
		}))
	}
	for _, c := range []struct {
		name string
		from netip.Addr
		to   netip.AddrPort
		n    int
		why  dropreason.Reason
	}{
		{"a process to a node", self, netip.AddrPortFrom(peer, pipeline.UDPPort), 0, dropreason.TunnelForged},
		{"a process to a node, in fragments", self, netip.AddrPortFrom(peer, pipeline.UDPPort), 2000,
			dropreason.TunnelForged},
		{"a process to a node, from an unknown address", stranger, netip.AddrPortFrom(peer, pipeline.UDPPort), 0,
			dropreason.TunnelForged},
		{"a process to another region", b.prefix.Addr().Next(), netip.AddrPortFrom(abroad, pipeline.UDPPort), 0,
			dropreason.TunnelForged},
		{"a process as another region", abroad, netip.AddrPortFrom(b.far.underlay, pipeline.UDPPort), 0,
			dropreason.TunnelForged},
		{"a process to its own node", self, netip.AddrPortFrom(self, pipeline.UDPPort), 0, dropreason.TunnelForged},
		{"a process to its own node, as another", peer, netip.AddrPortFrom(self, pipeline.UDPPort), 0,
			dropreason.TunnelForged},
		{"a process to another address of its own node, as another", peer, netip.AddrPortFrom(netip.IPv6Loopback(),
			pipeline.UDPPort), 0, dropreason.TunnelForged},
		{"a process to another port", self, netip.AddrPortFrom(peer, 53), 0, 0},
	} {
		before := b.drops(t)
		send(c.from, c.to, c.n, 0)
		if got := b.counted(t, before); c.why == 0 && len(got) != 0 ||
			c.why != 0 &&
				(len(got) != 1 || got[c.why.String()] != 1) { // the kernel sends no fragment after one that was dropped
			t.Errorf("%s: counted %v, want one for %v", c.name, got, c.why)
		}
	}
	mark := int(hook.TunnelMark(b.datapath.AcceptMark))
	before := b.drops(t)
	send(self, netip.AddrPortFrom(peer, pipeline.UDPPort), 0, mark)
	b.dropped(t, "a process that has guessed the mark", before, dropreason.TunnelForged)
	for _, to := range []netip.Addr{self, b.prefix.Addr().Next(), netip.IPv6Loopback()} {
		before = b.drops(t)
		send(peer, netip.AddrPortFrom(to, pipeline.UDPPort), 0, mark)
		b.dropped(t, "a process that has guessed the mark, to its own node", before, dropreason.TunnelForged)
	}
}

// addEdge gives the node another interface, and injects from its other end.
func (b *nimitzBench) addEdge(t testing.TB) *packet.Injector {
	t.Helper()
	ns := namespace(t, "stranger")
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index, attrs.HardwareAddr = "second", 300, b.hereMAC
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "second", netlink.NsFd(ns.FD())
	must(t, h.LinkAdd(pair))
	far, err := ns.Netlink()
	must(t, err)
	defer far.Close()
	for _, h := range []*netlink.Handle{h, far} {
		l, err := h.LinkByName("second")
		must(t, err)
		must(t, h.LinkSetUp(l))
	}
	must(t, ns.WaitUp(t.Context(), "second"))
	i, err := packet.NewInjector(ns, "second")
	must(t, err)
	t.Cleanup(func() { i.Close() })
	return i
}

// TestNimitzPorts: only packets of plugged devices belong to the second network. Without its program they are dropped.
func TestNimitzPorts(t *testing.T) {
	b := newNimitzBench(t)
	p4 := packet.Packet{Source: own4, Destination: far4, Body: gram}.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
	p6 := packet.Packet{Source: own6, Destination: far6, Body: gram}.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
	check := func(name string, why4, why6 dropreason.Reason) {
		for _, c := range []struct {
			frame []byte
			why   dropreason.Reason
		}{{p4, why4}, {p6, why6}} {
			before := b.drops(t)
			must(t, b.inject[2].Send(c.frame))
			b.dropped(t, name, before, c.why)
		}
	}
	must(t, b.datapath.Objects.PilNetworksV1.Delete(hook.NetworkNimitz))
	check("without a program", dropreason.NoProgram, dropreason.NoProgram)
	must(t, b.datapath.AttachTunnel())
	must(t, b.nimitz.Unplug(t.Context(), pipeline.Gateway))
	before := b.drops(t)
	must(
		t,
		b.inject[2].Send(
			packet.Packet{
				Source:      own4,
				Destination: service4,
				Body:        gram,
			}.Frame(
				pipeline.OutsideMAC,
				pipeline.InsideMAC,
			),
		),
	)
	b.dropped(t, "without a gateway", before, dropreason.NoRoute)
	// Packets that a switch has read itself are dropped and not counted. After Unplug, drops are counted again.
	device, err := b.datapath.Netlink.LinkByIndex(int(b.nimitz.ports[2]))
	must(t, err)
	taps := hook.NewOVSPorts(b.datapath.Hooks)
	must(t, taps.Plug(t.Context(), 2, pipeline.Device{Name: device.Attrs().Name}))
	before = b.drops(t)
	for _, frame := range [][]byte{
		p4, p6, packet.Packet{Source: own6, Destination: netip.MustParseAddr("ff02::1"),
			Body: gram}.Frame(pipeline.OutsideMAC, pipeline.InsideMAC),
		packet.Packet{Source: own6, Destination: far6, Body: packet.Raw{Proto: packet.ProtocolUDP, Data: make([]byte,
			4)}}.Frame(pipeline.OutsideMAC, pipeline.InsideMAC),
		packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC, packet.EtherTypeIPv6, make([]byte, 30)),
	} {
		must(t, b.inject[2].Send(frame))
	}
	must(
		t,
		b.inject[3].Send(
			packet.Packet{
				Source:      beside4,
				Destination: far4,
				Body:        gram,
			}.Frame(
				pipeline.OutsideMAC,
				pipeline.InsideMAC,
			),
		),
	)
	b.dropped(t, "a switch's", before, dropreason.SrcNotOwn)
	// The switch leaves packets with netpila's sources to the programs.
	for _, source := range []netip.Prefix{address.DefaultPlan().Private, address.DefaultPlan().Base} {
		before = b.drops(t)
		must(
			t,
			b.inject[2].Send(
				packet.Packet{
					Source:      source.Addr().Next(),
					Destination: far6,
					Body:        gram,
				}.Frame(
					pipeline.OutsideMAC,
					pipeline.InsideMAC,
				),
			),
		)
		b.dropped(t, "a switch's, in netpila's name", before, dropreason.SrcNotOwn)
		before = b.drops(t)
		half := packet.Packet{
			Source:      source.Addr().Next(),
			Destination: far6,
			Body:        packet.Raw{Proto: packet.ProtocolUDP, Data: make([]byte, 4)},
		}
		many := packet.Packet{Source: source.Addr().Next(), Destination: netip.MustParseAddr("ff02::1"), Body: gram}
		for _, p := range []packet.Packet{many, half} {
			must(t, b.inject[2].Send(p.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
		}
		b.dropped(t, "half a header, in netpila's name", before, dropreason.Malformed)
	}
	must(t, taps.Unplug(t.Context(), 2))
	check("of a switch no more", dropreason.NotIp6, dropreason.SrcNotOwn)
	must(t, b.nimitz.Plug(t.Context(), 2, pipeline.Device{Name: device.Attrs().Name}))
	// Another device with the same source address is not the port.
	must(t, b.nimitz.Unplug(t.Context(), 2))
	check("unplugged", dropreason.NotIp6, dropreason.SrcNotOwn)

	errIs := func(err error, what string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want an error with %q", err, what)
		}
	}
	errIs(b.nimitz.Plug(t.Context(), 9, pipeline.Device{Name: "nothing"}), "device nothing")
	errIs(b.nimitz.Plug(t.Context(), pipeline.VXLAN, pipeline.Device{Name: "eth0"}), "cannot be connected to this port")
	must(t, b.nimitz.Unplug(t.Context(), 9))
}
