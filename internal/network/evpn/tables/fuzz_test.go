package tables

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// packetContext is the head of the kernel's struct __sk_buff, as BPF_PROG_TEST_RUN takes it.
type packetContext struct {
	_              [2]uint32
	Mark           uint32
	_              [6]uint32
	IngressIfindex uint32
	Ifindex        uint32
	_              uint32
	Callback       [5]uint32
}

// arrive returns a program that gives a frame the tunnel key that a tunnel device would give it: the first two words of
// cb are VNI and sender. Then it calls the program of frames from tunnels.
func arrive(t testing.TB, program *ebpf.Program) *ebpf.Program {
	t.Helper()
	next, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { next.Close() })
	must(t, next.Put(uint32(0), uint32(program.FD())))
	const key, size, callback, sender = -48, 44, 48, 28 // offsets in the stack, __sk_buff and bpf_tunnel_key
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1), asm.Mov.Imm(asm.R0, 0)}
	for at := int16(key); at < 0; at += 8 {
		code = append(code, asm.StoreMem(asm.RFP, at, asm.R0, asm.DWord))
	}
	code = append(code,
		asm.LoadMem(asm.R2, asm.R6, callback, asm.Word), asm.StoreMem(asm.RFP, key, asm.R2, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, callback+4, asm.Word), asm.StoreMem(asm.RFP, key+sender, asm.R2, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, key), asm.Mov.Imm(asm.R3, size),
		asm.Mov.Imm(asm.R4, 0), asm.FnSkbSetTunnelKey.Call(),
		asm.Mov.Reg(asm.R1, asm.R6), asm.LoadMapPtr(asm.R2, next.FD()), asm.Mov.Imm(asm.R3, 0), asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, failed), asm.Return())
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: code, License: "Dual BSD/GPL"})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

const (
	verdictDrop     = 2
	verdictRedirect = 7
	failed          = 99
)

// is is what the tables of entries() say about an address.
type is struct {
	mac              net.HardwareAddr // that packets to it get
	vtep             netip.Addr       // zero: it is here
	bridged, unknown bool
}

var hosts = map[netip.Addr]is{
	own: {mac: ownMAC}, own6: {mac: ownMAC}, beside: {mac: besideMAC},
	far: {mac: routerOf(nodeVTEP), vtep: nodeVTEP}, far6: {mac: routerOf(nodeVTEP), vtep: nodeVTEP},
	switched: {mac: hostMAC, vtep: otherVTEP, bridged: true}, switched6: {mac: hostMAC, vtep: otherVTEP, bridged: true},
}

func find(a netip.Addr) (what is, found bool) {
	if what, found = hosts[a]; found {
		return what, true
	}
	in := func(prefix string) bool { return netip.MustParsePrefix(prefix).Contains(a) }
	return is{mac: routerMAC, vtep: otherVTEP, unknown: in("10.0.0.0/16") || in("fd12::/48")},
		in("172.20.0.0/16") || in("10.0.0.0/16") || in("fd12::/48")
}

func (w is) here() bool { return !w.vtep.IsValid() && !w.unknown }

// question is a message of ARP or neighbour discovery.
type question struct {
	answer         bool
	sender, target netip.Addr // of an answer: whom it is about, and who has asked
	mac            net.HardwareAddr
}

// readQuestion reads a message independently of the programs.
func readQuestion(f []byte) (q question, ok bool) {
	address := func(at, n int) netip.Addr { a, _ := netip.AddrFromSlice(f[at : at+n]); return a }
	switch binary.BigEndian.Uint16(f[12:]) {
	case packet.EtherTypeARP:
		operation := f[21]
		q = question{operation == 2, address(28, 4), address(38, 4), f[22:28]}
		ok = bytes.Equal(f[14:21], []byte{0, 1, 8, 0, 6, 4, 0}) && (operation == 1 || operation == 2)
	case packet.EtherTypeIPv6:
		if len(f) < 78 {
			return q, false
		}
		q = question{f[54] == packet.NeighborAdvertisement, address(22, 16), address(62, 16), f[6:12]}
		if q.answer {
			q.sender, q.target = q.target, address(38, 16)
		}
		ok = f[14]>>4 == 6 && f[20] == packet.ProtocolICMPv6 && f[21] == 255 && f[55] == 0 &&
			binary.BigEndian.Uint16(f[18:]) >= 24 && (f[54] == packet.NeighborSolicitation || q.answer)
	}
	return q, ok && q.mac[0]&1 == 0 && !bytes.Equal(q.mac, noMAC)
}

func (q question) asks(mac net.HardwareAddr) []byte {
	if q.target.Is4() {
		return who(mac, q.sender, q.target)
	}
	return who6(mac, q.sender, q.target)
}

func (q question) answered(mac net.HardwareAddr) []byte {
	switch {
	case q.target.Is4():
		return at(q.mac, q.sender, mac, q.target)
	case q.sender.IsUnspecified():
		return nd(multicastMAC(allNodes), mac, q.target, allNodes, packet.NeighborAdvertisement, 0x20, q.target, 2, mac)
	}
	return at6(q.mac, q.sender, mac, q.target)
}

// fromContainer returns what becomes of a container's message, nil if it is dropped.
func (q question) fromContainer() []byte {
	if q.answer || q.sender != own && q.sender != own6 || q.sender == q.target {
		return nil
	}
	q.mac = ownMAC
	if q.target == netip.MustParseAddr("169.254.1.1") || q.target == netip.MustParseAddr("fe80::1") {
		return q.answered(host.GatewayMAC)
	}
	what, found := find(q.target)
	switch {
	case !found:
		return nil
	case what.unknown:
		return q.asks(ownMAC)
	case what.here() || what.bridged:
		return q.answered(what.mac)
	}
	return q.answered(host.GatewayMAC)
}

// fromTunnel returns what becomes of a message from a VTEP.
func (q question) fromTunnel(vtep netip.Addr, wire pipeline.VNI, to net.HardwareAddr) []byte {
	what, found := find(q.target)
	if wire != segment || vtep != otherVTEP && vtep != silentVTEP || !found || !what.here() {
		return nil
	}
	if !q.answer {
		return q.answered(what.mac)
	}
	its, known := find(q.sender)
	if !known || !its.unknown && (!its.bridged || its.vtep != vtep) || !bytes.Equal(to, what.mac) {
		return nil
	}
	if q.sender.Is4() {
		return at(what.mac, q.target, q.mac, q.sender)
	}
	return at6(what.mac, q.target, q.mac, q.sender)
}

// moved returns an IP packet as it leaves: with these MACs, and routed with its hop limit decremented.
func moved(f []byte, to, from net.HardwareAddr, routed bool) []byte {
	f = slices.Concat(to, from, f[12:])
	if routed && f[12] == 8 {
		sum := uint32(^binary.BigEndian.Uint16(f[24:])) + uint32(^uint16(0x0100))
		binary.BigEndian.PutUint16(f[24:], ^uint16(sum+sum>>16))
		f[22]--
	} else if routed {
		f[21]--
	}
	return f
}

// ends returns addresses and hop limit of an IP packet.
func ends(f []byte) (src, dst netip.Addr, hops uint8) {
	switch {
	case f[12] == 8 && f[13] == 0:
		return netip.AddrFrom4([4]byte(f[26:30])), netip.AddrFrom4([4]byte(f[30:34])), f[22]
	case f[12] == 0x86 && f[13] == 0xdd && len(f) >= 54:
		return netip.AddrFrom16([16]byte(f[22:38])), netip.AddrFrom16([16]byte(f[38:54])), f[21]
	}
	return src, dst, 0
}

// sent returns what a container's packet is if it leaves; nil if it must not.
func sent(f []byte) []byte {
	src, dst, hops := ends(f)
	what, found := find(dst)
	if src != own && src != own6 || src.Is4() != dst.Is4() || !found || what.unknown {
		return nil
	}
	switch {
	case what.here():
		return moved(f, what.mac, host.GatewayMAC, false)
	case what.bridged:
		return moved(f, what.mac, ownMAC, false)
	case hops <= 1:
		return nil
	}
	return moved(f, what.mac, routerOf(ownVTEP), true)
}

// received returns what a packet from a VTEP is if it is delivered; nil if it must not be.
func received(vtep netip.Addr, wire pipeline.VNI, f []byte) []byte {
	src, dst, hops := ends(f)
	what, found := find(dst)
	routed := wire == vni && bytes.Equal(f[:6], routerOf(ownVTEP)) && hops > 1
	bridged := wire == segment && bytes.Equal(f[:6], what.mac)
	beyond := netip.MustParsePrefix("172.20.0.0/16").Contains(src)
	switch {
	case !found || !what.here():
	case vtep == nodeVTEP && routed, vtep == otherVTEP && routed && (src == switched || beyond):
		return moved(f, what.mac, host.GatewayMAC, true)
	case vtep == otherVTEP && bridged && src == switched:
		return moved(f, what.mac, host.GatewayMAC, false)
	}
	return nil
}

// isError reports whether a frame can be the ICMP error about a container's packet.
func isError(got, about []byte) bool {
	_, _, hops := ends(about)
	return hops <= 1 && bytes.Equal(got[:6], ownMAC) && bytes.Equal(got[6:12], host.GatewayMAC)
}

// Where the frames of FuzzEVPN come from: the container, or one of these VTEPs in one of these VNIs.
var (
	fuzzVTEPs = []netip.Addr{{}, otherVTEP, silentVTEP, nodeVTEP, strangeVTEP, ownVTEP}
	fuzzVNIs  = []pipeline.VNI{segment, vni, segment + 1, 8}
)

// FuzzEVPN sends frames from the container and from tunnels. Messages of ARP and neighbour discovery have exactly the
// consequences that they should, and other frames either these or none.
func FuzzEVPN(f *testing.F) {
	for _, m := range messages() {
		if !m.sum {
			f.Add(byte(slices.Index(fuzzVTEPs, m.outer.from)), byte(max(slices.Index(fuzzVNIs, m.outer.vni), 0)),
				m.frame)
		}
	}
	for _, a := range arrivals() {
		f.Add(byte(slices.Index(fuzzVTEPs, a.outer.from)), byte(slices.Index(fuzzVNIs, a.outer.vni)),
			a.packet.Frame(a.to, routerOf(nodeVTEP)))
	}
	for _, d := range departures() {
		f.Add(byte(0), byte(0), d.packet.Frame(host.GatewayMAC, ownMAC))
	}
	f.Fuzz(newBed(f, nil).judge(f))
}

// judge returns a function that sends a frame and compares what becomes of it.
func (b *bed) judge(f testing.TB) func(t *testing.T, from, in byte, frame []byte) {
	f.Helper()
	container, tunnel := b.Programs()
	tunnel = arrive(f, tunnel)
	h, err := b.ns.Netlink()
	must(f, err)
	defer h.Close()
	c1, err := h.LinkByName("c1")
	must(f, err)
	vxlan, err := h.LinkByName(hook.TunnelDevice)
	must(f, err)
	pace := b.objects.Maps["evpn_pace_v1"]
	slot := uint32(vni) % pace.MaxEntries()
	return func(t *testing.T, from, in byte, frame []byte) {
		if len(frame) < 42 || len(frame) > 1500 || frame[12] == 0x86 && len(frame) < 54 {
			return // the kernel does not run programs with less than an IPv6 header
		}
		vtep, wire := fuzzVTEPs[int(from)%len(fuzzVTEPs)], fuzzVNIs[int(in)%len(fuzzVNIs)]
		program, ctx := container, packetContext{Ifindex: uint32(c1.Attrs().Index)}
		if vtep.IsValid() {
			program, ctx.Ifindex, ctx.Mark = tunnel, uint32(vxlan.Attrs().Index), hook.TunnelMark(b.path.AcceptMark)
			ctx.Callback = [5]uint32{uint32(wire), binary.BigEndian.Uint32(vtep.AsSlice())}
		}
		ctx.IngressIfindex = ctx.Ifindex
		o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: ctx}
		must(t, pace.Put(slot, uint64(0))) // no message meets the limit
		var verdict uint32
		if err := b.ns.Do(func() (err error) { verdict, err = program.Run(o); return err }); err != nil {
			t.Fatalf("%d bytes % x: %v", len(frame), frame, err)
		}
		var want, got []byte
		if verdict == verdictRedirect {
			got = o.DataOut
		} else if verdict != verdictDrop {
			t.Fatalf("verdict %d", verdict)
		}
		q, asks := readQuestion(frame)
		switch {
		case asks && vtep.IsValid():
			want = q.fromTunnel(vtep, wire, frame[:6])
		case asks:
			want = q.fromContainer()
		case got == nil || !vtep.IsValid() && isError(got, frame):
			return
		case vtep.IsValid():
			want = received(vtep, wire, frame)
		default:
			want = sent(frame)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("from VTEP %v in VNI %d: % x\nbecame % x\nwant   % x", vtep, wire, frame, got, want)
		}
	}
}
