package datapath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// fabricErrors returns ICMP errors from the fabric and the verdicts on them. A router's error is translated and reaches
// the container whose packet it quotes, as if the peer had sent it. Forged errors are dropped.
func (b *progBench) fabricErrors() []progCase {
	router := netip.MustParseAddr("2001:db8:99::1")
	quote := func(from, to netip.Addr) []byte {
		return packet.Packet{Source: from, Destination: to, Body: gram}.Marshal()
	}
	tooBig := func(quoted []byte) packet.ICMP {
		return packet.ICMP{Type: packet.PacketTooBig, Rest: [4]byte{2: 5, 3: 0}, Payload: quoted}
	}
	from := func(source netip.Addr, body packet.Body) []byte {
		return packet.Packet{
			Source:      source,
			Destination: b.b1.plain(),
			Body:        body,
		}.Frame(
			b.uplinkMAC,
			host.ContainerMAC,
		)
	}
	b1, b3 := b.b1.plain(), b.b3.Addr()
	inside := packet.Packet{Source: sees(b3), Destination: b.b1.seen()}
	with := func(body packet.Body) packet.Packet {
		p := inside
		p.Body = body
		return p
	}
	red3 := address.Plain{Node: b.far.prefix, Tenant: 2, App: 1, Index: 77}.Addr()
	carrying := func(from, to netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return packet.Packet{Source: from, Destination: to, Body: body, Extensions: extensions}.Marshal()
	}
	options := []packet.Extension{padding(packet.HopByHop), padding(packet.DestinationOptions)}
	first, later, middle := packet.Fragment(
		0,
		true,
		9,
	), packet.Fragment(
		64,
		false,
		9,
	), packet.Raw{
		Proto: packet.ProtocolUDP,
		Data:  make([]byte, 64),
	}
	zeroSum := segment // the payload makes its checksum 0
	zeroSum.Payload = []byte{0, 0}
	sum := packet.Checksum(b1, b3, packet.ProtocolTCP, unsummed(zeroSum))
	zeroSum.Payload = []byte{byte(sum >> 8), byte(sum)}
	absent := packet.Packet{
		Source:      router,
		Destination: address.Plain{Node: b.prefix, Tenant: 1, App: 1, Index: 5}.Addr(),
		Body:        tooBig(quote(b1, b3)),
	}

	return []progCase{
		{name: "too big", frame: from(router, tooBig(quote(b1, b3))), out: with(tooBig(quote(b.b1.seen(), sees(b3))))},
		{
			name:  "too big, from the cache",
			frame: from(router, tooBig(quote(b1, b3))),
			out:   with(tooBig(quote(b.b1.seen(), sees(b3)))),
		},
		{
			name:  "time exceeded, from a node",
			frame: from(b.far.prefix.Addr().Next(), packet.ICMP{Type: packet.TimeExceeded, Payload: quote(b1, b3)}),
			out:   with(packet.ICMP{Type: packet.TimeExceeded, Payload: quote(b.b1.seen(), sees(b3))}),
		},
		{
			name:  "about a packet with options",
			frame: from(router, tooBig(carrying(b1, b3, gram, options...))),
			out:   with(tooBig(carrying(b.b1.seen(), sees(b3), gram, options...))),
		},
		{
			name:  "about a first fragment",
			frame: from(router, tooBig(carrying(b1, b3, gram, first))),
			out:   with(tooBig(carrying(b.b1.seen(), sees(b3), gram, first))),
		},
		{
			name:  "about a later fragment",
			frame: from(router, tooBig(carrying(b1, b3, middle, later))),
			out:   with(tooBig(carrying(b.b1.seen(), sees(b3), middle, later))),
		},
		{
			name:  "about a TCP segment with a checksum of 0",
			frame: from(router, tooBig(carrying(b1, b3, zeroSum))),
			out:   with(tooBig(carrying(b.b1.seen(), sees(b3), zeroSum))),
		},
		{
			name:  "about an echo",
			frame: from(router, tooBig(carrying(b1, b3, echo))),
			out:   with(tooBig(carrying(b.b1.seen(), sees(b3), echo))),
		},
		{
			name:   "about an error",
			frame:  from(router, tooBig(carrying(b1, b3, tooBig(quote(b3, b1))))),
			reason: "icmp-quote",
		},
		{
			name: "about a packet with a routing header",
			frame: from(
				router,
				tooBig(carrying(b1, b3, gram, packet.Extension{Type: packet.Routing, Data: make([]byte, 6)})),
			),
			reason: "icmp-quote",
		},
		{name: "an echo of a router", frame: from(router, echo), reason: "tenant-mismatch"},
		{name: "an error that quotes nothing", frame: from(router, tooBig(nil)), reason: "icmp-quote"},
		{
			name:   "an error that quotes half a header",
			frame:  from(router, tooBig(quote(b1, b3)[:30])),
			reason: "icmp-quote",
		},
		{
			name:   "an error about another container's packet",
			frame:  from(router, tooBig(quote(b.b2.plain(), b3))),
			reason: "icmp-quote",
		},
		{
			name:   "an error about a packet that never left",
			frame:  from(router, tooBig(quote(b1, b.b2.plain()))),
			reason: "icmp-quote",
		},
		{
			name:   "an error of another container about its peer's packet",
			frame:  from(b3.Next(), tooBig(quote(b1, b3))),
			reason: "icmp-quote",
		},
		{
			name:   "an error about another tenant's peer",
			frame:  from(router, tooBig(quote(b1, red3))),
			reason: "tenant-mismatch",
		},
		{
			name:   "an error about the internet",
			frame:  from(router, tooBig(quote(b1, router))),
			reason: "tenant-mismatch",
		},
		{
			name:   "an error about a ciphertext",
			frame:  from(router, tooBig(quote(b1, sees(b3)))),
			reason: "tenant-mismatch",
		},
		{name: "an error for no endpoint", frame: absent.Frame(b.uplinkMAC, host.ContainerMAC), reason: "no-endpoint"},
	}
}

// unsummed is a body whose checksum field is 0.
func unsummed(body packet.Body) []byte {
	zero := netip.IPv6Unspecified()
	b := packet.Packet{Source: zero, Destination: zero, Body: body}.Marshal()[40:]
	copy(b[checksumAt(body.Protocol()):], []byte{0, 0})
	return b
}

func TestErrorsOfTheFabric(t *testing.T) {
	b := newProgBench(t)
	for _, c := range b.fabricErrors() {
		b.check(t, b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()}, c)
	}
}

// newRoutedWire joins the nodes by a router of the kernel's own, whose second link is narrow.
func newRoutedWire(t *testing.T, narrow int) *wire {
	t.Helper()
	w := &wire{}
	router := namespace(t, "router")
	h, err := router.Netlink()
	must(t, err)
	defer h.Close()
	must(t, withSettings(router, func(s host.Sysctls) error {
		return errors.Join(
			s.Set("all", []host.Sysctl{{Family: "ipv6", Name: "forwarding", Value: "1"}}),
			s.Set("default", []host.Sysctl{{Family: "ipv6", Name: "accept_dad", Value: "0"}}),
		)
	}))
	for i, mtu := range []int{1500, narrow} {
		n := &testNode{
			ns:       namespace(t, fmt.Sprint("node", i)),
			prefix:   netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
			underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8:70:%d::2", i+1)),
		}
		w.nodes[i] = n
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index, attrs.MTU = fmt.Sprint("to", i), 100+i, mtu
		pair := netlink.NewVeth(attrs)
		pair.PeerName, pair.PeerNamespace, pair.PeerMTU = "eth0", netlink.NsFd(n.ns.FD()), uint32(1500)
		must(t, h.LinkAdd(pair))
		gateway := n.underlay.Prev()
		port, err := h.LinkByName(attrs.Name)
		must(t, err)
		must(
			t,
			h.AddrAdd(port, &netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(gateway, 64)), Flags: unix.IFA_F_NODAD}),
		)
		must(t, h.LinkSetUp(port))
		n.configure(t, &testNode{prefix: netip.MustParsePrefix("::/0"), underlay: gateway})
		must(t, h.RouteAdd(&netlink.Route{Dst: host.IPNet(n.prefix), Gw: n.underlay.AsSlice()}))
		must(t, n.ns.WaitUp(t.Context(), "eth0"))
		must(t, router.WaitUp(t.Context(), attrs.Name))
		n.open(t, joined)
	}
	return w
}

// TestPathMTU: TCP gets through a link narrower than the containers' MTU, and the container knows.
func TestPathMTU(t *testing.T) {
	w := newRoutedWire(t, 1280)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	transfer(t, a, b, 1<<20)
	if mtu := pathMTU(t, a.ns, b.seen()); mtu != 1280 {
		t.Errorf("the container believes in an MTU of %d", mtu)
	}
	// The same, as an administrator looks it up.
	show := exec.CommandContext(t.Context(), "ip", "-6", "route", "get", b.seen().String())
	var said bytes.Buffer
	show.Stdout, show.Stderr = &said, &said
	if err := a.ns.Run(show); err != nil || !strings.Contains(said.String(), " mtu 1280 ") {
		t.Errorf("ip -6 route get: %v\n%s", err, &said)
	}
}

func pathMTU(t *testing.T, ns *netns.Namespace, to netip.Addr) int {
	t.Helper()
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	routes, err := h.RouteGet(to.AsSlice())
	must(t, err)
	return routes[0].MTU
}

// TestTimeExceeded: the container learns that a router dropped a packet, but not which.
func TestTimeExceeded(t *testing.T) {
	w := newRoutedWire(t, 1500)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	inA := capture(t, a.ns)
	send := injector(t, a.ns)
	sent := packet.Packet{Source: a.seen(), Destination: b.seen(), HopLimit: 2, Body: gram}
	must(t, send.Send(sent.Frame(host.GatewayMAC, host.ContainerMAC)))

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	seen, err := inA.Next(ctx)
	must(t, err)
	got, err := seen.Packet()
	must(t, err)
	icmp, ok := got.Body.(packet.ICMP)
	if !ok || icmp.Type != packet.TimeExceeded || got.Source != b.seen() || got.Destination != a.seen() {
		t.Fatalf("the container saw: %+v", got)
	}
	// The hop limit is 1 at the router; all else is as the container sent it.
	sent.HopLimit = 1
	if !bytes.Equal(icmp.Payload, sent.Marshal()) || !packet.ChecksumOK(seen.Frame[14:]) {
		t.Errorf("it quotes\n%x, sent was\n%x", icmp.Payload, sent.Marshal())
	}
}
