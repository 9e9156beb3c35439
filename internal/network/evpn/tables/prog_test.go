package tables

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

var gram = packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("pilaster")}

func between(from, to netip.Addr, hops uint8) packet.Packet {
	return packet.Packet{Source: from, Destination: to, HopLimit: hops, Body: gram}
}

// arrival is a packet from the fabric, and what becomes of it.
type arrival struct {
	name    string
	outer   outer
	to      net.HardwareAddr // of the inner frame
	packet  packet.Packet
	reason  string
	hopLeft uint8 // of the packet that the container gets
}

func arrivals() []arrival {
	node, other := outer{nodeVTEP, ownVTEP, vni, identity}, outer{otherVTEP, ownVTEP, vni, 0}
	bridged := outer{otherVTEP, ownVTEP, segment, 0}
	with := func(o outer, change func(*outer)) outer { change(&o); return o }
	router := routerOf(ownVTEP)
	return []arrival{
		{"of a node", node, router, between(far, own, 9), "", 8},
		{"of a node, IPv6", node, router, between(far6, own6, 9), "", 8},
		{"of a node, on its last hop", node, router, between(far, own, 1), "hop-limit", 0},
		{"of a node, for the container's MAC", node, ownMAC, between(far, own, 9), "mac-mismatch", 0},
		{"of a node, for another router", node, routerOf(nodeVTEP), between(far, own, 9), "mac-mismatch", 0},
		{"of a node, in the segment", with(node, func(o *outer) { o.vni = segment }), ownMAC, between(far, own, 9),
			"no-route", 0},
		{"of a node, to an address elsewhere", node, router, between(far, beyond, 9), "no-route", 0},
		{"of a node, to no container", node, router, between(far, own.Prev(), 9), "no-endpoint", 0},
		{"of another speaker, routed", other, router, between(beyond, own, 9), "", 8},
		{"of another speaker's host, routed", other, router, between(switched, own, 9), "", 8},
		{"of another speaker, bridged", bridged, ownMAC, between(switched, own, 9), "", 9},
		{"bridged, on its last hop", bridged, ownMAC, between(switched, own, 1), "", 1},
		{"bridged, for the router", bridged, router, between(switched, own, 9), "mac-mismatch", 0},
		{"routed, for the container's MAC", other, ownMAC, between(beyond, own, 9), "mac-mismatch", 0},
		{"bridged, from behind a router", bridged, ownMAC, between(beyond, own, 9), "foreign-unknown", 0},
		{"from a container, by another speaker", other, router, between(far, own, 9), "foreign-unknown", 0},
		{"from another speaker's VTEP without routes", with(other, func(o *outer) { o.from = strangeVTEP }), router,
			between(beyond, own, 9), "foreign-unknown", 0},
		{"in another tenant's VNI", with(other, func(o *outer) { o.vni = 8 }), router, between(beyond, own, 9),
			"foreign-unknown", 0},
		{"as this node", with(node, func(o *outer) { o.from = ownVTEP }), router, between(far, own, 9),
			"own-source", 0},
	}
}

// departure is a packet of the container, and how it leaves.
type departure struct {
	name     string
	packet   packet.Packet
	outer    outer
	to, from net.HardwareAddr
	hopLeft  uint8
	reason   string
}

func departures() []departure {
	return []departure{
		{"to a node", between(own, far, 9), outer{ownVTEP, nodeVTEP, vni, identity}, routerOf(nodeVTEP),
			routerOf(ownVTEP), 8, ""},
		{"to a node, IPv6", between(own6, far6, 9), outer{ownVTEP, nodeVTEP, vni, identity}, routerOf(nodeVTEP),
			routerOf(ownVTEP), 8, ""},
		{"to another speaker's router", between(own, beyond, 9), outer{ownVTEP, otherVTEP, vni, 0}, routerMAC,
			routerOf(ownVTEP), 8, ""},
		{"to a host in the segment", between(own, switched, 9), outer{ownVTEP, otherVTEP, segment, 0}, hostMAC,
			ownMAC, 9, ""},
		{"to a host in the segment, on its last hop", between(own, switched, 1), outer{ownVTEP, otherVTEP, segment, 0},
			hostMAC, ownMAC, 1, ""},
		{name: "with another source", packet: between(far, own, 9), reason: "src-not-own"},
		{name: "to no container", packet: between(own, far.Next(), 9), reason: "no-endpoint"},
	}
}

// wrong returns the cases that go wrong.
func (b *bed) wrong(t *testing.T) (failed []string) {
	t.Helper()
	for _, c := range arrivals() {
		before := b.drops(t)
		inner := c.packet.Frame(c.to, routerOf(nodeVTEP))
		must(t, b.fromFabric.Send(c.outer.frame(b.uplinkMAC, fabricMAC, inner)))
		want := c.packet
		want.HopLimit = c.hopLeft
		frame := b.next(t, b.to, before, func(f []byte) bool { return bytes.Contains(f, gram.Payload) })
		said, delivered := b.reasons(t, before), want.Frame(ownMAC, host.GatewayMAC)
		switch {
		case c.reason != "" && (frame != nil || fmt.Sprint(said) != fmt.Sprintf("[%s]", c.reason)):
			t.Logf("in, %s: dropped for %v, and delivered %x; want %s", c.name, said, frame, c.reason)
			failed = append(failed, "in, "+c.name)
		case c.reason == "" && !bytes.Equal(frame, delivered):
			t.Logf("in, %s: delivered\n%x, want\n%x; dropped for %v", c.name, frame, delivered, said)
			failed = append(failed, "in, "+c.name)
		}
	}
	for _, c := range departures() {
		before := b.drops(t)
		must(t, b.from.Send(c.packet.Frame(host.GatewayMAC, ownMAC)))
		want := c.packet
		want.HopLimit = c.hopLeft
		var is outer
		var inner []byte
		b.next(t, b.toFabric, before, func(f []byte) bool {
			o, frame, ok := untunnel(f)
			if ok = ok && o.from == ownVTEP && o.to != ownVTEP; ok { // not one that the fabric has sent
				is, inner = o, frame
			}
			return ok
		})
		said := b.reasons(t, before)
		switch {
		case c.reason != "" && (inner != nil || fmt.Sprint(said) != fmt.Sprintf("[%s]", c.reason)):
			t.Logf("out, %s: dropped for %v, and left as %x; want %s", c.name, said, inner, c.reason)
			failed = append(failed, "out, "+c.name)
		case c.reason == "" && (is != c.outer || !bytes.Equal(inner, want.Frame(c.to, c.from))):
			t.Logf("out, %s: left as\n%+v %x, want\n%+v %x; dropped for %v", c.name, is, inner, c.outer,
				want.Frame(c.to, c.from), said)
			failed = append(failed, "out, "+c.name)
		}
	}
	return failed
}

// TestPackets sends packets through the kernel's tunnel device, both ways.
func TestPackets(t *testing.T) {
	b := newBed(t, nil)
	if failed := b.wrong(t); len(failed) > 0 {
		t.Errorf("%q", failed)
	}
}

// TestTable: the table that explains decisions to users decides as the programs do, except about MACs and hops.
func TestTable(t *testing.T) {
	table := pipeline.Table{Pool: pool, Entries: entries()}
	seen := 0
	agrees := func(name, reason string, v pipeline.Verdict, want bool) {
		t.Helper()
		if got := v.Drop.String(); reason != "" && got != reason || reason == "" && (v.Drop != 0 || !want) {
			t.Errorf("%s: %+v, want %q", name, v, reason)
		}
		seen++
	}
	for _, c := range arrivals() {
		if slices.Contains([]string{"hop-limit", "mac-mismatch", "own-source"}, c.reason) {
			continue
		}
		v, _ := table.Run(pipeline.Packet{From: pipeline.VXLAN, Outer: c.outer.from, VNI: c.outer.vni,
			Identity: c.outer.identity, Src: c.packet.Source, Dst: c.packet.Destination})
		agrees(c.name, c.reason, v, v.To == 2 && v.Identity == c.outer.identity)
	}
	for _, c := range departures() {
		v, _ := table.Run(pipeline.Packet{From: 2, Src: c.packet.Source, Dst: c.packet.Destination})
		agrees(c.name, c.reason, v, v.To == pipeline.VXLAN && c.outer == outer{ownVTEP, v.VTEP, v.VNI, v.Identity})
	}
	if seen < 15 {
		t.Errorf("%d cases", seen)
	}
}

// TestReset: `node reset` finds the tunnel address that the node has got, and no other address.
func TestReset(t *testing.T) {
	b := newBed(t, nil)
	must(t, b.path.Close())
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	must(t, err)
	must(t, h.AddrAdd(lo, &netlink.Addr{IPNet: host.HostNet(otherVTEP)}))
	left := func() (all []string) {
		addrs, err := h.AddrList(lo, unix.AF_INET)
		must(t, err)
		for _, a := range addrs {
			all = append(all, a.IP.String())
		}
		return all
	}
	if before := left(); !slices.Contains(before, ownVTEP.String()) {
		t.Fatalf("lo has %v, without the tunnel address", before)
	}
	must(t, b.ns.Do(func() error {
		all, err := datapath.StaleState(plan.Node(1), netip.Prefix{}, b.pins)
		for _, is := range all {
			err = errors.Join(err, is.Remove())
		}
		return err
	}))
	if after := left(); slices.Contains(after, ownVTEP.String()) || !slices.Contains(after, otherVTEP.String()) {
		t.Errorf("lo has %v, want %v and not %v", after, otherVTEP, ownVTEP)
	}
}

// TestEntries: entries are read back from the kernel as they were written.
func TestEntries(t *testing.T) {
	b := newBed(t, nil)
	got, err := b.Entries(t.Context())
	must(t, err)
	wanted := map[pipeline.Entry]bool{}
	for _, e := range entries() {
		wanted[e] = true
	}
	for _, e := range got {
		if !wanted[e] {
			t.Errorf("the tables have %v", e)
		}
		delete(wanted, e)
	}
	for e := range wanted {
		t.Errorf("the tables lack %v", e)
	}
}
