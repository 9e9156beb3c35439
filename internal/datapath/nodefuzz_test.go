package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// Ports of the sockets that the node and b1 have open with each other during fuzzing. They are the same in every
// process, because one process makes the seeds and others run them.
const (
	asking    = 4000 // of the node
	answering = 5000 // of b1
)

// converse opens a connection and a connected socket of the node to b1.
func (b *fuzzBench) converse(f testing.TB) {
	f.Helper()
	its := netip.AddrPortFrom(b.b1.seen(), answering).String()
	var listener net.Listener
	must(f, b.b1.ns.Do(func() (err error) { listener, err = net.Listen("tcp6", its); return err }))
	defer listener.Close()
	must(f, b.ns.Do(func() error {
		// A connection without answers must not end while the fuzzing goes on.
		tcp := net.Dialer{
			Timeout:   patience,
			KeepAlive: -1,
			LocalAddr: &net.TCPAddr{IP: b.address().AsSlice(), Port: asking},
		}
		udp := net.Dialer{LocalAddr: &net.UDPAddr{IP: b.address().AsSlice(), Port: asking}}
		for network, d := range map[string]net.Dialer{"tcp6": tcp, "udp6": udp} {
			c, err := d.Dial(network, its)
			if err != nil {
				return err
			}
			f.Cleanup(func() { c.Close() })
		}
		return nil
	}))
	inside, err := listener.Accept()
	must(f, err)
	f.Cleanup(func() { inside.Close() })
}

// toNode returns packets of b1 for its node, answers and others.
func (b *fuzzBench) toNode() (all [][]byte) {
	gateway := b.gateway(b.b1)
	about := packet.Packet{Source: gateway, Destination: b.b1.seen(), Body: gram}.Marshal()
	for _, body := range []packet.Body{
		packet.ICMP{Type: packet.EchoReply, Rest: packet.Echo(1, 1)}, echo,
		packet.ICMP{Type: packet.DestinationUnreachable, Code: 4, Payload: about},
		packet.TCP{SourcePort: answering, DestinationPort: asking, Flags: packet.ACK},
		packet.TCP{SourcePort: answering, DestinationPort: asking, Flags: packet.SYN},
		packet.UDP{SourcePort: answering, DestinationPort: asking, Payload: []byte("odd")},
		packet.UDP{SourcePort: answering + 1, DestinationPort: asking, Payload: []byte("odd")},
	} {
		all = append(all, b.frame(b.sent(gateway, body)))
	}
	return all
}

// FuzzFromNode: whatever the node's stack sends by its device to containers, only packets that the node itself sends
// from its own address reach one. There they have the node's alias in the container's tenant as source.
func FuzzFromNode(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilNode
	seed(f, frames(b.fromNode(f))...)
	f.Fuzz(func(t *testing.T, frame []byte, other, source, destination, how byte) {
		if len(frame) < ipv6At+1 {
			t.Skip("shorter than any frame")
		}
		frame = b.shape(frame, source, destination, how)
		ctx := skb{Ifindex: uint32(b.datapath.NodeNear), Mark: uint32(other), Timestamp: uint64(other)}
		if how&fromDevice != 0 {
			ctx.IngressIfindex = b.uplinkIfindex()
		}
		if how&asSegments != 0 {
			ctx.Segments = 2
		}
		forwarded := ctx.IngressIfindex != 0
		switch verdict, out := b.send(t, frame, &ctx); verdict {
		case verdictNext, answered:
			t.Fatalf("it was passed on or answered:\n%x", frame)
		case verdictRedirect:
			if err := b.fromStack(frame, out, how&asSegments != 0); err != nil || forwarded {
				t.Fatalf("%v; forwarded: %v\n%x", err, forwarded, frame)
			}
			if ctx.Mark != 0 || ctx.Timestamp != 0 {
				t.Fatalf("it left with mark %#x and time %d:\n%x", ctx.Mark, ctx.Timestamp, frame)
			}
		}
	})
}

// fromStack returns what is wrong with a packet of the node's stack that went to a container.
func (m model) fromStack(in, out []byte, segments bool) error {
	a, whole := dissect(in, segments)
	if !whole {
		return fmt.Errorf("it is not a whole IPv6 packet")
	}
	if err := a.mayPass(in); err != nil {
		return err
	}
	if a.source != m.node.Addr().Next() {
		return fmt.Errorf("source %v is not the node", a.source)
	}
	for _, c := range m.containers {
		if c.seen() == a.destination {
			w := passage{
				source:         a.source,
				destination:    a.destination,
				newSource:      m.gateway(c),
				newDestination: a.destination,
			}
			return joinMACs(w.check(in, out, a), out, c.record.Device.ContainerMAC)
		}
	}
	return fmt.Errorf("no container here sees itself as %v", a.destination)
}

// toNode returns what is wrong with a packet of c that went to its node, by the address that c sees.
func (m model) toNode(c *testContainer, in, out []byte, a anatomy) error {
	if upper := in[ipv6At+a.upper : ipv6At+a.end]; a.later || !m.answers(c, a.protocol, upper) {
		return fmt.Errorf("it is no answer to what the node began")
	}
	w := passage{
		source:         a.source,
		destination:    a.destination,
		newSource:      a.source,
		newDestination: m.node.Addr().Next(),
	}
	return joinMACs(w.check(in, out, a), out, host.ContainerMAC)
}

// answers reports whether a packet of c with this transport header answers a packet of the node.
func (m model) answers(c *testContainer, protocol uint8, upper []byte) bool {
	switch protocol {
	case packet.ProtocolICMPv6:
		return upper[0] < 128 || upper[0] == packet.EchoReply
	case packet.ProtocolTCP, packet.ProtocolUDP:
		const syn, ack = 2, 16
		open := c == m.containers[0] && upper[0] == answering>>8 && upper[1] == answering&0xff &&
			upper[2] == asking>>8 &&
			upper[3] == asking&0xff
		return open && (protocol == packet.ProtocolUDP || upper[13]&(syn|ack) != syn)
	}
	return false
}
