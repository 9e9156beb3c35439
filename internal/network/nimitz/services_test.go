package nimitz

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

var (
	storage = netip.MustParseAddr("2001:db8::9")
	name7   = netip.MustParseAddr("fd09::7")
	name8   = netip.MustParseAddr("fd09::8")
)

// northSouth is two tenants with equal containers, which call one service by two names; what tenant 7 has on either node is published by node 1.
type northSouth struct {
	*cluster
	near, far, other endpoint.Record
	services         []Service
	published        []Publication
}

func newNorthSouth(t *testing.T) *northSouth {
	c := newCluster(t, 2, tenantOf(7, overlay("fd00:1::/48", 80)), tenantOf(8, overlay("fd00:1::/48", 80)))
	one, two := c.nodes[0], c.nodes[1]
	s := &northSouth{cluster: c, near: one.add(c.tenants[0], 1), far: two.add(c.tenants[0], 2), other: one.add(c.tenants[1], 3)}
	s.services = []Service{{"t7", "storage", name7, storage}, {"t8", "files", name8, storage}}
	for i, r := range []endpoint.Record{s.far, s.near} {
		s.published = append(s.published, Publication{"t7", fmt.Sprint("web", i), r.Attachments[0].Address, one.prefix, UnderlayAddress(one.prefix, address.Index(i+2))})
	}
	for _, n := range c.nodes {
		n.must(n.SetServices(t.Context(), s.services, s.published))
	}
	return s
}

func (n *node) run(from pipeline.Port, src, dst netip.Addr) pipeline.Verdict {
	out, _ := n.sw.table().Run(pipeline.Packet{From: from, Src: src, Dst: dst})
	return out
}

// ways are (c) and (d) hop by hop, as the tables are now.
func (s *northSouth) ways(t *testing.T) {
	t.Helper()
	one, two := s.nodes[0], s.nodes[1]
	seen := map[netip.Addr]bool{}
	for _, c := range []struct {
		r    endpoint.Record
		name netip.Addr
		not  netip.Addr
	}{{s.near, name7, name8}, {s.other, name8, name7}} {
		a, port := c.r.Attachments[0].Address, pipeline.Port(c.r.ID)
		out := one.run(port, a, c.name)
		if out.Drop != 0 || out.To != pipeline.Gateway || out.Dst != storage || seen[out.Src] || out.Src == a {
			t.Errorf("%s to its service: %+v", c.r.Tenant, out)
		}
		seen[out.Src] = true
		if back := one.run(pipeline.Gateway, storage, out.Src); back.To != port || back.Src != c.name || back.Dst != a {
			t.Errorf("%s's answer: %+v", c.r.Tenant, back)
		}
		if out := one.run(port, a, c.not); out.Drop == 0 {
			t.Errorf("%s to another tenant's service: %+v", c.r.Tenant, out)
		}
	}
	client := s.nodes[0].client(one.prefix).Addr()
	for _, p := range s.published {
		v := one.published[p.Underlay]
		at, from := one, pipeline.Gateway
		out := at.run(from, client, v)
		if p.Container == s.far.Attachments[0].Address {
			if out.To != pipeline.VXLAN || out.VTEP != pipeline.VTEP(two.prefix) {
				t.Fatalf("to %v at the gateway: %+v", p.Underlay, out)
			}
			in, _ := two.sw.table().Run(pipeline.Packet{From: pipeline.VXLAN, Outer: pipeline.VTEP(one.prefix), VNI: out.VNI, Src: out.Src, Dst: out.Dst})
			if in.To != pipeline.Port(s.far.ID) || in.Src != client {
				t.Fatalf("to %v at its node: %+v", p.Underlay, in)
			}
			back := two.run(in.To, in.Dst, in.Src)
			if back.VTEP != pipeline.VTEP(one.prefix) {
				t.Fatalf("its answer: %+v", back)
			}
			out, _ = one.sw.table().Run(pipeline.Packet{From: pipeline.VXLAN, Outer: pipeline.VTEP(two.prefix), VNI: back.VNI, Src: back.Src, Dst: back.Dst})
		} else {
			out = one.run(out.To, out.Dst, out.Src)
		}
		if out.Drop != 0 || out.To != pipeline.Gateway || out.Src != v || out.Dst != client {
			t.Errorf("the answer of %v at the gateway: %+v, not from %v", p.Container, out, v)
		}
	}
}

// TestNorthSouth: (c) and (d) by what SetServices comes to; an agent that starts anew, with nobody telling it of services yet, changes nothing.
func TestNorthSouth(t *testing.T) {
	s := newNorthSouth(t)
	s.ways(t)
	for _, n := range s.nodes {
		n.must(n.Check(t.Context(), n.record[1]))
		applied := n.sw.applied
		n.start(n.config.Indexes)
		s.ways(t)
		for _, tenant := range s.tenants {
			if n.hosts(tenant) {
				n.hear(tenant)
			}
		}
		n.must(n.SetServices(t.Context(), s.services, s.published))
		if n.sw.applied != applied {
			t.Errorf("a start changed %d entries", n.sw.applied-applied)
		}
	}
	s.ways(t)

	// One that leaves before anybody has told leaves nothing of its own; who comes gets what it needs once somebody has.
	one := s.nodes[0]
	one.start(one.config.Indexes)
	gone := s.other.Attachments[0].Address
	one.remove(s.other)
	for _, e := range one.sw.has {
		if strings.Contains(e.String(), gone.String()+" in VNI 8") {
			t.Errorf("left: %v", e)
		}
	}
	s.other = one.add(s.tenants[1], 3)
	one.must(one.SetServices(t.Context(), s.services, s.published))
	one.hear(s.tenants[0])
	s.ways(t)

	for _, n := range s.nodes {
		n.must(n.SetServices(t.Context(), nil, nil))
		for _, e := range n.sw.has {
			if e.Stage() == pipeline.NAT {
				t.Errorf("left: %v", e)
			}
		}
	}
	if len(one.published) != 0 {
		t.Errorf("still published: %v", one.published)
	}
}

// TestServiceCounts: a node's entries for services are as many as its tenants' services, its containers and what it publishes, each added and none
// multiplied (§3.2; NM3).
func TestServiceCounts(t *testing.T) {
	count := func(services, containers, published int) int {
		c := newCluster(t, 1, tenantOf(7, overlay("fd00:1::/48", 80)))
		n := c.nodes[0]
		for range containers {
			n.add(c.tenants[0], 1)
		}
		before := len(n.sw.has)
		var all []Service
		for i := range services {
			all = append(all, Service{"t7", fmt.Sprint(i), inBlock(netip.MustParsePrefix("fd09::/80"), 9, uint32(i)), inBlock(netip.MustParsePrefix("2001:db8::/80"), 9, uint32(i))})
		}
		var pubs []Publication
		for i := range published {
			pubs = append(pubs, Publication{"t7", fmt.Sprint(i), inBlock(netip.MustParsePrefix("fd00:1:0:0:9::/80"), 9, uint32(i)), n.prefix, UnderlayAddress(n.prefix, address.Index(i+2))})
		}
		n.must(n.SetServices(t.Context(), all, pubs))
		return len(n.sw.has) - before
	}
	const aService, aContainer, aPublication, theGateway = 4, 2, 2, 2
	for _, c := range [][3]int{{1, 1, 0}, {7, 5, 0}, {14, 10, 0}, {0, 5, 3}, {14, 10, 6}} {
		want := c[0]*aService + c[2]*aPublication
		if c[0] > 0 {
			want += c[1] * aContainer
		}
		if c[2] > 0 {
			want += theGateway
		}
		if got := count(c[0], c[1], c[2]); got != want {
			t.Errorf("%d services, %d containers, %d publications: %d entries, not %d", c[0], c[1], c[2], got, want)
		}
	}
}

func TestServicesThatCannotBeAreRefused(t *testing.T) {
	s := newNorthSouth(t)
	n := s.nodes[0]
	before := n.sw.applied
	good, pub := s.services[0], s.published[0]
	for want, spoil := range map[string]func(*Service, *Publication){
		"gateways are of IPv6":                          func(s *Service, _ *Publication) { s.Virtual = netip.MustParseAddr("10.9.9.9") },
		"2001:db8::9%eth0 cannot":                       func(s *Service, _ *Publication) { s.Real = s.Real.WithZone("eth0") },
		"which are others'":                             func(s *Service, _ *Publication) { s.Virtual = plan.Gateway6.Addr().Next() },
		"in the tenant's own":                           func(s *Service, _ *Publication) { s.Virtual = netip.MustParseAddr("fd00:1::99") },
		"in the base prefix":                            func(s *Service, _ *Publication) { s.Virtual = plan.Node(1).Addr().Next() },
		"is a container's address":                      func(s *Service, _ *Publication) { s.Real = address.Plain{Node: plan.Node(1), Tenant: 1}.Addr() },
		"its address and its name":                      func(s *Service, _ *Publication) { s.Virtual = s.Real },
		"both have":                                     func(s *Service, _ *Publication) { s.Tenant, s.Real = "t8", storage },
		"not one of the gateway's addresses":            func(_ *Service, p *Publication) { p.Underlay = UnderlayAddress(p.Gateway, 1) },
		"none":                                          func(_ *Service, p *Publication) { p.Underlay = plan.Node(1).Addr().Next() },
		"10.0.0.1 is not":                               func(_ *Service, p *Publication) { p.Container = netip.MustParseAddr("10.0.0.1") },
		"both have " + s.published[1].Underlay.String(): func(_ *Service, p *Publication) { p.Underlay = s.published[1].Underlay },
	} {
		of, at := good, pub
		spoil(&of, &at)
		err := n.SetServices(t.Context(), []Service{of, s.services[1]}, []Publication{at, s.published[1]})
		if want == "none" {
			want = "not one of the gateway's addresses"
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasSuffix(err.Error(), "nothing was changed") {
			t.Errorf("want %q: %v", want, err)
		}
	}
	if n.sw.applied != before {
		t.Error("something was changed")
	}
	s.ways(t)
	n.config.Gateway = nil
	if err := n.SetServices(t.Context(), s.services, nil); err == nil || !strings.Contains(err.Error(), "no gateway") {
		t.Errorf("without a gateway: %v", err)
	}
}

var _ Gateway = (*node)(nil)
