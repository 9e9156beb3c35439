package datapath

import (
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// longFrame is the length of a frame whose packet is longer than the length field of IPv6 can express.
const longFrame = 14 + 40 + 65_535

// countLong counts the frames above longFrame that come in by a device, before any program of ours.
func countLong(t *testing.T, ns *netns.Namespace, device string) (count func() uint64) {
	t.Helper()
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { counter.Close() })
	program, err := ebpf.NewProgram(
		&ebpf.ProgramSpec{Name: "count_long", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // __sk_buff.len
			asm.JLE.Imm(asm.R2, longFrame, "next"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, counter.FD()),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "next"),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("next"), // TCX_NEXT
			asm.Return(),
		}},
	)
	must(t, err)
	t.Cleanup(func() { program.Close() })
	must(t, ns.Do(func() error {
		at, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(
			link.TCXOptions{Interface: at.Index, Program: program, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()},
		)
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	return func() (n uint64) {
		must(t, counter.Lookup(uint32(0), &n))
		return n
	}
}

// raiseGSO lets a device take packets of 200,000 bytes for segmentation.
func raiseGSO(t *testing.T, ns *netns.Namespace, device string) {
	t.Helper()
	const size = 200_000
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	at, err := h.LinkByName(device)
	must(t, err)
	must(t, h.LinkSetGSOMaxSize(at, size))
	must(t, h.LinkSetGROMaxSize(at, size))
}

// TestBigTCP: packets of segments longer than IPv6 can say (RFC 2675's option, within the kernel only) go
// through both nodes whole, and what they carry arrives as it was sent.
func TestBigTCP(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	for _, c := range []*testContainer{a, b} {
		raiseGSO(t, c.ns, "eth0")
		if c.record.Device.HostName != "" {
			raiseGSO(t, c.node.ns, c.record.Device.HostName)
		}
		raiseGSO(t, c.node.ns, "eth0")
	}
	fromFabric := countLong(t, b.node.ns, "eth0")
	fromContainer := fromFabric
	if joined == endpoint.Veth { // with other kinds, no packet comes in by a device on the node
		fromContainer = countLong(t, a.node.ns, a.record.Device.HostName)
	}
	for range 8 {
		sendIntact(t, a, b, 16<<20)
		if fromContainer() > 0 && fromFabric() > 0 {
			break
		}
	}
	t.Logf("longer than 65,535 bytes: %d packets from the container, %d from the fabric", fromContainer(), fromFabric())
	if fromContainer() == 0 || fromFabric() == 0 {
		t.Error("no packet was longer than IPv6 can say")
	}
	for _, n := range w.nodes {
		for r, count := range n.drops(t) {
			if r != "nd-ignored" && r != "mld-ignored" {
				t.Errorf("dropped for %s: %d packets", r, count)
			}
		}
	}
}

// sendIntact sends random bytes over TCP, and compares what arrived.
func sendIntact(t *testing.T, from, to *testContainer, n int) {
	t.Helper()
	sent := make([]byte, n)
	source := rand.NewChaCha8([32]byte{})
	source.Read(sent)
	var listener net.Listener
	must(t, to.ns.Do(func() (err error) {
		listener, err = net.Listen("tcp6", netip.AddrPortFrom(to.seen(), 0).String())
		return err
	}))
	defer listener.Close()
	type result struct {
		sum [sha256.Size]byte
		err error
	}
	received := make(chan result, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			received <- result{err: err}
			return
		}
		defer conn.Close()
		all, err := io.ReadAll(conn)
		received <- result{sha256.Sum256(all), err}
	}()
	var conn net.Conn
	must(t, from.ns.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp6", listener.Addr().String(), 5*time.Second)
		return err
	}))
	must(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	_, err := conn.Write(sent)
	must(t, err)
	must(t, conn.Close())
	if r := <-received; r.err != nil || r.sum != sha256.Sum256(sent) {
		t.Errorf("something else arrived, or nothing: %v", r.err)
	}
}
