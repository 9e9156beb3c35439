package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// regionsWire has two regions behind one router, which drops packets from another device than the one to their source.
// Each region has a node and an Edge Switch: nodes 1 and 2 in the west, nodes 2 and 1 in the east.
type regionsWire struct{ west, east *nimitzWire }

func newRegionsWire(t testing.TB) *regionsWire {
	t.Helper()
	router := namespace(t, "router")
	must(t, withSettings(router, func(s host.Sysctls) error {
		return s.Set("all", []host.Sysctl{{Family: "ipv6", Name: "forwarding", Value: "1"}})
	}))
	w := &regionsWire{&nimitzWire{wire: &wire{}}, &nimitzWire{wire: &wire{}}}
	for r, region := range []*nimitzWire{w.west, w.east} {
		for i := range region.nodes {
			n := &testNode{
				ns:     namespace(t, fmt.Sprint("node", r, i)),
				prefix: netip.MustParsePrefix(fmt.Sprintf("fd7%d:696c:6100:%d::/64", r, i+1)),
			}
			n.underlay = joinRouter(t, router, n.ns, 1+2*r+i, n.prefix)
			region.nodes[i] = n
		}
	}
	checkSources(t, router)
	for _, region := range []*nimitzWire{w.west, w.east} {
		for i, n := range region.nodes {
			n.open(t, endpoint.Veth)
			var err error
			region.switches[i], err = n.datapath.Nimitz()
			must(t, err)
		}
	}
	w.lead(t, w.west, w.east, 0, 7, 12)
	w.lead(t, w.east, w.west, 1, 12, 7)
	return w
}

// lead adds the entries by which a region's node (index at) and its Edge Switch (the other one) reach the tenant's
// containers in the other region.
func (w *regionsWire) lead(t testing.TB, here, there *nimitzWire, at int, vni, theirs pipeline.VNI) {
	node, edge, peer := here.nodes[at].prefix, here.nodes[1-at].prefix, there.nodes[at].prefix
	region := pipeline.Peer{Nodes: here.nodes[0].datapath.config.Plan.Base}
	ofNode, ofEdge := []pipeline.Entry{region}, []pipeline.Entry{region, pipeline.Peer{Nodes: peer}}
	forward := func(to netip.Prefix, by netip.Prefix) pipeline.Entry {
		return pipeline.Forward{VNI: vni, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(by)}
	}
	for _, far := range overlay(2 - at) {
		ofNode = append(ofNode, forward(far, edge))
		ofEdge = append(ofEdge, forward(far, peer), pipeline.Foreign{Edge: peer, Theirs: theirs, Source: far, VNI: vni})
	}
	for _, near := range overlay(1 + at) {
		ofEdge = append(ofEdge, forward(near, node))
	}
	must(t, here.switches[at].Apply(t.Context(), nil, ofNode))
	must(t, here.switches[1-at].Apply(t.Context(), nil, ofEdge))
}

// TestNimitzRegions: containers of a tenant communicate across regions, through both Edge Switches. tshark reads the
// tunnel addresses of each hop, and behind the last Edge Switch the other region's VNI without an identity (§3.1; NM6).
func TestNimitzRegions(t *testing.T) {
	w := newRegionsWire(t)
	near, far := w.west.add(t, 1, 7, 2), w.east.add(t, 2, 12, 2)
	other := w.west.add(t, 1, 8, 3) // of a tenant that is not in the east
	way := []*testNode{w.west.nodes[0], w.west.nodes[1], w.east.nodes[0], w.east.nodes[1]}
	var captures []*packet.Capture
	for _, n := range way {
		captures = append(captures, capture(t, n.ns))
	}
	for family := range 2 {
		from, to := near.of(family), far.of(family)
		transfer(t, from, to, 2<<20)
		transfer(t, to, from, 2<<20)
		datagram(t, from, to, 100)
		datagram(t, from, to, 20000)
	}
	if r := other.ping(t, far.record.Attachments[1].Address, 56, impatience); r.Received != 0 {
		t.Error("a container of the other region answers another tenant")
	}
	seen := map[*testNode][]string{}
	for i, n := range way {
		seen[n] = readByTshark(t, captures[i], n.prefix)
	}
	for i, hop := range []struct {
		at, by *testNode
		of     string // VNI and identity
		source string // of a container, in both families
	}{
		{way[1], way[0], "7|70", "1::2"}, {way[2], way[1], "7|70", "1::2"}, {way[3], way[2], "12|0", "1::2"},
		{way[2], way[3], "12|120", "2::2"}, {way[1], way[2], "12|120", "2::2"}, {way[0], way[1], "7|0", "2::2"},
	} {
		lines := seen[hop.at]
		for _, a := range []string{"10.0." + strings.Replace(hop.source, "::", ".", 1), "fd10:0:0:" + hop.source} {
			if want := pipeline.VTEP(hop.by.prefix).String() + "|" + hop.of + "|" + a; !slices.Contains(lines, want) {
				t.Errorf("hop %d: tshark sees no %s among\n%s", i, want, strings.Join(lines, "\n"))
			}
		}
		if len(lines) > 4 {
			t.Errorf("hop %d: tshark sees more than the two containers:\n%s", i, strings.Join(lines, "\n"))
		}
	}
	for i, n := range way {
		got := n.counted(t, nil)
		if i == 0 {
			delete(got, "no-route") // of the other tenant
		}
		if len(got) != 0 {
			t.Errorf("node %d of the way dropped %v", i, got)
		}
	}
}
