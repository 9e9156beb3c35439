package oncache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// skb is the context of a test run (struct __sk_buff), before and after the program.
type skb struct {
	_       [2]uint32
	Mark    uint32
	_       [7]uint32
	Ifindex uint32
	_       [33]uint32
	GSOSize uint32
	_       [3]uint32
}

// Verdicts, and the index of the device for which all programs run: lo, whose MAC is all zeros.
const (
	next     = ^uint32(0)
	redirect = 7
	device   = 1
)

// Marks of bpf/oncache.bpf.c.
const (
	learnOut = 0x6f6e6301
	learnIn  = 0x6f6e6302
)

var (
	here, there   = netip.MustParseAddr("fd00:1::1"), netip.MustParseAddr("fd00:2::1") // containers
	node, peer    = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	own, far      = make(net.HardwareAddr, 6), net.HardwareAddr{2, 0, 0, 0, 0, 2} // of the uplink and beyond it
	gateway, eth0 = net.HardwareAddr{2, 0, 0, 0, 1, 1}, net.HardwareAddr{2, 0, 0, 0, 1, 2}
	vtep, vtepFar = net.HardwareAddr{2, 0, 0, 0, 2, 1}, net.HardwareAddr{2, 0, 0, 0, 2, 2}
)

const (
	vni     = 77
	tunnels = 4789
)

var overlay = Config{Uplink: "lo", Address: node, VNI: vni, Port: tunnels}

// bench has one node's programs. Tests run them on packets with BPF_PROG_TEST_RUN.
type bench struct {
	*Cache
	ns *netns.Namespace
}

func newBench(t *testing.T) *bench {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), "ns"))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	b := &bench{ns: ns}
	must(t, ns.Do(func() (err error) { b.Cache, err = Open(overlay); return err }))
	t.Cleanup(func() { must(t, b.Close()) })
	return b
}

func (b *bench) run(
	t *testing.T,
	p *ebpf.Program,
	frame []byte,
	mark uint32,
) (verdict uint32, out []byte, marked uint32) {
	t.Helper()
	return b.runAs(t, p, frame, skb{Ifindex: device, Mark: mark})
}

func (b *bench) runAs(
	t *testing.T,
	p *ebpf.Program,
	frame []byte,
	ctx skb,
) (verdict uint32, out []byte, marked uint32) {
	t.Helper()
	out = make([]byte, 2048)
	o := ebpf.RunOptions{Data: frame, DataOut: out, Context: ctx, ContextOut: &ctx}
	must(t, b.ns.Do(func() (err error) { verdict, err = p.Run(&o); return err }))
	return verdict, o.DataOut, ctx.Mark
}

var (
	said     = packet.TCP{SourcePort: 4000, DestinationPort: 80, Flags: packet.ACK, Payload: []byte("pilaster")}
	answered = packet.TCP{SourcePort: 80, DestinationPort: 4000, Flags: packet.ACK, Payload: []byte("indeed")}
)

// sent returns a frame that the container sends, received a frame for the container, both as the container sees them.
func sent(body packet.Body, change ...func(*packet.Packet)) []byte {
	return changed(packet.Packet{Source: here, Destination: there, Body: body}, change).Frame(gateway, eth0)
}

func received(body packet.Body, change ...func(*packet.Packet)) []byte {
	return changed(packet.Packet{Source: there, Destination: here, Body: body}, change).Frame(eth0, gateway)
}

func fragment(p *packet.Packet) { p.Extensions = []packet.Extension{packet.Fragment(0, true, 7)} }

func changed(p packet.Packet, change []func(*packet.Packet)) packet.Packet {
	for _, c := range change {
		c(&p)
	}
	return p
}

// leaving and coming return a container's frame in the tunnel, as the network's own devices of this node and of the
// peer send it.
func leaving(frame []byte) []byte { return tunnelled(node, peer, far, own, vtepFar, vtep, frame) }
func coming(frame []byte) []byte  { return tunnelled(peer, node, own, far, vtep, vtepFar, frame) }

func tunnelled(source, destination netip.Addr, to, from, innerTo, innerFrom net.HardwareAddr, frame []byte) []byte {
	inner := slices.Concat([]byte{8, 0, 0, 0, 0, 0, vni, 0}, innerTo, innerFrom, frame[12:])
	f := packet.Packet{
		Source:      source,
		Destination: destination,
		Body:        packet.UDP{SourcePort: 50_000, DestinationPort: tunnels, Payload: inner},
	}.Frame(
		to,
		from,
	)
	f[checksumAt], f[checksumAt+1] = 0, 0
	return f
}

// Offsets in a frame of the tunnel.
const (
	classAt    = 14 + 1
	outerTo    = 14 + 24 + 15 // the last byte of the destination
	portAt     = 14 + 40
	targetAt   = portAt + 3
	lengthAt   = portAt + 5
	checksumAt = portAt + 6
	flagsAt    = portAt + 8
	vniAt      = flagsAt + 6
	innerType  = flagsAt + 8 + 13
)

func with(frame []byte, at int, value byte) []byte {
	f := bytes.Clone(frame)
	f[at] = value
	return f
}

// fillCache runs the programs on the packets of one connection in both directions, as they pass the network's own
// devices.
func (b *bench) fillCache(t *testing.T) {
	t.Helper()
	for _, step := range []struct {
		program    *ebpf.Program
		frame      []byte
		mark, want uint32
	}{
		{b.objects.OnceOut, sent(said), 0, learnOut},
		{b.objects.OnceLearnOut, leaving(sent(said)), learnOut, learnOut},
		{b.objects.OnceOut, sent(said), 0, learnOut},
		{b.objects.OnceIn, coming(received(answered)), 0, learnIn},
		{b.objects.OnceLearnIn, received(answered), learnIn, learnIn},
	} {
		verdict, out, mark := b.run(t, step.program, step.frame, step.mark)
		if verdict != next || mark != step.want || !bytes.Equal(out, step.frame) {
			t.Fatalf(
				"%v: verdict %d, mark %#x; not left as it was: %v",
				step.program,
				int32(verdict),
				mark,
				!bytes.Equal(out, step.frame),
			)
		}
	}
}

// The cache changes packets exactly as the network's own devices do, except for the outer source port.
func TestSameAsTheNetwork(t *testing.T) {
	b := newBench(t)
	b.fillCache(t)
	for _, body := range []packet.TCP{
		said, {SourcePort: 4000, DestinationPort: 80, Flags: packet.ACK | packet.FIN, Payload: make([]byte, 1000)},
		{SourcePort: 4000, DestinationPort: 80, Flags: packet.SYN | packet.ACK}, // SYN+ACK does not open a connection
	} {
		for class := range uint8(4) { // encapsulation copies the ECN bits to the outer header (RFC 6040)
			frame := sent(body, func(p *packet.Packet) { p.TrafficClass = class })
			want := with(leaving(frame), classAt, class<<4)
			verdict, out, mark := b.run(t, b.objects.OnceOut, frame, 0)
			port := binary.BigEndian.Uint16(out[portAt:])
			copy(out[portAt:], want[portAt:portAt+2])
			if verdict != redirect || mark != 0 || port < 0xc000 || !bytes.Equal(out, want) {
				t.Errorf(
					"out, class %d: verdict %d, mark %#x, port %d\n got % x\nwant % x",
					class,
					int32(verdict),
					mark,
					port,
					out,
					want,
				)
			}
		}
	}
	verdict, out, mark := b.run(t, b.objects.OnceIn, coming(received(answered)), 0)
	if want := received(answered); verdict != redirect || mark != 0 || !bytes.Equal(out, want) {
		t.Errorf("in: verdict %d, mark %#x\n got % x\nwant % x", int32(verdict), mark, out, want)
	}
}

// The programs pass packets on a cache miss to the network unchanged, with or without a learn mark.
func TestLeftToTheNetwork(t *testing.T) {
	hops := func(n uint8) func(*packet.Packet) { return func(p *packet.Packet) { p.HopLimit = n } }
	in := coming(received(answered))
	errorOf := packet.ICMP{Type: packet.PacketTooBig, Payload: sent(said)[14:]}
	syn := func(body packet.TCP) packet.TCP { body.Flags = packet.SYN; return body }
	drop := func(m func(*bench) *ebpf.Map) func(*testing.T, *bench) {
		return func(t *testing.T, b *bench) { must(t, empty(m(b))) }
	}
	filter := func(b *bench) *ebpf.Map { return b.objects.OnceFilter }
	set := func(out, device uint32) func(*testing.T, *bench) {
		return func(t *testing.T, b *bench) { must(t, b.filter(out, device)) }
	}
	for _, c := range []struct {
		name    string
		out     bool
		frame   []byte
		prepare func(*testing.T, *bench)
		learns  bool
		forgets bool // the program deletes the connection's entry, so that both directions pass the network again
	}{
		{name: "out: connection unknown", out: true, frame: sent(said), prepare: drop(filter), learns: true,
			forgets: true},
		{name: "out: never let in", out: true, frame: sent(said), prepare: set(1, 0), learns: true},
		{name: "out: never let out", out: true, frame: sent(said), prepare: set(0, device), learns: true},
		{name: "out: another container's connection", out: true, frame: sent(said), prepare: set(1, device+1),
			learns: true},
		{name: "out: headers unknown", out: true, frame: sent(said),
			prepare: drop(func(b *bench) *ebpf.Map { return b.objects.OnceEgress }), learns: true, forgets: true},
		{name: "out: another port", out: true,
			frame: sent(packet.TCP{SourcePort: 4001, DestinationPort: 80, Flags: packet.ACK}), learns: true},
		{name: "out: another protocol", out: true, frame: sent(packet.UDP{SourcePort: 4000, DestinationPort: 80}),
			learns: true},
		{name: "out: new connection", out: true, frame: sent(syn(said)), learns: true, forgets: true},
		{name: "out: hops run out", out: true, frame: sent(said, hops(2))},
		{name: "out: fragment", out: true, frame: sent(said, fragment)},
		{name: "out: ICMPv6 error", out: true, frame: sent(errorOf)},
		{name: "out: IPv4", out: true, frame: with(sent(said), 12, 8)},
		{name: "in: connection unknown", frame: in, prepare: drop(filter), learns: true, forgets: true},
		{name: "in: never let in", frame: in, prepare: set(1, 0), learns: true},
		{name: "in: never let out", frame: in, prepare: set(0, device), learns: true},
		{name: "in: container has moved", frame: in, prepare: set(1, device+1), learns: true, forgets: true},
		{name: "in: container unknown", frame: in,
			prepare: drop(func(b *bench) *ebpf.Map { return b.objects.OnceIngress }), learns: true, forgets: true},
		{name: "in: new connection", frame: coming(received(syn(answered))), learns: true, forgets: true},
		{name: "in: hops run out", frame: coming(received(answered, hops(1)))},
		{name: "in: congestion marked on the way", frame: with(in, classAt, 0x30)},
		{name: "in: ECT(1) around ECT(0)", frame: with(coming(received(answered,
			func(p *packet.Packet) { p.TrafficClass = 2 })), classAt, 0x10)},
		{name: "in: longer than it says", frame: append(bytes.Clone(in), 0)},
		{name: "in: another length in UDP", frame: with(in, lengthAt, in[lengthAt]+1)},
		{name: "in: version 4", frame: with(in, 14, 0x40)},
		{name: "in: reserved byte", frame: with(in, vniAt+1, 1)},
		{name: "in: ICMPv6 error", frame: coming(received(errorOf))},
		{name: "in: another's frame", frame: with(in, 5, 9)},
		{name: "in: another node's", frame: with(in, outerTo, 9)},
		{name: "in: another port", frame: with(in, targetAt, 9)},
		{name: "in: another network", frame: with(in, vniAt, 9)},
		{name: "in: flags", frame: with(in, flagsAt, 0x88)},
		{name: "in: no IPv6 inside", frame: with(in, innerType, 0)},
		{name: "in: not UDP", frame: with(in, 14+6, packet.ProtocolTCP)},
		{name: "in: cut", frame: in[:84+40]},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.fillCache(t)
			if c.prepare != nil {
				c.prepare(t, b)
			}
			program, want := b.objects.OnceIn, uint32(0)
			if c.out {
				program = b.objects.OnceOut
			}
			if c.learns {
				want = map[bool]uint32{true: learnOut, false: learnIn}[c.out]
			}
			verdict, out, mark := b.run(t, program, c.frame, 0)
			if verdict != next || mark != want || !bytes.Equal(out, c.frame) {
				t.Errorf("verdict %d, mark %#x; left as it was: %v", int32(verdict), mark, bytes.Equal(out, c.frame))
			}
			if known := b.known(t); known == c.forgets {
				t.Errorf("the connection is known: %v", known)
			}
		})
	}
}

// Segments of UDP data would be lost behind the cache, so they pass the network, and the connection stays known.
func TestSegmentsOfUDPAreLeft(t *testing.T) {
	b := newBench(t)
	b.fillCache(t)
	in := coming(received(answered))
	verdict, out, mark := b.runAs(t, b.objects.OnceIn, in, skb{Ifindex: device, GSOSize: 8}) // of no kind, so not TCP
	if verdict != next || mark != 0 || !bytes.Equal(in, out) || !b.known(t) {
		t.Errorf("verdict %d, mark %#x; left as it was: %v", int32(verdict), mark, bytes.Equal(in, out))
	}
}

// connection is the map key of fillCache's connection.
var connection = slices.Concat(here.AsSlice(), there.AsSlice(), []byte{4000 >> 8, 4000 & 0xff, 0, 80, 6, 0, 0, 0})

func (b *bench) filter(out, device uint32) error {
	return b.objects.OnceFilter.Put(connection, []uint32{out, device})
}

func (b *bench) known(t *testing.T) bool {
	err := b.objects.OnceFilter.Lookup(connection, make([]uint32, 2))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

// The cache learns nothing from packets without the right mark, nor from packets whose outer UDP header has a checksum.
func TestNotLearnt(t *testing.T) {
	b := newBench(t)
	for name, c := range map[string]struct {
		program *ebpf.Program
		frame   []byte
		mark    uint32
	}{
		"out: no mark":        {b.objects.OnceLearnOut, leaving(sent(said)), 0},
		"out: the other mark": {b.objects.OnceLearnOut, leaving(sent(said)), learnIn},
		"out: outer checksum": {b.objects.OnceLearnOut, with(leaving(sent(said)), checksumAt, 1), learnOut},
		"out: not the tunnel": {b.objects.OnceLearnOut, sent(said), learnOut},
		"out: forwarded":      {b.objects.OnceLearnOut, coming(sent(said)), learnOut},
		"in: no mark":         {b.objects.OnceLearnIn, received(answered), 0},
		"in: the other mark":  {b.objects.OnceLearnIn, received(answered), learnOut},
		"in: fragment":        {b.objects.OnceLearnIn, received(said, fragment), learnIn},
		"out: fragment":       {b.objects.OnceLearnOut, leaving(sent(said, fragment)), learnOut},
		"in: IPv4":            {b.objects.OnceLearnIn, with(received(answered), 12, 8), learnIn},
	} {
		b.run(t, c.program, c.frame, c.mark)
		for _, m := range []*ebpf.Map{b.objects.OnceFilter, b.objects.OnceEgress, b.objects.OnceIngress} {
			if err := m.NextKey(nil, make([]byte, m.KeySize())); !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Errorf("%s: something was learnt: %v", name, err)
			}
		}
		must(t, b.Clear())
	}
}

// Full maps evict entries and accept new ones.
func TestTablesAreBounded(t *testing.T) {
	b := newBench(t)
	for port := range uint16(10_000) {
		b.run(t, b.objects.OnceLearnOut, leaving(sent(packet.UDP{SourcePort: port, DestinationPort: 53})), learnOut)
	}
	count, key := 0, make([]byte, b.objects.OnceFilter.KeySize())
	entries := b.objects.OnceFilter.Iterate()
	for entries.Next(key, make([]byte, b.objects.OnceFilter.ValueSize())) {
		count++
	}
	if count < 2048 || count > 4096 {
		t.Errorf("%d connections are known", count)
	}
}

func TestOpenSaysWhatIsMissing(t *testing.T) {
	b := newBench(t)
	must(t, b.ns.Do(func() error {
		if _, err := Open(Config{Uplink: "none", Address: node}); err == nil ||
			!bytes.Contains([]byte(err.Error()), []byte("oncache: none: ")) {
			t.Errorf("opened: %v", err)
		}
		if err := b.Join("none"); err == nil {
			t.Error("a container joined by a device that is not there")
		}
		return nil
	}))
}
