package datapath

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/perf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// newVXLANWire connects the nodes by a tunnel whose UDP checksums the kernel computes. The receiving kernel sums up
// each packet, and delivers the inner packet with that sum (CHECKSUM_COMPLETE).
func newVXLANWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{}
	outer := [2]netip.Addr{netip.MustParseAddr("2001:db8:71::1"), netip.MustParseAddr("2001:db8:71::2")}
	for i := range w.nodes {
		w.nodes[i] = &testNode{
			ns:       namespace(t, fmt.Sprint("node", i)),
			prefix:   netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
			underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
		}
	}
	h, err := w.nodes[0].ns.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "outer", 100
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "outer", netlink.NsFd(w.nodes[1].ns.FD())
	must(t, h.LinkAdd(pair))
	for i, n := range w.nodes {
		h, err := n.ns.Netlink()
		must(t, err)
		defer h.Close()
		under, err := h.LinkByName("outer")
		must(t, err)
		must(
			t,
			h.AddrAdd(under, &netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(outer[i], 64)), Flags: unix.IFA_F_NODAD}),
		)
		must(
			t,
			withSettings(n.ns, func(s host.Sysctls) error {
				return s.Set("outer", []host.Sysctl{{Family: "ipv6", Name: "accept_dad", Value: "0"}})
			}),
		)
		must(t, n.ns.Do(func() error { return sumsInSoftware("outer") }))
		must(t, h.LinkSetUp(under))
		tunnel := netlink.NewLinkAttrs()
		tunnel.Name = "eth0"
		must(t, h.LinkAdd(&netlink.Vxlan{
			LinkAttrs: tunnel, VxlanId: 7, VtepDevIndex: under.Attrs().Index, Port: 4789,
			SrcAddr: outer[i].AsSlice(), Group: outer[1-i].AsSlice(), Learning: true,
		}))
		n.configure(t, w.nodes[1-i])
	}
	for _, n := range w.nodes {
		must(t, n.ns.WaitUp(t.Context(), "outer"))
	}
	openAll(t, joined, w.nodes[:]...)
	return w
}

// sumsInSoftware disables checksum offload on a device: the kernel writes checksums before it sends.
func sumsInSoftware(device string) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		rest [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], device)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL,
		uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("checksums of %s: %w", device, errno)
	}
	return nil
}

// sums compares packets that came into a container with the sum that the kernel has of them.
type sums struct {
	reader *perf.Reader
	ended  sync.WaitGroup
	t      *testing.T
	right  map[string]int // packets with the right sum, by what they are
}

func watchSums(t *testing.T, c *testContainer) *sums {
	t.Helper()
	events, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerfEventArray})
	must(t, err)
	t.Cleanup(func() { events.Close() })
	program, err := ebpf.NewProgram(
		&ebpf.ProgramSpec{Name: "tell_sum", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R7, asm.R1, 0, asm.Word), // __sk_buff.len
			asm.Mov.Imm(asm.R2, 0),
			asm.FnCsumUpdate.Call(), // the sum, or an error where there is none
			asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
			asm.LSh.Imm(asm.R7, 32), // so many bytes of the packet too
			asm.LoadImm(asm.R3, 0xffffffff, asm.DWord),
			asm.Or.Reg(asm.R3, asm.R7),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.LoadMapPtr(asm.R2, events.FD()),
			asm.Mov.Reg(asm.R4, asm.RFP),
			asm.Add.Imm(asm.R4, -8),
			asm.Mov.Imm(asm.R5, 8),
			asm.FnPerfEventOutput.Call(),
			asm.Mov.Imm(asm.R0, -1), // TCX_NEXT
			asm.Return(),
		}},
	)
	must(t, err)
	t.Cleanup(func() { program.Close() })
	s := &sums{t: t, right: map[string]int{}}
	s.reader, err = perf.NewReader(events, 8<<20)
	must(t, err)
	must(t, c.ns.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(
			link.TCXOptions{Interface: eth0.Index, Program: program, Attach: ebpf.AttachTCXIngress},
		)
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	s.ended.Go(s.judge)
	return s
}

func (s *sums) judge() {
	for {
		record, err := s.reader.Read()
		if err != nil {
			return
		}
		if len(record.RawSample) < 8+14+40 {
			continue
		}
		sum, frame := int64(binary.NativeEndian.Uint64(record.RawSample)), record.RawSample[8:]
		if sum < 0 {
			continue // not CHECKSUM_COMPLETE: CHECKSUM_PARTIAL, or accepted without a sum
		}
		length := 14 + 40 + int(binary.BigEndian.Uint16(frame[14+4:]))
		frame = frame[:min(len(frame), length)] // the ring pads
		p, _ := packet.DecodeFrame(frame)
		what := fmt.Sprintf("protocol %d", p.Body.Protocol())
		if len(p.Extensions) > 0 {
			what = "fragment"
		}
		if want, got := onesSum(frame[14:]), onesSum(record.RawSample[:4]); want != got {
			s.t.Errorf("%s of %d bytes: the kernel's sum is %#04x, of its bytes %#04x", what, len(frame), got, want)
			continue
		}
		s.right[what]++
	}
}

// onesSum is the Internet checksum's sum, in which 0 and 0xffff are one number.
func onesSum(b []byte) uint16 {
	var sum uint64
	for ; len(b) > 1; b = b[2:] {
		sum += uint64(binary.NativeEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint64(binary.NativeEndian.Uint16([]byte{b[0], 0}))
	}
	return uint16(sum % 0xffff)
}

// TestSumOfTheWholePacketOnTheWay: the sum that a receiving kernel has computed stays right when our programs change a
// packet, in both directions and on both nodes, and no kernel counts a wrong checksum.
func TestSumOfTheWholePacketOnTheWay(t *testing.T) {
	w := newVXLANWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	watched := []*sums{watchSums(t, a), watchSums(t, b)}
	for _, pair := range [][2]*testContainer{{a, b}, {b, a}} {
		transfer(t, pair[0], pair[1], 4<<20)
		datagram(t, pair[0], pair[1], 1200)
		datagram(t, pair[0], pair[1], 20000)
		for _, size := range []int{56, 1200, 4000} {
			if r := pair[0].ping(t, pair[1].seen(), size, patience); r.Received != r.Sent {
				t.Errorf("%d of %d pings of %d bytes came back", r.Received, r.Sent, size)
			}
		}
	}
	for i, s := range watched {
		must(t, s.reader.Flush()) // what is there is read before
		s.ended.Wait()
		must(t, s.reader.Close())
		t.Logf("container %d: %v packets with a sum of their own", i, s.right)
		for _, what := range []string{"protocol 6", "protocol 17", "protocol 58", "fragment"} {
			if s.right[what] == 0 {
				t.Errorf("container %d: no %s came with a sum of its own", i, what)
			}
		}
	}
	for _, ns := range []*netns.Namespace{a.ns, b.ns, w.nodes[0].ns, w.nodes[1].ns} {
		must(t, ns.Do(wrongSums))
	}
}

// wrongSums fails where the kernel has counted checksum errors in the calling thread's namespace.
func wrongSums() error {
	for _, file := range []string{"snmp", "snmp6"} {
		text, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if file == "snmp" && (len(names) == 0 || names[0] != fields[0]) {
				names = fields // then a line with the values
				continue
			}
			if file == "snmp6" {
				names = fields[:1]
				fields = fields[1:]
			}
			for i, name := range names {
				if strings.HasSuffix(name, "CsumErrors") && fields[i] != "0" {
					return fmt.Errorf("%s %s: %s", file, name, fields[i])
				}
			}
		}
	}
	return nil
}
