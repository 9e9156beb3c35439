package ovs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
	"pilaster.io/pilaster/internal/packet"
)

// set of entries, to compare.
func setOf(entries []pipeline.Entry) map[pipeline.Entry]int {
	m := map[pipeline.Entry]int{}
	for _, e := range entries {
		m[e]++
	}
	return m
}

func (b *bed) has(t *testing.T, want []pipeline.Entry) {
	t.Helper()
	got, err := b.s.Entries(limit(t))
	must(t, err)
	is, wanted := setOf(got), setOf(want)
	for e := range wanted {
		if is[e] != 1 {
			t.Errorf("%v: found %d times", e, is[e])
		}
	}
	for e := range is {
		if wanted[e] == 0 {
			t.Errorf("%v: unexpected entry", e)
		}
	}
}

// TestEntries adds, changes and removes entries, all or nothing, and reads them back. With LooseDeletes it also removes
// prefixes that contain other prefixes.
func TestEntries(t *testing.T) {
	b := newBed(t)
	all := entries()
	for _, loose := range []bool{false, true} {
		b.s.config.LooseDeletes = loose
		must(t, b.s.Apply(limit(t), nil, all))
		b.has(t, all)
		must(t, b.s.Apply(limit(t), nil, all)) // idempotent
		b.has(t, all)

		bad := pipeline.Forward{VNI: 7, To: all[0].(pipeline.Peer).Nodes, Port: lastContainer + 1}
		if err := b.s.Apply(limit(t), all, []pipeline.Entry{bad}); err == nil ||
			!strings.Contains(err.Error(), bad.String()[:20]) && !strings.Contains(err.Error(), "ports") {
			t.Errorf("invalid port: %v", err)
		}
		b.has(t, all)

		must(t, b.s.Apply(limit(t), all[:3], nil))
		b.has(t, all[3:])
		for i, e := range all {
			if f, ok := e.(pipeline.Forward); ok && f.To.Bits() < 32 { // and not the longer prefixes in it
				must(t, b.s.Apply(limit(t), []pipeline.Entry{e}, nil))
				rest := append(append([]pipeline.Entry{}, all[3:i]...), all[i+1:]...)
				b.has(t, rest)
				must(t, b.s.Apply(limit(t), nil, []pipeline.Entry{e}))
			}
		}
		must(t, b.s.Apply(limit(t), all, nil))
		b.has(t, nil)
	}
}

// TestReopened: entries and ports stay when the agent restarts, except a port whose device was deleted meanwhile.
func TestReopened(t *testing.T) {
	b := newBed(t)
	b.plug(t)
	must(t, b.s.Apply(limit(t), nil, packettest.Entries()))
	h, err := b.node.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName(deviceOf(4))
	must(t, err)
	must(t, h.LinkDel(l))
	constants := func() (all []string) {
		flows, err := b.s.flows(limit(t), cookieOurs, cookieMask|0xff<<cookieKind)
		must(t, err)
		for _, f := range flows {
			all = append(all, place(f))
		}
		slices.Sort(all)
		return all
	}
	before := constants()
	b.open(t)
	b.has(t, packettest.Entries())
	if after := constants(); !slices.Equal(before, after) {
		t.Errorf("the constant flows changed from %v to %v", before, after)
	}
	got, err := b.s.Plugged(limit(t))
	must(t, err)
	want := map[pipeline.Port]string{2: "c2", 3: "c3", pipeline.Gateway: "gw"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("ports %v, want %v", got, want)
	}
	must(t, b.s.Plug(limit(t), 2, pipeline.Device{Name: "c2"}))
	if err := b.s.Plug(limit(t), 2, pipeline.Device{Name: "c3"}); err == nil {
		t.Error("one device was accepted as two ports")
	}
	must(t, b.s.Unplug(limit(t), 2))
	must(t, b.s.Unplug(limit(t), 2))
	if got, err := b.s.Plugged(limit(t)); err != nil || got[2] != "" || len(got) != 2 {
		t.Errorf("ports %v, %v", got, err)
	}
	must(t, Remove(limit(t), b.config))
	must(t, Remove(limit(t), b.config))
	for _, name := range []string{bridgeName, underlayName, hostSide, bridgeSide} {
		if _, err := h.LinkByName(name); err == nil {
			t.Errorf("%s is left over", name)
		}
	}
	b.open(t)
	b.has(t, nil)
}

// TestOffload: a container that leaves the switch gets checksum offload back. A new container in its place is left
// alone.
func TestOffload(t *testing.T) {
	b := newBed(t)
	b.link(t, "c2", nil, nil)
	b.link(t, "c3", nil, nil)
	is := func(name string) uint32 {
		t.Helper()
		var on uint32
		must(t, b.beyond.Do(func() (err error) {
			on, err = netns.Ethtool(name, unix.ETHTOOL_GTXCSUM, 0)
			return err
		}))
		return on
	}
	plugged := uint32(0)
	if b.config.Datapath == Kernel {
		plugged = 1
	}
	two := pipeline.Device{Name: "c2", Netns: b.beyond.Path(), Inside: "c2"}
	must(t, b.s.Plug(limit(t), 2, two))
	b.open(t) // a new process plugs existing devices again
	must(t, b.s.Plug(limit(t), 2, two))
	if got := is("c2"); got != plugged {
		t.Errorf("after Plug its offload is %d", got)
	}
	for range 2 {
		must(t, b.s.Unplug(limit(t), 2))
		if got := is("c2"); got != 1 {
			t.Errorf("after Unplug its offload is %d", got)
		}
	}
	must(t, b.beyond.Do(func() error { return NoOffload("c3") }))
	must(t, b.s.relieve(pipeline.Device{Name: "c2", Netns: b.beyond.Path(), Inside: "c3"}))
	must(t, b.s.relieve(pipeline.Device{Name: "c2", Netns: b.beyond.Path() + "-gone", Inside: "c2"}))
	if got := is("c3"); got != 0 {
		t.Errorf("offload of the new container is %d", got)
	}
}

// TestPackets: the switch processes each packet of the cases as the pipeline defines.
func TestPackets(t *testing.T) {
	b := newBed(t)
	b.plug(t)
	must(t, b.s.Apply(limit(t), nil, packettest.Entries()))
	ends := map[pipeline.Port]end{}
	for _, p := range append(packettest.Ports, pipeline.VXLAN, pipeline.Gateway) {
		ends[p] = b.end(t, p)
	}
	for _, c := range slices.Concat(packettest.Cases(), errorCases(), linkCases()) {
		t.Run(c.Name, func(t *testing.T) { b.meet(t, c, ends) })
	}
	// Packets that another network's programs check are neither forwarded nor counted here; only the packet sent after
	// them comes out.
	cases := packettest.Cases()
	i := slices.IndexFunc(cases, func(c packettest.Case) bool { return c.From == 2 && judge(c).Drop == 0 })
	before := fmt.Sprint(b.drops(t, limit(t)))
	others := packet.Packet{
		Source:      b.config.Others[0].Addr().Next(),
		Destination: netip.MustParseAddr("fd10:0:0:2::2"),
		Body:        packet.UDP{},
	}
	must(t, ends[2].Send(others.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
	b.meet(t, cases[i], ends)
	if after := fmt.Sprint(b.drops(t, limit(t))); after != before {
		t.Errorf("the drops changed from %v to %v", before, after)
	}
	if b.config.Datapath == Kernel {
		b.offloaded(t, ends)
	}
}

// errorCases are ICMP errors about translated packets. This switch could not translate their quotes.
func errorCases() []packettest.Case {
	at := func(name string, from pipeline.Port, src, dst string, kind uint8, drop dropreason.Reason) packettest.Case {
		return packettest.Case{
			Name: name, Table: pipeline.Table{Entries: packettest.Entries()}, From: from, Drop: drop,
			Packet: packet.Packet{
				Source:      netip.MustParseAddr(src),
				Destination: netip.MustParseAddr(dst),
				Body:        packet.ICMP{Type: kind, Payload: make([]byte, 48)},
			},
		}
	}
	own, far, virtual, gateway := "fd10:0:0:1::2", "fd10:0:0:2::2", "fd64:0:0:1::2", "fd64:0:0:1::1"
	return []packettest.Case{
		at("a router's error for a container", pipeline.Gateway, "2001:db8:9::1", virtual, 2, dropreason.IcmpQuote),
		at("a service's error for a container", pipeline.Gateway, "2001:db8:9::9", virtual, 1, dropreason.IcmpQuote),
		at("a container's error for a client", 2, own, gateway, 4, dropreason.IcmpQuote),
		at("a container's error for another", 2, own, far, 1, 0),
		at("a container's error for a service, IPv4", 2, "10.0.1.2", "10.9.9.9", 3, dropreason.IcmpQuote),
	}
}

// linkCases are packets that kernels send by default. The tests of eBPF do not count them.
func linkCases() (all []packettest.Case) {
	own := netip.MustParseAddr("fd10:0:0:1::2")
	for _, c := range []struct {
		to   netip.Addr
		body packet.ICMP
		why  dropreason.Reason
	}{
		{netip.MustParseAddr("fd10:0:0:2::2"), packet.ICMP{Type: 133, Payload: make([]byte, 8)}, dropreason.NdIgnored},
		{netip.MustParseAddr("ff02::1:ff00:1"), packet.ICMP{Type: 135, Payload: make([]byte, 16)},
			dropreason.NdIgnored},
		{netip.MustParseAddr("ff02::16"), packet.ICMP{Type: 143, Payload: make([]byte, 20)}, dropreason.MldIgnored},
	} {
		all = append(
			all,
			packettest.Case{
				Name:   fmt.Sprintf("%v for type %d to %v", c.why, c.body.Type, c.to),
				Table:  pipeline.Table{Entries: packettest.Entries()},
				From:   2,
				Packet: packet.Packet{Source: own, Destination: c.to, Body: c.body},
				Drop:   c.why,
			},
		)
	}
	return all
}

// judge returns the pipeline's result, or the drop for what this switch does not support.
func judge(c packettest.Case) packettest.Result {
	want := c.Want()
	if want.Drop != 0 || len(c.Packet.Extensions) == 0 || !want.Src.Is4() ||
		want.Src == c.Packet.Source && want.Dst == c.Packet.Destination {
		return want
	}
	if _, later := c.Packet.Body.(packet.Raw); later {
		return packettest.Result{Verdict: pipeline.Verdict{Drop: dropreason.LaterFragment}}
	}
	return want
}

// meet sends one packet and waits until it comes out, or a drop counter shows it.
func (b *bed) meet(t *testing.T, c packettest.Case, ends map[pipeline.Port]end) {
	ctx, cancel := context.WithTimeout(limit(t), limitOfPacket)
	defer cancel()
	want := judge(c)
	before := b.drops(t, ctx)
	frame := c.In()
	if c.From == pipeline.VXLAN {
		frame = encapsulate(c.Outer, pipeline.VTEP(packettest.Here), c.VNI, c.Identity, frame)
	}
	must(t, ends[c.From].Send(frame))
	if want.Drop != 0 {
		for b.drops(t, ctx)[want.Drop.String()] == before[want.Drop.String()] {
			if ctx.Err() != nil {
				t.Fatalf("not dropped for %v; drops were %v and are %v", want.Drop, before, b.drops(t, limit(t)))
			}
		}
	} else {
		got, err := ends[want.To].next(ctx)
		if err != nil {
			t.Fatalf("%v; drops were %v and are %v", err, before, b.drops(t, limit(t)))
		}
		inner := got
		if want.To == pipeline.VXLAN {
			inner = b.tunnelled(t, got, want)
		}
		if !bytes.Equal(inner, want.Frame) {
			t.Errorf("it came out as\n%x, want\n%x", inner, want.Frame)
		}
		if after := b.drops(t, ctx); fmt.Sprint(after) != fmt.Sprint(before) {
			t.Errorf("drops were %v and are %v", before, after)
		}
	}
	// Nothing may have come out elsewhere: when the switch responds, it has sent all its packets.
	b.drops(t, ctx)
	for p, e := range ends {
		if frame, err := e.next(past()); err == nil {
			t.Errorf("%v was sent %x too", p, frame)
		}
	}
}

// tunnelled checks and removes the tunnel's headers.
func (b *bed) tunnelled(t *testing.T, frame []byte, want packettest.Result) []byte {
	t.Helper()
	outer, err := packet.DecodeFrame(frame)
	must(t, err)
	udp, ok := outer.Body.(packet.UDP)
	if !ok || len(udp.Payload) < 8 {
		t.Fatalf("not VXLAN: %+v", outer)
	}
	if outer.Source != pipeline.VTEP(packettest.Here) || outer.Destination != want.VTEP ||
		udp.DestinationPort != outerUDP {
		t.Errorf("from %v to %v, port %d", outer.Source, outer.Destination, udp.DestinationPort)
	}
	if !packet.ChecksumOK(frame[14:]) {
		t.Error("wrong checksum of the tunnel's UDP")
	}
	head := binary.BigEndian.Uint64(udp.Payload)
	if vni := pipeline.VNI(head >> 8 & 0xffffff); vni != want.VNI {
		t.Errorf("VNI %d, want %d", vni, want.VNI)
	}
	flags, identity, extension := head>>56, uint16(head>>32), uint64(0x88)
	if b.config.Datapath == Kernel && want.Identity == 0 {
		extension = 0x08 // the kernel omits an empty extension
	}
	if flags != extension || identity != want.Identity {
		t.Errorf("flags %#x, identity %d, want %d", flags, identity, want.Identity)
	}
	return udp.Payload[8:]
}

var (
	_ nimitz.Switch  = (*Switch)(nil)
	_ nimitz.Lacking = (*Switch)(nil)
)

// TestRestarted: Open vSwitch restarts with only its ports left. The switch works again when it is opened again and
// given its entries.
func TestRestarted(t *testing.T) {
	b := newBed(t)
	b.plug(t)
	must(t, b.daemons.Stop())
	if _, err := b.s.Entries(limit(t)); err == nil || !strings.Contains(err.Error(), "ovs-vswitchd running?") {
		t.Errorf("without Open vSwitch: %v", err)
	}
	var err error
	b.daemons, err = Start(limit(t), b.node, b.config.RunDir)
	must(t, err)
	b.open(t)
	b.has(t, nil)
	must(t, b.s.Apply(limit(t), nil, packettest.Entries()))
	ends := map[pipeline.Port]end{}
	for _, p := range append(packettest.Ports, pipeline.VXLAN, pipeline.Gateway) {
		ends[p] = b.end(t, p)
	}
	for _, c := range packettest.Cases() {
		if strings.HasSuffix(c.Name, ", UDP") {
			b.meet(t, c, ends)
		}
	}
}

// TestBundle: the bridge rejects one of many flows. The error says which and why, and no flow is added. The same
// connection still accepts the next change.
func TestBundle(t *testing.T) {
	b := newBed(t)
	good := openflow.Flow{Table: 9, Cookie: 5, Match: []openflow.Value{ip4.is()}}
	for _, c := range []struct {
		bad  openflow.Flow
		says string
	}{
		{openflow.Flow{Table: 9, Actions: []openflow.Action{openflow.DecTTL{}}}, "add flow of table 9, priority 0: : " +
			"dec_ttl: bad action: the match does not fit it"},
		{openflow.Flow{Table: 9, Match: []openflow.Value{openflow.IPProto.Number(6)}},
			"add flow of table 9, priority 0: ip_proto=0x6: drop: bad match: a field that it depends on is missing"},
		{openflow.Flow{Table: 9, Goto: 3}, "add flow of table 9, priority 0: : goto 3: bad instruction: no such " +
			"table to go to"},
	} {
		must(t, b.s.withBridge(limit(t), bridgeName, func(conn *openflow.Conn) error {
			changes := make([]openflow.Change, 3000) // more than a socket holds of their errors
			for i := range changes {
				changes[i].Flow = c.bad
			}
			changes[0].Flow = good
			err := conn.Apply(limit(t), changes)
			if !errors.As(err, new(*openflow.Error)) || err.Error() != c.says {
				t.Errorf("%v: %v, want %s", c.bad, err, c.says)
			}
			if flows, err := conn.Flows(limit(t), 5, ^uint64(0)); err != nil || len(flows) != 0 {
				t.Errorf("flows of a rejected bundle: %v, %v", flows, err)
			}
			must(t, conn.Apply(limit(t), []openflow.Change{{Flow: good}}))
			if flows, err := conn.Flows(limit(t), 5, ^uint64(0)); err != nil || len(flows) != 1 ||
				flows[0].String() != good.String() {
				t.Errorf("added %v, %v", flows, err)
			}
			must(t, conn.Apply(limit(t), []openflow.Change{{Command: openflow.Delete, Flow: good}}))
			return nil
		}))
	}
}
