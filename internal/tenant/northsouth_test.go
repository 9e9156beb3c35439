package tenant

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

var (
	node1 = netip.MustParsePrefix("fd70:696c:6100:1::/64")
	node2 = netip.MustParsePrefix("fd70:696c:6100:2::/64")
)

func service(name, virtual, real string) UnderlayService {
	return UnderlayService{name, netip.MustParseAddr(virtual), netip.MustParseAddr(real)}
}

func publication(name, container string, gateway netip.Prefix, i address.Index) Publication {
	return Publication{name, netip.MustParseAddr(container), gateway, UnderlayAddress(gateway, i)}
}

func TestCheckNorthSouth(t *testing.T) {
	both := []Overlay{overlay("10.0.0.0/16", 24), overlay("fd12:3456::/48", 80)}
	storage, db := service("storage", "fd09::7", "2001:db8::9"), service("db", "fd09::8", "2001:db8::a")
	east := Region{
		Name:  "east",
		CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd12:9999::/48")},
	}
	web := publication("web", "fd12:3456::5", node1, 2)
	list := func(n int) (services []UnderlayService, publications []Publication) {
		for i := range n {
			services = append(
				services,
				service(fmt.Sprint("s", i), fmt.Sprintf("fd09::1:%x", i), fmt.Sprintf("2001:db8::1:%x", i)),
			)
			publications = append(
				publications,
				publication(fmt.Sprint("p", i), fmt.Sprintf("fd12:3456::1:%x", i), node1, address.Index(i+2)),
			)
		}
		return services, publications
	}
	most, mostPublished := list(256)
	tooMany, tooManyPublished := list(257)
	for _, c := range []struct {
		services     []UnderlayService
		publications []Publication
		refused      string
	}{
		{nil, nil, ""},
		{[]UnderlayService{storage, db}, []Publication{web}, ""},
		{most, mostPublished, ""},
		{tooMany, nil, "256 at most"},
		{nil, tooManyPublished, "256 at most"},
		{[]UnderlayService{storage, service("storage", "fd09::8", "2001:db8::a")}, nil,
			"two underlay services storage"},
		{[]UnderlayService{service("Storage", "fd09::7", "2001:db8::9")}, nil, "underlay service name"},
		{[]UnderlayService{storage, service("db", "fd09::7", "2001:db8::a")}, nil,
			"storage and db of tenant blue both have fd09::7"},
		{[]UnderlayService{storage, service("db", "fd09::8", "2001:db8::9")}, nil, "both have 2001:db8::9"},
		{[]UnderlayService{storage, service("db", "2001:db8::9", "2001:db8::a")}, nil, "both have 2001:db8::9"},
		{[]UnderlayService{service("self", "fd09::7", "fd09::7")}, nil, "both its virtual and its real"},
		{[]UnderlayService{service("v4", "10.9.9.9", "2001:db8::9")}, nil, "IPv6 alone"},
		{[]UnderlayService{service("v4", "fd09::7", "192.0.2.9")}, nil, "IPv6 alone"},
		{[]UnderlayService{service("mapped", "fd09::7", "::ffff:192.0.2.9")}, nil, "IPv6 alone"},
		{[]UnderlayService{{Name: "none"}}, nil, "IPv6 alone"},
		{[]UnderlayService{service("zone", "fd09::7", "fd09::9%eth0")}, nil, "where routes do"},
		{[]UnderlayService{service("many", "fd09::7", "ff0e::1")}, nil, "where routes do"},
		{[]UnderlayService{service("link", "fe80::1", "2001:db8::9")}, nil, "where routes do"},
		{[]UnderlayService{service("loop", "fd09::7", "::1")}, nil, "where routes do"},
		{[]UnderlayService{service("any", "fd09::7", "::")}, nil, "where routes do"},
		{[]UnderlayService{service("gate", "fd70:696c:6700::7", "2001:db8::9")}, nil, "gateway prefix"},
		{[]UnderlayService{service("private", "fd09::7", "fc00::9")}, nil, "private prefix"},
		{[]UnderlayService{service("own", "fd12:3456::7", "2001:db8::9")}, nil, "own CIDR fd12:3456::/48"},
		{[]UnderlayService{service("own", "fd09::7", "fd12:3456::7")}, nil, "own CIDR fd12:3456::/48"},
		{[]UnderlayService{service("east", "fd12:9999::7", "2001:db8::9")}, nil,
			"the tenant's CIDR fd12:9999::/48 in region east"},
		{[]UnderlayService{service("east", "fd09::7", "fd12:9999::7")}, nil,
			"the tenant's CIDR fd12:9999::/48 in region east"},
		{[]UnderlayService{service("behind", "fd09::7", "fd70:696c:6100:1::5")}, nil, ""},
		{[]UnderlayService{service("base", "fd70:696c:6100:1::1", "2001:db8::9")}, nil, "in the base prefix"},
		{[]UnderlayService{service("container", "fd09::7", "fd70:696c:6100:1:0:700:100:1")}, nil, "a container's"},

		{nil, []Publication{web, publication("web", "fd12:3456::6", node1, 3)}, "two publications web"},
		{nil, []Publication{publication("", "fd12:3456::6", node1, 3)}, "publication name"},
		{nil, []Publication{web, publication("api", "fd12:3456::6", node1, 2)}, "web and api of tenant blue both have"},
		{nil, []Publication{web, publication("api", "fd12:3456::5", node2, 2)}, ""},
		{nil, []Publication{web, publication("api", "fd12:3456::5", node1, 3)}, "web and api of tenant blue are both " +
			"of container fd12:3456::5 at the gateway of fd70:696c:6100:1::/64"},
		{nil, []Publication{publication("v4", "10.0.0.5", node1, 2)}, "IPv6 alone"},
		{nil, []Publication{publication("far", "fd12:3457::5", node1, 2)}, "not in the tenant's CIDR fd12:3456::/48"},
		{nil, []Publication{publication("node", "fd12:3456::5", netip.MustParsePrefix("fd70:696c:6200:1::/64"), 2)},
			"no node's prefix"},
		{nil, []Publication{{"wide", web.Container, netip.MustParsePrefix("fd70:696c:6100::/48"), web.Underlay}},
			"no node's prefix"},
		{nil, []Publication{{"none", web.Container, netip.Prefix{}, web.Underlay}}, "no node's prefix"},
		{nil, []Publication{publication("own", "fd12:3456::5", node1, 1)}, "fd70:696c:6100:1:0:ff:0:2 and above"},
		{nil, []Publication{{"other", web.Container, node2, web.Underlay}}, "fd70:696c:6100:2:0:ff:0:2 and above"},
		{nil, []Publication{{"app", web.Container, node1, netip.MustParseAddr("fd70:696c:6100:1:0:1:0:2")}},
			"and above"},
		{nil, []Publication{{"tenant", web.Container, node1, netip.MustParseAddr("fd70:696c:6100:1:0:7ff:0:2")}},
			"and above"},
	} {
		blue := Tenant{
			Name:             "blue",
			Network:          Nimitz,
			Overlays:         both,
			Regions:          []Region{east},
			UnderlayServices: c.services,
			Publications:     c.publications,
		}
		err := blue.CheckNorthSouth(address.DefaultPlan())
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%.3v %.3v: %v; want %q", c.services, c.publications, err, c.refused)
		}
	}
}

// TestCheckNorthSouthNeedsGateways: the error names what the cluster or the tenant lacks.
func TestCheckNorthSouthNeedsGateways(t *testing.T) {
	plan, six := address.DefaultPlan(), []Overlay{overlay("fd12:3456::/48", 80)}
	four, few := plan, plan
	four.Gateway6 = netip.Prefix{}
	few.Gateway6 = netip.MustParsePrefix("fd70:696c:6700::/76") // 16 blocks
	high := plan.Node(16)
	for _, c := range []struct {
		plan     address.Plan
		overlays []Overlay
		gateway  netip.Prefix
		refused  string
	}{
		{plan, six, high, ""},
		{few, six, node1, ""},
		{plan, []Overlay{overlay("10.0.0.0/16", 24)}, node1, "no IPv6 CIDR"},
		{four, six, node1, "no IPv6 gateway prefix"},
		{few, six, high, "has number 16"},
	} {
		blue := Tenant{
			Name:         "blue",
			Network:      Nimitz,
			Overlays:     c.overlays,
			Publications: []Publication{publication("web", "fd12:3456::5", c.gateway, 2)},
		}
		err := blue.CheckNorthSouth(c.plan)
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%v in %v: %v; want %q", c.gateway, c.plan.Gateway6, err, c.refused)
		}
	}
}

func TestTunnelAddress(t *testing.T) {
	for prefix, want := range map[string]string{
		"fd70:696c:6100:3::/64": "fd70:696c:6100:3::2",
		"fd70:696c:6100::/40":   "fd70:696c:6100::2", // a region's base prefix
	} {
		if got := TunnelAddress(netip.MustParsePrefix(prefix)); got != netip.MustParseAddr(want) {
			t.Errorf("%s: %v, want %s", prefix, got, want)
		}
	}
}
