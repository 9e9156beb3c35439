package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/reason"
)

var _ nimitz.Switch = (*Nimitz)(nil)

// nimitzBench is a node with three containers and a gateway, and another that is only listened to.
type nimitzBench struct {
	*testNode
	far      *testNode
	nimitz   *Nimitz
	inject   map[pipeline.Port]*packet.Injector
	captures map[pipeline.Port]*packet.Capture
	farMAC   net.HardwareAddr
	hereMAC  net.HardwareAddr
}

func newNimitzBench(t testing.TB) *nimitzBench {
	w := newWireOf(t, Veth)
	b := &nimitzBench{
		testNode: w.nodes[0], far: w.nodes[1],
		inject: map[pipeline.Port]*packet.Injector{}, captures: map[pipeline.Port]*packet.Capture{},
	}
	var err error
	b.nimitz, err = b.datapath.Nimitz()
	must(t, err)
	listen := func(port pipeline.Port, ns *netns.Namespace, device string) {
		b.captures[port], err = packet.NewCapture(ns, device, packet.IncomingOnly)
		must(t, err)
		b.inject[port], err = packet.NewInjector(ns, device)
		must(t, err)
		t.Cleanup(func() { b.captures[port].Close(); b.inject[port].Close() })
	}
	for _, port := range packettest.Ports {
		c := b.add(t, blue, 1)
		must(t, b.nimitz.Plug(t.Context(), port, c.record.Device.HostName))
		listen(port, c.ns, "eth0")
	}
	stack := namespace(t, "stack")
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "gateway", 200
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace, pair.PeerHardwareAddr = "gateway", netlink.NsFd(stack.FD()), pipeline.InsideMAC
	must(t, h.LinkAdd(pair))
	for _, ns := range []*netns.Namespace{b.ns, stack} {
		h, err := ns.Netlink()
		must(t, err)
		defer h.Close()
		l, err := h.LinkByName("gateway")
		must(t, err)
		must(t, h.LinkSetUp(l))
	}
	must(t, stack.WaitUp(t.Context(), "gateway"))
	must(t, b.nimitz.Plug(t.Context(), pipeline.Gateway, "gateway"))
	listen(pipeline.Gateway, stack, "gateway")

	listen(pipeline.VXLAN, b.far.ns, "eth0")
	b.farMAC = b.inject[pipeline.VXLAN].MAC()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	b.hereMAC = eth0.Attrs().HardwareAddr
	must(t, b.far.trust(b.inject[pipeline.VXLAN]))
	must(t, b.nimitz.Apply(t.Context(), nil, packettest.Entries()))
	return b
}

// trust has a node let by what an injector sends by its uplink.
func (n *testNode) trust(i *packet.Injector) error {
	var mark uint32
	if err := n.datapath.objects.JudgedMark.Get(&mark); err != nil {
		return err
	}
	return i.Mark(mark)
}

// outer is what is around a packet between nodes.
type outer struct {
	from, to netip.Addr
	port     uint16
	vni      pipeline.VNI
	identity uint16
}

func (o outer) frame(to, from net.HardwareAddr, inner []byte) []byte {
	header := binary.BigEndian.AppendUint32(nil, 0x08000000)
	if o.identity != 0 {
		header = binary.BigEndian.AppendUint32(nil, 0x88000000|uint32(o.identity))
	}
	header = binary.BigEndian.AppendUint32(header, uint32(o.vni)<<8)
	body := packet.UDP{SourcePort: 55555, DestinationPort: o.port, Payload: append(header, inner...)}
	return packet.Packet{Source: o.from, Destination: o.to, Body: body}.Frame(to, from)
}

func untunnel(frame []byte) (o outer, inner []byte, err error) {
	p, err := packet.DecodeFrame(frame)
	if err != nil {
		return o, nil, err
	}
	gram, ok := p.Body.(packet.UDP)
	if !ok || len(gram.Payload) < 8 {
		return o, nil, fmt.Errorf("no VXLAN: %+v", p)
	}
	flags := binary.BigEndian.Uint32(gram.Payload)
	if flags&^0x8000ffff != 0x08000000 {
		return o, nil, fmt.Errorf("VXLAN flags %#x", flags)
	}
	o = outer{p.Source, p.Destination, gram.DestinationPort, pipeline.VNI(binary.BigEndian.Uint32(gram.Payload[4:]) >> 8), uint16(flags)}
	return o, gram.Payload[8:], nil
}

// counted are the reasons of what was dropped since, without those that count by themselves.
func (n *testNode) counted(t testing.TB, before map[string]uint64) map[string]uint64 {
	t.Helper()
	now := n.drops(t)
	for r, count := range before {
		if now[r] -= count; now[r] == 0 {
			delete(now, r)
		}
	}
	delete(now, reason.NdIgnored.String())
	delete(now, reason.MldIgnored.String())
	return now
}

// send puts a case's packet into its port.
func (b *nimitzBench) send(t testing.TB, c packettest.Case) {
	t.Helper()
	frame := c.In()
	if c.From == pipeline.VXLAN {
		o := outer{c.Outer, pipeline.VTEP(b.prefix), pipeline.UDPPort, c.VNI, c.Identity}
		frame = o.frame(b.hereMAC, b.farMAC, frame)
	}
	must(t, b.inject[c.From].Send(frame))
}

// dropped waits until a reason has counted one packet, and nothing else any.
func (b *nimitzBench) dropped(t testing.TB, name string, before map[string]uint64, why reason.Reason) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for len(b.counted(t, before)) == 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if got := b.counted(t, before); len(got) != 1 || got[why.String()] != 1 {
		t.Errorf("%s: counted %v, want a drop for %v", name, got, why)
	}
}

// leaves waits for a frame at a port that is as a result says.
func (b *nimitzBench) leaves(t testing.TB, name string, before map[string]uint64, want packettest.Result) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	around := outer{pipeline.VTEP(b.prefix), want.VTEP, pipeline.UDPPort, want.VNI, want.Identity}
	var seen [][]byte
	for {
		got, err := b.captures[want.To].Next(ctx)
		if err != nil {
			t.Errorf("%s: it does not come to %v as %x: %v; counted %v, seen %x", name, want.To, want.Frame, err, b.counted(t, before), seen)
			return
		}
		frame := got.Frame
		if want.To == pipeline.VXLAN {
			o, inner, err := untunnel(frame)
			if err != nil {
				continue // neighbours speak there too
			}
			if o != around || (!got.ChecksumPartial && !packet.ChecksumOK(frame[14:])) {
				t.Errorf("%s: in a tunnel %+v, want %+v", name, o, around)
			}
			frame = inner
		}
		if bytes.Equal(frame, want.Frame) {
			break
		}
		seen = append(seen, frame)
	}
	if got := b.counted(t, before); len(got) != 0 {
		t.Errorf("%s: counted %v", name, got)
	}
}

// TestNimitzPackets: what the switch does with each packet is what the pipeline says (NM2).
func TestNimitzPackets(t *testing.T) {
	b := newNimitzBench(t)
	for _, c := range packettest.Cases() {
		before, want := b.drops(t), c.Want()
		b.send(t, c)
		if want.Drop != 0 {
			b.dropped(t, c.Name, before, want.Drop)
		} else {
			b.leaves(t, c.Name, before, want)
		}
	}
}

// TestNimitzTables: entries come back from the kernel as they were written, and go.
func TestNimitzTables(t *testing.T) {
	b := newNimitzBench(t)
	b.holds(t, packettest.Entries())

	// A match has one entry: another takes its place, and each goes by its match alone.
	moved := pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.2.0/24"), Port: pipeline.VXLAN, VTEP: pipeline.VTEP(packettest.Stranger)}
	wider := pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.0.0/8")}
	longer := pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.2.128/25")}
	must(t, b.nimitz.Apply(t.Context(), nil, []pipeline.Entry{moved, wider}))
	changed := append(slices.DeleteFunc(packettest.Entries(), func(e pipeline.Entry) bool { return e.Match() == moved.Match() }), moved, wider)
	b.holds(t, changed)
	must(t, b.nimitz.Apply(t.Context(), []pipeline.Entry{longer}, nil)) // which is not there; a shorter prefix is
	b.holds(t, changed)
	must(t, b.nimitz.Apply(t.Context(), changed, nil))
	b.holds(t, nil)
	for m, n := range b.nimitz.used {
		if n != 0 {
			t.Errorf("%s is empty and counts %d", tableOf(m), n)
		}
	}
}

func (b *nimitzBench) holds(t testing.TB, want []pipeline.Entry) {
	t.Helper()
	got, err := b.nimitz.Entries(t.Context())
	must(t, err)
	text := func(all []pipeline.Entry) []string {
		lines := make([]string, len(all))
		for i, e := range all {
			lines[i] = e.String()
		}
		slices.Sort(lines)
		return lines
	}
	if g, w := text(got), text(want); !slices.Equal(g, w) {
		t.Errorf("the tables hold\n%s\nwant\n%s", strings.Join(g, "\n"), strings.Join(w, "\n"))
	}
	if g, w := pipeline.Count(got), pipeline.Count(want); !maps.Equal(g, w) {
		t.Errorf("the tables hold %v, want %v", g, w)
	}
}
