package scenario

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func cachedPair(t *testing.T) (*Wire, Pair) {
	t.Helper()
	w, err := NewWire(filepath.Join(t.TempDir(), "w"))
	must(t, err)
	t.Cleanup(func() { must(t, w.Close()) })
	p, err := cachedVXLAN(w)
	must(t, err)
	return w, p
}

// watch captures packets on a device of a node.
func watch(t *testing.T, n *Node, device string, options ...packet.CaptureOption) *packet.Capture {
	t.Helper()
	c, err := packet.NewCapture(n.NS, device, options...)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// inNamespace returns the result of open, called in the namespace.
func inNamespace[T any](t *testing.T, ns *netns.Namespace, open func() (T, error)) (it T) {
	t.Helper()
	must(t, ns.Do(func() (err error) { it, err = open(); return err }))
	return it
}

// port is the port of the tests' servers.
const port = 7000

func (p Pair) at(port uint16) string { return netip.AddrPortFrom(p.Target, port).String() }

// tcp opens a connection from client to server.
func tcp(t *testing.T, p Pair) (client, server net.Conn) {
	t.Helper()
	l := inNamespace(t, p.Server, func() (net.Listener, error) { return net.Listen("tcp", p.at(port)) })
	defer l.Close()
	client = inNamespace(
		t,
		p.Client,
		func() (net.Conn, error) { return net.DialTimeout("tcp", p.at(port), time.Minute) },
	)
	server, err := l.Accept()
	must(t, err)
	for _, c := range []net.Conn{client, server} {
		t.Cleanup(func() { c.Close() })
		must(t, c.SetDeadline(time.Now().Add(time.Minute)))
	}
	return client, server
}

// echoes sends one byte and waits for its echo, n times.
func echoes(t *testing.T, client, server io.ReadWriter, n int) {
	t.Helper()
	b := make([]byte, 1)
	for i := range n {
		for _, way := range [][2]io.ReadWriter{{client, server}, {server, client}} {
			b[0] = byte(i)
			_, err := way[0].Write(b)
			must(t, err)
			_, err = way[1].Read(b)
			must(t, err)
			if b[0] != byte(i) {
				t.Fatalf("byte %d: got echo %d", i, b[0])
			}
		}
	}
}

// sendOnce sends a datagram without a response, on a new flow.
func sendOnce(t *testing.T, p Pair, n int, payload []byte) {
	t.Helper()
	c := inNamespace(t, p.Client, func() (net.PacketConn, error) { return net.ListenPacket("udp", "[::]:0") })
	defer c.Close()
	for range n {
		_, err := c.WriteTo(payload, net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.Target, port+1)))
		must(t, err)
	}
}

// passed returns summaries of the packets between two nodes that the network's own device received before the packet
// with the sentinel.
func passed(t *testing.T, c *packet.Capture, s packet.Sentinel) (all []string) {
	t.Helper()
	got, err := c.Until(t.Context(), s.In)
	must(t, err)
	for _, one := range got {
		p, err := one.Packet()
		must(t, err)
		if p.Source.IsLinkLocalUnicast() || s.In(one) {
			continue
		}
		if icmp, is := p.Body.(packet.ICMP); is && icmp.Type >= 133 && icmp.Type <= 137 {
			continue // neighbour discovery: the kernel probes a neighbour at any time
		}
		what := fmt.Sprintf("%T", p.Body)
		if segment, is := p.Body.(packet.TCP); is {
			what += fmt.Sprint(" ", segment.Flags&(packet.SYN|packet.ACK))
		}
		all = append(all, what)
	}
	return all
}

// TestSegmentsOfUDP: UDP_SEGMENT data of a connection in the cache arrives whole. Behind a program that decapsulated
// it, the kernel would drop it (bpf/tunnel/pull.h).
func TestSegmentsOfUDP(t *testing.T) {
	_, p := cachedPair(t)
	server := inNamespace(t, p.Server, func() (net.PacketConn, error) { return net.ListenPacket("udp", p.at(port)) })
	defer server.Close()
	client := inNamespace(t, p.Client, func() (net.Conn, error) { return net.Dial("udp", p.at(port)) })
	defer client.Close()
	b := make([]byte, 2000)
	for range 5 { // fills the cache
		_, err := client.Write(b[:1])
		must(t, err)
		_, from, err := server.ReadFrom(b)
		must(t, err)
		_, err = server.WriteTo(b[:1], from)
		must(t, err)
		_, err = client.Read(b)
		must(t, err)
	}
	const size, count = 1000, 10
	raw, err := client.(*net.UDPConn).SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
	}))
	must(t, err)
	_, err = client.Write(make([]byte, count*size))
	must(t, err)
	must(t, server.SetReadDeadline(time.Now().Add(10*time.Second)))
	for i := range count {
		if n, _, err := server.ReadFrom(b); err != nil || n != size {
			t.Fatalf("%d of %d datagrams arrived; then %d bytes: %v", i, count, n, err)
		}
	}
}

// TestCacheIsPassedBy: only the first packets of a connection in each direction pass the network's own devices (OC1,
// OC2).
func TestCacheIsPassedBy(t *testing.T) {
	w, p := cachedPair(t)
	client, server := tcp(t, p)
	echoes(t, client, server, 5) // the first connection also teaches where the other node is
	for name, c := range map[string]struct {
		talk func(*testing.T)
		slow []string
	}{
		"TCP": {func(t *testing.T) {
			client, server := tcp(t, p)
			echoes(t, client, server, 50)
		}, []string{"packet.TCP 2", "packet.TCP 18", "packet.TCP 16"}}, // SYN and its answer do not teach
		"UDP": {func(t *testing.T) {
			server := inNamespace(t, p.Server, func() (net.PacketConn, error) {
				return net.ListenPacket("udp",
					p.at(port))
			})
			defer server.Close()
			client := inNamespace(t, p.Client, func() (net.Conn, error) { return net.Dial("udp", p.at(port)) })
			defer client.Close()
			b := make([]byte, 1)
			for range 50 {
				_, err := client.Write(b)
				must(t, err)
				_, from, err := server.ReadFrom(b)
				must(t, err)
				_, err = server.WriteTo(b, from)
				must(t, err)
				_, err = client.Read(b)
				must(t, err)
			}
		}, []string{"packet.UDP", "packet.UDP"}},
		"ICMPv6": {func(t *testing.T) {
			if got, err := packet.Ping(t.Context(), p.Client, p.Target, packet.PingOptions{Count: 50,
				Timeout: time.Minute}); err != nil || got.Received != 50 {
				t.Fatalf("got %+v: %v", got, err)
			}
		}, []string{"packet.ICMP", "packet.ICMP"}},
		"one side sends": {func(t *testing.T) { sendOnce(t, p, 3, []byte{1}) },
			[]string{"packet.UDP", "packet.UDP", "packet.UDP"}},
	} {
		t.Run(name, func(t *testing.T) {
			taps := []*packet.Capture{watch(t, w.Nodes[0], "vxlan"), watch(t, w.Nodes[1], "vxlan")}
			c.talk(t)
			end := packet.NewSentinel()
			sendOnce(t, p, 1, end[:])
			for i, tap := range taps {
				slow := passed(t, tap, end)
				if name == "one side sends" { // and receives an ICMP port unreachable
					slow = slices.DeleteFunc(slow, func(s string) bool { return s == "packet.ICMP" })
				}
				if name == "TCP" && len(slow) == len(c.slow)+2 { // the first data may leave before the ACK is learnt
					slow = slow[:len(c.slow)]
				}
				if !slices.Equal(slow, c.slow) {
					t.Errorf(
						"node %d: %d packets passed the network's own device, %q first; want %q",
						i+1,
						len(slow),
						slow[:min(len(slow), 5)],
						c.slow,
					)
				}
			}
		})
	}
}

// TestCacheForgets: after Fresh, a connection's packets pass the network's own devices until the way to the other node
// and the connection are cached again.
func TestCacheForgets(t *testing.T) {
	w, p := cachedPair(t)
	client, server := tcp(t, p)
	echoes(t, client, server, 5)
	tap := watch(t, w.Nodes[0], "vxlan")
	must(t, p.Fresh())
	echoes(t, client, server, 5)
	end := packet.NewSentinel()
	sendOnce(t, p, 1, end[:])
	if slow := passed(t, tap, end); !slices.Equal(slow, []string{"packet.TCP 16", "packet.TCP 16", "packet.TCP 16"}) {
		t.Errorf("unexpected packets passed the network's own device: %q", slow)
	}
}

// TestCacheOnTheWire: the cache sends valid VXLAN packets, even if the kernel does segmentation and checksums in
// software (OC4).
func TestCacheOnTheWire(t *testing.T) {
	w, p := cachedPair(t)
	for _, n := range w.Nodes {
		must(t, inside(n.NS, func(*netlink.Handle) error {
			for _, f := range append(slices.Clone(segmentation), feature{"tx", unix.ETHTOOL_GTXCSUM,
				unix.ETHTOOL_STXCSUM}) {
				if _, err := f.off("eth0"); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	client, server := tcp(t, p)
	echoes(t, client, server, 5)
	wire, slow := watch(t, w.Nodes[1], "eth0", packet.IncomingOnly), watch(t, w.Nodes[1], "vxlan")

	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(rand.Uint32())
	}
	go client.Write(sent)
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(server, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("the received data differs: %v", err)
	}
	end := packet.NewSentinel()
	sendOnce(t, p, 1, end[:])
	if by := passed(t, slow, end); len(by) > 0 {
		t.Errorf("%d packets passed the network's own device, want none", len(by))
	}
	frames, err := wire.Until(t.Context(), end.In)
	must(t, err)
	// The kernel sends multicast listener reports at any time, up to minutes after a device came up.
	frames = slices.DeleteFunc(frames, func(f packet.Captured) bool { return f.Frame[0] == 0x33 && f.Frame[1] == 0x33 })
	bytes, first := 0, frames[0]
	for _, f := range frames {
		inner := vxlanInside(t, w, f)
		if len(f.Frame) > 1514 {
			t.Fatalf("unexpected frame of %d bytes", len(f.Frame))
		}
		if f.ChecksumPartial || !packet.ChecksumOK(inner[14:14+40+int(binary.BigEndian.Uint16(inner[14+4:]))]) {
			t.Fatal("a segment with a wrong checksum")
		}
		p, err := packet.DecodeFrame(inner)
		must(t, err)
		if segment, is := p.Body.(packet.TCP); is {
			bytes += len(segment.Payload)
			if f.Frame[54] != first.Frame[54] || f.Frame[55] != first.Frame[55] {
				t.Error("segments of one connection have different outer ports, and could take different paths")
			}
		}
	}
	if bytes < len(sent) {
		t.Errorf("got %d bytes on the wire", bytes)
	}
}

// vxlanInside returns the inner frame of a packet. The test fails unless the packet is VXLAN from node 1 to node 2 with
// the headers of the scenario's kernel device.
func vxlanInside(t *testing.T, w *Wire, c packet.Captured) []byte {
	t.Helper()
	p, err := c.Packet()
	must(t, err)
	udp, is := p.Body.(packet.UDP)
	payload := len(c.Frame) - 14 - 40
	if !is || p.Source != w.Nodes[0].Underlay || p.Destination != w.Nodes[1].Underlay || p.HopLimit != 64 ||
		udp.DestinationPort != vxlanPort ||
		len(udp.Payload) < 8+14+40 || int(binary.BigEndian.Uint16(c.Frame[14+4:])) != payload ||
		int(binary.BigEndian.Uint16(c.Frame[54+4:])) != payload ||
		!bytes.Equal(c.Frame[54+6:54+8], []byte{0, 0}) ||
		!bytes.Equal(udp.Payload[:8], []byte{8, 0, 0, 0, 0, 0, vxlanID, 0}) {
		t.Fatalf("unexpected VXLAN headers: % x", c.Frame[:min(len(c.Frame), 84)])
	}
	inner := udp.Payload[8:]
	if !bytes.Equal(inner[:12], slices.Concat(w.Nodes[1].hardware(), w.Nodes[0].hardware())) {
		t.Fatalf("unexpected inner MACs % x", inner[:12])
	}
	return inner
}
