package oncache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

func must(t testing.TB, err error) {
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
	_       [30]uint32
	GSOSegs uint32
	_       [2]uint32
	GSOSize uint32
	_       [3]uint32
}

// Verdicts.
const (
	next     = ^uint32(0)
	redirect = 7
)

// world says which headers the packets have.
type world struct{ inner4, outer4, bridged bool }

var worlds = []world{
	{false, false, false}, {true, false, false}, {false, true, false}, {true, true, false}, {false, false, true},
	{true, true, true},
}

func (w world) String() string {
	family := map[bool]string{true: "4", false: "6"}
	how := map[bool]string{true: "bridged", false: "routed"}
	return fmt.Sprintf("IPv%s in IPv%s, %s", family[w.inner4], family[w.outer4], how[w.bridged])
}

// ends returns addresses: containers here and there, node and peer.
func (w world) ends() (here, there, node, peer netip.Addr) {
	here, there = netip.MustParseAddr("fd00:1::1"), netip.MustParseAddr("fd00:2::1")
	node, peer = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	if w.inner4 {
		here, there = netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("10.1.2.1")
	}
	if w.outer4 {
		node, peer = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	}
	return here, there, node, peer
}

var (
	own, far      = net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2} // uplink and beyond it
	gateway, eth0 = net.HardwareAddr{2, 0, 0, 0, 1, 1}, net.HardwareAddr{2, 0, 0, 0, 1, 2}
	vtep, vtepFar = net.HardwareAddr{2, 0, 0, 0, 2, 1}, net.HardwareAddr{2, 0, 0, 0, 2, 2}
	eth0Far       = net.HardwareAddr{2, 0, 0, 0, 3, 1}
)

const (
	vni     = 77
	tunnels = 4789
	others  = 0xdead_4005 // a mark of others, outside of DefaultMarkMask
)

// bench has one node's programs. Tests run them on packets with BPF_PROG_TEST_RUN.
type bench struct {
	*Cache
	world
	ns                *netns.Namespace
	uplink, container int // ifindex
	sender            *driver
	receiver          *driver
}

func newBench(t testing.TB, w world, change ...func(*Config)) *bench {
	t.Helper()
	spec, err := loadOncache()
	must(t, err)
	return newBenchOf(t, spec, w, change...)
}

func newBenchOf(t testing.TB, spec *ebpf.CollectionSpec, w world, change ...func(*Config)) *bench {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), "ns"))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	b := &bench{ns: ns, world: w}
	_, _, node, _ := w.ends()
	c := Config{Uplink: "uplink", Device: "overlay", Address: node, VNI: vni, Port: tunnels, Bridged: w.bridged}
	for _, f := range change {
		f(&c)
	}
	if !c.Tracks {
		c.TTL = time.Hour // however slow the machine is
	}
	// So that the kernel sends nothing, which the programs would count.
	must(t, ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
	}))
	b.uplink = b.device(t, "uplink", own, 1500)
	b.device(t, "overlay", vtep, 1430)
	b.container = b.device(t, "container", net.HardwareAddr{2, 0, 0, 0, 9, 9}, 1430)
	must(t, ns.Do(func() (err error) { b.Cache, err = open(spec.Copy(), c.withDefaults()); return err }))
	t.Cleanup(func() { must(t, b.Close()) })
	b.lease(t)
	b.sender, b.receiver = newSender(t, w, b.objects.OnceLearnOut), newReceiver(t, b.objects.OnceIn)
	return b
}

func (b *bench) device(t testing.TB, name string, mac net.HardwareAddr, mtu int) (index int) {
	t.Helper()
	must(t, b.ns.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr, attrs.MTU = name, mac, mtu
		quiet := false
		d := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &quiet} // stands for any Ethernet device
		err := errors.Join(netns.Retry(func() error { return netlink.LinkAdd(d) }), netlink.LinkSetUp(d))
		index = d.Attrs().Index
		return err
	}))
	return index
}

// step is one run of a program.
type step struct {
	program string // out, in, learn out, learn in
	frame   []byte
	mark    uint32
	plain   bool // not sent by a tunnel device
	summed  bool // a device has verified the outer checksum
	device  int  // 0: where the program is attached
	gsoSize uint32
	gsoSegs uint32
}

func (b *bench) run(t *testing.T, s step) (verdict uint32, out []byte, mark uint32) {
	t.Helper()
	ctx := skb{Ifindex: uint32(b.uplink), Mark: s.mark, GSOSize: s.gsoSize, GSOSegs: s.gsoSegs}
	program := map[string]*ebpf.Program{
		"out": b.objects.OnceOut, "in": b.objects.OnceIn, "learn out": b.objects.OnceLearnOut,
		"learn in": b.objects.OnceLearnIn,
	}[s.program]
	if s.program == "out" || s.program == "learn in" {
		ctx.Ifindex = uint32(b.container)
	}
	if s.device != 0 {
		ctx.Ifindex = uint32(s.device)
	}
	data := s.frame
	if s.program == "learn out" && !s.plain && b.isTunnelled(s.frame) {
		program, data = b.sender.of(t, b.world, s.frame)
	}
	if s.summed {
		program = b.receiver.program
	}
	out = make([]byte, 2048)
	o := ebpf.RunOptions{Data: data, DataOut: out, Context: ctx, ContextOut: &ctx}
	must(t, b.ns.Do(func() (err error) { verdict, err = program.Run(&o); return err }))
	return verdict, o.DataOut, ctx.Mark
}

// field is the cache's part of a mark: generation and direction.
func (b *bench) field(way uint32) uint32 { return (b.marks<<wayBits | way) << 4 }

var (
	said     = packet.TCP{SourcePort: 4000, DestinationPort: 80, Flags: packet.ACK, Payload: []byte("pilaster")}
	answered = packet.TCP{SourcePort: 80, DestinationPort: 4000, Flags: packet.ACK, Payload: []byte("indeed")}
)

// flags returns a segment with other flags.
func flags(body packet.TCP, f packet.TCPFlags) packet.TCP { body.Flags = f; return body }

// echo returns an ICMP echo request.
func (w world) echo() packet.ICMP {
	if w.inner4 {
		return packet.ICMP{Type: packet.EchoRequest4, Rest: packet.Echo(7, 1)}
	}
	return packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(7, 1)}
}

func (w world) icmpError() packet.ICMP {
	if w.inner4 {
		return packet.ICMP{Type: packet.Unreachable4, Payload: make([]byte, 28)}
	}
	return packet.ICMP{Type: packet.PacketTooBig, Payload: make([]byte, 48)}
}

type change = func(*packet.Packet)

func hops(n uint8) change       { return func(p *packet.Packet) { p.HopLimit = n } }
func class(n uint8) change      { return func(p *packet.Packet) { p.TrafficClass = n } }
func fragment(p *packet.Packet) { p.Extensions = []packet.Extension{packet.Fragment(0, true, 7)} }

func later(p *packet.Packet) {
	p.Extensions = []packet.Extension{packet.Fragment(8, false, 7)}
}

func changed(p packet.Packet, change []change) packet.Packet {
	p.HopLimit = packet.DefaultHopLimit
	for _, c := range change {
		c(&p)
	}
	return p
}

// sent returns a frame that the container sends, received a frame for the container, both as the container sees them.
func (w world) sent(body packet.Body, change ...change) []byte {
	here, there, _, _ := w.ends()
	p := changed(packet.Packet{Source: here, Destination: there, Body: body}, change)
	if w.bridged {
		return p.Frame(eth0Far, eth0)
	}
	return p.Frame(gateway, eth0)
}

func (w world) received(body packet.Body, change ...change) []byte {
	here, there, _, _ := w.ends()
	p := changed(packet.Packet{Source: there, Destination: here, Body: body}, change)
	if w.bridged {
		return p.Frame(eth0, eth0Far)
	}
	return p.Frame(eth0, gateway)
}

// leaving returns the packet of sent in the tunnel, as the overlay's own devices of this node send it; coming returns a
// packet from the peer in the tunnel, which received has as the overlay's devices deliver it.
func (w world) leaving(body packet.Body, change ...change) []byte {
	here, there, node, peer := w.ends()
	p := changed(packet.Packet{Source: here, Destination: there, Body: body}, change)
	if w.bridged {
		return w.tunnelled(node, peer, far, own, p.TrafficClass, p.Frame(eth0Far, eth0))
	}
	p.HopLimit--
	return w.tunnelled(node, peer, far, own, p.TrafficClass, p.Frame(vtepFar, vtep))
}

func (w world) coming(body packet.Body, change ...change) []byte {
	here, there, node, peer := w.ends()
	p := changed(packet.Packet{Source: there, Destination: here, Body: body}, change)
	if w.bridged {
		return w.tunnelled(peer, node, own, far, p.TrafficClass, p.Frame(eth0, eth0Far))
	}
	p.HopLimit++
	return w.tunnelled(peer, node, own, far, p.TrafficClass, p.Frame(vtep, vtepFar))
}

func (w world) tunnelled(source, destination netip.Addr, to, from net.HardwareAddr, class uint8, frame []byte) []byte {
	ecn := class & 3
	if ecn == 3 { // as the kernel's tunnels do
		ecn = 2
	}
	body := packet.UDP{SourcePort: 50_000, DestinationPort: tunnels,
		Payload: slices.Concat([]byte{8, 0, 0, 0, 0, 0, vni, 0}, frame)}
	f := packet.Packet{Source: source, Destination: destination, Body: body, TrafficClass: ecn}.Frame(to, from)
	return w.with(f, "checksum", 0, 0)
}

// at returns the offset of a field in a frame of the tunnel.
func (w world) at(field string) int {
	udp := 14 + 40
	if w.outer4 {
		udp = 14 + 20
	}
	inner := udp + 16 + 14
	outer := map[string]int{"class": 14, "protocol": 14 + 6, "source": 14 + 23, "destination": 14 + 39}
	if w.outer4 {
		outer = map[string]int{"class": 15, "id": 14 + 4, "protocol": 14 + 9, "header": 14 + 10, "source": 14 + 15,
			"destination": 14 + 19}
	}
	if at, ok := outer[field]; ok {
		return at
	}
	return map[string]int{
		"port": udp, "target": udp + 2, "length": udp + 4, "checksum": udp + 6, "flags": udp + 8, "vni": udp + 14,
		"reserved": udp + 15, "inner to": udp + 16, "inner type": inner - 2, "inner": inner,
	}[field]
}

// with returns a frame of the tunnel with another field.
func (w world) with(frame []byte, field string, value ...byte) []byte {
	f := bytes.Clone(frame)
	copy(f[w.at(field):], value)
	return w.summed(f)
}

// summed gives the outer IPv4 header its checksum.
func (w world) summed(f []byte) []byte {
	if w.outer4 {
		binary.BigEndian.PutUint16(f[24:], 0)
		binary.BigEndian.PutUint16(f[24:], headerSum(f[14:34]))
	}
	return f
}

func headerSum(header []byte) uint16 {
	var sum uint32
	for i := 0; i < len(header); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// clean empties the cache and makes it learn.
func (b *bench) clean(t *testing.T) {
	t.Helper()
	_, err := b.Evict(Selector{All: true})
	must(t, errors.Join(err, b.Resume()))
	b.lease(t)
}

// lease gives the programs a lease that does not end in the test.
func (b *bench) lease(t testing.TB) {
	t.Helper()
	now, err := monotonic()
	must(t, errors.Join(err, b.objects.OnceLease.Set(now+uint64(time.Hour))))
}

// introduce makes the MAC known that the container sends from.
func (b *bench) introduce(t *testing.T) {
	t.Helper()
	mac := make([]byte, 8)
	copy(mac, eth0)
	must(t, b.objects.OnceSender.Put(uint32(b.container), binary.NativeEndian.Uint64(mac)))
}

// fill runs the programs on the packets of one connection in both directions, as they pass the overlay's own devices.
func (b *bench) fill(t *testing.T) {
	t.Helper()
	b.clean(t)
	out, in := others|b.field(1), others|b.field(2)
	for _, s := range []struct {
		step
		want uint32
	}{
		{step{program: "out", frame: b.sent(said)}, b.field(1)},
		{step{program: "in", frame: b.coming(answered)}, b.field(2)},
		{step{program: "learn out", frame: b.leaving(said), mark: out}, out},
		{step{program: "out", frame: b.sent(said)}, b.field(1)}, // the destination is known now
		{step{program: "learn out", frame: b.leaving(said), mark: out}, out},
		{step{program: "learn in", frame: b.received(answered), mark: in}, in},
	} {
		verdict, out, mark := b.run(t, s.step)
		if verdict != next || mark != s.want || !bytes.Equal(out, s.frame) {
			t.Fatalf("%s: verdict %d, mark %#x, want %#x; changed: %v", s.program, int32(verdict), mark, s.want,
				!bytes.Equal(out, s.frame))
		}
	}
	if !b.known(t) {
		t.Fatal("the connection is not known")
	}
}

// connection is the key of fill's connection in the filter.
func (w world) connection() flowKey {
	here, there, _, _ := w.ends()
	return flowKey{here.As16(), there.As16(), [2]byte{4000 >> 8, 4000 & 0xff}, [2]byte{0, 80}, vni<<8 | 6}
}

func (b *bench) verdict(t *testing.T) (v verdict, known bool) {
	t.Helper()
	err := b.objects.OnceFilter.Lookup(b.connection(), &v)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	return v, err == nil
}

// known reports whether the overlay's answer for a direction of the connection is known.
func (b *bench) known(t *testing.T) bool {
	v, _ := b.verdict(t)
	return v.Generation == b.filter && (v.Out != 0 || v.In != 0)
}

// change changes the filter entry of fill's connection.
func (b *bench) change(t *testing.T, f func(*verdict)) {
	t.Helper()
	v, _ := b.verdict(t)
	f(&v)
	must(t, b.objects.OnceFilter.Put(b.connection(), v))
}

func empty[K, V any](t *testing.T, m *ebpf.Map) {
	t.Helper()
	_, err := remove(m, func(K, V) bool { return true })
	must(t, err)
}
