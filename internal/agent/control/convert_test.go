package control

import (
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// TestMappingFromProto: a mapping keeps its fields, and one of an older orchestrator has only tenant, prefix and node.
func TestMappingFromProto(t *testing.T) {
	to, node := netip.MustParsePrefix("10.0.0.5/32"), netip.MustParsePrefix("fd70:696c:6100:1::/64")
	old := &pilasterv1.Mapping{Tenant: "green", To: to.String(), Node: node.String(), Name: "n1", Key: "c1/eth0"}
	full := proto.CloneOf(old)
	full.NextHops, full.Locator = []string{"192.0.2.1", "2001:db8::1"}, "fd70:696c:6200:1::/64"
	full.Mac, full.App, full.Sequence, full.Origin = "0a:01:02:03:04:05", 9, 1<<40, "192.0.2.254"
	outside := proto.CloneOf(full)
	outside.Node = ""
	is := network.Mapping{
		Tenant: "green", To: to, Node: node,
		NextHops: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
		Locator:  netip.MustParsePrefix("fd70:696c:6200:1::/64"), MAC: net.HardwareAddr{0x0a, 1, 2, 3, 4, 5},
		App: 9, Sequence: 1 << 40, Origin: "192.0.2.254",
	}
	onNoNode := is
	onNoNode.Node = netip.Prefix{}
	for name, c := range map[string]struct {
		m    *pilasterv1.Mapping
		want network.Mapping
	}{
		"of an older orchestrator": {old, network.Mapping{Tenant: "green", To: to, Node: node}},
		"with all fields":          {full, is},
		"on no node":               {outside, onNoNode},
	} {
		if got, err := MappingFromProto(c.m); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	for name, change := range map[string]func(*pilasterv1.Mapping){
		"neither node nor next hop": func(m *pilasterv1.Mapping) { m.Node, m.NextHops = "", nil },
		"node of 48 bits":           func(m *pilasterv1.Mapping) { m.Node = "fd70:696c:6100::/48" },
		"next hop with a zone":      func(m *pilasterv1.Mapping) { m.NextHops[0] = "fe80::1%eth0" },
		"locator of 48 bits":        func(m *pilasterv1.Mapping) { m.Locator = "fd70:696c:6200::/48" },
		"MAC of 8 bytes":            func(m *pilasterv1.Mapping) { m.Mac = "0a:01:02:03:04:05:06:07" },
		"reserved app":              func(m *pilasterv1.Mapping) { m.App = 0xff00 },
		"app of 17 bits":            func(m *pilasterv1.Mapping) { m.App = 1 << 16 },
	} {
		m := proto.CloneOf(full)
		change(m)
		if got, err := MappingFromProto(m); err == nil {
			t.Errorf("%s: accepted as %+v", name, got)
		}
	}
}

// A tenant whose networks this build lacks, or which do not fit its addresses, is refused.
func TestTenantsOfALaterBuild(t *testing.T) {
	for _, p := range []*pilasterv1.Tenant{
		{Name: "green", Network: "netpila", Leaving: "later"},
		{Name: "green", Network: "nimitz", Leaving: "nimitz", Addressing: 3},
		{Name: "green", Network: "netpila", Leaving: "nimitz"},
		{Name: "green", Network: "netpila", Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16"}}},
	} {
		p.Ids = []*pilasterv1.TenantId{{Id: 3, Key: make([]byte, 16)}}
		if _, err := tenantFromProto(p, address.DefaultPlan()); err == nil ||
			!strings.Contains(err.Error(), "upgrade the agent") {
			t.Errorf("%v: %v", p, err)
		}
	}
}

// TestRegionsOfMessages: regions that no orchestrator can have sent are refused.
func TestRegionsOfMessages(t *testing.T) {
	said := func() *pilasterv1.Tenant {
		return &pilasterv1.Tenant{
			Name: "green", Network: tenant.Nimitz, Addressing: pilasterv1.Addressing_ADDRESSING_OWN,
			Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16"}},
			Ids:      []*pilasterv1.TenantId{{Id: 3, Key: make([]byte, 16)}},
			Regions: []*pilasterv1.TenantRegion{
				{
					Name:     "east",
					Cidrs:    []string{"10.1.0.0/16"},
					Edge:     agenttest.NodePrefix.String(),
					PeerEdge: "fd71:696c:6100:5::/64",
					PeerVni:  12,
				},
			},
		}
	}
	got, err := tenantFromProto(said(), address.DefaultPlan())
	if err != nil || len(got.Regions) != 1 || got.Regions[0].PeerVNI != 12 ||
		got.Regions[0].PeerEdge.String() != "fd71:696c:6100:5::/64" {
		t.Errorf("%+v, %v", got.Regions, err)
	}
	for what, change := range map[string]func(*pilasterv1.TenantRegion){
		"CIDR":  func(r *pilasterv1.TenantRegion) { r.Cidrs = []string{"10.1.0.1/16"} },
		"edge":  func(r *pilasterv1.TenantRegion) { r.PeerEdge = "fd71:696c:6100:5::/63" },
		"VNI 0": func(r *pilasterv1.TenantRegion) { r.PeerVni = 0 },
	} {
		wrong := said()
		change(wrong.Regions[0])
		if _, err := tenantFromProto(wrong, address.DefaultPlan()); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want an error with %q", err, what)
		}
	}
}

// TestEgressOfMessages: egress rules, nodes and protected prefixes of a tenant arrive unchanged, and invalid ones are
// refused.
func TestEgressOfMessages(t *testing.T) {
	said := func() *pilasterv1.Tenant {
		return &pilasterv1.Tenant{
			Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 3, Key: make([]byte, 16)}},
			Egress: []*pilasterv1.EgressRule{
				{To: "2001:db8:8::/48"},
				{To: "2001:db8:9::/48", Allow: true, Gateways: []*pilasterv1.EgressGateway{
					{Node: "n1", Prefix: "fd70:696c:6100:1::/64", Address: "2001:db8:7::9"},
				}},
			},
			NodePrefixes: []string{"fd70:696c:6100::/40"},
			Protected:    []string{"2001:db8:5::/48"},
		}
	}
	want := []tenant.EgressRule{
		{To: netip.MustParsePrefix("2001:db8:8::/48")},
		{
			To: netip.MustParsePrefix("2001:db8:9::/48"), Allow: true,
			Via: []tenant.EgressGateway{{
				Node: "n1", Prefix: netip.MustParsePrefix("fd70:696c:6100:1::/64"),
				Address: netip.MustParseAddr("2001:db8:7::9"),
			}},
		},
	}
	got, err := tenantFromProto(said(), address.DefaultPlan())
	if err != nil || !slices.EqualFunc(got.Egress, want, tenant.EgressRule.Equal) ||
		!slices.Equal(got.Nodes, []netip.Prefix{address.DefaultPlan().Base}) ||
		!slices.Equal(got.Protected, []netip.Prefix{netip.MustParsePrefix("2001:db8:5::/48")}) {
		t.Errorf("got %+v, %v", got, err)
	}
	for says, change := range map[string]func(*pilasterv1.Tenant){
		"not a prefix":          func(w *pilasterv1.Tenant) { w.Egress[0].To = "everywhere" },
		"host bits":             func(w *pilasterv1.Tenant) { w.Egress[0].To = "2001:db8:8::1/48" },
		"two egress rules":      func(w *pilasterv1.Tenant) { w.Egress[0].To = w.Egress[1].To },
		"not the /64 of a node": func(w *pilasterv1.Tenant) { w.Egress[1].Gateways[0].Prefix = "" },
		"not a node's /64":      func(w *pilasterv1.Tenant) { w.Egress[1].Gateways[0].Prefix = "2001:db8::/64" },
		"not an address":        func(w *pilasterv1.Tenant) { w.Egress[1].Gateways[0].Address = "x" },
		"has no nodes":          func(w *pilasterv1.Tenant) { w.NodePrefixes[0] = "2001:db8::/48" },
		"protected prefixes":    func(w *pilasterv1.Tenant) { w.Protected[0] = "x" },
		"on network ila":        func(w *pilasterv1.Tenant) { w.Network = "ila" },
	} {
		wrong := said()
		change(wrong)
		if wrong.Network != "" {
			wrong.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
			wrong.Overlays = []*pilasterv1.Overlay{{Cidr: "fd70:696c:e100:0:6000:3::/96"}}
		}
		if _, err := tenantFromProto(wrong, address.DefaultPlan()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want an error with %q", err, says)
		}
	}
}
