package nimitz

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	storage = netip.MustParseAddr("2001:db8::9")
	name7   = netip.MustParseAddr("fd09::7")
	name8   = netip.MustParseAddr("fd09::8")
)

// northSouth has three nodes, and two tenants with the same CIDR. Both tenants reach the same server, each at a
// different virtual address. Tenant 7 has one container on node 1 and one on node 2. Nodes 1 and 3 publish both
// containers; node 3 has no container.
type northSouth struct {
	*cluster
	near, far, other endpoint.Record
}

func newNorthSouth(t *testing.T) *northSouth {
	c := newCluster(t, 3, tenantOf(7, overlay("fd00:1::/48", 80)), tenantOf(8, overlay("fd00:1::/48", 80)))
	one, two := c.nodes[0], c.nodes[1]
	s := &northSouth{
		cluster: c,
		near:    one.add(c.tenants[0], 1),
		far:     two.add(c.tenants[0], 2),
		other:   one.add(c.tenants[1], 3),
	}
	c.tenants[0].UnderlayServices = []tenant.UnderlayService{{Name: "storage", Virtual: name7, Real: storage}}
	c.tenants[1].UnderlayServices = []tenant.UnderlayService{{Name: "files", Virtual: name8, Real: storage}}
	for i, r := range []endpoint.Record{s.far, s.near} {
		for _, at := range []*node{one, c.nodes[2]} {
			c.tenants[0].Publications = append(
				c.tenants[0].Publications,
				publication(at, fmt.Sprintf("web%d-%d", i, at.prefix.Addr().As16()[7]), r.Attachments[0].Address, i+2),
			)
		}
	}
	c.nodes[2].carries["t7"] = true
	s.put(t)
	c.nodes[2].receive(c.tenants[0])
	return s
}

func publication(at *node, name string, container netip.Addr, i int) tenant.Publication {
	return tenant.Publication{
		Name:      name,
		Container: container,
		Gateway:   at.prefix,
		Underlay:  tenant.UnderlayAddress(at.prefix, address.Index(i)),
	}
}

// put sends the current state of the tenants to the nodes.
func (s *northSouth) put(t *testing.T) {
	for _, n := range s.nodes {
		for _, of := range s.tenants {
			if n.hosts(of) {
				n.must(n.PutTenant(t.Context(), of))
			}
		}
	}
}

func (n *node) run(from pipeline.Port, src, dst netip.Addr) pipeline.Verdict {
	out, _ := n.sw.table().Run(pipeline.Packet{From: from, Src: src, Dst: dst})
	return out
}

// ways checks (c) and (d) hop by hop with the current tables.
func (s *northSouth) ways(t *testing.T) {
	t.Helper()
	one := s.nodes[0]
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
			t.Errorf("%s's reply: %+v", c.r.Tenant, back)
		}
		if out := one.run(port, a, c.not); out.Drop == 0 {
			t.Errorf("%s to another tenant's service: %+v", c.r.Tenant, out)
		}
	}
	for _, p := range s.tenants[0].Publications {
		gateway := one
		if p.Gateway != one.prefix {
			gateway = s.nodes[2]
		}
		s.published(t, gateway, p)
	}
}

// published checks the path of a client's packet to a container, and of the reply.
func (s *northSouth) published(t *testing.T, gateway *node, p tenant.Publication) {
	t.Helper()
	client, v, home, r := gateway.client(gateway.prefix).Addr(), gateway.publishes[p.Underlay], s.nodes[0], s.near
	if p.Container == s.far.Attachments[0].Address {
		home, r = s.nodes[1], s.far
	}
	hop := func(at, from *node, v pipeline.Verdict) pipeline.Verdict {
		out, _ := at.sw.table().
			Run(pipeline.Packet{From: pipeline.VXLAN, Outer: pipeline.VTEP(from.prefix), VNI: v.VNI, Src: v.Src,
				Dst: v.Dst})
		return out
	}
	in := gateway.run(pipeline.Gateway, client, v)
	if home != gateway {
		if in.To != pipeline.VXLAN || in.VTEP != pipeline.VTEP(home.prefix) {
			t.Fatalf("%s at the gateway: %+v", p.Name, in)
		}
		in = hop(home, gateway, in)
	}
	if in.To != pipeline.Port(r.ID) || in.Src != client || in.Dst != p.Container {
		t.Fatalf("%s at its node: %+v", p.Name, in)
	}
	out, trace := home.sw.table().Run(pipeline.Packet{From: in.To, Src: in.Dst, Dst: in.Src})
	if !isOutside(trace) {
		t.Errorf("the reply of %s does not go outside: %v", p.Name, trace)
	}
	if home != gateway {
		if out.VTEP != pipeline.VTEP(gateway.prefix) {
			t.Fatalf("the reply of %s: %+v", p.Name, out)
		}
		out = hop(gateway, home, out)
	}
	if out.Drop != 0 || out.To != pipeline.Gateway || out.Src != v || out.Dst != client {
		t.Errorf("the reply of %s at the gateway: %+v, not from %v", p.Name, out, v)
	}
}

// TestNorthSouth: (c) and (d) with the services and publications of tenants. An agent restart changes nothing, except
// that it removes entries for what was deleted meanwhile.
func TestNorthSouth(t *testing.T) {
	s := newNorthSouth(t)
	s.ways(t)
	for _, n := range s.nodes {
		for _, r := range n.record {
			n.must(n.Check(t.Context(), r))
		}
		applied, before := n.sw.applied, n.publishes
		n.start(n.config.Indexes)
		s.ways(t)
		if n.sw.applied != applied || !maps.Equal(n.publishes, before) {
			t.Errorf("a restart changed %d entries; published %v, then %v", n.sw.applied-applied, before, n.publishes)
		}
	}
	one := s.nodes[0]
	for _, n := range s.nodes {
		for _, of := range s.tenants {
			if n.hosts(of) {
				n.receive(of)
			}
		}
	}
	s.ways(t)

	// A removed container leaves no entries, and a new one gets all it needs.
	gone := s.other.Attachments[0].Address
	one.remove(s.other)
	for _, e := range one.sw.has {
		if strings.Contains(e.String(), gone.String()+" in VNI 8") {
			t.Errorf("left over: %v", e)
		}
	}
	s.other = one.add(s.tenants[1], 3)
	// When a published container is removed, its entry on the node is removed, too. The next container with the same
	// address gets a new entry.
	was := one.publishes[s.tenants[0].Publications[2].Underlay]
	one.carries["t7"], one.kept = true, nil
	one.remove(s.near)
	if one.kept == nil || one.kept[was] {
		t.Errorf("connections of %v were not ended; Keep was called with %v", was, one.kept)
	}
	if now := one.publishes[s.tenants[0].Publications[2].Underlay]; now == was ||
		one.run(pipeline.Gateway, one.client(one.prefix).Addr(), was).Drop == 0 {
		t.Errorf("the gateway leads to %v, which was %v's", now, s.near.Attachments[0].Address)
	}
	one.record[s.near.ID] = s.near
	one.must(one.Activate(t.Context(), s.near))
	s.ways(t)

	for i := range s.tenants {
		s.tenants[i].UnderlayServices, s.tenants[i].Publications = nil, nil
	}
	s.put(t)
	for _, n := range s.nodes {
		for _, e := range n.sw.has {
			if e.Stage() == pipeline.NAT {
				t.Errorf("left over: %v", e)
			}
		}
		if len(n.publishes) != 0 {
			t.Errorf("still published: %v", n.publishes)
		}
	}
}

// TestServicesWithoutAGateway: a node without a gateway drops packets to services. Its containers still reply to
// clients that come by other nodes' gateways.
func TestServicesWithoutAGateway(t *testing.T) {
	s := newNorthSouth(t)
	one, two := s.nodes[0], s.nodes[1]
	for _, n := range []*node{one, two} {
		n.alone = true
		n.start(n.config.Indexes)
		n.must(n.FollowMTU(1400))
	}
	if _, there := one.sw.ports[pipeline.Gateway]; there || one.mtu != 0 {
		t.Error("something is its port")
	}
	if out := one.run(pipeline.Port(s.near.ID), s.near.Attachments[0].Address, name7); out.Drop == 0 {
		t.Errorf("to a service: %+v", out)
	}
	for _, p := range s.tenants[0].Publications {
		if p.Gateway == s.nodes[2].prefix {
			s.published(t, s.nodes[2], p)
		}
	}
	if g := one.Gateway(); g.Own.IsValid() || g.Missing != "the kernel has no NAT" || g.UnderlayServices != 2 ||
		g.Publications != 2 {
		t.Errorf("%+v", g)
	}
	three := s.nodes[2]
	own, virtual := three.Addresses()
	if g := three.Network.Gateway(); g != (network.Gateway{
		Own: own, Virtual: virtual, UnderlayServices: 1, Publications: 2,
	}) {
		t.Errorf("%+v", g)
	}
	three.must(three.FollowMTU(1400))
	if three.mtu != 1400 {
		t.Errorf("the gateway has an MTU of %d", three.mtu)
	}
}

// TestAnothersService: a service of tenant 7 may be a container of tenant 8. Containers of tenant 8 still reach this
// container at its own address.
func TestAnothersService(t *testing.T) {
	c := newCluster(t, 2, tenantOf(7, overlay("fd00:1::/48", 80)), tenantOf(8, overlay("fd00:2::/48", 80)))
	one := c.nodes[0]
	from, to := one.add(c.tenants[1], 1), c.nodes[1].add(c.tenants[1], 2)
	real := to.Attachments[0].Address
	c.tenants[0].UnderlayServices = []tenant.UnderlayService{{Name: "theirs", Virtual: name7, Real: real}}
	c.tenants[1].UnderlayServices = []tenant.UnderlayService{{Name: "storage", Virtual: name8, Real: storage}}
	one.add(c.tenants[0], 3)
	for _, of := range c.tenants {
		one.must(one.PutTenant(t.Context(), of))
	}
	one.receive(c.tenants[1])
	own := from.Attachments[0].Address
	if out := one.run(pipeline.Port(from.ID), own, real); out.To != pipeline.VXLAN || out.Src != own {
		t.Errorf("%+v", out)
	}
}

// TestServiceCounts: a node's entries for services are the sum, not a product, of its tenants' services, its containers
// and its publications (§3.2; NM3).
func TestServiceCounts(t *testing.T) {
	count := func(services, containers, published int) int {
		c := newCluster(t, 1, tenantOf(7, overlay("fd00:1::/48", 80)))
		n := c.nodes[0]
		for range containers {
			n.add(c.tenants[0], 1)
		}
		before := len(n.sw.has)
		of := c.tenants[0]
		for i := range services {
			of.UnderlayServices = append(
				of.UnderlayServices,
				tenant.UnderlayService{
					Name:    fmt.Sprint(i),
					Virtual: inBlock(netip.MustParsePrefix("fd09::/80"), 9, uint32(i)),
					Real:    inBlock(netip.MustParsePrefix("2001:db8::/80"), 9, uint32(i)),
				},
			)
		}
		for i := range published {
			of.Publications = append(
				of.Publications,
				publication(n, fmt.Sprint(i), inBlock(netip.MustParsePrefix("fd00:1:0:0:9::/80"), 9, uint32(i)), i+2),
			)
		}
		n.must(n.PutTenant(t.Context(), of))
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

// TestServicesThatCannotBeAreRefused: invalid services, which the orchestrator would reject (rules in internal/tenant),
// change nothing.
func TestServicesThatCannotBeAreRefused(t *testing.T) {
	s := newNorthSouth(t)
	n := s.nodes[0]
	before := n.sw.applied
	for want, spoil := range map[string]func(seven, eight *tenant.Tenant){
		"in the tenant's own CIDR": func(_,
			eight *tenant.Tenant) {
			eight.UnderlayServices[0].Virtual = netip.MustParseAddr("fd00:1::99")
		},
		"tenants t7 and t8 both have": func(seven,
			eight *tenant.Tenant) {
			eight.Publications = seven.Publications[:1]
		},
	} {
		seven, eight := s.tenants[0], s.tenants[1]
		eight.UnderlayServices = slices.Clone(eight.UnderlayServices)
		spoil(&seven, &eight)
		if err := n.PutTenant(t.Context(), eight); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.HasSuffix(err.Error(), "nothing was changed") {
			t.Errorf("want %q: %v", want, err)
		}
	}
	if n.sw.applied != before {
		t.Error("an invalid service changed the switch")
	}
	s.ways(t)
}

var _ Gateway = (*node)(nil)

// dropped holds the drop counters of a switch or a gateway.
type dropped struct {
	drops map[dropreason.Reason]uint64
	err   error
}

func (d dropped) Drops(context.Context) (map[dropreason.Reason]uint64, error) { return d.drops, d.err }

// TestDrops: Drops adds the counters of switch and gateway, and returns those that it could read together with the
// error of the others.
func TestDrops(t *testing.T) {
	broken := errors.New("broken")
	n := New(Config{
		Switch: struct {
			Switch
			dropped
		}{dropped: dropped{map[dropreason.Reason]uint64{dropreason.NoRoute: 2, dropreason.ConnectionLimit: 1}, broken}},
		Gateway: struct {
			Gateway
			dropped
		}{dropped: dropped{map[dropreason.Reason]uint64{dropreason.ConnectionLimit: 3}, nil}},
	})
	got, err := n.Drops(t.Context())
	if want := map[dropreason.Reason]uint64{dropreason.NoRoute: 2, dropreason.ConnectionLimit: 4}; !maps.Equal(
		got,
		want,
	) ||
		!errors.Is(err, broken) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if got, err := New(Config{}).Drops(t.Context()); len(got) != 0 || err != nil {
		t.Errorf("a node without a gateway: %v, %v", got, err)
	}
}
