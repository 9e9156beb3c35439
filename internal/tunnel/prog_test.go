package tunnel

import (
	"bytes"
	"encoding/binary"
	"fmt"
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

// Numbers of bpf/tunnel/headers.h.
const (
	nextIP4, nextIP6, nextEthernet = 1, 2, 3

	hasGroup, hasGPE, hasNSH, hasCsum, copyDSCP = 1, 2, 4, 8, 16
)

// result is enum tunnel_result.
type result int

const (
	ok result = iota
	other
	options
	malformed
	badFlags
	badNSH
	congested
	leftToKernel
	tooLong
	failed
)

const (
	vxlanPort, gpePort = 4789, 4790
	vni                = 0x123456
	group              = 0xabcd
	path               = 0x00002aff // service path 42, index 255
)

// Verdicts of programs.
const (
	next = ^uint32(0)
	drop = 2
)

var (
	macA, macB = net.HardwareAddr{2, 0, 0, 0, 0, 1}, make(net.HardwareAddr, 6) // lo, where programs run, has none
	v4         = [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	v6         = [2]netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")}
	inner4     = [2]netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2")}
	inner6     = [2]netip.Addr{netip.MustParseAddr("fd00:9::1"), netip.MustParseAddr("fd00:9::2")}
	context24  = []byte{1, 1, 7, 20, 'o', 'p', 'a', 'q', 'u', 'e', ' ', 'b', 'y', 't', 'e', 's', 0, 1, 2, 3, 4, 5, 6, 7}
)

// node has one node's programs.
type node struct {
	programsObjects
	ns *netns.Namespace
}

func newNode(t *testing.T) *node {
	t.Helper()
	spec, err := loadPrograms()
	must(t, err)
	return newNodeOf(t, spec)
}

func newNodeOf(t *testing.T, spec *ebpf.CollectionSpec) *node {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), "ns"))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	n := &node{ns: ns}
	must(t, spec.LoadAndAssign(&n.programsObjects, nil))
	t.Cleanup(func() { n.Close() })
	return n
}

func (n *node) set(t *testing.T, s settings) {
	t.Helper()
	must(t, n.TunSettings.Put(uint32(0), s.programsSettings()))
}

func (n *node) results(t *testing.T) (r programsResults) {
	t.Helper()
	must(t, n.TunResults.Lookup(uint32(0), &r))
	return r
}

func (n *node) forget(t *testing.T) {
	t.Helper()
	must(t, n.TunResults.Put(uint32(0), programsResults{}))
}

// run runs a program on a frame and returns its verdict, the frame after it and the parsed headers.
func (n *node) run(t *testing.T, p *ebpf.Program, frame []byte) (verdict uint32, out []byte) {
	t.Helper()
	o := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)}
	must(t, n.ns.Do(func() (err error) { verdict, err = p.Run(&o); return err }))
	return verdict, o.DataOut
}

// settings are those of the programs, as a test writes them.
type settings struct {
	ends    [2]netip.Addr
	flags   uint8
	next    uint8 // 0: Ethernet
	tos     uint8
	md      uint8 // 0: 2
	context []byte
	// Of the programs between namespaces.
	uplink, device uint32
	pullSegments   bool
}

func (s settings) port() uint16 {
	if s.flags&hasGPE != 0 {
		return gpePort
	}
	return vxlanPort
}

func (s settings) innermost() uint8 {
	if s.next == 0 {
		return nextEthernet
	}
	return s.next
}

func (s settings) mdType() uint8 {
	if s.md == 0 {
		return 2
	}
	return s.md
}

func addrOf(a netip.Addr) (b programsAddr) {
	bytes16 := a.As16()
	b.Hi, b.Lo = binary.NativeEndian.Uint64(bytes16[:8]), binary.NativeEndian.Uint64(bytes16[8:])
	return b
}

func swap16(v uint16) uint16 { return v>>8 | v<<8 }

func (s settings) programsSettings() (p programsSettings) {
	p.Push.Src, p.Push.Dst = addrOf(s.ends[0]), addrOf(s.ends[1])
	p.Push.Vni, p.Push.Group, p.Push.Dport = vni, group, swap16(s.port())
	p.Push.Flags, p.Push.Next, p.Push.Md = s.flags, s.innermost(), s.mdType()
	p.Push.Tos, p.Push.Ttl, p.Push.NshTtl = s.tos, 64, 63
	p.Push.Path = binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, path))
	copy(p.Context[:], s.context)
	p.Size, p.Uplink, p.Device = uint32(len(s.context)), s.uplink, s.device
	p.Port, p.Accept = swap16(s.port()), s.flags&(hasGroup|hasGPE|hasNSH)
	if s.pullSegments {
		p.PullSegments = 1
	}
	return p
}

// headers are those between the outer UDP header and the inner frame or packet, by the drafts' figures.
func (s settings) headers() []byte {
	var b []byte
	switch {
	case s.flags&hasNSH != 0:
		b = []byte{0x0c, 0, 0, 4}
	case s.flags&hasGPE != 0:
		b = []byte{0x0c, 0, 0, s.innermost()}
	case s.flags&hasGroup != 0:
		b = []byte{0x88, 0, group >> 8, group & 0xff}
	default:
		b = []byte{0x08, 0, 0, 0}
	}
	b = append(b, vni>>16, vni>>8&0xff, vni&0xff, 0)
	if s.flags&hasNSH != 0 {
		length := (8 + len(s.context)) / 4
		b = binary.BigEndian.AppendUint16(b, uint16(63<<6|length))
		b = append(b, s.mdType(), s.innermost())
		b = binary.BigEndian.AppendUint32(b, path)
		b = append(b, s.context...)
	}
	return b
}

// wrapped is what tun_push must make of a frame. The outer MACs are zero, as lo's are.
func (s settings) wrapped(frame []byte, tos uint8, port uint16) []byte {
	payload := s.headers()
	if s.innermost() == nextEthernet {
		payload = append(payload, frame...)
	} else {
		payload = append(payload, frame[14:]...)
	}
	out := packet.Packet{
		Source: s.ends[0], Destination: s.ends[1], TrafficClass: tos,
		Body: packet.UDP{SourcePort: port, DestinationPort: s.port(), Payload: payload},
	}.Frame(make([]byte, 6), make([]byte, 6))
	udp := 14 + 40
	if s.ends[0].Is4() {
		out[14+6] = 0x40 // DF
		resum4(out[14:])
		udp = 14 + 20
	}
	if s.flags&hasCsum == 0 {
		out[udp+6], out[udp+7] = 0, 0
	}
	return out
}

// resum4 corrects the checksum of an IPv4 header of 20 bytes.
func resum4(header []byte) {
	header[10], header[11] = 0, 0
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(header[10:], ^uint16(sum))
}

func innerFrame(ends [2]netip.Addr, tos uint8, body packet.Body) []byte {
	return packet.Packet{Source: ends[0], Destination: ends[1], TrafficClass: tos, Body: body}.Frame(macB, macA)
}

var (
	segment  = packet.TCP{SourcePort: 4000, DestinationPort: 80, Flags: packet.ACK, Payload: []byte("pilaster!")}
	datagram = packet.UDP{SourcePort: 4000, DestinationPort: 53, Payload: []byte("pilaster")}
	echo     = packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(1, 2), Payload: []byte("pilaster")}
	echo4    = packet.ICMP{Type: packet.EchoRequest4, Rest: packet.Echo(1, 2), Payload: []byte("pilaster")}
)

// layout is a combination of headers.
type layout struct {
	name string
	settings
}

var layouts = []layout{
	{"plain", settings{}},
	{"group", settings{flags: hasGroup}},
	{"GPE, Ethernet", settings{flags: hasGPE}},
	{"NSH of type 1", settings{flags: hasGPE | hasNSH, md: 1, context: context24[:16]}},
	{"NSH of type 2", settings{flags: hasGPE | hasNSH, context: context24}},
	{"NSH without context", settings{flags: hasGPE | hasNSH}},
}

// frames returns inner frames with their IP version.
func frames(tos uint8) map[string][]byte {
	return map[string][]byte{
		"TCP 4": innerFrame(inner4, tos, segment), "TCP 6": innerFrame(inner6, tos, segment),
		"UDP 4": innerFrame(inner4, tos, datagram), "UDP 6": innerFrame(inner6, tos, datagram),
		"ICMP 4": innerFrame(inner4, tos, echo4), "ICMP 6": innerFrame(inner6, tos, echo),
	}
}

func is4(frame []byte) bool { return frame[12] == 8 }

// each calls f for every combination of outer family, headers and inner frame.
func each(t *testing.T, tos uint8, f func(t *testing.T, s settings, frame []byte)) {
	for family, ends := range map[string][2]netip.Addr{"IPv4": v4, "IPv6": v6} {
		for _, l := range layouts {
			for name, frame := range frames(tos) {
				s := l.settings
				s.ends = ends
				t.Run(fmt.Sprintf("%s, %s, %s", family, l.name, name), func(t *testing.T) { f(t, s, frame) })
				if s.flags&hasGPE != 0 {
					s.next = nextIP6
					if is4(frame) {
						s.next = nextIP4
					}
					t.Run(fmt.Sprintf("%s, %s, %s without Ethernet", family, l.name, name),
						func(t *testing.T) { f(t, s, frame) })
				}
			}
		}
	}
}

// TestPushAndPull: the bytes are those that another implementation builds, and pull restores the frame.
func TestPushAndPull(t *testing.T) {
	n := newNode(t)
	each(t, 0x02, func(t *testing.T, s settings, frame []byte) {
		for _, extra := range []struct{ flags, tos, want uint8 }{
			{0, 0xb9, 0xba}, {hasCsum, 0, 2}, {copyDSCP, 0xb8, 2},
		} {
			s := s
			s.flags, s.tos = s.flags|extra.flags, extra.tos
			n.set(t, s)
			n.forget(t)
			verdict, out := n.run(t, n.TunPush, frame)
			if verdict != 0 || len(out) < len(frame)+36 {
				t.Fatalf("push: verdict %d, results %v", int32(verdict), n.results(t).Push)
			}
			udp := 14 + 40
			if s.ends[0].Is4() {
				udp = 14 + 20
			}
			port := binary.BigEndian.Uint16(out[udp:])
			if want := s.wrapped(frame, extra.want, port); port < 0xc000 || !bytes.Equal(out, want) {
				t.Fatalf("flags %#x: from port %d\n got % x\nwant % x", s.flags, port, out, want)
			}
			verdict, back := n.run(t, n.TunPull, out)
			r := n.results(t)
			inner := bytes.Clone(frame)
			if s.innermost() != nextEthernet {
				clear(inner[:12]) // the outer MACs stay
			}
			if verdict != 0 || !bytes.Equal(back, inner) {
				t.Fatalf("pull: verdict %d, results %v\n got % x\nwant % x", int32(verdict), r.Pull, back, inner)
			}
			want := s.programsSettings().Push
			want.Tos, want.InnerTos, want.Sport = extra.want, 2, swap16(port)
			want.Inner = uint16(len(out) - (len(frame) - 14))
			want.Flags &^= copyDSCP
			if s.flags&hasNSH != 0 {
				want.Nsh = uint16(8 + len(s.context))
			} else {
				want.Path, want.Md, want.NshTtl = 0, 0, 0
			}
			if s.flags&hasGroup == 0 {
				want.Group = 0
			}
			if is4(frame) {
				want.InnerIp4 = 1
			}
			if r.Last != want {
				t.Errorf("pull read\n %+v, want\n %+v", r.Last, want)
			}
		}
	})
}

// TestECN: RFC 6040. Push copies the field; pull combines both fields or drops, and keeps checksums right.
func TestECN(t *testing.T) {
	const notCapable, ect1, ect0, ce, dropped = 0, 1, 2, 3, 4
	want := [4][4]int{ // by inner, then by outer field
		notCapable: {notCapable, notCapable, notCapable, dropped},
		ect1:       {ect1, ect1, ect1, ce},
		ect0:       {ect0, ect1, ect0, ce},
		ce:         {ce, ce, ce, ce},
	}
	n := newNode(t)
	for _, ends := range [][2]netip.Addr{v4, v6} {
		for _, inner := range [][2]netip.Addr{inner4, inner6} {
			for in := range uint8(4) {
				s := settings{ends: ends, flags: hasGPE | hasNSH, context: context24, tos: 0xb8}
				n.set(t, s)
				frame := innerFrame(inner, 0x48|in, segment)
				_, out := n.run(t, n.TunPush, frame)
				if !bytes.Equal(out, s.wrapped(frame, 0xb8|in, portOf(out))) {
					t.Errorf("%v in %v, field %d: wrong headers\n% x", inner, ends, in, out)
				}
				for outer := range uint8(4) {
					n.forget(t)
					verdict, got := n.run(t, n.TunPull, s.wrapped(frame, outer, 50_000))
					switch want := want[in][outer]; {
					case want == dropped:
						if verdict != drop || n.results(t).Pull[congested] != 1 {
							t.Errorf("%v in %v, CE around a flow without ECN: verdict %d", inner, ends, int32(verdict))
						}
					case verdict != 0 || !bytes.Equal(got, innerFrame(inner, 0x48|uint8(want), segment)):
						t.Errorf("%v in %v, %d around %d: verdict %d, want field %d\n% x", inner, ends, outer, in,
							int32(verdict), want, got)
					}
				}
			}
		}
	}
}

func portOf(out []byte) uint16 {
	if is4(out) {
		return binary.BigEndian.Uint16(out[34:])
	}
	return binary.BigEndian.Uint16(out[54:])
}

// refusal is a damaged packet, and the result that it must have.
type refusal struct {
	name   string
	s      settings
	change func([]byte) []byte
	want   result
}

const (
	udp4, udp6 = 14 + 20, 14 + 40
	vx4, vx6   = udp4 + 8, udp6 + 8
	nshAt      = vx4 + 8
)

var plain4, plain6, nsh4 = settings{ends: v4}, settings{ends: v6},
	settings{ends: v4, flags: hasGPE | hasNSH, context: context24}

func refusals() []refusal {
	set := func(at int, values ...byte) func([]byte) []byte {
		return func(b []byte) []byte { copy(b[at:], values); return b }
	}
	// In frames with IPv4 outside, whose header gets a right checksum again.
	set4 := func(at int, values ...byte) func([]byte) []byte {
		return func(b []byte) []byte { copy(b[at:], values); resum4(b[14:]); return b }
	}
	return []refusal{
		{"whole, IPv4", plain4, nil, ok},
		{"whole, IPv6", plain6, nil, ok},
		{"another ethertype", plain4, set(12, 8, 6), other},
		{"TCP, IPv4", plain4, set4(14+9, 6), other},
		{"TCP, IPv6", plain6, set(14+6, 6), other},
		{"another port, IPv4", plain4, set(udp4+3, 1), other},
		{"another port, IPv6", plain6, set(udp6+3, 1), other},
		{"IPv4 options", plain4, set4(14, 0x46), options},
		{"first fragment, IPv4", plain4, set4(14+6, 0x20), options},
		{"later fragment, IPv4", plain4, set4(14+7, 1), options},
		{"fragment, IPv6", plain6, set(14+6, 44), options},
		{"hop-by-hop options, IPv6", plain6, set(14+6, 0), options},
		{"routing header, IPv6", plain6, set(14+6, 43), options},
		{"destination options, IPv6", plain6, set(14+6, 60), options},
		{"authentication header, IPv6", plain6, set(14+6, 51), options},
		{"version 5 as IPv4", plain4, set4(14, 0x55), malformed},
		{"header of 16 bytes, IPv4", plain4, set4(14, 0x44), malformed},
		{"version 4 as IPv6", plain6, set(14, 0x40), malformed},
		{"header checksum", plain4, set(14+8, 63), malformed},
		{"shorter than it says, IPv4", plain4, func(b []byte) []byte { return b[:len(b)-1] }, malformed},
		{"longer than it says, IPv4", plain4, func(b []byte) []byte { return append(b, 0) }, malformed},
		{"shorter than it says, IPv6", plain6, func(b []byte) []byte { return b[:len(b)-1] }, malformed},
		{"longer than it says, IPv6", plain6, func(b []byte) []byte { return append(b, 0) }, malformed},
		{"another length in IPv4", plain4, set4(14+2, 0, 40), malformed},
		{"another length in UDP, IPv4", plain4, set(udp4+4, 0, 30), malformed},
		{"another length in UDP, IPv6", plain6, set(udp6+4, 0, 30), malformed},
		{"mapped source", plain6, set(14+8, mapped(v4[0])...), malformed},
		{"mapped destination", plain6, set(14+24, mapped(v4[1])...), malformed},
		{"no VNI", plain4, set(vx4, 0), badFlags},
		{"reserved flag", plain4, set(vx4, 0x18), badFlags},
		{"reserved bytes", plain6, set(vx6+2, 1), badFlags},
		{"reserved byte behind the VNI", plain6, set(vx6+7, 1), badFlags},
		{"group where none is accepted", plain4, set(vx4, 0x88), badFlags},
		{"GPE where none is accepted", plain4, set(vx4, 0x0c, 0, 0, 3), badFlags},
		{"GPE and group", settings{ends: v4, flags: hasGroup | hasGPE}, set(vx4, 0x8c), badFlags},
		{"OAM of GPE", nsh4, set(vx4, 0x0d), badFlags},
		{"version of GPE", nsh4, set(vx4, 0x1c), badFlags},
		{"next protocol 0 of GPE", nsh4, set(vx4+3, 0), badFlags},
		{"next protocol 5 of GPE", nsh4, set(vx4+3, 5), badFlags},
		{"NSH where none is accepted", settings{ends: v4, flags: hasGPE}, set(vx4+3, 4), badFlags},
		{"version of the NSH", nsh4, set(nshAt, 0x4f), badNSH},
		{"OAM of the NSH", nsh4, set(nshAt, 0x2f), badNSH},
		{"TTL of the NSH", nsh4, set(nshAt, 0, 8), badNSH},
		{"length of the NSH", nsh4, set(nshAt+1, 0xc0|63), badNSH},
		{"no length of the NSH", nsh4, set(nshAt+1, 0xc0|1), badNSH},
		{"length for type 1", nsh4, set(nshAt+2, 1), badNSH},
		{"type 0", nsh4, set(nshAt+2, 0), badNSH},
		{"type 15", nsh4, set(nshAt+2, 15), badNSH},
		{"NSH in NSH", nsh4, set(nshAt+3, 4), badNSH},
		{"MPLS in NSH", nsh4, set(nshAt+3, 5), badNSH},
		{"protocol 0 in NSH", nsh4, set(nshAt+3, 0), badNSH},
		{"unassigned bits of the NSH", nsh4, set(nshAt, 0x1f), ok},
		{"ARP inside", plain4, set(vx4+8+12, 8, 6), leftToKernel},
		{"VLAN inside", plain6, set(vx6+8+12, 0x81, 0), leftToKernel},
		{"half an inner header", plain6, func(b []byte) []byte { return cut(b[:vx6+8+14+39], plain6) }, malformed},
		{"inner version", plain4, set(vx4+8+14, 0x40), malformed},
		{"inner ethertype of the other version", plain4, set(vx4+8+12, 8, 0), malformed},
		{"IPv4 in NSH that is IPv6", nsh4, set(nshAt+3, nextIP4), malformed},
	}
}

// fault runs a damaged packet and returns what is wrong with the outcome.
func (n *node) fault(t *testing.T, c refusal) string {
	t.Helper()
	n.set(t, c.s)
	n.forget(t)
	in := c.s.wrapped(innerFrame(inner6, 0, segment), 0, 50_000)
	if c.change != nil {
		in = c.change(in)
	}
	verdict, out := n.run(t, n.TunPull, in)
	switch r := n.results(t); {
	case r.Pull[c.want] != 1:
		return fmt.Sprintf("results %v, want number %d", r.Pull, c.want)
	case c.want != ok && (verdict != next || !bytes.Equal(in, out)):
		return fmt.Sprintf("verdict %d; left as it was: %v", int32(verdict), bytes.Equal(in, out))
	}
	return ""
}

// TestPullRefuses: each damaged packet is left as it was, with its result.
func TestPullRefuses(t *testing.T) {
	n := newNode(t)
	for _, c := range refusals() {
		if fault := n.fault(t, c); fault != "" {
			t.Errorf("%s: %s", c.name, fault)
		}
	}
	frame := innerFrame(inner6, 0, segment)
	// Cut everywhere, with right lengths in IP and UDP, there is no inner packet.
	for _, s := range []settings{plain4, plain6, nsh4} {
		n.set(t, s)
		whole := s.wrapped(frame, 0, 50_000)
		inner := len(whole) - len(frame) + 14 + 40
		for length := s.udpAt(); length < inner; length++ { // the kernel runs no program on less
			n.forget(t)
			damaged := cut(bytes.Clone(whole[:length]), s)
			if verdict, out := n.run(t, n.TunPull, damaged); verdict != next || !bytes.Equal(out, damaged) {
				t.Errorf("%v cut to %d bytes: verdict %d, results %v", s.ends, length, int32(verdict),
					n.results(t).Pull)
			}
		}
	}
}

// cut corrects the lengths of a frame of the tunnel that was cut.
func cut(frame []byte, s settings) []byte {
	at := s.udpAt()
	switch {
	case len(frame) < at:
		return frame
	case s.ends[0].Is4():
		binary.BigEndian.PutUint16(frame[14+2:], uint16(len(frame)-14))
		resum4(frame[14:])
	default:
		binary.BigEndian.PutUint16(frame[14+4:], uint16(len(frame)-at))
	}
	if len(frame) >= at+6 {
		binary.BigEndian.PutUint16(frame[at+4:], uint16(len(frame)-at))
	}
	return frame
}

func mapped(a netip.Addr) []byte {
	return slices.Concat(make([]byte, 10), []byte{0xff, 0xff}, a.AsSlice())
}

// TestPushRefuses: what push cannot do leaves the packet as it was.
func TestPushRefuses(t *testing.T) {
	n := newNode(t)
	tcp := innerFrame(inner6, 0, segment)
	noChecksum := innerFrame(inner4, 0, datagram)
	noChecksum[14+20+6], noChecksum[14+20+7] = 0, 0
	fragment := packet.Packet{Source: inner6[0], Destination: inner6[1], Body: datagram,
		Extensions: []packet.Extension{packet.Fragment(0, true, 7)}}.Frame(macB, macA)
	arp := bytes.Clone(tcp)
	arp[12], arp[13] = 8, 6
	for _, c := range []struct {
		name  string
		s     settings
		frame []byte
		want  result
	}{
		{"ARP", settings{ends: v4}, arp, leftToKernel},
		{"NSH without GPE", settings{ends: v4, flags: hasNSH}, tcp, leftToKernel},
		{"IPv6 without GPE", settings{ends: v4, next: nextIP6}, tcp, leftToKernel},
		{"IPv6 as IPv4", settings{ends: v4, flags: hasGPE, next: nextIP4}, tcp, leftToKernel},
		{"IPv4 as IPv6", settings{ends: v4, flags: hasGPE, next: nextIP6}, noChecksum, leftToKernel},
		{"type 1 with 24 bytes", settings{ends: v4, flags: hasGPE | hasNSH, md: 1, context: context24}, tcp,
			leftToKernel},
		{"checksum over UDP without one", settings{ends: v6, flags: hasCsum}, noChecksum, leftToKernel},
		{"checksum over a fragment", settings{ends: v6, flags: hasCsum}, fragment, leftToKernel},
		{"checksum over a padded packet", settings{ends: v6, flags: hasCsum}, append(bytes.Clone(tcp), 0),
			leftToKernel},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.set(t, c.s)
			n.forget(t)
			verdict, out := n.run(t, n.TunPush, c.frame)
			if r := n.results(t); verdict != next || r.Push[c.want] != 1 || !bytes.Equal(out, c.frame) {
				t.Errorf("verdict %d, results %v; left as it was: %v", int32(verdict), r.Push,
					bytes.Equal(out, c.frame))
			}
		})
	}
}

// TestPushAfterPull: a packet from a device that decapsulates nothing can be pulled and pushed again.
func TestPushAfterPull(t *testing.T) {
	n := newNode(t)
	s := settings{ends: v4}
	n.set(t, s)
	n.run(t, n.TunRelay, s.wrapped(innerFrame(inner4, 0, segment), 0, 50_000))
	if r := n.results(t); r.Pull[ok] != 1 || r.Push[ok] != 1 {
		t.Errorf("pull %v, push %v", r.Pull, r.Push)
	}
}
