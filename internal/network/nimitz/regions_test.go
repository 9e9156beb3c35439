package nimitz

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// regions has two regions; the last node of each is its Edge Switch. Tenant t7 is in both, with VNI 7 in west and 12 in
// east. Each region also has another tenant, with the VNI that t7 has in the other region.
type regions struct {
	west, east *cluster
	near, far  endpoint.Record // of t7
}

func newRegions(t *testing.T) *regions {
	there := tenantOf(12, overlay("10.1.0.0/16", 24), overlay("fd00:2::/48", 80))
	other := tenantOf(7, overlay("10.1.0.0/16", 24))
	there.Name, other.Name = "t7", "t12"
	elsewhere := plan
	elsewhere.Base = netip.MustParsePrefix("fd71:696c:6100::/40")
	r := &regions{
		west: newRegion(
			t,
			plan,
			3,
			tenantOf(7, overlay("10.0.0.0/16", 24), overlay("fd00:1::/48", 80)),
			tenantOf(12, overlay("10.0.0.0/16", 24)),
		),
		east: newRegion(t, elsewhere, 2, there, other),
	}
	for _, c := range []*cluster{r.west, r.east} {
		edge := c.nodes[len(c.nodes)-1]
		edge.edge, edge.carries["t7"] = true, true
		edge.start(memory{})
		edge.receive(c.tenants[0])
		c.nodes[0].add(c.tenants[1], 3)
	}
	r.near, r.far = r.west.nodes[0].add(r.west.tenants[0], 1), r.east.nodes[0].add(r.east.tenants[0], 2)
	r.west.tenants[0].Regions, r.east.tenants[0].Regions = r.west.sees("east", r.east), r.east.sees("west", r.west)
	r.put(t)
	return r
}

func (c *cluster) edge() *node { return c.nodes[len(c.nodes)-1] }

// sees returns what nodes receive about their first tenant in another region.
func (c *cluster) sees(name string, other *cluster) []tenant.Region {
	theirs := other.tenants[0]
	r := tenant.Region{Name: name, Edge: c.edge().prefix, PeerEdge: other.edge().prefix, PeerVNI: theirs.IDs[0].ID}
	for _, o := range theirs.Overlays {
		r.CIDRs = append(r.CIDRs, o.CIDR)
	}
	return []tenant.Region{r}
}

func (r *regions) put(t *testing.T) {
	for _, c := range []*cluster{r.west, r.east} {
		for _, n := range c.nodes {
			if n.hosts(c.tenants[0]) {
				n.must(n.PutTenant(t.Context(), c.tenants[0]))
			}
		}
	}
}

// hop is a packet in a tunnel.
type hop struct {
	to       netip.Prefix // a node
	vni      pipeline.VNI
	identity uint16
}

// crosses reports whether a container's packet goes to the other region.
func (r *regions) crosses(from *node, to netip.Addr) bool {
	other := r.east
	if from.c == r.east {
		other = r.west
	}
	return slices.ContainsFunc(other.tenants[0].Overlays, func(o tenant.Overlay) bool { return o.CIDR.Contains(to) })
}

// send follows a container's packet until it arrives or is dropped.
func (r *regions) send(
	from *node,
	port pipeline.Port,
	src, dst netip.Addr,
) (hops []hop, at *node, out pipeline.Verdict) {
	p, at := pipeline.Packet{From: port, Src: src, Dst: dst}, from
	for range 5 {
		var trace []pipeline.Entry
		if out, trace = at.sw.table().Run(p); out.Drop == 0 && p.From == port &&
			isOutside(trace) != r.crosses(from, dst) {
			r.west.t.Errorf("from %v to %v: %v", from.prefix, dst, trace)
		}
		if out.Drop != 0 || out.To != pipeline.VXLAN {
			break
		}
		p = pipeline.Packet{
			From:     pipeline.VXLAN,
			Outer:    pipeline.VTEP(at.prefix),
			VNI:      out.VNI,
			Identity: out.Identity,
			Src:      out.Src,
			Dst:      out.Dst,
		}
		for _, n := range slices.Concat(r.west.nodes, r.east.nodes) {
			if pipeline.VTEP(n.prefix) == out.VTEP {
				at = n
			}
		}
		hops = append(hops, hop{at.prefix, out.VNI, out.Identity})
	}
	return hops, at, out
}

// TestCrossRegion: traffic type (e), in both directions and both families. Each Edge Switch sets the VNI of the tenant
// in the next region (§3.1; NM6).
func TestCrossRegion(t *testing.T) {
	r := newRegions(t)
	for i := range r.near.Attachments {
		near, far := r.near.Attachments[i].Address, r.far.Attachments[i].Address
		hops, at, out := r.send(r.west.nodes[0], pipeline.Port(r.near.ID), near, far)
		if want := []hop{{r.west.edge().prefix, 7, 1}, {r.east.edge().prefix, 7, 1},
			{r.east.nodes[0].prefix, 12, 0}}; !slices.Equal(
			hops,
			want,
		) ||
			at != r.east.nodes[0] ||
			out.Drop != 0 ||
			out.To != pipeline.Port(r.far.ID) ||
			out.Src != near {
			t.Errorf("from %v to %v: %v, then %+v; want %v", near, far, hops, out, want)
		}
		hops, at, out = r.send(r.east.nodes[0], pipeline.Port(r.far.ID), far, near)
		if want := []hop{{r.east.edge().prefix, 12, 2}, {r.west.edge().prefix, 12, 2},
			{r.west.nodes[0].prefix, 7, 0}}; !slices.Equal(
			hops,
			want,
		) ||
			at != r.west.nodes[0] ||
			out.Drop != 0 ||
			out.To != pipeline.Port(r.near.ID) {
			t.Errorf("from %v to %v: %v, then %+v; want %v", far, near, hops, out, want)
		}
	}
	// A tenant whose VNI belongs to another tenant in the other region.
	for _, of := range r.west.nodes[0].record {
		if of.Tenant != "t7" {
			if hops, _, out := r.send(r.west.nodes[0], pipeline.Port(of.ID), of.Attachments[0].Address,
				r.far.Attachments[0].Address); out.Drop == 0 ||
				len(hops) != 0 {
				t.Errorf("tenant %s reaches another tenant's container in the other region: %v, %+v",
					of.Tenant, hops, out)
			}
		}
	}
}

// TestEntriesOfRegions: a node has one entry for each CIDR of a tenant in another region. The Edge Switch has two for
// each CIDR, and one for the peer. All are removed with the region.
func TestEntriesOfRegions(t *testing.T) {
	r := newRegions(t)
	with := func(n *node) map[pipeline.Stage]int { return pipeline.Count(n.sw.table().Entries) }
	node, edge := r.west.nodes[0], r.west.edge()
	nodeHas, edgeHas, all := with(node), with(edge), r.west.tenants[0].Regions
	edge.sw.applied = 0
	edge.start(memory{})
	if edge.sw.applied != 0 {
		t.Errorf("a restarted Edge Switch makes %d changes", edge.sw.applied)
	}
	r.west.tenants[0].Regions = nil
	r.put(t)
	nodeHad, edgeHad := with(node), with(edge)
	if more := nodeHas[pipeline.Forwarding] - nodeHad[pipeline.Forwarding]; more != 2 ||
		nodeHas[pipeline.Register] != nodeHad[pipeline.Register] ||
		nodeHas[pipeline.Decap] != nodeHad[pipeline.Decap] {
		t.Errorf("a node has %v, and %v without the other region", nodeHas, nodeHad)
	}
	if edgeHas[pipeline.Forwarding]-edgeHad[pipeline.Forwarding] != 2 ||
		edgeHas[pipeline.Register]-edgeHad[pipeline.Register] != 2 ||
		edgeHas[pipeline.Decap]-edgeHad[pipeline.Decap] != 1 {
		t.Errorf("an Edge Switch has %v, and %v without the other region", edgeHas, edgeHad)
	}

	// A node that is no Edge Switch any more has no entries for other regions.
	r.west.tenants[0].Regions = all
	r.put(t)
	if got := with(edge); got[pipeline.Register] != edgeHas[pipeline.Register] {
		t.Errorf("an Edge Switch has %v again, want %v", got, edgeHas)
	}
	edge.edge = false
	edge.start(memory{})
	for _, e := range edge.sw.has {
		f, forwards := e.(pipeline.Forward)
		p, takes := e.(pipeline.Peer)
		if _, foreign := e.(pipeline.Foreign); foreign ||
			forwards && f.Port == pipeline.VXLAN && !plan.Base.Contains(f.VTEP) ||
			takes && p.Nodes != plan.Base {
			t.Errorf("a former Edge Switch still has %v", e)
		}
	}
}

// TestRegionsThatCannotBeAreRefused: invalid regions change nothing.
func TestRegionsThatCannotBeAreRefused(t *testing.T) {
	r := newRegions(t)
	node := r.west.nodes[0]
	before := len(node.sw.has)
	for what, change := range map[string]func(*tenant.Region){
		"10.0.0.0/16": func(of *tenant.Region) { of.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.3.0/24")} },
		"10.1.0.0/16": func(of *tenant.Region) {
			of.CIDRs = append(slices.Clone(of.CIDRs), netip.MustParsePrefix("10.1.3.0/24"))
		},
		node.prefix.String():                func(of *tenant.Region) { of.PeerEdge = node.prefix },
		address.DefaultPlan().Base.String(): func(of *tenant.Region) { of.Edge = of.PeerEdge },
	} {
		wrong := r.west.tenants[0]
		wrong.Regions = slices.Clone(wrong.Regions)
		change(&wrong.Regions[0])
		if err := node.PutTenant(t.Context(), wrong); err == nil || !strings.Contains(err.Error(), what) ||
			!strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("%v, want an error with %q", err, what)
		}
		if len(node.sw.has) != before {
			t.Errorf("%s: %d entries, want %d as before", what, len(node.sw.has), before)
		}
	}
}
