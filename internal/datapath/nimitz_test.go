package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

var _ nimitz.Switch = (*Nimitz)(nil)

// nimitzBench is a node with three containers and a gateway, and a second node that only captures packets.
type nimitzBench struct {
	*testNode
	far      *testNode
	nimitz   *Nimitz
	inject   map[pipeline.Port]*packet.Injector
	captures map[pipeline.Port]*packet.Capture
	records  []endpoint.Record
	farMAC   net.HardwareAddr
	hereMAC  net.HardwareAddr
}

func newNimitzBench(t testing.TB) *nimitzBench { return nimitzBenchOf(t, directTunnel()) }

func nimitzBenchOf(t testing.TB, direct bool) *nimitzBench {
	w := newWireWith(t, endpoint.Veth, direct)
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
		must(t, b.nimitz.Plug(t.Context(), port, pipeline.Device{Name: c.record.Device.HostName}))
		b.records = append(b.records, c.record)
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
	must(t, b.nimitz.Plug(t.Context(), pipeline.Gateway, pipeline.Device{Name: "gateway"}))
	listen(pipeline.Gateway, stack, "gateway")

	listen(pipeline.VXLAN, b.far.ns, "eth0")
	b.farMAC = b.inject[pipeline.VXLAN].MAC()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	b.hereMAC = eth0.Attrs().HardwareAddr
	for _, edge := range []netip.Prefix{packettest.Abroad, packettest.Farther} {
		must(t, h.RouteAdd(&netlink.Route{Dst: host.IPNet(edge), Gw: b.far.underlay.AsSlice()}))
	}
	must(t, b.far.trust(b.inject[pipeline.VXLAN]))
	must(t, b.nimitz.Apply(t.Context(), nil, packettest.Entries()))
	return b
}

// trust makes a node's programs accept the packets that an injector sends by the uplink.
func (n *testNode) trust(i *packet.Injector) error {
	var mark uint32
	if err := n.datapath.Objects.AcceptMark.Get(&mark); err != nil {
		return err
	}
	return i.Mark(mark)
}

// outer has the tunnel headers of a packet between nodes.
type outer struct {
	from, to netip.Addr
	port     uint16
	vni      pipeline.VNI
	identity uint16
	relayed  int
}

// relayed are the flags of packets that nodes pass on, by how often.
var relayed = [pipeline.MaxRelays + 1]uint32{0, 0x400000, 0x480000}

func (o outer) frame(to, from net.HardwareAddr, inner []byte) []byte {
	payload := packet.VXLAN(uint32(o.vni), o.identity, inner)
	if o.relayed > 0 {
		flags := binary.BigEndian.Uint32(payload)
		binary.BigEndian.PutUint32(payload, flags|relayed[o.relayed]|0x80000000)
	}
	body := packet.UDP{SourcePort: 55555, DestinationPort: o.port, Payload: payload}
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
	times := slices.Index(relayed[:], flags&0x480000)
	if flags&^0x8048ffff != 0x08000000 || times < 0 {
		return o, nil, fmt.Errorf("VXLAN flags %#x", flags)
	}
	o = outer{
		p.Source,
		p.Destination,
		gram.DestinationPort,
		pipeline.VNI(binary.BigEndian.Uint32(gram.Payload[4:]) >> 8),
		uint16(flags),
		times,
	}
	return o, gram.Payload[8:], nil
}

// counted returns the drops since before, by reason, without neighbour discovery and MLD, which kernels send.
func (n *testNode) counted(t testing.TB, before map[string]uint64) map[string]uint64 {
	t.Helper()
	now := n.drops(t)
	for r, count := range before {
		if now[r] -= count; now[r] == 0 {
			delete(now, r)
		}
	}
	delete(now, dropreason.NdIgnored.String())
	delete(now, dropreason.MldIgnored.String())
	return now
}

// send puts a case's packet into its port.
func (b *nimitzBench) send(t testing.TB, c packettest.Case) {
	t.Helper()
	frame := c.In()
	if c.From == pipeline.VXLAN {
		o := outer{c.Outer, pipeline.VTEP(b.prefix), pipeline.UDPPort, c.VNI, c.Identity, c.Relayed}
		frame = o.frame(b.hereMAC, b.farMAC, frame)
	}
	must(t, b.inject[c.From].Send(frame))
}

// dropped waits for a drop, and checks that there is one for this reason and no other.
func (n *testNode) dropped(t testing.TB, name string, before map[string]uint64, why dropreason.Reason) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for len(n.counted(t, before)) == 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if got := n.counted(t, before); len(got) != 1 || got[why.String()] != 1 {
		t.Errorf("%s: counted %v, want a drop for %v", name, got, why)
	}
}

// leaves waits until the expected frame arrives at its port.
func (b *nimitzBench) leaves(t testing.TB, name string, before map[string]uint64, want packettest.Result) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var around outer
	if want.To == pipeline.VXLAN {
		around = outer{pipeline.VTEP(b.prefix), want.VTEP, pipeline.UDPPort, want.VNI, want.Identity, want.Relayed}
	}
	var seen []string
	for {
		got, err := b.captures[want.To].Next(ctx)
		if err != nil {
			t.Errorf(
				"%s: it does not come to %v as %x in %v: %v; counted %v, seen %s",
				name,
				want.To,
				want.Frame,
				around,
				err,
				b.counted(t, before),
				seen,
			)
			return
		}
		var o outer
		frame := got.Frame
		if want.To == pipeline.VXLAN {
			if o, frame, err = untunnel(got.Frame); err != nil {
				continue // neighbours send there too
			}
			if !got.ChecksumPartial && !packet.ChecksumOK(got.Frame[14:]) {
				t.Errorf("%s: the tunnel's checksum is wrong", name)
			}
		}
		if o == around && bytes.Equal(frame, want.Frame) {
			break
		}
		seen = append(seen, fmt.Sprintf("%x in %v", frame, o)) // one that should have been dropped before, perhaps
	}
	if got := b.counted(t, before); len(got) != 0 {
		t.Errorf("%s: counted %v", name, got)
	}
}

// TestNimitzPackets: the switch processes each packet as the pipeline does (NM2).
func TestNimitzPackets(t *testing.T) { nimitzBenchOf(t, false).forwardsAll(t) }

// TestNimitzPacketsDirect: so it does when programs push and pull the headers of the tunnel (OC1).
func TestNimitzPacketsDirect(t *testing.T) { nimitzBenchOf(t, true).forwardsAll(t) }

// TestNimitzEntryProgram: containers on network nimitz alone have this network's program at their device, with the same
// results. Containers with a second network have the program for all networks.
func TestNimitzEntryProgram(t *testing.T) {
	b := newNimitzBench(t)
	for _, r := range b.records {
		both, own := r, r
		own.Attachments = slices.Clone(r.Attachments)
		own.Attachments[0].Network = nimitz.Name
		both.Attachments = append(slices.Clone(r.Attachments), own.Attachments...)
		for _, c := range []struct {
			name    string
			record  endpoint.Record
			program *ebpf.Program
		}{
			{"netpila alone", r, b.datapath.Objects.PilContainer},
			{"nimitz alone", own, b.datapath.Objects.PilNimitz},
			{"both", both, b.datapath.Objects.PilContainer},
			{"nimitz alone again", own, b.datapath.Objects.PilNimitz},
		} {
			must(t, b.datapath.Attach(c.record))
			l, err := b.datapath.Netlink.LinkByName(r.Device.HostName)
			must(t, err)
			if err := b.datapath.CheckProgram(l, netlink.HANDLE_MIN_INGRESS, c.program, c.name); err != nil {
				t.Error(err)
			}
		}
	}
	b.forwardsAll(t)
}

// TestNimitzMoved: late packets to a container that has moved to another node follow it there.
func TestNimitzMoved(t *testing.T) {
	entries, cases := packettest.Moved()
	for _, direct := range []bool{false, true} {
		b := nimitzBenchOf(t, direct)
		must(t, b.nimitz.Apply(t.Context(), nil, entries))
		b.forwards(t, cases)
		b.holds(t, slices.Concat(packettest.Entries(), entries))
		for _, e := range entries {
			f := e.(pipeline.Forward)
			var route [8]uint32
			must(t, b.nimitz.tables.NimForwardV1.Lookup(prefixKey(f.To, f.VNI), &route))
			if route[3] != 0 {
				t.Errorf("%v: older builds read %#x as outside", f, route[3])
			}
		}
	}
}

func (b *nimitzBench) forwardsAll(t *testing.T) { b.forwards(t, packettest.Cases()) }

func (b *nimitzBench) forwards(t *testing.T, cases []packettest.Case) {
	for _, c := range cases {
		before, want := b.drops(t), c.Want()
		b.send(t, c)
		if want.Drop != 0 {
			b.dropped(t, c.Name, before, want.Drop)
		} else {
			b.leaves(t, c.Name, before, want)
		}
	}
}

// TestNimitzTables: entries are read back from the kernel as they were written, and can be removed.
func TestNimitzTables(t *testing.T) {
	b := newNimitzBench(t)
	b.holds(t, packettest.Entries())

	// A match has one entry: a new entry replaces it, and Apply removes an entry by its match alone.
	moved := pipeline.Forward{
		VNI:  7,
		To:   netip.MustParsePrefix("10.0.2.0/24"),
		Port: pipeline.VXLAN,
		VTEP: pipeline.VTEP(packettest.Stranger),
	}
	wider := pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.0.0/8")}
	longer := pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.2.128/25")}
	must(t, b.nimitz.Apply(t.Context(), nil, []pipeline.Entry{moved, wider}))
	changed := append(
		slices.DeleteFunc(packettest.Entries(), func(e pipeline.Entry) bool { return e.Match() == moved.Match() }),
		moved,
		wider,
	)
	b.holds(t, changed)
	must(t, b.nimitz.Apply(t.Context(), []pipeline.Entry{longer}, nil)) // not in the map, which has a shorter prefix
	b.holds(t, changed)
	must(t, b.nimitz.Apply(t.Context(), changed, nil))
	b.holds(t, nil)
	for m, n := range b.nimitz.used {
		if n != 0 {
			t.Errorf("%v is empty and counts %d", m, n)
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

// TestOffloadsAreFull: a node has 1024 offloads at most, and says what to do about more.
func TestOffloadsAreFull(t *testing.T) {
	b := newNimitzBench(t)
	offload := func(i int) pipeline.Entry {
		return pipeline.Offload{ID: uint32(i + 1), VNI: 7, Backend: netip.MustParsePrefix("fd71:0:0:1::/64"), Epoch: 1}
	}
	var all []pipeline.Entry
	for i := range 1024 {
		all = append(all, offload(i))
	}
	must(t, b.nimitz.Apply(t.Context(), nil, all))
	err := b.nimitz.Apply(t.Context(), nil, []pipeline.Entry{offload(1024)})
	if !errors.Is(err, network.ErrConflict) || !strings.Contains(err.Error(), "has room for 1024 entries") ||
		!strings.Contains(err.Error(), "stop offloads") {
		t.Errorf("one more: %v", err)
	}
	has, err := b.nimitz.Entries(t.Context())
	must(t, err)
	if n := pipeline.Count(has)[pipeline.Sharing]; n != len(all) {
		t.Errorf("the tables hold %d offloads, want %d", n, len(all))
	}
}

// TestNimitzIsFull: Apply refuses entries that are invalid or have no room before it writes anything.
func TestNimitzIsFull(t *testing.T) {
	b := newNimitzBench(t)
	room := int(b.datapath.Objects.NimPeersV1.MaxEntries())
	peer := func(i int) pipeline.Entry {
		return pipeline.Peer{Nodes: netip.MustParsePrefix(fmt.Sprintf("fd71:0:0:%x::/64", i))}
	}
	all := packettest.Entries()
	for i := range room - pipeline.Count(all)[pipeline.Decap] {
		all = append(all, peer(i))
	}
	must(t, b.nimitz.Apply(t.Context(), nil, all))
	wider := netip.MustParsePrefix("10.0.0.0/8")
	forward := pipeline.Forward{VNI: 9, To: wider}
	for _, c := range []struct {
		what        string
		remove, add []pipeline.Entry
	}{
		{fmt.Sprintf("the map of peers has room for %d entries, holds %d and would get 1 more; nothing was "+
			"changed", room, room), nil, []pipeline.Entry{forward, peer(room)}},
		{"connect one first; nothing was changed", all[:1], []pipeline.Entry{forward, pipeline.Forward{VNI: 9,
			To: netip.MustParsePrefix("10.0.0.1/32"), Port: 77}}},
		{"more than 24 bits", nil, []pipeline.Entry{forward, pipeline.Forward{VNI: 1 << 24,
			To: netip.MustParsePrefix("10.0.0.1/32")}}},
		{"not a node's tunnel address", nil, []pipeline.Entry{forward, pipeline.Forward{VNI: 9,
			To: netip.MustParsePrefix("10.0.0.1/32"), Port: pipeline.VXLAN, VTEP: far6.Next()}}},
		{"one address is IPv4", nil, []pipeline.Entry{forward, pipeline.DNAT{VNI: 9, Virtual: own4, RealVNI: 9,
			Real: own6}}},
		{"not an IPv4 or IPv6 address", nil, []pipeline.Entry{forward, pipeline.Sender{Port: 2,
			Address: netip.MustParseAddr("::ffff:10.0.0.1"), VNI: 9}}},
		{"not a node's prefix", nil, []pipeline.Entry{forward, pipeline.Foreign{Edge: packettest.Region, Theirs: 8,
			Source: wider, VNI: 9}}},
		{"more than 24 bits", nil, []pipeline.Entry{forward, pipeline.Foreign{Edge: packettest.Abroad, Theirs: 1 << 24,
			Source: wider, VNI: 9}}},
		{"prefix must be IPv6", nil, []pipeline.Entry{forward,
			pipeline.Peer{Nodes: netip.MustParsePrefix("10.0.0.0/8")}}},
	} {
		if err := b.nimitz.Apply(t.Context(), c.remove, c.add); err == nil || !strings.Contains(err.Error(), c.what) {
			t.Errorf("%v, want an error with %q", err, c.what)
		}
		b.holds(t, all)
	}
	must(t, b.nimitz.Apply(t.Context(), []pipeline.Entry{peer(0)}, nil))
	must(t, b.nimitz.Apply(t.Context(), nil, []pipeline.Entry{peer(room)}))

	// Apply undoes a change that fails half-way: the kernel refuses entries for a full map.
	var rows []mapEntry
	for _, e := range []pipeline.Entry{forward, peer(room + 1)} {
		r, err := b.nimitz.encode(e)
		must(t, err)
		rows = append(rows, r)
	}
	before, err := b.nimitz.Entries(t.Context())
	must(t, err)
	gone, err := b.nimitz.encode(packettest.Entries()[3])
	must(t, err)
	gone.value = nil
	c := pipelineChange{n: b.nimitz, entries: append([]mapEntry{gone}, rows...)}
	if err := c.write(); err == nil {
		t.Error("a full table takes one more")
	}
	must(t, c.undo())
	b.holds(t, before)
}

// TestNimitzOutlivesItsAgent: another agent takes over ports, entries and devices without packet loss, also with
// different limits.
func TestNimitzOutlivesItsAgent(t *testing.T) {
	b := newNimitzBench(t)
	c := packettest.Cases()[0]
	for _, more := range []int{0, 10} {
		c2 := b.datapath.config
		c2.MaxEndpoints += more
		c2.MaxMappings += more
		var next *Datapath
		must(t, b.ns.Do(func() (err error) { next, err = Open(c2); return err }))
		found := slices.Clone(b.records)
		before := b.drops(t)
		_, err := next.Restore(t.Context(), found, func(found []endpoint.Record) error {
			b.send(t, c)
			return next.Netpila().Repair(t.Context(), found, found)
		})
		must(t, err)
		b.leaves(t, "while it is taken over", before, c.Want())
		must(t, b.datapath.Close())
		b.datapath = next
		t.Cleanup(func() { next.Close() })
		b.send(t, c)
		b.leaves(t, "before it is asked for", before, c.Want())
		b.nimitz, err = next.Nimitz()
		must(t, err)
		b.holds(t, packettest.Entries())
		if want := map[pipeline.Port]bool{2: true, 3: true, 4: true}; len(b.nimitz.ports) < len(want) {
			t.Errorf("it finds ports %v, want %v", b.nimitz.ports, want)
		}
		for m, used := range b.nimitz.used {
			if keys, _, err := bpfobj.RawEntries(m); err != nil || len(keys) != used {
				t.Errorf("%v: %d entries counted as %d: %v", m, len(keys), used, err)
			}
		}
	}
	// The device of an endpoint that is gone is no port any more.
	_, err := b.datapath.Restore(t.Context(), b.records[1:], func(found []endpoint.Record) error {
		return b.datapath.Netpila().Repair(t.Context(), found, found)
	})
	must(t, err)
	must(t, bpfobj.ForEachEntry(b.datapath.Objects.PilPortsV1, func(_ uint32, p bpfobj.PilasterDevEp) {
		if p.Endpoint == 2 {
			t.Errorf("port %d is of a container that has gone", p.Endpoint)
		}
	}))

	tables, err := DumpTables(b.datapath.config.BPFFS)
	must(t, err)
	if len(tables.Kept) != len(packettest.Entries()) || len(tables.Ports) != 2 {
		t.Errorf("the dump has %d entries and ports %v", len(tables.Kept), tables.Ports)
	}
	names := map[string]bool{}
	must(t, b.ns.Do(func() error {
		left, err := StaleState(b.prefix, netip.Prefix{}, b.datapath.config.BPFFS)
		for _, l := range left {
			names[l.Name] = true
		}
		return err
	}))
	for _, name := range []string{hook.TunnelDevice, pipeline.VTEP(b.prefix).String() + "/128 on lo"} {
		if !names[name] {
			t.Errorf("%s is not among what is left: %v", name, names)
		}
	}
}
