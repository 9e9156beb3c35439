package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
)

// offloadSocket sends frames together with a virtio_net_hdr, in which the sender leaves work on the packet to a device.
// Root in a container can open such sockets.
type offloadSocket int

func newOffloadSocket(t *testing.T, c *testContainer) offloadSocket {
	t.Helper()
	var fd int
	var eth0 *net.Interface
	must(t, c.ns.Do(func() (err error) {
		if eth0, err = net.InterfaceByName("eth0"); err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1))
	must(t, unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: eth0.Index}))
	return offloadSocket(fd)
}

// offload is the work that a virtio_net_hdr leaves to a device; the zero value means none.
type offload struct {
	sum           bool // the device computes the checksum from start on, and writes it at start+offset
	start, offset int
	kind          byte // of the segments into which the device cuts the packet: gsoTCP, gsoUDP or none
	size          int  // of each segment
}

const (
	gsoTCP = 4 // VIRTIO_NET_HDR_GSO_TCPV6
	gsoUDP = 5 // VIRTIO_NET_HDR_GSO_UDP_L4
)

func (s offloadSocket) sendOffloaded(frame []byte, o offload) error {
	header := []byte{0, o.kind}
	if o.sum {
		header[0] = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	}
	for _, v := range []int{0, o.size, o.start, o.offset} {
		header = binary.NativeEndian.AppendUint16(header, uint16(v))
	}
	_, err := unix.Write(int(s), append(header, frame...))
	return err
}

// send sends a frame whose checksum from start on a device computes and writes at start+offset.
func (s offloadSocket) send(frame []byte, start, offset int) error {
	err := s.sendOffloaded(frame, offload{sum: true, start: start, offset: offset})
	if joined != endpoint.Veth && errors.Is(err, unix.ENOBUFS) {
		return nil // dropped on the way out; behind a veth the sender gets no error
	}
	return err
}

const l4 = 14 + 40 // offset of the transport header behind Ethernet and IPv6

// TestDeviceMayNotWriteOverWhatWasChecked: a device writes a checksum after our programs checked the packet, and the
// sender chooses place and value. Written over an address, the checksum would forge a tenant.
func TestDeviceMayNotWriteOverWhatWasChecked(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	socket := newOffloadSocket(t, a)
	frame := func(body packet.Body, extensions ...packet.Extension) []byte {
		return packet.Packet{
			Source:      a.seen(),
			Destination: b.seen(),
			Body:        body,
			Extensions:  extensions,
		}.Frame(
			host.GatewayMAC,
			host.ContainerMAC,
		)
	}
	options := padding(packet.DestinationOptions)
	for _, c := range []struct {
		name          string
		frame         []byte
		start, offset int
	}{
		{"tenant id of the source", frame(gram), 20, 10},
		{"source, from behind it", frame(gram), 30, 0},
		{"next header", frame(gram), 20, 0},
		{"an option", frame(gram, options), l4, 2},
		{"ports", frame(gram), l4, 0},
		{"type of an ICMPv6 message", frame(echo), l4, 0},
		{"just behind the ports", frame(gram), l4 + 4, 2},
		{"a later fragment", frame(packet.Raw{Proto: 17, Data: make([]byte, 64)}, packet.Fragment(64, false, 9)),
			l4 + 16, 6},
	} {
		before := w.nodes[0].drops(t)["malformed"]
		must(t, socket.send(c.frame, c.start, c.offset))
		// Frames of one sender stay in order: the drop is counted before the echo comes back.
		mustReach(t, a, b, c.name)
		if n := w.nodes[0].drops(t)["malformed"] - before; n != 1 {
			t.Errorf("a checksum over the %s: %d drops", c.name, n)
		}
	}
}

// TestOptionsOfLongPackets: a socket with PACKET_VNET_HDR cannot send hop-by-hop options to the fabric in a packet as
// long as those of BIG TCP, of which the kernel removes only BIG TCP's own header.
func TestOptionsOfLongPackets(t *testing.T) {
	w := newWireOf(t, endpoint.Veth)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	raiseGSO(t, a.ns, "eth0")
	raiseGSO(t, a.node.ns, a.record.Device.HostName)
	raiseGSO(t, a.node.ns, "eth0")
	socket := newOffloadSocket(t, a)
	wire := capture(t, w.nodes[1].ns)
	hop := func(data ...byte) packet.Extension { return packet.Extension{Type: packet.HopByHop, Data: data} }
	long := packet.TCP{SourcePort: 1000, DestinationPort: 80, Flags: packet.ACK, Payload: make([]byte, 60_000)}
	for _, c := range []struct {
		name       string
		extensions []packet.Extension
	}{
		{"router alert", []packet.Extension{hop(5, 2, 0, 0, 1, 0)}},
		{"BIG TCP's option before other options",
			[]packet.Extension{hop(0xc2, 4, 0, 1, 0, 0, 5, 2, 0, 0, 1, 4, 0, 0)}},
		{"BIG TCP's option before another header",
			[]packet.Extension{hop(0xc2, 4, 0, 1, 0, 0), padding(packet.DestinationOptions)}},
	} {
		// The packet is built with a length that the header can say, and made longer.
		frame := packet.Packet{Source: a.seen(), Destination: b.seen(), Body: long, Extensions: c.extensions}.Frame(
			host.GatewayMAC, host.ContainerMAC)
		at := len(frame) - len(long.Payload) - 20
		frame = append(frame, make([]byte, 10_000)...)
		frame[14+4], frame[14+5] = 0, 0
		before := w.nodes[0].drops(t)["hop-options"]
		must(t, socket.sendOffloaded(frame, offload{sum: true, start: at, offset: 16, kind: gsoTCP, size: 1400}))
		mustReach(t, a, b, c.name) // frames of one sender stay in order
		if n := w.nodes[0].drops(t)["hop-options"] - before; n == 0 {
			t.Errorf("%s: not dropped", c.name)
		}
	}
	for _, c := range sentinelAfter(t, wire, func(s packet.Sentinel) {
		must(t, w.nodes[0].ns.Do(func() error { return sendUDP(w.nodes[1].underlay, s[:]) }))
	}) {
		if p, err := c.Packet(); err == nil && len(p.Extensions) > 0 && p.Extensions[0].Type == packet.HopByHop {
			t.Errorf("on the wire: %+v", p.Extensions)
		}
	}
}

// TestChecksumsLeftToADevice: what a device is still to complete is right on the wire. (In the other
// container it would be so too if both nodes made the same mistake, each in its direction.)
func TestChecksumsLeftToADevice(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	socket := newOffloadSocket(t, a)
	wire := capture(t, w.nodes[1].ns)
	sent := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{Source: a.seen(), Destination: b.seen(), Body: body, Extensions: extensions}
	}
	tunnel := packet.UDP{SourcePort: 1000, DestinationPort: 4789, Payload: make([]byte, 100)}
	for _, c := range []struct {
		name       string
		packet     packet.Packet
		start      int // offset of the header whose checksum the device fills in
		offset     int // of the field in it
		unfinished int // offset of the outer header if its checksum is incomplete, too
	}{
		{"UDP", sent(gram), l4, 6, l4},
		{"TCP", sent(segment), l4, 16, l4},
		{"UDP behind options", sent(gram, padding(packet.DestinationOptions)), l4 + 8, 6, l4 + 8},
		{"UDP in a tunnel", sent(tunnel), l4 + 8 + 50, 6, 0},
	} {
		must(t, socket.send(leftToDevice(c.packet, c.unfinished), c.start, c.offset))
		want := c.packet
		want.Source, want.Destination, want.HopLimit = a.plain(), b.plain(), 63
		wantOnWire(t, wire, c.name, want, c.unfinished)
	}
}

// leftToDevice is a frame whose transport header at unfinished, unless it is 0, has an incomplete checksum: the field
// holds the sum of the pseudo header.
func leftToDevice(p packet.Packet, unfinished int) []byte {
	frame := p.Frame(host.GatewayMAC, host.ContainerMAC)
	if unfinished > 0 {
		sum := ^packet.Checksum(p.Source, p.Destination, p.Body.Protocol(), make([]byte, len(frame)-unfinished))
		field := map[uint8]int{packet.ProtocolUDP: 6, packet.ProtocolTCP: 16}[p.Body.Protocol()]
		binary.BigEndian.PutUint16(frame[unfinished+field:], sum)
	}
	return frame
}

// wantOnWire waits for the next packet of the source, whose checksum is left to a device.
func wantOnWire(t *testing.T, wire *packet.Capture, name string, want packet.Packet, unfinished int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	seen, err := wire.Until(ctx, func(c packet.Captured) bool {
		p, err := c.Packet()
		return err == nil && p.Source == want.Source
	})
	must(t, err)
	got, frame := seen[len(seen)-1], leftToDevice(want, unfinished)
	if !bytes.Equal(got.Frame[14:], frame[14:]) || !got.ChecksumPartial {
		t.Errorf("%s:\n got %x\nwant %x", name, got.Frame, frame)
	}
}

// TestSumOfTheWholePacketStaysRight: a device that sums up all it receives (CHECKSUM_COMPLETE) is
// believed by the kernel, so what we change must cancel out in its sum.
func TestSumOfTheWholePacketStaysRight(t *testing.T) {
	// BPF_F_TEST_SKB_CHECKSUM_COMPLETE, Linux 6.16: EBADMSG if the sum is wrong after the run
	const completeChecksum = 1 << 2
	b := newProgBench(t)
	far, near := b.b3.Addr(), b.b1.plain()
	quoted := packet.Packet{Source: near, Destination: far, Body: gram}.Marshal()
	for _, c := range []struct {
		name       string
		body       packet.Body
		extensions []packet.Extension
	}{
		{"UDP", gram, nil},
		{"TCP", segment, nil},
		{"echo", echo, nil},
		{"UDP behind options", gram, []packet.Extension{padding(packet.DestinationOptions)}},
		{"first fragment", gram, []packet.Extension{packet.Fragment(0, true, 9)}},
		{"later fragment", packet.Raw{Proto: packet.ProtocolUDP, Data: make([]byte, 64)},
			[]packet.Extension{packet.Fragment(64, false, 9)}},
		{"no checksum", nil, nil},
		{"port unreachable", packet.ICMP{Type: packet.DestinationUnreachable, Code: 4, Payload: quoted}, nil},
	} {
		p := packet.Packet{Source: far, Destination: near, Body: c.body, Extensions: c.extensions}
		must(t, b.ns.Do(func() error {
			verdict, err := b.datapath.Objects.PilUplinkIn.Run(&ebpf.RunOptions{
				Data: p.Frame(
					b.uplinkMAC,
					host.ContainerMAC,
				), Context: skb{Ifindex: b.uplinkIfindex()}, Flags: completeChecksum,
			})
			if err != nil || verdict != verdictRedirect {
				t.Errorf("%s: verdict %d, %v", c.name, verdict, err)
			}
			return nil
		}))
	}
}
