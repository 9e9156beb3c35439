package tunnel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// wire is two nodes, each with a container on a bridge and the kernel's VXLAN device beside it. Programs can take the
// device's place, for packets from the first node's container to the second one's.
type wire struct {
	ends      [2]netip.Addr
	nodes     [2]*scenario.Node
	inside    [2]*netns.Namespace
	from, to  *node // programs of the first and the second node
	container uint32
	uplink    uint32
}

// mtu of the containers, below that of the nodes' link by more than the longest headers.
const mtu = 1380

// newWire makes the devices; like has what is special about the kernel's VXLAN devices.
func newWire(t *testing.T, outer6 bool, like netlink.Vxlan) *wire {
	t.Helper()
	s, err := scenario.NewWire(filepath.Join(t.TempDir(), "wire"))
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	w := &wire{nodes: s.Nodes, from: newNode(t), to: newNode(t)}
	for i, n := range s.Nodes {
		w.ends[i] = n.Underlay4
		if outer6 {
			w.ends[i] = n.Underlay
		}
	}
	for i, n := range s.Nodes {
		w.inside[i], err = s.Namespace(fmt.Sprint("inside", i))
		must(t, err)
		must(t, s.Link(n.NS, "c", w.inside[i], "eth0"))
		must(t, configureContainer(w.inside[i], inner4[i], inner6[i]))
		must(t, connect(n.NS, w.ends[i], w.ends[1-i], like))
	}
	w.uplink, w.container = index(t, w.nodes[0].NS, "eth0"), index(t, w.nodes[1].NS, "c")
	for _, to := range []netip.Addr{inner4[1], inner6[1]} {
		w.sendIntact(t, to, 1000) // by the kernel's devices: resolves neighbours
	}
	return w
}

func configureContainer(ns *netns.Namespace, addresses ...netip.Addr) error {
	return scenario.OnDevice(ns, "eth0", func(h *netlink.Handle, eth0 netlink.Link) error {
		errs := []error{h.LinkSetMTU(eth0, mtu)}
		for _, a := range addresses {
			bits := 24
			if a.Is6() {
				bits = 64
			}
			errs = append(errs, h.AddrAdd(eth0,
				&netlink.Addr{IPNet: scenario.IPNet(netip.PrefixFrom(a, bits)), Flags: unix.IFA_F_NODAD}))
		}
		return errors.Join(append(errs, h.LinkSetUp(eth0))...)
	})
}

// connect puts c and a VXLAN device on a bridge.
func connect(ns *netns.Namespace, own, peer netip.Addr, like netlink.Vxlan) error {
	return scenario.OnDevice(ns, "c", func(h *netlink.Handle, c netlink.Link) error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
		bridge.Name = "br"
		if err := h.LinkAdd(bridge); err != nil {
			return err
		}
		vx := like
		vx.LinkAttrs = netlink.NewLinkAttrs()
		vx.Name, vx.MasterIndex = "vx", bridge.Attrs().Index
		vx.VxlanId, vx.Port, vx.SrcAddr, vx.Group = vni, vxlanPort, own.AsSlice(), peer.AsSlice()
		return errors.Join(h.LinkAdd(&vx), h.LinkSetUp(&vx), h.LinkSetMaster(c, bridge), h.LinkSetUp(c),
			h.LinkSetUp(bridge))
	})
}

func index(t *testing.T, ns *netns.Namespace, device string) (n uint32) {
	t.Helper()
	must(t, ns.Do(func() error {
		d, err := net.InterfaceByName(device)
		if err == nil {
			n = uint32(d.Index)
		}
		return err
	}))
	return n
}

// attach attaches a program until the test ends.
func attach(t *testing.T, ns *netns.Namespace, device string, hook ebpf.AttachType, p *ebpf.Program) {
	t.Helper()
	at := index(t, ns, device)
	must(t, ns.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: int(at), Program: p, Attach: hook})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
}

// push has the first node's program push what its container sends.
func (w *wire) push(t *testing.T, s settings) {
	t.Helper()
	s.ends, s.uplink = w.ends, w.uplink
	w.from.set(t, s)
	attach(t, w.nodes[0].NS, "c", ebpf.AttachTCXIngress, w.from.TunPush)
}

// pull has the second node's program pull what the fabric brings.
func (w *wire) pull(t *testing.T, s settings) {
	t.Helper()
	s.device = w.container
	w.to.set(t, s)
	attach(t, w.nodes[1].NS, "eth0", ebpf.AttachTCXIngress, w.to.TunPull)
}

// sendIntact sends random bytes over TCP from the first to the second container and compares what arrived.
func (w *wire) sendIntact(t *testing.T, to netip.Addr, n int) {
	t.Helper()
	sent := make([]byte, n)
	rand.NewChaCha8([32]byte{}).Read(sent)
	var listener net.Listener
	must(t, w.inside[1].Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
		return err
	}))
	defer listener.Close()
	type received struct {
		sum [sha256.Size]byte
		n   int
		err error
	}
	done := make(chan received, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			done <- received{err: err}
			return
		}
		defer conn.Close()
		all, err := io.ReadAll(conn)
		done <- received{sha256.Sum256(all), len(all), err}
	}()
	var conn net.Conn
	must(t, w.inside[0].Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", listener.Addr().String(), 5*time.Second)
		return err
	}))
	must(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	_, err := conn.Write(sent)
	must(t, err)
	must(t, conn.Close())
	if r := <-done; r.err != nil || r.sum != sha256.Sum256(sent) {
		t.Errorf("to %v: %d bytes arrived, or others: %v", to, r.n, r.err)
	}
}

var zeroChecksums = netlink.Vxlan{UDP6ZeroCSumTx: true, UDP6ZeroCSumRx: true}

// TestWithKernelDevice: a program understands the kernel's VXLAN device at the other end, and the device the program.
func TestWithKernelDevice(t *testing.T) {
	for _, outer6 := range []bool{false, true} {
		for _, grouped := range []bool{false, true} {
			for _, byProgram := range [][2]bool{{true, false}, {false, true}, {true, true}} {
				name := fmt.Sprintf("IPv6 %v, group %v, push by a program %v, pull by a program %v", outer6, grouped,
					byProgram[0], byProgram[1])
				t.Run(name, func(t *testing.T) { testWithKernelDevice(t, outer6, grouped, byProgram) })
			}
		}
	}
}

func testWithKernelDevice(t *testing.T, outer6, grouped bool, byProgram [2]bool) {
	like, s := zeroChecksums, settings{}
	if grouped {
		like.GBP, s.flags = true, hasGroup
	}
	w := newWire(t, outer6, like)
	s.ends = w.ends
	w.from.set(t, s)
	if grouped {
		attach(t, w.nodes[0].NS, "vx", ebpf.AttachTCXEgress, w.from.TunSetMark)
		attach(t, w.nodes[1].NS, "vx", ebpf.AttachTCXIngress, w.to.TunSeeMark)
	}
	if byProgram[0] {
		w.push(t, s)
	}
	if byProgram[1] {
		w.pull(t, s)
	}
	for _, to := range []netip.Addr{inner4[1], inner6[1]} {
		w.sendIntact(t, to, 4<<20)
	}
	pushed, pulled := w.from.results(t), w.to.results(t)
	t.Logf("push %v, pull %v", pushed.Push[:failed+1], pulled.Pull[:failed+1])
	if byProgram[0] && pushed.Push[ok] < 50 || byProgram[1] && pulled.Pull[ok] < 50 {
		t.Errorf("push %v, pull %v: the kernel's devices did it", pushed.Push, pulled.Pull)
	}
	if !grouped {
		return
	}
	if byProgram[1] && pulled.Last.Group != group || !byProgram[1] && pulled.Mark != group {
		t.Errorf("group %#x, mark %#x; want %#x", pulled.Last.Group, pulled.Mark, group)
	}
}

// TestChecksumOverIPv6: a device that wants checksums gets them from the program, or, for segments, from the kernel.
func TestChecksumOverIPv6(t *testing.T) {
	for _, c := range []struct {
		flags uint8
		want  bool
	}{{0, false}, {hasCsum, true}} {
		w := newWire(t, true, netlink.Vxlan{})
		w.push(t, settings{flags: c.flags})
		if got := w.datagrams(t, 10, 0); (got == 10) != c.want || !c.want && got != 0 {
			t.Errorf("flags %d: %d of 10 datagrams arrived", c.flags, got)
		}
		if c.want {
			w.sendIntact(t, inner4[1], 4<<20)
			w.sendIntact(t, inner6[1], 4<<20)
			r := w.from.results(t)
			t.Logf("push %v", r.Push[:failed+1])
			if r.Push[ok] == 0 || r.Push[leftToKernel] == 0 {
				t.Errorf("push %v: want some by the program and some by the kernel", r.Push)
			}
		}
	}
}

// datagrams sends n datagrams of 1,000 bytes, as one buffer of segments unless segment is 0, and returns how many
// arrived.
func (w *wire) datagrams(t *testing.T, n, segment int) (arrived int) {
	t.Helper()
	var receiver *net.UDPConn
	var sender net.Conn
	to := &net.UDPAddr{IP: inner6[1].AsSlice()}
	must(t, w.inside[1].Do(func() (err error) { receiver, err = net.ListenUDP("udp", to); return err }))
	defer receiver.Close()
	must(t, w.inside[0].Do(func() (err error) {
		sender, err = net.Dial("udp", receiver.LocalAddr().String())
		return err
	}))
	defer sender.Close()
	payload := make([]byte, 1000*n)
	for i := range n {
		payload[1000*i] = byte(i + 1)
	}
	if segment > 0 {
		raw, err := sender.(*net.UDPConn).SyscallConn()
		must(t, err)
		must(t, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, segment)
		}))
		must(t, err)
		_, err = sender.Write(payload)
		must(t, err)
	} else {
		for i := range n {
			_, err := sender.Write(payload[1000*i : 1000*(i+1)])
			must(t, err)
		}
	}
	// Nothing tells that a packet was lost, so the wait has an end.
	must(t, receiver.SetReadDeadline(time.Now().Add(time.Second)))
	seen := map[byte]bool{}
	for b := make([]byte, 2000); len(seen) < n; {
		length, err := receiver.Read(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		must(t, err)
		if length == 1000 {
			seen[b[0]] = true
		}
	}
	return len(seen)
}

// TestUDPSegments: UDP_SEGMENT data is lost behind a program's pull, and arrives by each remedy.
func TestUDPSegments(t *testing.T) {
	const feature = "tx-udp-segmentation"
	for _, c := range []struct {
		name         string
		pullSegments bool
		prepare      func(*wire) error
		want         int
		left         uint64 // packets left to the kernel's device
	}{
		{name: "pulled all the same", pullSegments: true, want: 0, left: 1},
		{name: "left to the kernel's device", want: 10, left: 1},
		{name: "feature off on the sending node's uplink", pullSegments: true, want: 10, prepare: func(w *wire) error {
			return w.nodes[0].NS.Do(func() error { return netns.SetFeature("eth0", feature, false) })
		}},
		{name: "feature off on the sending container's device", pullSegments: true, want: 10,
			prepare: func(w *wire) error {
				return w.inside[0].Do(func() error { return netns.SetFeature("eth0", feature, false) })
			}},
	} {
		for _, outer6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, IPv6 %v", c.name, outer6), func(t *testing.T) {
				w := newWire(t, outer6, zeroChecksums)
				if c.prepare != nil {
					must(t, c.prepare(w))
				}
				w.push(t, settings{})
				w.pull(t, settings{pullSegments: c.pullSegments})
				if got := w.datagrams(t, 10, 0); got != 10 {
					t.Fatalf("%d of 10 plain datagrams arrived", got)
				}
				before := w.to.results(t).Pull[leftToKernel]
				got := w.datagrams(t, 10, 1000)
				left := w.to.results(t).Pull[leftToKernel] - before
				t.Logf("%d of 10 datagrams arrived; packets left to the kernel: %d", got, left)
				if got != c.want || left != c.left {
					t.Errorf("%d of 10 datagrams arrived, want %d; left to the kernel: %d, want %d", got, c.want, left,
						c.left)
				}
			})
		}
	}
}

// TestTCPSegments: with an NSH of 32 bytes the data of TCP arrives as sent, whether packets cross the wire before or
// after segmentation, and each segment on the wire has all headers.
func TestTCPSegments(t *testing.T) {
	for _, outer6 := range []bool{false, true} {
		for _, next := range []uint8{0, nextIP6} {
			for _, software := range []bool{false, true} {
				name := fmt.Sprintf("IPv6 %v, next protocol %d, segmented by software %v", outer6, next, software)
				t.Run(name, func(t *testing.T) { testTCPSegments(t, outer6, next, software) })
			}
		}
	}
}

func testTCPSegments(t *testing.T, outer6 bool, next uint8, software bool) {
	w := newWire(t, outer6, zeroChecksums)
	s := settings{ends: w.ends, flags: hasGPE | hasNSH, next: next, context: context24}
	if software {
		// Then the sending node also completes checksums.
		must(t, w.nodes[0].NS.Do(func() error {
			_, err := netns.Ethtool("eth0", unix.ETHTOOL_STXCSUM, 0)
			return err
		}))
	}
	w.push(t, s)
	w.pull(t, s)
	capture, err := packet.NewCapture(w.nodes[1].NS, "eth0", packet.IncomingOnly)
	must(t, err)
	defer capture.Close()
	w.sendIntact(t, inner6[1], 1<<20)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	whole, long, all := 0, 0, 0
	_, err = capture.Until(ctx, func(c packet.Captured) bool {
		if !s.isTunnel(c.Frame) {
			return false
		}
		all++
		if len(c.Frame) > 1514 {
			long++
		}
		fin, fault := s.segmentFault(c.Frame, software)
		if fault == "" {
			whole++
		} else {
			t.Errorf("packet %d: %s\n% x", all, fault, c.Frame[:min(len(c.Frame), 200)])
		}
		return fin
	})
	must(t, err)
	pulled := w.to.results(t).Pull
	t.Logf("%d of %d packets whole, %d of them longer than a frame; pull %v", whole, all, long, pulled[:failed+1])
	if whole != all || software && (long > 0 || all < 700) || !software && long == 0 {
		t.Errorf("%d of %d packets whole, %d longer than a frame", whole, all, long)
	}
	if pulled[ok] < uint64(all) {
		t.Errorf("pull %v", pulled)
	}
}

func (s settings) udpAt() int {
	if s.ends[0].Is4() {
		return 14 + 20
	}
	return 14 + 40
}

func (s settings) isTunnel(frame []byte) bool {
	at := s.udpAt()
	return len(frame) > at+8 && is4(frame) == s.ends[0].Is4() && binary.BigEndian.Uint16(frame[at+2:]) == s.port()
}

// segmentFault checks a packet to the tunnel's port against what its sender must have written; checksums only if
// complete. fin is of the last segment.
func (s settings) segmentFault(frame []byte, complete bool) (fin bool, fault string) {
	headers := s.headers()
	innerAt := s.udpAt() + 8 + len(headers)
	ipAt := innerAt
	if s.innermost() == nextEthernet {
		ipAt += 14
	}
	if len(frame) < ipAt+40+20 {
		return false, "short"
	}
	inner := bytes.Clone(frame[ipAt-14:])
	copy(inner, frame[:12])
	inner[12], inner[13] = 0x86, 0xdd
	want := s.wrapped(append(s.innerEthernet(frame, innerAt), frame[ipAt:]...), frame[ipAt+1]>>4&3, portOf(frame))
	copy(want, frame[:12])
	got := bytes.Clone(frame)
	if is4(got) {
		if resum4(got[14:]); !bytes.Equal(got, frame) {
			return false, "IPv4 checksum"
		}
		got[18], got[19] = 0, 0 // the id of segments counts up
		resum4(got[14:])
	}
	if !bytes.Equal(got, want) {
		return false, fmt.Sprintf("outer headers\nwant % x", want[:ipAt])
	}
	p, err := packet.DecodeFrame(inner)
	if err != nil {
		return false, err.Error()
	}
	if complete && !packet.ChecksumOK(inner[14:]) {
		return false, "inner checksum"
	}
	tcp, isTCP := p.Body.(packet.TCP)
	return isTCP && tcp.Flags&packet.FIN != 0, ""
}

// innerEthernet returns the inner Ethernet header of a frame of the tunnel, or one in its place.
func (s settings) innerEthernet(frame []byte, innerAt int) []byte {
	if s.innermost() == nextEthernet {
		return bytes.Clone(frame[innerAt : innerAt+14])
	}
	return append(bytes.Clone(frame[:12]), 0x86, 0xdd)
}

// TestPushAfterPushAndPull: a packet that one node's program pushed, and that came by a veth, still counts as
// encapsulated when another node's program has pulled it: it cannot be pushed again, and push says so.
func TestPushAfterPushAndPull(t *testing.T) {
	w := newWire(t, false, zeroChecksums)
	s := settings{}
	w.push(t, s)
	s.ends = w.ends
	w.to.set(t, s)
	attach(t, w.nodes[1].NS, "eth0", ebpf.AttachTCXIngress, w.to.TunRelay)
	w.datagrams(t, 10, 0)
	r := w.to.results(t)
	t.Logf("pull %v, push %v", r.Pull[:failed+1], r.Push[:failed+1])
	if r.Push[leftToKernel] < 10 { // the kernel's own device sends some, too
		t.Errorf("pull %v, push %v", r.Pull, r.Push)
	}
}
