package speaker

import (
	"flag"
	"log/slog"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	ours "pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/bgp/bgptest"
	"pilaster.io/pilaster/internal/evpn"
)

func TestMain(m *testing.M) {
	flag.Set("test.parallel", "16") // tests wait for GoBGP's timers
	os.Exit(bgptest.Isolate(m.Run))
}

const (
	ownASN  = 65001
	peerASN = 65002
)

func addr(text string) netip.Addr     { return netip.MustParseAddr(text) }
func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text) }

// shop is the tenant of these tests; 10.1.0.0/24 has the cluster's nodes, 10.2.0.0/24 other speakers.
func shop() evpn.Tenant {
	return evpn.Tenant{
		Name: "shop", Number: 100, VNI: 100, L3VNI: 4000,
		CIDRs: []netip.Prefix{prefix("10.0.0.0/16"), prefix("fd00:a::/64")},
		Allow: []netip.Prefix{prefix("172.20.0.0/16")},
	}
}

func settings() evpn.Settings {
	return evpn.Settings{
		ASNs: []uint32{ownASN, peerASN}, OwnVTEPs: prefix("10.1.0.0/24"), VTEPs: []netip.Prefix{prefix("10.2.0.0/24")},
		Tenants: []evpn.Tenant{shop()},
	}
}

// own is what the cluster announces: 4 routes.
func own() []evpn.Own {
	n := evpn.Node{VTEP: addr("10.1.0.1"), RouterMAC: evpn.MAC{0x02, 0, 0, 0, 0x0f, 1}}
	return []evpn.Own{{
		Tenant: shop(), Nodes: []evpn.Node{n},
		Containers: []evpn.Container{{
			Node: n, MAC: evpn.MAC{0x02, 0, 0, 0, 1, 0x11}, Addrs: []netip.Addr{addr("10.0.0.11"), addr("fd00:a::11")},
		}},
		Subnets: []evpn.Subnet{{Node: n, Prefix: prefix("10.0.1.0/24")}},
	}}
}

// theirs are routes of another speaker, which this cluster imports: a host, its part in replication, and a prefix.
func theirs(host byte) []evpn.Route {
	n := evpn.Node{VTEP: netip.AddrFrom4([4]byte{10, 2, 0, host}), RouterMAC: evpn.MAC{0x02, 0, 0, 0, 0x0f, host}}
	return evpn.Routes(peerASN, []evpn.Own{{
		Tenant: shop(), Nodes: []evpn.Node{n},
		Containers: []evpn.Container{{
			Node: n, MAC: evpn.MAC{0x02, 0, 0, 0, 2, host},
			Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 2, host})},
		}},
		Subnets: []evpn.Subnet{{Node: n, Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 20, host, 0}), 24)}},
	}})
}

// announcement is the message by which a peer announces a route. Own further attributes replace none.
func announcement(t testing.TB, r evpn.Route, asns ...uint32) *bgp.BGPMessage {
	t.Helper()
	path, err := toPath(r)
	if err != nil {
		t.Fatal(err)
	}
	reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_EVPN, []bgp.PathNLRI{{NLRI: path.Nlri}}, r.VTEP)
	if err != nil {
		t.Fatal(err)
	}
	asns = append([]uint32{peerASN}, asns...)
	attrs := []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(originIGP),
		bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, asns)}),
		reach,
	}
	for _, a := range path.Attrs {
		if a.GetType() != bgp.BGP_ATTR_TYPE_ORIGIN && a.GetType() != bgp.BGP_ATTR_TYPE_NEXT_HOP {
			attrs = append(attrs, a)
		}
	}
	return bgp.NewBGPUpdateMessage(nil, attrs, nil)
}

func withdrawal(t testing.TB, r evpn.Route) *bgp.BGPMessage {
	t.Helper()
	nlri, err := toNLRI(r)
	if err != nil {
		t.Fatal(err)
	}
	unreach, err := bgp.NewPathAttributeMpUnreachNLRI(bgp.RF_EVPN, []bgp.PathNLRI{{NLRI: nlri}})
	if err != nil {
		t.Fatal(err)
	}
	return bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{unreach}, nil)
}

func announcements(t testing.TB, routes []evpn.Route) (all []*bgp.BGPMessage) {
	t.Helper()
	for _, r := range routes {
		all = append(all, announcement(t, r))
	}
	return all
}

// start starts a speaker with default settings, and announces own.
func start(t testing.TB, c Config) *Speaker {
	t.Helper()
	c.ASN, c.RouterID = ownASN, addr("127.0.0.1")
	c.Log = slog.New(slog.DiscardHandler)
	if c.Limits.Routes == 0 {
		c.Limits.Routes = 1000
	}
	if c.Limits.Restart == 0 {
		c.Limits.Restart = time.Hour
	}
	s, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if err := s.Configure(settings()); err != nil {
		t.Fatal(err)
	}
	if err := s.Announce(t.Context(), own()); err != nil {
		t.Fatal(err)
	}
	return s
}

// listen starts a peer with the address 127.0.0.N, and returns how the speaker finds it.
func listen(t testing.TB, n byte) (*bgptest.Peer, ours.Peer) {
	t.Helper()
	return listenAs(t, n, peerASN)
}

// listenAs starts a peer of an AS.
func listenAs(t testing.TB, n byte, asn uint32) (*bgptest.Peer, ours.Peer) {
	t.Helper()
	a := netip.AddrFrom4([4]byte{127, 0, 0, n})
	return bgptest.Listen(t, netip.AddrPortFrom(a, bgpPort), asn), ours.Peer{Addr: a, ASN: asn, Port: bgpPort}
}

const (
	bgpPort      = 1790
	waitTimeout  = time.Minute
	waitInterval = 100 * time.Millisecond
)

// wait waits until a condition on the status is true.
func wait(t testing.TB, s *Speaker, what string, ok func(Status) bool) Status {
	t.Helper()
	status := s.Status()
	for deadline := time.Now().Add(waitTimeout); !ok(status); status = s.Status() {
		if time.Now().After(deadline) {
			t.Fatalf("after %v: not %s: %+v", waitTimeout, what, status)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return status
}

func records(s Status) (n int) {
	for _, count := range s.Records {
		n += count
	}
	return n
}

func refused(s PeerStatus) (n int) {
	for _, count := range s.Refused {
		n += count
	}
	return n
}
