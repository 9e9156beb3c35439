package datapath

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// cut makes fragments of a packet's upper layer, [from, to) each, behind the packet's own extension headers.
func cut(whole packet.Packet, id uint32, spans ...[2]int) (fragments []packet.Packet) {
	plain := whole
	plain.Extensions = nil
	upper := plain.Marshal()[40:]
	for _, s := range spans {
		f := whole
		f.Extensions = append(
			append([]packet.Extension{}, whole.Extensions...),
			packet.Fragment(uint16(s[0]), s[1] < len(upper), id),
		)
		f.Body = packet.Raw{Proto: whole.Body.Protocol(), Data: upper[s[0]:s[1]]}
		fragments = append(fragments, f)
	}
	return fragments
}

// TestHeadersOnTheWire: packets with extension headers, and fragments in any order, reach the socket. On the fabric
// they are as sent except for plaintext addresses, with a checksum that is right for the whole packet.
func TestHeadersOnTheWire(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	fabric, err := packet.NewCapture(w.nodes[1].ns, "eth0", packet.IncomingOnly)
	must(t, err)
	defer fabric.Close()
	send := injector(t, a.ns)
	var socket *net.UDPConn
	must(t, b.ns.Do(func() (err error) {
		socket, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(b.seen(), 0)))
		return err
	}))
	defer socket.Close()
	port := uint16(socket.LocalAddr().(*net.UDPAddr).Port)
	data := bytes.Repeat([]byte("pilaster"), 15) // after 8 bytes of header: 128
	gram := packet.UDP{SourcePort: 1000, DestinationPort: port, Payload: data}
	tcp := packet.TCP{SourcePort: 1000, DestinationPort: port, Flags: packet.SYN, Payload: data}
	with := func(body packet.Body, extensions ...packet.Extension) func(from, to netip.Addr, hops uint8) packet.Packet {
		return func(from, to netip.Addr, hops uint8) packet.Packet {
			return packet.Packet{Source: from, Destination: to, HopLimit: hops, Body: body, Extensions: extensions}
		}
	}
	options := padding(packet.DestinationOptions)
	unknown := packet.Extension{
		Type: packet.DestinationOptions,
		Data: []byte{0x1e, 4, 1, 2, 3, 4},
	} // receivers that do not know the option skip it
	for i, c := range []struct {
		name    string
		whole   func(from, to netip.Addr, hops uint8) packet.Packet
		spans   [][2]int // nil: not in fragments
		arrives bool
		dropped int // how many of the first fragments are dropped as malformed
		fails   int // reassemblies in the container
	}{
		{name: "in order", whole: with(gram), spans: [][2]int{{0, 64}, {64, 128}}, arrives: true},
		{name: "in reverse", whole: with(gram), spans: [][2]int{{64, 128}, {0, 64}}, arrives: true},
		{name: "three, the first last", whole: with(gram), spans: [][2]int{{64, 128}, {8, 64}, {0, 8}}, arrives: true},
		{name: "the only one", whole: with(gram), spans: [][2]int{{0, 128}}, arrives: true},
		{name: "behind options", whole: with(gram, options), spans: [][2]int{{64, 128}, {0, 64}}, arrives: true},
		{name: "overlapping", whole: with(gram), spans: [][2]int{{0, 64}, {56, 128}}, fails: 1},
		{name: "overlapping, in reverse", whole: with(gram), spans: [][2]int{{56, 128}, {0, 64}}, fails: 1},
		{name: "a tiny first one", whole: with(tcp), spans: [][2]int{{0, 8}, {8, 140}}, dropped: 1},
		{name: "destination options", whole: with(gram, options), arrives: true},
		{name: "an unknown option", whole: with(gram, unknown), arrives: true},
		{name: "options again", whole: with(gram, options, options), arrives: true},
		{name: "no upper layer", whole: with(nil, options)},
		{name: "an unknown upper layer", whole: with(packet.Raw{Proto: 253, Data: data}, options)},
		{name: "encrypted payload", whole: with(packet.Raw{Proto: 50, Data: data})},
		{name: "authentication", whole: with(packet.Raw{Proto: authHeader, Data: append([]byte{17, 4, 0, 0, 0, 0, 0, 1,
			0, 0, 0, 1}, make([]byte, 12+136)...)})},
	} {
		inside, outside := []packet.Packet{
			c.whole(a.seen(), b.seen(), 64),
		}, []packet.Packet{
			c.whole(a.plain(), b.plain(), 63),
		}
		if c.spans != nil {
			inside, outside = cut(inside[0], uint32(i+1), c.spans...), cut(outside[0], uint32(i+1), c.spans...)
			for k := range c.spans {
				if c.spans[k][0] > 0 {
					outside[k].Body = inside[k].Body // only the first has a header, and in it the checksum
				}
			}
		}
		malformed, failed := w.nodes[0].drops(t)["malformed"], b.counter(t, "Ip6ReasmFails")
		mark := []byte(fmt.Sprint("after ", c.name))
		for _, p := range append(inside, packet.Packet{Source: a.seen(), Destination: b.seen(),
			Body: packet.UDP{SourcePort: 1000, DestinationPort: port, Payload: mark}}) {
			must(t, send.Send(p.Frame(host.GatewayMAC, host.ContainerMAC)))
		}

		seen, err := a.until(t, fabric, mark)
		must(t, err)
		for k, p := range outside[c.dropped:] {
			if k >= len(seen) || !bytes.Equal(seen[k], p.Marshal()) {
				t.Errorf("%s: packet %d on the wire: %x, not %x", c.name, k+1, seen[min(k, len(seen)-1)], p.Marshal())
			}
		}
		if got := w.nodes[0].drops(t)["malformed"] - malformed; got != uint64(c.dropped) ||
			len(seen) != len(outside)-c.dropped+1 {
			t.Errorf("%s: %d drops, %d packets on the wire", c.name, got, len(seen)-1)
		}
		want := [][]byte{mark}
		if c.arrives {
			want = [][]byte{data, mark}
		}
		must(t, socket.SetReadDeadline(time.Now().Add(patience)))
		for _, expected := range want {
			buffer := make([]byte, 256)
			n, _, err := socket.ReadFromUDPAddrPort(buffer)
			if err != nil || !bytes.Equal(buffer[:n], expected) {
				t.Fatalf("%s: the socket got %q, not %q: %v", c.name, buffer[:n], expected, err)
			}
		}
		if got := b.counter(t, "Ip6ReasmFails") - failed; c.fails > 0 && got == 0 {
			t.Errorf("%s: the container did not refuse to put them together", c.name)
		}
	}
}

// until collects the packets of the container on the fabric up to the datagram with this payload.
func (c *testContainer) until(t *testing.T, fabric *packet.Capture, mark []byte) (seen [][]byte, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		got, err := fabric.Next(ctx)
		if err != nil {
			return seen, err
		}
		if p, _ := got.Packet(); p.Source != c.plain() {
			continue
		}
		seen = append(seen, got.Frame[14:])
		if bytes.HasSuffix(got.Frame, mark) {
			return seen, nil
		}
	}
}

// counter returns an IPv6 counter of the container's kernel.
func (c *testContainer) counter(t *testing.T, name string) (n int) {
	t.Helper()
	must(t, c.ns.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if fields := strings.Fields(line); fields[0] == name {
				_, err = fmt.Sscan(fields[1], &n)
				return err
			}
		}
		return fmt.Errorf("no counter %s", name)
	}))
	return n
}
