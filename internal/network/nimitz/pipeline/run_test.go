package pipeline

import (
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/dropreason"
)

var (
	addr   = netip.MustParseAddr
	prefix = netip.MustParsePrefix
	n1     = prefix("fd70:696c:6100:1::/64")
	n2     = prefix("fd70:696c:6100:2::/64")
	region = prefix("fd70:696c:6100::/40")
)

// Tenants 7 and 8 have the same addresses. Node N has a container 10.0.N.2 of tenant 7 at port 2, and of tenant 8 at
// port 3. Clients outside reach tenant 7's container at 100.64.N.2. 100.64.N.1 is node N's gateway. Tenant 7 reaches
// storage at 192.0.2.9 by the address 10.9.9.9.
func table(here, there byte, remote netip.Prefix) Table {
	at := func(n ...byte) netip.Addr { return netip.AddrFrom4([4]byte(n)) }
	cidr := func(n byte) netip.Prefix { return netip.PrefixFrom(at(10, 0, n, 0), 24) }
	return Table{Region: region, Entries: []Entry{
		Peer{region},
		Sender{2, at(10, 0, here, 2), 7, 70},
		Sender{3, at(10, 0, here, 2), 8, 80},
		NorthSouth{7, prefix("192.0.2.9/32")},
		NorthSouth{7, netip.PrefixFrom(at(100, 64, here, 1), 32)},
		DNAT{7, addr("10.9.9.9"), 7, addr("192.0.2.9")},
		SNAT{7, addr("192.0.2.9"), addr("10.9.9.9")},
		DNAT{GatewayVNI, at(100, 64, here, 2), 7, at(10, 0, here, 2)},
		SNAT{7, at(10, 0, here, 2), at(100, 64, here, 2)},
		DNAT{
			GatewayVNI,
			at(100, 64, here, 3),
			7,
			at(10, 0, there, 2),
		}, // a virtual address here leads to the container on the other node
		SNAT{7, at(10, 0, there, 2), at(100, 64, here, 3)},
		Forward{VNI: 7, To: prefix("10.0.0.0/16")},
		Forward{VNI: 8, To: prefix("10.0.0.0/16")},
		Forward{VNI: 7, To: netip.PrefixFrom(at(10, 0, here, 2), 32), Port: 2},
		Forward{VNI: 8, To: netip.PrefixFrom(at(10, 0, here, 2), 32), Port: 3},
		Forward{VNI: 7, To: cidr(there), Port: VXLAN, VTEP: VTEP(remote)},
		Forward{VNI: 8, To: cidr(there), Port: VXLAN, VTEP: VTEP(remote)},
		Forward{VNI: Any, To: prefix("192.0.2.9/32"), Port: Gateway},
		Forward{VNI: Any, To: netip.PrefixFrom(at(100, 64, here, 1), 32), Port: Gateway},
		Forward{VNI: Any, To: netip.PrefixFrom(at(100, 64, there, 1), 32), Port: VXLAN, VTEP: VTEP(remote)},
	}}
}

// TestTraffic: the traffic types of NIMITZ §3.1 and appendix A, hop by hop, and packets that must not get through
// (NM1).
func TestTraffic(t *testing.T) {
	one, two := table(1, 2, n2), table(2, 1, n1)
	c1, c2, storage, virtual, client := addr(
		"10.0.1.2",
	), addr(
		"10.0.2.2",
	), addr(
		"192.0.2.9",
	), addr(
		"10.9.9.9",
	), addr(
		"100.64.1.1",
	)
	v1, v2 := VTEP(n1), VTEP(n2)
	none := netip.Addr{}
	for _, c := range []struct {
		name string
		at   Table
		in   Packet
		out  Verdict
	}{
		{"a: same node", Table{Region: region, Entries: append(one.Entries, Sender{4, addr("10.0.1.4"), 7, 71})},
			Packet{4, none, 0, 0, addr("10.0.1.4"), c1, 0}, Verdict{0, 2, none, 7, 71, addr("10.0.1.4"), c1, 0}},
		{"b: leaves", one, Packet{2, none, 0, 0, c1, c2, 0}, Verdict{0, VXLAN, v2, 7, 70, c1, c2, 0}},
		{"b: arrives", two, Packet{VXLAN, v1, 7, 70, c1, c2, 0}, Verdict{0, 2, none, 7, 70, c1, c2, 0}},
		{"b: of the other tenant", two, Packet{VXLAN, v1, 8, 80, c1, c2, 0}, Verdict{0, 3, none, 8, 80, c1, c2, 0}},
		{"c: to the service", one, Packet{2, none, 0, 0, c1, virtual, 0},
			Verdict{0, Gateway, none, 7, 70, addr("100.64.1.2"), storage, 0}},
		{"c: its answer", one, Packet{Gateway, none, 0, 0, storage, addr("100.64.1.2"), 0},
			Verdict{0, 2, none, 7, 0, virtual, c1, 0}},
		{"d: at the gateway", one, Packet{Gateway, none, 0, 0, client, addr("100.64.1.3"), 0},
			Verdict{0, VXLAN, v2, 7, 0, client, c2, 0}},
		{"d: at the container's node", two, Packet{VXLAN, v1, 7, 0, client, c2, 0},
			Verdict{0, 2, none, 7, 0, client, c2, 0}},
		{"d: the answer leaves", two, Packet{2, none, 0, 0, c2, client, 0},
			Verdict{0, VXLAN, v1, 7, 70, c2, client, 0}},
		{"d: the answer at the gateway", one, Packet{VXLAN, v2, 7, 70, c2, client, 0},
			Verdict{0, Gateway, none, 7, 70, addr("100.64.1.3"), client, 0}},
		{"a node does not", one, Packet{VXLAN, v2, 7, 70, c2, c2, 0},
			Verdict{dropreason.NoRoute, 0, none, 7, 70, c2, c2, 0}},
		{"another's source", one, Packet{2, none, 0, 0, c2, c1, 0},
			Verdict{dropreason.SrcNotOwn, 0, none, 0, 0, c2, c1, 0}},
		{"no container is there", one, Packet{2, none, 0, 0, c1, addr("10.0.7.7"), 0},
			Verdict{dropreason.NoEndpoint, 0, none, 7, 70, c1, addr("10.0.7.7"), 0}},
		{"outside, and no service", one, Packet{2, none, 0, 0, c1, addr("192.0.2.1"), 0},
			Verdict{dropreason.NoRoute, 0, none, 7, 70, c1, addr("192.0.2.1"), 0}},
		{"outside, without a virtual address", one, Packet{3, none, 0, 0, c1, storage, 0},
			Verdict{dropreason.Untranslated, 0, none, 8, 80, c1, storage, 0}},
		{"a peer's gateway, without a virtual address there", one, Packet{VXLAN, v2, 8, 80, c2, client, 0},
			Verdict{dropreason.Untranslated, 0, none, 8, 80, c2, client, 0}},
		{"another tenant's service", one, Packet{3, none, 0, 0, c1, virtual, 0},
			Verdict{dropreason.NoRoute, 0, none, 8, 80, c1, virtual, 0}},
		{"not from a VTEP", two, Packet{VXLAN, addr("fd70:696c:6100:1::1"), 7, 70, c1, c2, 0},
			Verdict{dropreason.PeerUnknown, 0, none, 7, 70, c1, c2, 0}},
		{"from another network's", two, Packet{VXLAN, addr("fd00::2"), 7, 70, c1, c2, 0},
			Verdict{dropreason.PeerUnknown, 0, none, 7, 70, c1, c2, 0}},
		{"an unknown VNI", two, Packet{VXLAN, v1, 9, 0, c1, c2, 0},
			Verdict{dropreason.NoRoute, 0, none, 9, 0, c1, c2, 0}},
		{"the gateway to nothing virtual", one, Packet{Gateway, none, 0, 0, storage, c1, 0},
			Verdict{dropreason.NoRoute, 0, none, GatewayVNI, 0, storage, c1, 0}},
	} {
		got, trace := c.at.Run(c.in)
		if got != c.out {
			t.Errorf("%s: %+v, want %+v; it met %v", c.name, got, c.out, trace)
		}
	}
}

// Nodes of another region, behind its Edge Switch, and of a third region.
var (
	peer  = prefix("fd80:0:0:1::/64")
	third = prefix("fd90:0:0:1::/64")
)

// edge returns node 1's table as the Edge Switch, which knows the locations of both tenants. Tenant 7 is in the other
// regions too, with the numbers 8 and 9.
func edge() Table {
	t := table(1, 2, n2)
	t.Entries = append(
		t.Entries,
		Peer{
			peer,
		},
		Foreign{peer, 8, prefix("10.1.0.0/16"), 7},
		Forward{VNI: 7, To: prefix("10.1.0.0/16"), Port: VXLAN, VTEP: VTEP(peer)},
		Peer{
			third,
		},
		Foreign{third, 9, prefix("10.2.0.0/16"), 7},
		Forward{VNI: 7, To: prefix("10.2.0.0/16"), Port: VXLAN, VTEP: VTEP(third)},
	)
	return t
}

// TestRegions: cross-region traffic at an Edge Switch, and packets that a compromised node or region could send to it
// (NM6).
func TestRegions(t *testing.T) {
	here, there, farther := addr("10.0.2.2"), addr("10.1.3.4"), addr("10.2.3.4")
	v2, by, by3 := VTEP(n2), VTEP(peer), VTEP(third)
	none := netip.Addr{}
	for _, c := range []struct {
		name string
		in   Packet
		out  Verdict
	}{
		{"e: leaves the region", Packet{VXLAN, v2, 7, 70, here, there, 0},
			Verdict{0, VXLAN, by, 7, 70, here, there, 0}},
		{"e: arrives", Packet{VXLAN, by, 8, 99, there, here, 0}, Verdict{0, VXLAN, v2, 7, 0, there, here, 0}},
		{"e: arrives from the third", Packet{VXLAN, by3, 9, 99, farther, here, 0},
			Verdict{0, VXLAN, v2, 7, 0, farther, here, 0}},
		{"within the region", Packet{VXLAN, v2, 7, 70, here, here, 0},
			Verdict{dropreason.NoRoute, 0, none, 7, 70, here, here, 0}},
		{"a tenant that is not in the other", Packet{VXLAN, v2, 8, 80, here, there, 0},
			Verdict{dropreason.NoRoute, 0, none, 8, 80, here, there, 0}},
		{"from abroad to abroad", Packet{VXLAN, by, 8, 99, there, farther, 0},
			Verdict{dropreason.NoRoute, 0, none, 7, 0, there, farther, 0}},
		{"from abroad and back", Packet{VXLAN, by, 8, 99, there, there, 0},
			Verdict{dropreason.NoRoute, 0, none, 7, 0, there, there, 0}},
		{"from abroad to a missing container", Packet{VXLAN, by, 8, 99, there, addr("10.0.7.7"), 0},
			Verdict{dropreason.NoEndpoint, 0, none, 7, 0, there, addr("10.0.7.7"), 0}},
		{"from abroad to a service", Packet{VXLAN, by, 8, 99, there, addr("10.9.9.9"), 0},
			Verdict{dropreason.Untranslated, 0, none, 7, 0, there, addr("192.0.2.9"), 0}},
		{"from abroad to the gateway", Packet{VXLAN, by, 8, 99, there, addr("100.64.1.1"), 0},
			Verdict{dropreason.Untranslated, 0, none, 7, 0, there, addr("100.64.1.1"), 0}},
		{"a VNI of here from abroad", Packet{VXLAN, by, 7, 99, there, here, 0},
			Verdict{dropreason.ForeignUnknown, 0, none, 7, 99, there, here, 0}},
		{"a VNI of the third from the other", Packet{VXLAN, by, 9, 99, there, here, 0},
			Verdict{dropreason.ForeignUnknown, 0, none, 9, 99, there, here, 0}},
		{"the gateway's VNI from abroad", Packet{VXLAN, by, GatewayVNI, 0, there, here, 0},
			Verdict{dropreason.ForeignUnknown, 0, none, GatewayVNI, 0, there, here, 0}},
		{"a source of here from abroad", Packet{VXLAN, by, 8, 99, addr("10.0.1.2"), here, 0},
			Verdict{dropreason.ForeignUnknown, 0, none, 8, 99, addr("10.0.1.2"), here, 0}},
		{"a source of the third from the other", Packet{VXLAN, by, 8, 99, farther, here, 0},
			Verdict{dropreason.ForeignUnknown, 0, none, 8, 99, farther, here, 0}},
		{"a client's source from abroad", Packet{VXLAN, by, 8, 0, addr("100.64.1.1"), here, 0},
			Verdict{dropreason.ForeignUnknown, 0, none, 8, 0, addr("100.64.1.1"), here, 0}},
		{"not the other's tunnel address", Packet{VXLAN, peer.Addr().Next(), 8, 99, there, here, 0},
			Verdict{dropreason.PeerUnknown, 0, none, 8, 99, there, here, 0}},
		{"a node of the other that is no Edge Switch",
			Packet{VXLAN, VTEP(prefix("fd80:0:0:2::/64")), 8, 99, there, here, 0},
			Verdict{dropreason.PeerUnknown, 0, none, 8, 99, there, here, 0}},
	} {
		got, trace := edge().Run(c.in)
		if got != c.out {
			t.Errorf("%s: %+v, want %+v; it met %v", c.name, got, c.out, trace)
		}
	}
	// A node that is no Edge Switch accepts nothing from other regions, even though it sends to them.
	node := table(1, 2, n2)
	node.Entries = append(node.Entries, Forward{VNI: 7, To: prefix("10.1.0.0/16"), Port: VXLAN, VTEP: v2})
	if got, _ := node.Run(Packet{VXLAN, by, 8, 99, there, addr("10.0.1.2"), 0}); got.Drop != dropreason.PeerUnknown {
		t.Errorf("a node takes from abroad: %+v", got)
	}
	if got, _ := node.Run(Packet{VXLAN, v2, 7, 70, here, there, 0}); got.Drop != dropreason.NoRoute {
		t.Errorf("a node sends on what is for another region: %+v", got)
	}
	if got, _ := node.Run(Packet{From: 2, Src: addr("10.0.1.2"), Dst: there}); got != (Verdict{0, VXLAN, v2, 7, 70,
		addr("10.0.1.2"), there, 0}) {
		t.Errorf("a container to another region: %+v", got)
	}
}

// TestMatches: no two entries of the tables above have the same match: switches could not distinguish them.
func TestMatches(t *testing.T) {
	seen := map[any]Entry{}
	for _, e := range edge().Entries {
		if other, twice := seen[e.Match()]; twice {
			t.Errorf("%v and %v have one match", e, other)
		}
		seen[e.Match()] = e
	}
}
