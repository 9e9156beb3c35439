package evpn

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

var (
	peerA = netip.MustParseAddr("192.0.2.1")
	peerB = netip.MustParseAddr("192.0.2.2")
	now   = time.Unix(1_800_000_000, 0)
)

const (
	asn     = 65001
	peerASN = 65002
)

func addr(text string) netip.Addr     { return netip.MustParseAddr(text) }
func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text) }

func mac(t testing.TB, text string) MAC {
	t.Helper()
	m, err := ParseMAC(text)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// shop is a tenant whose addresses other tenants may have too.
func shop() Tenant {
	return Tenant{
		Name: "shop", Number: 100, VNI: 100, L3VNI: 4000,
		CIDRs: []netip.Prefix{prefix("10.0.0.0/16"), prefix("fd00:a::/64")},
		Allow: []netip.Prefix{prefix("172.20.0.0/16")},
	}
}

func bank() Tenant {
	t := shop()
	t.Name, t.Number, t.VNI, t.L3VNI = "bank", 101, 101, 4001
	return t
}

func settings() Settings {
	return Settings{
		ASNs:     []uint32{asn, peerASN},
		OwnVTEPs: prefix("10.1.0.0/24"),
		VTEPs:    []netip.Prefix{prefix("10.2.0.0/24")},
		Gateways: []MAC{{0x02, 0, 0, 0, 0, 1}},
		Tenants:  []Tenant{shop(), bank()},
	}
}

func newTable(t testing.TB) *Table {
	t.Helper()
	table := NewTable()
	if err := table.Configure(settings()); err != nil {
		t.Fatal(err)
	}
	table.PeerUp(peerA)
	table.PeerUp(peerB)
	return table
}

// The routes that a speaker with this VTEP announces: of a host, its part in replication, and a prefix.
func host(t testing.TB, vtep, hostMAC, ip string, sequence uint32) Route {
	r := shop().container(peerASN, Container{
		Node: Node{addr(vtep), MAC{0x02, 0, 0, 1, 0, 1}}, MAC: mac(t, hostMAC), Addrs: []netip.Addr{addr(ip)},
		Sequence: sequence,
	})[0]
	return r
}

func member(vtep string) Route { return shop().multicast(peerASN, Node{VTEP: addr(vtep)}) }

func subnet(vtep, p string) Route {
	return shop().subnet(peerASN, Subnet{Node{addr(vtep), MAC{0x02, 0, 0, 1, 0, 1}}, prefix(p)})
}

// ownSubnet is a subnet of a node of this cluster.
func ownSubnet(p string) []Own {
	return []Own{{Tenant: shop(), Subnets: []Subnet{{Node{addr("10.1.0.1"), MAC{2}}, prefix(p)}}}}
}

const (
	vtep1 = "10.2.0.1"
	vtep2 = "10.2.0.2"
	mac1  = "02:00:00:00:02:11"
	ip1   = "10.0.0.11"
)

func update(t testing.TB, table *Table, from netip.Addr, routes ...Route) {
	t.Helper()
	for _, r := range routes {
		if err := table.Update(from, r, 100); err != nil {
			t.Fatal(err)
		}
	}
}

// find returns the records of a kind.
func find(table *Table, kind RecordKind) []Record {
	return slices.DeleteFunc(table.Records(), func(r Record) bool { return r.Kind != kind })
}

func TestRoutes(t *testing.T) {
	n1, n2 := Node{addr("10.1.0.1"), MAC{2, 0, 0, 0, 1, 1}}, Node{addr("10.1.0.2"), MAC{2, 0, 0, 0, 1, 2}}
	own := []Own{{
		Tenant: shop(), Nodes: []Node{n2, n1},
		Containers: []Container{{n1, mac(t, mac1), []netip.Addr{addr(ip1), addr("fd00:a::11")}, 7}},
		Subnets:    []Subnet{{n2, prefix("10.0.3.9/24")}},
	}}
	routes := Routes(asn, own)
	if len(routes) != 5 {
		t.Fatalf("%d routes, not 2 of the container, 2 of the nodes and 1 of the subnet: %v", len(routes), routes)
	}
	if !slices.IsSortedFunc(routes, func(a, b Route) int { return a.Key.compare(b.Key) }) {
		t.Error("the routes are not in order")
	}
	c := routes[0]
	if c.Kind != KindMACIP || c.RD.String() != "10.1.0.1:100" || c.VNI != 100 || c.L3VNI != 4000 || c.Sequence != 7 ||
		c.RouterMAC != n1.RouterMAC || c.VTEP != n1.VTEP || c.Encap != VXLAN ||
		!slices.Equal(c.Targets, []Target{NewTarget(asn, 100), NewTarget(asn, 4000)}) {
		t.Errorf("container: %+v", c)
	}
	if m := routes[2]; m.Kind != KindMulticast || m.Replication != n1.VTEP || m.VNI != 100 {
		t.Errorf("node: %+v", m)
	}
	if p := routes[4]; p.Kind != KindPrefix || p.Prefix != prefix("10.0.3.0/24") || p.VNI != 4000 ||
		p.RouterMAC != n2.RouterMAC {
		t.Errorf("subnet: %+v", p)
	}
	// Another cluster with the same tenants imports all of them.
	s := settings()
	s.OwnVTEPs, s.VTEPs, s.Tenants[0].Allow = prefix("10.2.0.0/24"), []netip.Prefix{prefix("10.1.0.0/24")},
		[]netip.Prefix{prefix("10.0.0.0/8")}
	s.Tenants[0].CIDRs = []netip.Prefix{prefix("10.0.0.0/24"), prefix("fd00:a::/64")}
	r, err := newRules(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range routes {
		if tenant, reason := r.check(&route); reason != Accepted || tenant.Name != "shop" {
			t.Errorf("%v is refused: %v", route.Key, reason)
		}
	}
}

// Whatever is allowed, no route is about multicast, broadcast or loopback addresses.
func TestUnicastOnly(t *testing.T) {
	s := settings()
	s.Tenants[0].Allow = []netip.Prefix{prefix("0.0.0.0/0"), prefix("::/0")}
	r, err := newRules(s)
	if err != nil {
		t.Fatal(err)
	}
	for to, want := range map[string]Reason{
		"0.0.0.0/0": Accepted, "198.51.100.0/24": Accepted, "2001:db8::/32": Accepted,
		"255.255.255.255/32": ForeignPrefix, "224.0.0.0/4": ForeignPrefix, "127.0.0.1/32": ForeignPrefix,
		"ff02::1/128": ForeignPrefix,
	} {
		route := subnet(vtep1, to)
		if _, reason := r.check(&route); reason != want {
			t.Errorf("prefix %s: %v, want %v", to, reason, want)
		}
	}
	route := host(t, vtep1, mac1, "255.255.255.255", 0)
	if _, reason := r.check(&route); reason != ForeignAddress {
		t.Errorf("host with the broadcast address: %v", reason)
	}
}

func TestReasons(t *testing.T) {
	h := func(change func(*Route)) Route { r := host(t, vtep1, mac1, ip1, 0); change(&r); return r }
	p := func(change func(*Route)) Route { r := subnet(vtep1, "172.20.1.0/24"); change(&r); return r }
	m := func(change func(*Route)) Route { r := member(vtep1); change(&r); return r }
	tests := []struct {
		name  string
		route Route
		want  Reason
	}{
		{"host", h(func(*Route) {}), Accepted},
		{"host without address", h(func(r *Route) { r.Prefix = netip.Prefix{} }), Accepted},
		{"host without L3 VNI", h(func(r *Route) { r.L3VNI, r.RouterMAC = 0, MAC{} }), Accepted},
		{"host at an allowed prefix", h(func(r *Route) { r.Prefix = prefix("172.20.0.1/32") }), Accepted},
		{"target by RFC 8365", h(func(r *Route) { r.Targets = []Target{newAutoTarget(peerASN, 100)} }), Accepted},
		{"prefix", p(func(*Route) {}), Accepted},
		{"member", m(func(*Route) {}), Accepted},
		{"malformed", h(func(r *Route) { r.Fault = Malformed }), Malformed},
		{"loop", h(func(r *Route) { r.Fault = Loop }), Loop},
		{"other type", h(func(r *Route) { r.Kind = 4 }), UnsupportedType},
		{"segment", h(func(r *Route) { r.Fault = UnsupportedSegment }), UnsupportedSegment},
		{"gateway", p(func(r *Route) { r.Fault = UnsupportedGateway }), UnsupportedGateway},
		{"own VTEP", h(func(r *Route) { r.VTEP = addr("10.1.0.9") }), OwnVTEP},
		{"unknown VTEP", h(func(r *Route) { r.VTEP = addr("10.3.0.1") }), ForeignVTEP},
		{"IPv6 VTEP", h(func(r *Route) { r.VTEP = addr("fd00::1") }), ForeignVTEP},
		{"no VTEP", h(func(r *Route) { r.VTEP = netip.Addr{} }), ForeignVTEP},
		{"MPLS", h(func(r *Route) { r.Encap = 10 }), OtherEncapsulation},
		{"no encapsulation", h(func(r *Route) { r.Encap = 0 }), OtherEncapsulation},
		{"tag", h(func(r *Route) { r.Tag = 5 }), TaggedRoute},
		{"no target", h(func(r *Route) { r.Targets = nil }), UnknownTarget},
		{"unknown target", h(func(r *Route) { r.Targets = []Target{NewTarget(peerASN, 999)} }), UnknownTarget},
		{"target of another AS", h(func(r *Route) { r.Targets = []Target{NewTarget(65003, 100)} }), UnknownTarget},
		// A route with the target of one tenant must not reach another one's segment.
		{"VNI of another tenant", h(func(r *Route) { r.VNI = 101 }), OtherVNI},
		{"unknown VNI", h(func(r *Route) { r.VNI = 999 }), OtherVNI},
		{"host with L3 VNI as label 1", h(func(r *Route) { r.VNI = 4000 }), OtherVNI},
		{"host with another tenant's L3 VNI", h(func(r *Route) { r.L3VNI = 4001 }), OtherVNI},
		{"prefix with VNI of the segment", p(func(r *Route) {
			r.VNI, r.Targets = 100, []Target{NewTarget(peerASN, 100)}
		}), OtherVNI},
		{"multicast MAC", h(func(r *Route) { r.MAC = MAC{1} }), BadMAC},
		{"no MAC", h(func(r *Route) { r.MAC = MAC{} }), BadMAC},
		{"gateway's MAC", h(func(r *Route) { r.MAC = MAC{0x02, 0, 0, 0, 0, 1} }), BadMAC},
		{"no router MAC", h(func(r *Route) { r.RouterMAC = MAC{} }), BadRouterMAC},
		{"prefix without router MAC", p(func(r *Route) { r.RouterMAC = MAC{} }), BadRouterMAC},
		{"address outside", h(func(r *Route) { r.Prefix = prefix("10.9.0.1/32") }), ForeignAddress},
		{"address in a node's subnet", h(func(r *Route) { r.Prefix = prefix("10.0.7.11/32") }), OwnSubnet},
		{"prefix outside", p(func(r *Route) { r.Prefix = prefix("172.21.0.0/24") }), ForeignPrefix},
		{"prefix in the tenant's CIDR", p(func(r *Route) { r.Prefix = prefix("10.0.0.11/32") }), ForeignPrefix},
		{"default route", p(func(r *Route) { r.Prefix = prefix("0.0.0.0/0") }), ForeignPrefix},
		{"no replication", m(func(r *Route) { r.Replication = netip.Addr{} }), BadTunnel},
		{"replication to another VTEP", m(func(r *Route) { r.Replication = addr(vtep2) }), BadTunnel},
		{"other originator", m(func(r *Route) { r.Prefix = prefix("10.2.0.2/32") }), BadTunnel},
	}
	seen := map[Reason]bool{TooManyPaths: true} // TestPathsAreBounded
	for _, test := range tests {
		table := newTable(t)
		table.SetOwn(ownSubnet("10.0.7.0/24"))
		update(t, table, peerA, test.route)
		c := table.Count(peerA)
		if test.want == Accepted {
			if c.Accepted[test.route.Kind] != 1 || len(c.Refused) != 0 || len(table.Records()) == 0 {
				t.Errorf("%s: %+v, %v", test.name, c, table.Records())
			}
			continue
		}
		seen[test.want] = true
		if c.Refused[test.want] != 1 || len(c.Refused) != 1 || len(c.Accepted) != 0 || len(table.Records()) != 0 {
			t.Errorf("%s: %+v, not refused for %v; records %v", test.name, c, test.want, table.Records())
		}
	}
	for _, r := range Reasons() {
		if !seen[r] || r.Text() == "" {
			t.Errorf("reason %v has no test or no text", r)
		}
	}
}

func TestRulesRefuseSharedNumbers(t *testing.T) {
	for name, change := range map[string]func(*Tenant){
		"number":   func(t *Tenant) { t.Number = 100 },
		"VNI":      func(t *Tenant) { t.VNI = 100 },
		"L3 VNI":   func(t *Tenant) { t.L3VNI = 4000 },
		"mixed":    func(t *Tenant) { t.L3VNI = 100 },
		"no VNI":   func(t *Tenant) { t.VNI = 0 },
		"too high": func(t *Tenant) { t.VNI = MaxVNI + 1 },
		"0":        func(t *Tenant) { t.Number = 0 },
	} {
		s := settings()
		change(&s.Tenants[1])
		table := newTable(t)
		update(t, table, peerA, host(t, vtep1, mac1, ip1, 0))
		if err := table.Configure(s); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if len(table.Records()) != 2 {
			t.Errorf("%s: refused settings changed the records: %v", name, table.Records())
		}
	}
}
