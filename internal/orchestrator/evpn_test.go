package orchestrator

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	gobgp "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/bgp/bgptest"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/evpn/speaker"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// announcedNetwork has what BGP needs of a network, and nothing else.
const announcedNetwork = "announced"

func init() {
	tenant.AddNetwork(tenant.Traits{
		Name: announcedNetwork, Addressings: []tenant.Addressing{tenant.Own},
		Capabilities: tenant.OwnCIDRs | tenant.Mappings | tenant.Announced, About: "for tests",
	})
}

const peerASN = 65002

// withPeer is a configuration with a BGP peer.
func withPeer(t *testing.T) (Config, *bgptest.Peer) {
	t.Helper()
	peer := bgptest.Listen(t, netip.MustParseAddrPort("127.0.0.1:0"), peerASN)
	flags := evpnroutes.Flags{
		ASN: 65001, Peers: []string{fmt.Sprintf("%v=%d", peer.Addr, peerASN)}, Pool: "10.1.0.0/24",
		VTEPs: []string{"10.2.0.0/24"}, Allow: []string{"shop=172.20.0.0/16"},
		Stale: time.Hour, Limits: speaker.Limits{Routes: 1000, Restart: time.Hour},
	}
	c := testConfig(t)
	var err error
	if c.EVPN, err = flags.Config(); err != nil {
		t.Fatal(err)
	}
	return c, peer
}

func evpnStatus(t *testing.T, s *Server) (status evpnroutes.Status) {
	t.Helper()
	resp, err := unixrpc.Client(Socket(s.config.RunDir)).Get(unixrpc.URL + EVPNStatusPath)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("status: %v", resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(&status); err != nil {
		t.Fatal(err)
	}
	return status
}

// announced returns the current routes of an orchestrator, as its peer received them, in order. Each one is the text of
// its NLRI and attributes.
func announced(updates []*gobgp.BGPUpdate) []string {
	routes := map[string]string{}
	for _, u := range updates {
		var other []string
		for _, a := range u.PathAttributes {
			if t := a.GetType(); t != gobgp.BGP_ATTR_TYPE_MP_REACH_NLRI && t != gobgp.BGP_ATTR_TYPE_MP_UNREACH_NLRI {
				other = append(other, a.String())
			}
		}
		slices.Sort(other)
		for _, a := range u.PathAttributes {
			switch a := a.(type) {
			case *gobgp.PathAttributeMpReachNLRI:
				for _, n := range a.Value {
					routes[n.NLRI.String()] = fmt.Sprintf("%v via %v %v", n.NLRI, a.Nexthop, other)
				}
			case *gobgp.PathAttributeMpUnreachNLRI:
				for _, n := range a.Value {
					delete(routes, n.NLRI.String())
				}
			}
		}
	}
	var all []string
	for _, r := range routes {
		all = append(all, r)
	}
	slices.Sort(all)
	return all
}

func waitAnnounced(peer *bgptest.Peer, what string, ok func([]string) bool) (routes []string) {
	peer.WaitUpdates(what, func(u []*gobgp.BGPUpdate) bool {
		routes = announced(u)
		return ok(routes)
	})
	return routes
}

// foreignHost announces a host of another speaker with a MAC that a container will have.
func foreignHost(t *testing.T, vni uint32, mac evpn.MAC, sequence uint32) *gobgp.BGPMessage {
	t.Helper()
	vtep := netip.MustParseAddr("10.2.0.7")
	rd := evpn.NewRD(vtep, 7)
	nlri, err := gobgp.NewEVPNMacIPAdvertisementRoute(gobgp.GetRouteDistinguisher(rd[:]),
		gobgp.EthernetSegmentIdentifier{Value: make([]byte, 9)}, 0, mac.String(), netip.Addr{}, []uint32{vni})
	if err != nil {
		t.Fatal(err)
	}
	reach, err := gobgp.NewPathAttributeMpReachNLRI(gobgp.RF_EVPN, []gobgp.PathNLRI{{NLRI: nlri}}, vtep)
	if err != nil {
		t.Fatal(err)
	}
	return gobgp.NewBGPUpdateMessage(nil, []gobgp.PathAttributeInterface{
		gobgp.NewPathAttributeOrigin(0),
		gobgp.NewPathAttributeAsPath([]gobgp.AsPathParamInterface{
			gobgp.NewAs4PathParam(gobgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{peerASN}),
		}),
		reach,
		gobgp.NewPathAttributeExtendedCommunities([]gobgp.ExtendedCommunityInterface{
			gobgp.NewTwoOctetAsSpecificExtended(gobgp.EC_SUBTYPE_ROUTE_TARGET, peerASN, vni, true),
			gobgp.NewEncapExtended(gobgp.TUNNEL_TYPE_VXLAN),
			gobgp.NewMacMobilityExtended(sequence, false),
		}),
	}, nil)
}

// Two orchestrators with one store announce the same routes, also after one starts again, and a container that takes
// the MAC of another speaker's host gets the next sequence in the store.
func TestOrchestratorsAnnounceTheSame(t *testing.T) {
	t.Parallel()
	etcd := storetest.Debian(t)
	config1, peer1 := withPeer(t)
	config2, peer2 := withPeer(t)
	config1.Etcd, config2.Etcd = etcd, etcd
	s1 := start(t, config1)
	s2 := start(t, config2)
	created, err := operator(s1.config.RunDir).CreateTenant(t.Context(), connect.NewRequest(
		&pilasterv1.CreateTenantRequest{Name: "shop", Network: announcedNetwork, Overlays: []*pilasterv1.Overlay{
			{Cidr: "10.0.0.0/16"}, {Cidr: "fd00:a::/64"},
		}}))
	if err != nil {
		t.Fatal(err)
	}
	vni := evpn.SegmentVNI(created.Msg.Tenant.Ids[0].Id)
	node := registered(t, s1, testNode(1))
	resolve(t, node, "shop", "web")
	if got := allocate(t, node, "shop", "c1"); !strings.Contains(got, "10.0.0.2/32") {
		t.Fatalf("allocated %s; the test expects the second address", got)
	}

	// A node's part in replication, and a container's two addresses.
	three := func(routes []string) bool { return len(routes) == 3 }
	first := waitAnnounced(peer1, "3 routes of the first", three)
	if second := waitAnnounced(peer2, "3 routes of the second", three); !slices.Equal(first, second) {
		t.Errorf("the first announces\n%s\nand the second\n%s", strings.Join(first, "\n"), strings.Join(second, "\n"))
	}
	if !strings.Contains(strings.Join(first, "\n"), "via 10.1.0.1") {
		t.Errorf("routes without the node's VTEP:\n%s", strings.Join(first, "\n"))
	}

	mac := evpn.ContainerMAC(netip.MustParseAddr("10.0.0.3")) // of the next container
	peer1.Send(foreignHost(t, vni, mac, 4))
	peer2.Send(foreignHost(t, vni, mac, 4))
	for _, s := range []*Server{s1, s2} {
		until(t, "an imported MAC", func() bool { return evpnStatus(t, s).Records[evpn.RecordMAC] == 1 })
	}
	if got := allocate(t, node, "shop", "c2"); !strings.Contains(got, "10.0.0.3/32") {
		t.Fatalf("allocated %s; the test expects the third address", got)
	}
	moved := func(routes []string) bool {
		return len(routes) == 5 && strings.Count(strings.Join(routes, "\n"), "mac-mobility: 5") == 2
	}
	first = waitAnnounced(peer1, "a container with sequence 5", moved)
	if second := waitAnnounced(peer2, "a container with sequence 5", moved); !slices.Equal(first, second) {
		t.Errorf("the first announces\n%s\nand the second\n%s", strings.Join(first, "\n"), strings.Join(second, "\n"))
	}
	if status := evpnStatus(t, s1); status.Records[evpn.RecordMAC] != 0 || len(status.Contested) != 1 {
		t.Errorf("status: %+v", status)
	}

	// An orchestrator that starts again announces the same, because the sequence is in the store.
	s2.Close()
	config3, peer3 := withPeer(t)
	config3.Etcd = etcd
	start(t, config3)
	if third := waitAnnounced(peer3, "all routes", moved); !slices.Equal(first, third) {
		t.Errorf("the first announces\n%s\nand the third\n%s", strings.Join(first, "\n"), strings.Join(third, "\n"))
	}

	config4, _ := withPeer(t)
	config4.Etcd, config4.EVPN.Pool = etcd, netip.MustParsePrefix("10.3.0.0/24")
	if _, err := Start(t.Context(), config4); err == nil || !strings.Contains(err.Error(), "10.1.0.0/24") {
		t.Errorf("with another VTEP pool: %v", err)
	}
	if text := metricsOf(t, s1); !strings.Contains(text, `pilaster_orchestrator_evpn_peer_up{peer="127.0.0.1"} 1`) ||
		!strings.Contains(text, `pilaster_orchestrator_evpn_routes_announced{type="mac-ip"} 4`) {
		t.Errorf("metrics:\n%s", text)
	}
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after a minute: no %s", what)
		}
	}
}

func metricsOf(t *testing.T, s *Server) string {
	t.Helper()
	families, err := s.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			fmt.Fprintf(&b, "%s{%s} %v\n", f.GetName(), strings.Join(labels, ","), m.GetGauge().GetValue())
		}
	}
	return b.String()
}

// An orchestrator without peers says so.
func TestNoPeers(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	resp, err := unixrpc.Client(Socket(s.config.RunDir)).Get(unixrpc.URL + EVPNStatusPath)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("status %v", resp.Status)
	}
}

// A peer has one session, so it cannot be one for both.
func TestCheckPeers(t *testing.T) {
	var c Config
	a := bgp.Peer{Addr: netip.MustParseAddr("fd00::1")}
	c.EVPN.Peers, c.BGP.Peers = []bgp.Peer{a}, []bgp.Peer{{Addr: netip.MustParseAddr("fd00::2")}}
	if err := CheckPeers(c); err != nil {
		t.Error(err)
	}
	c.BGP.Peers = append(c.BGP.Peers, a)
	if err := CheckPeers(c); err == nil || !strings.Contains(err.Error(), "fd00::1 is a peer for") {
		t.Errorf("error %v", err)
	}
}
