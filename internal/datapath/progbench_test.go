package datapath

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// Verdicts of a program: drop, redirect, or continue with the next program.
const (
	verdictDrop     = 2
	verdictRedirect = 7
	verdictNext     = 0xffffffff
)

// skb is the head of the kernel's struct __sk_buff, as BPF_PROG_TEST_RUN takes it.
type skb struct {
	_              [2]uint32
	Mark           uint32
	_              [6]uint32
	IngressIfindex uint32
	Ifindex        uint32
	_              [27]uint32
	Timestamp      uint64
	_              uint32
	Segments       uint32
	_              [2]uint32
	SegmentSize    uint32
	_              [3]uint32
}

// progBench is a node with two blue containers and a red one, whose programs are run on packets as data.
type progBench struct {
	*testNode
	far        *testNode // another node's prefix and addresses, without a Datapath; packets for it leave the node
	b1, b2, r1 *testContainer
	b3         address.Plain // a blue container on the far node
	uplinkMAC  net.HardwareAddr
	pinned     bool       // all packets meet the caches of one CPU
	b1Gateway  netip.Addr // the node as b1 sees it
}

func newProgBench(t testing.TB) *progBench {
	w := newLink(t)
	b := &progBench{testNode: w.nodes[0], far: w.nodes[1]}
	b.open(t, endpoint.Veth) // frames run as data come in by devices of the node
	b.b1, b.b2, b.r1 = b.add(t, blue, 1), b.add(t, blue, 2), b.add(t, red, 1)
	b.b3 = allocated(address.Plain{Node: b.far.prefix, Tenant: 1, App: 1, Index: 77})
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	b.uplinkMAC, b.b1Gateway = eth0.Attrs().HardwareAddr, b.b1.gateway(t, blue)
	return b
}

// sees returns an address as a blue container sees it.
func sees(a netip.Addr) netip.Addr { return address.NewCipher(blue.Current().Key).Encrypt(a) }

func (b *progBench) run(
	t testing.TB,
	p *ebpf.Program,
	frame []byte,
	ctx skb,
) (verdict uint32, out []byte, reasons map[string]uint64) {
	t.Helper()
	before := b.drops(t)
	out = make([]byte, len(frame)+answerLength)
	options := &ebpf.RunOptions{Data: frame, DataOut: out, Context: ctx}
	must(t, b.ns.Do(func() (err error) {
		if b.pinned {
			err = onFirstCPU()
		}
		if err == nil {
			verdict, err = p.Run(options)
		}
		return err
	}))
	reasons = map[string]uint64{}
	for r, n := range b.drops(t) {
		if n > before[r] {
			reasons[r] = n - before[r]
		}
	}
	return verdict, options.DataOut, reasons
}

// onFirstCPU keeps the calling thread on one CPU.
func onFirstCPU() error {
	var cpu unix.CPUSet
	cpu.Set(0)
	return unix.SchedSetaffinity(0, &cpu)
}

type progCase struct {
	name   string
	frame  []byte
	reason string        // dropped for it
	next   bool          // left to the next program
	out    packet.Packet // the redirected packet; with a reason: the ICMP error for the sender
}

func (b *progBench) check(t *testing.T, p *ebpf.Program, ctx skb, c progCase) {
	t.Helper()
	verdict, out, reasons := b.run(t, p, c.frame, ctx)
	counted := len(reasons) == 0
	if c.reason != "" {
		counted = len(reasons) == 1 && reasons[c.reason] == 1
	}
	switch {
	case c.reason != "" && !c.out.Source.IsValid():
		if verdict != verdictDrop || !counted {
			t.Errorf("%s: verdict %d, counted %v; want a drop for %s", c.name, verdict, reasons, c.reason)
		}
	case c.next:
		if verdict != verdictNext || !counted || !bytes.Equal(out, c.frame) {
			t.Errorf("%s: verdict %d, counted %v; want the packet left alone", c.name, verdict, reasons)
		}
	default:
		got, err := packet.DecodeFrame(out)
		if verdict != verdictRedirect || !counted || err != nil {
			t.Errorf(
				"%s: verdict %d, counted %v, %v; want it sent, counted for %q",
				c.name,
				verdict,
				reasons,
				err,
				c.reason,
			)
			return
		}
		if want := c.out.Marshal(); !bytes.Equal(out[14:], want) {
			t.Errorf("%s:\n got %+v\nwant %+v", c.name, got, c.out)
		}
	}
}

// sent returns a packet of b1 to a destination.
func (b *progBench) sent(to netip.Addr, body packet.Body, extensions ...packet.Extension) packet.Packet {
	return packet.Packet{Source: b.b1.seen(), Destination: to, Body: body, Extensions: extensions}
}

func (b *progBench) frame(p packet.Packet) []byte { return p.Frame(host.GatewayMAC, host.ContainerMAC) }

func (b *progBench) uplinkIfindex() uint32 { return uint32(b.datapath.Uplinks[0].Attrs().Index) }

func (b *progBench) mark(t testing.TB) uint32 {
	t.Helper()
	var mark uint32
	must(t, b.datapath.Objects.PacketMark.Get(&mark))
	return mark
}

// allocated returns the next address, from the given index on, whose ciphertext under blue's key is in the private
// prefix.
func allocated(p address.Plain) address.Plain { return allocatedOf(blue, p) }

func allocatedOf(of tenant.Tenant, p address.Plain) address.Plain {
	p, _, err := address.NewCipher(of.Current().Key).Draw(address.DefaultPlan().Private, p)
	if err != nil {
		panic(err)
	}
	return p
}

// summed returns a header of a protocol that has its checksum at the same offset as UDP.
func summed(protocol uint8, source, destination netip.Addr) packet.Raw {
	header := []byte{0x03, 0xe8, 0, 53, 0, 0, 0, 0, 1, 2, 3, 4}
	binary.BigEndian.PutUint16(header[6:], packet.Checksum(source, destination, protocol, header))
	return packet.Raw{Proto: protocol, Data: header}
}

func changed(a netip.Addr, change func(*address.Plain)) netip.Addr {
	p := address.Split(a)
	change(&p)
	return p.Addr()
}

// padding is an options header that says nothing.
func padding(kind uint8) packet.Extension {
	return packet.Extension{Type: kind, Data: []byte{1, 4, 0, 0, 0, 0}}
}

func homeAddress() packet.Extension {
	return packet.Extension{
		Type: packet.DestinationOptions,
		Data: append([]byte{1, 2, 0, 0, 0xc9, 16}, make([]byte, 16)...),
	}
}

func repeat(e packet.Extension, n int) []packet.Extension {
	all := make([]packet.Extension, n)
	for i := range all {
		all[i] = e
	}
	return all
}
