package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// tag puts an 802.1Q header of VLAN 5 into a frame.
func tag(frame []byte) []byte { return header8021(0x8100, 5, frame) }

// priorityTag puts an 802.1Q header of VLAN 0 into a frame, which has only a priority.
func priorityTag(frame []byte) []byte { return header8021(0x8100, 7<<13, frame) }

func header8021(kind, tag uint16, frame []byte) []byte {
	tagged := binary.BigEndian.AppendUint16(bytes.Clone(frame[:12]), kind)
	return append(binary.BigEndian.AppendUint16(tagged, tag), frame[12:]...)
}

// TestTaggedFramesStayOut: a VLAN is another network; its frames neither leave a container nor reach one.
func TestTaggedFramesStayOut(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	inB := capture(t, b.ns)
	eth0 := injector(t, a.ns)
	inside := packet.Packet{Source: a.seen(), Destination: b.seen(), Body: gram}
	must(t, eth0.Send(tag(inside.Frame(host.GatewayMAC, host.ContainerMAC))))
	mustReach(t, a, b, "after a tagged frame")
	if got := w.nodes[0].drops(t)["not-ip6"]; got != 1 {
		t.Errorf("a tagged frame from a container: %d drops", got)
	}

	// From the fabric, a tagged frame belongs to the owner of the VLAN: our tcx program lets it pass.
	fabric := injector(t, w.nodes[0].ns)
	outside := packet.Packet{Source: a.plain(), Destination: b.plain(), Body: gram}
	must(t, fabric.Send(tag(outside.Frame(w.nodes[1].mac(t), fabric.MAC()))))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s := packet.NewSentinel()
	must(
		t,
		eth0.Send(
			packet.Packet{
				Source:      a.seen(),
				Destination: b.seen(),
				Body:        packet.Raw{Proto: 253, Data: s[:]},
			}.Frame(
				host.GatewayMAC,
				host.ContainerMAC,
			),
		),
	)
	seen, err := inB.Until(ctx, s.In)
	must(t, err)
	for _, c := range seen {
		if p, err := c.Packet(); err != nil || p.Body.Protocol() == packet.ProtocolUDP {
			t.Errorf("in the container: %+v, %v", p, err)
		}
	}
}

// TestPriorityTags: Linux treats a frame with a tag of VLAN 0 like one without. So do our programs: they check it, and
// deliver it without the tag. They drop frames with a second such tag, which they could not read but Linux could.
func TestPriorityTags(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	c, far, sibling := n.add(t, blue, 1), peer.add(t, blue, 1), n.add(t, blue, 1)
	peer.detach(t, "uplink_out") // it drops frames with two tags
	raw, inside := injector(t, peer.ns), capture(t, c.ns)
	keepOrder(t)
	twice := func(frame []byte) []byte { return priorityTag(priorityTag(frame)) }
	for _, a := range []struct {
		name       string
		tag        func([]byte) []byte
		source, to netip.Addr
		why        string
	}{
		{"a container to the node", priorityTag, far.plain(), n.underlay, "tenant-to-node"},
		{"this node", priorityTag, n.address(), n.underlay, "own-source"},
		{"this node's container", priorityTag, sibling.plain(), c.plain(), "own-source"},
		{"ciphertext", priorityTag, far.seen(), n.underlay, "private-outside"},
		{"a container to the node, tagged twice", twice, far.plain(), n.address(), "malformed"},
		{"a container to a container, tagged twice", twice, far.plain(), c.plain(), "malformed"},
		{"a container to the node, tagged by a provider", func(f []byte) []byte {
			return priorityTag(header8021(0x88a8,
				0, f))
		}, far.plain(), n.address(), "malformed"},
	} {
		before := n.drops(t)[a.why]
		must(
			t,
			raw.Send(a.tag(packet.Packet{Source: a.source, Destination: a.to, Body: gram}.Frame(n.mac(t), raw.MAC()))),
		)
		if seen := drain(t, inside, c); len(seen) != 1 {
			t.Errorf("%s: the container got %x", a.name, seen[0].Frame)
		}
		if got := n.drops(t)[a.why] - before; got != 1 {
			t.Errorf("%s: %d drops for %s, want 1", a.name, got, a.why)
		}
	}
	for range 2 { // the second time from the cache
		must(
			t,
			raw.Send(
				priorityTag(
					packet.Packet{Source: far.plain(), Destination: c.plain(), Body: gram}.Frame(n.mac(t), raw.MAC()),
				),
			),
		)
		seen := drain(t, inside, c)
		want := packet.Packet{
			Source:      far.seen(),
			Destination: c.seen(),
			Body:        gram,
		}.Frame(
			c.record.Device.ContainerMAC,
			host.GatewayMAC,
		)
		if len(seen) != 2 || !bytes.Equal(seen[0].Frame, want) {
			t.Errorf("a container to a container: %d frames, not %x", len(seen)-1, want)
		}
	}
}

// TestHalfAHeaderStaysIn: a frame too short for source and destination neither leaves a container nor reaches one.
func TestHalfAHeaderStaysIn(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	raw := injector(t, a.ns)
	must(
		t,
		raw.Send(
			packet.Packet{Source: a.seen(), Destination: b.seen()}.Frame(host.GatewayMAC, host.ContainerMAC)[:14+20],
		),
	)
	mustReach(t, a, b, "after half a header")
	if got := w.nodes[0].drops(t)["malformed"]; got != 1 {
		t.Errorf("half an IPv6 header: %d drops", got)
	}
}

func (n *testNode) mac(t *testing.T) net.HardwareAddr {
	t.Helper()
	var eth0 *net.Interface
	must(t, n.ns.Do(func() (err error) {
		eth0, err = net.InterfaceByName("eth0")
		return err
	}))
	return eth0.HardwareAddr
}

// TestNodeCannotLieAboutTheProtocol: a process with a packet socket sets the protocol of its frames, but the programs
// read the frame instead.
func TestNodeCannotLieAboutTheProtocol(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	frame := packet.Packet{
		Source:      a.plain(),
		Destination: b.plain(),
		Body:        gram,
	}.Frame(
		w.nodes[1].mac(t),
		w.nodes[0].mac(t),
	)
	for i, protocol := range []uint16{unix.ETH_P_IPV6, unix.ETH_P_IP, unix.ETH_P_8021Q} {
		must(t, w.nodes[0].ns.Do(func() error {
			eth0, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			err = unix.Sendto(
				fd,
				frame,
				0,
				&unix.SockaddrLinklayer{Protocol: protocol<<8 | protocol>>8, Ifindex: eth0.Index},
			)
			if !errors.Is(err, unix.ENOBUFS) { // what a drop on the way out looks like to the sender
				t.Errorf("sent as %#04x: %v", protocol, err)
			}
			return nil
		}))
		if got := w.nodes[0].drops(t)["host-claims-tenant"]; got != uint64(i+1) {
			t.Errorf("a container's packet declared as %#04x: %d drops in all, not %d", protocol, got, i+1)
		}
	}
}

// TestMACsSayNothing: whatever MACs a container writes, the packet reaches its peer on the node, always with the same
// MACs.
func TestMACsSayNothing(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[0].add(t, blue, 1)
	inA := capture(t, a.ns)
	raw := injector(t, a.ns)
	odd := net.HardwareAddr{0x02, 1, 2, 3, 4, 5}
	must(t, raw.Send(packet.Packet{Source: a.seen(), Destination: b.seen(), Body: echo}.Frame(odd, odd)))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	reply, err := inA.Next(ctx)
	must(t, err)
	p, err := reply.Packet()
	if body, ok := p.Body.(packet.ICMP); err != nil || !ok || body.Type != packet.EchoReply || p.Source != b.seen() {
		t.Errorf("answered %+v, %v", p, err)
	}
	if want := packet.Frame(a.record.Device.ContainerMAC, host.GatewayMAC, packet.EtherTypeIPv6, nil); !bytes.HasPrefix(
		reply.Frame,
		want,
	) {
		t.Errorf("the answer's Ethernet header: %x, not %x", reply.Frame[:14], want)
	}
}
