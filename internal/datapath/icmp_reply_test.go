package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	answerLength = 40 + 8 // bytes of an error before its quote
	quoteMax     = 1280 - answerLength
	answerBurst  = 32 // of bpf/common/icmp_error.h
)

// gateway returns the node's address as the container sees it.
func (c *testContainer) gateway(t testing.TB, of tenant.Tenant) netip.Addr {
	t.Helper()
	guest, err := of.Gateway(address.DefaultPlan(), c.node.prefix, of.Current())
	must(t, err)
	return guest.Address
}

// icmpFromNode is the error that b1 gets from the node about a packet it sent.
func (b *progBench) icmpFromNode(kind uint8, mtu uint32, about packet.Packet) packet.Packet {
	return packet.Packet{Source: b.b1Gateway, Destination: b.b1.seen(), Body: errorAbout(kind, mtu, about.Marshal())}
}

func errorAbout(kind uint8, mtu uint32, quoted []byte) packet.ICMP {
	e := packet.ICMP{Type: kind, Payload: quoted[:min(len(quoted), quoteMax)]}
	binary.BigEndian.PutUint32(e.Rest[:], mtu)
	return e
}

// long returns a datagram whose IPv6 packet has this number of bytes.
func long(bytes int) packet.UDP {
	return packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: make([]byte, bytes-48)}
}

// TestAnswers: the sender of a packet that cannot be forwarded gets an error with the packet it sent and nothing else.
func TestAnswers(t *testing.T) {
	b := newProgBench(t)
	far := sees(b.b3.Addr())
	hops := func(p packet.Packet) packet.Packet { p.HopLimit = 1; return p }
	udp := hops(b.sent(far, gram))
	used := b.frame(udp)
	used[14+7] = 0
	quoted := udp.Marshal()
	quoted[7] = 0
	later := hops(
		b.sent(far, packet.Raw{Proto: packet.ProtocolUDP, Data: make([]byte, 64)}, packet.Fragment(64, false, 9)),
	)
	laterICMP := hops(
		b.sent(far, packet.Raw{Proto: packet.ProtocolICMPv6, Data: make([]byte, 64)}, packet.Fragment(64, false, 9)),
	)
	unreachable := hops(b.sent(far, packet.ICMP{Type: packet.DestinationUnreachable,
		Payload: packet.Packet{Source: far, Destination: b.b1.seen(), Body: gram}.Marshal()}))
	everyone, group := net.HardwareAddr{255, 255, 255, 255, 255, 255}, net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
	tooLong := b.sent(far, long(1501))
	tooFar := hops(tooLong)
	for _, c := range []progCase{
		{name: "1,501 bytes and a hop limit of 1", frame: b.frame(tooFar), reason: "hop-limit",
			out: b.icmpFromNode(packet.TimeExceeded, 0, tooFar)},
		{name: "a hop limit of 1", frame: b.frame(udp), reason: "hop-limit", out: b.icmpFromNode(packet.TimeExceeded,
			0, udp)},
		{name: "a hop limit of 0", frame: used, reason: "hop-limit",
			out: packet.Packet{Source: b.b1Gateway, Destination: b.b1.seen(), Body: errorAbout(packet.TimeExceeded, 0,
				quoted)}},
		{name: "a later fragment", frame: b.frame(later), reason: "hop-limit", out: b.icmpFromNode(packet.TimeExceeded,
			0, later)},
		{name: "an error", frame: b.frame(unreachable), reason: "hop-limit"},
		{name: "a later fragment, perhaps of an error", frame: b.frame(laterICMP), reason: "hop-limit"},
		{name: "to all stations", frame: udp.Frame(everyone, host.ContainerMAC), reason: "hop-limit"},
		{name: "to a group of stations", frame: udp.Frame(group, host.ContainerMAC), reason: "hop-limit"},
		{name: "1,501 bytes", frame: b.frame(tooLong), reason: "too-big", out: b.icmpFromNode(packet.PacketTooBig,
			1500, tooLong)},
		{name: "1,500 bytes", frame: b.frame(b.sent(far, long(1500))),
			out: packet.Packet{Source: b.b1.plain(), Destination: b.b3.Addr(), HopLimit: 63, Body: long(1500)}},
		{name: "1,501 bytes, same node", frame: b.frame(b.sent(b.b2.seen(), long(1501))), out: b.sent(b.b2.seen(),
			long(1501))},
	} {
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, c)
	}

	b.fillCache(t, b.cached(t, b.b3.Addr(), 1400))
	tooLong = b.sent(far, long(1401))
	for _, c := range []progCase{
		{name: "1,401 bytes, from the cache", frame: b.frame(tooLong), reason: "too-big",
			out: b.icmpFromNode(packet.PacketTooBig, 1400, tooLong)},
		{name: "1,400 bytes, from the cache", frame: b.frame(b.sent(far, long(1400))),
			out: packet.Packet{Source: b.b1.plain(), Destination: b.b3.Addr(), HopLimit: 63, Body: long(1400)}},
	} {
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, c)
	}

	b.fillCache(t, bpfobj.PilasterFlow{})
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	must(
		t,
		h.RouteReplace(
			&netlink.Route{Dst: host.IPNet(b.far.prefix), Gw: b.far.underlay.AsSlice(), MTU: 1400, MTULock: true},
		),
	)
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, progCase{
		name: "1,401 bytes, by a narrow route", frame: b.frame(tooLong), reason: "too-big",
		out: b.icmpFromNode(packet.PacketTooBig, 1400, tooLong)})

	clear := b.add(t, plain, 1)
	other := address.Plain{Node: b.far.prefix, Tenant: plain.Current().ID, App: 1, Index: 1}.Addr()
	sent := packet.Packet{Source: clear.seen(), Destination: other, HopLimit: 1, Body: gram}
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: clear.ifindex()}, progCase{
		name: "in a clear tenant", frame: b.frame(sent), reason: "hop-limit",
		out: packet.Packet{
			Source:      clear.gateway(t, plain),
			Destination: clear.seen(),
			Body:        errorAbout(packet.TimeExceeded, 0, sent.Marshal()),
		},
	})
}

// TestLengthOfSegments: a packet of segments is as long as the longest of them, their headers included.
func TestLengthOfSegments(t *testing.T) {
	b := newProgBench(t)
	far := sees(b.b3.Addr())
	data := make([]byte, 2900)
	options := packet.TCP{
		SourcePort:      1000,
		DestinationPort: 80,
		Flags:           packet.ACK,
		Options:         make([]byte, 12),
		Payload:         data,
	}
	bare := packet.TCP{SourcePort: 1000, DestinationPort: 80, Flags: packet.ACK, Payload: data}
	for _, c := range []struct {
		name  string
		frame []byte
		size  uint32
		fits  bool
	}{
		{"TCP", b.frame(b.sent(far, bare)), 1440, true},
		{"TCP, a byte more", b.frame(b.sent(far, bare)), 1441, false},
		{"TCP with options", b.frame(b.sent(far, options)), 1428, true},
		{"TCP with options, a byte more", b.frame(b.sent(far, options)), 1429, false},
		{"UDP", b.frame(b.sent(far, packet.UDP{Payload: data})), 1452, true},
		{"UDP, a byte more", b.frame(b.sent(far, packet.UDP{Payload: data})), 1453, false},
		{"behind options", b.frame(b.sent(far, bare, padding(packet.DestinationOptions))), 1432, true},
		{"behind options, a byte more", b.frame(b.sent(far, bare, padding(packet.DestinationOptions))), 1433, false},
		{"TCP with options behind options", b.frame(b.sent(far, options, padding(packet.DestinationOptions))), 1420,
			true},
		{"TCP with options behind options, a byte more", b.frame(b.sent(far, options,
			padding(packet.DestinationOptions))), 1421, false},
		{"a list of packets", b.frame(b.sent(far, packet.Raw{Proto: 132, Data: data})), math.MaxUint16, true},
	} {
		verdict, _, reasons := b.run(
			t,
			b.datapath.Objects.PilContainer,
			c.frame,
			skb{Ifindex: b.b1.ifindex(), Segments: 3, SegmentSize: c.size},
		)
		if c.fits != (reasons["too-big"] == 0) || verdict != verdictRedirect {
			t.Errorf("%s: segments of %d bytes: verdict %d, counted %v", c.name, c.size, verdict, reasons)
		}
	}
}

// TestAnswersAreFew: a container that keeps sending receives a burst of errors and then few, at a limited rate.
func TestAnswersAreFew(t *testing.T) {
	b := newProgBench(t)
	last := b.frame(packet.Packet{Source: b.b1.seen(), Destination: sees(b.b3.Addr()), HopLimit: 1, Body: gram})
	pace := func(due uint64) {
		for slot := range b.datapath.Objects.PilIcmpRate.MaxEntries() {
			must(t, b.datapath.Objects.PilIcmpRate.Put(slot, due))
		}
	}
	answers := func() (n int) {
		for range 2 * answerBurst {
			if verdict, _, _ := b.run(t, b.datapath.Objects.PilContainer, last,
				skb{Ifindex: b.b1.ifindex()}); verdict == verdictRedirect {
				n++
			}
		}
		return n
	}
	if n := answers(); n < answerBurst {
		t.Errorf("after a silence: %d answers, not at least %d", n, answerBurst)
	}
	pace(math.MaxUint64 / 2)
	if n := answers(); n != 0 {
		t.Errorf("after too many: %d answers more", n)
	}
	pace(0)
	if n := answers(); n < answerBurst {
		t.Errorf("after a while: %d answers, not at least %d", n, answerBurst)
	}
}

// TestFirstHop: a traceroute shows the node first, by its address in the tenant. Then it shows a router in the fabric,
// by the peer's address, and then the peer.
func TestFirstHop(t *testing.T) {
	w := newRoutedWire(t, 1500)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	for i, want := range []hop{
		{a.gateway(t, blue), packet.TimeExceeded},
		{b.seen(), packet.TimeExceeded},
		{b.seen(), packet.DestinationUnreachable},
	} {
		if got := a.probe(t, b.seen(), i+1); got != want {
			t.Errorf("hop %d is %+v, not %+v", i+1, got, want)
		}
	}
	if n := w.nodes[0].drops(t)["hop-limit"]; n != 1 {
		t.Errorf("%d drops for a hop limit that was used up once", n)
	}
}

// hop has the sender of the answer to a probe, and the type of the answer.
type hop struct {
	from netip.Addr
	kind uint8
}

// probe sends what traceroute does, and reads the error from the socket.
func (c *testContainer) probe(t *testing.T, to netip.Addr, hops int) (answer hop) {
	t.Helper()
	must(t, c.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := errors.Join(
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, hops),
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1),
			unix.Sendto(fd, []byte("who is there?"), 0, &unix.SockaddrInet6{Port: 33434, Addr: to.As16()}),
		); err != nil {
			return err
		}
		// An error makes the socket ready, whatever is asked for.
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, int(patience.Milliseconds())); n != 1 {
			return fmt.Errorf("no answer to a probe of %d hops: %w", hops, err)
		}
		control := make([]byte, 256)
		_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 64), control, unix.MSG_ERRQUEUE)
		if err != nil {
			return err
		}
		messages, err := unix.ParseSocketControlMessage(control[:n])
		if err != nil {
			return err
		}
		for _, m := range messages { // struct sock_extended_err, and the address of who sent it
			if m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_RECVERR && len(m.Data) >= 16+24 {
				answer = hop{netip.AddrFrom16([16]byte(m.Data[16+8:])), m.Data[5]}
			}
		}
		return nil
	}))
	return answer
}

// TestUplinkNarrowerThanContainers: until the containers' MTU has changed too, they get errors.
func TestUplinkNarrowerThanContainers(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	for _, n := range w.nodes {
		n.setUplink(t, func(h *netlink.Handle, eth0 netlink.Link) error { return h.LinkSetMTU(eth0, 1300) })
	}
	transfer(t, a, b, 1<<20)
	want := 1300
	if joined == endpoint.Macvlan {
		want = 0 // the kernel lets no macvlan be wider than its uplink, so no sender needs an error
	}
	if mtu := pathMTU(t, a.ns, b.seen()); mtu != want {
		t.Errorf("the container believes in an MTU of %d, not %d", mtu, want)
	}
	for r, n := range w.nodes[0].drops(t) {
		if r != "too-big" && r != "nd-ignored" && r != "mld-ignored" {
			t.Errorf("%d packets were dropped: %s", n, r)
		}
	}
}

func (n *testNode) setUplink(t *testing.T, change func(*netlink.Handle, netlink.Link) error) {
	t.Helper()
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	must(t, change(h, eth0))
}
