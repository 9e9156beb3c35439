package nimitz

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// send forwards a container's packet from node to node, and returns the node and the container where it arrives.
func (c *cluster) send(from *node, r endpoint.Record, src, dst netip.Addr) (at *node, out pipeline.Verdict) {
	out, trace := from.sw.table().Run(pipeline.Packet{From: pipeline.Port(r.ID), Src: src, Dst: dst})
	if isOutside(trace) {
		c.t.Errorf("container %v was treated as outside by %v", dst, src)
	}
	if out.Drop != 0 || out.To != pipeline.VXLAN {
		return from, out
	}
	for _, n := range c.nodes {
		if pipeline.VTEP(n.prefix) == out.VTEP {
			out, _ = n.sw.table().
				Run(pipeline.Packet{From: pipeline.VXLAN, Outer: pipeline.VTEP(from.prefix), VNI: out.VNI,
					Identity: out.Identity, Src: out.Src, Dst: out.Dst})
			return n, out
		}
	}
	c.t.Errorf("packet to %v is sent to VTEP %v, which no node has", dst, out.VTEP)
	return nil, out
}

// isOutside reports whether a packet left for a destination that is not a container of the region, so that no other
// node checks it.
func isOutside(trace []pipeline.Entry) bool {
	return slices.ContainsFunc(trace, func(e pipeline.Entry) bool {
		f, is := e.(pipeline.Forward)
		return is && (f.Outside || f.Port == pipeline.Gateway)
	})
}

// reach compares the tables of all nodes with every possible packet: exactly those from one container to another of its
// tenant arrive, with the sender's identity.
func (c *cluster) reach() {
	c.t.Helper()
	type end struct {
		n *node
		r endpoint.Record
		a netip.Addr
	}
	var ends []end
	for _, n := range c.nodes {
		for _, r := range n.record {
			for _, a := range r.Attachments {
				ends = append(ends, end{n, r, a.Address})
			}
		}
	}
	for _, from := range ends {
		targets := map[netip.Addr]end{}
		for _, to := range ends {
			if _, own := targets[to.a]; !own || to.r.Tenant == from.r.Tenant {
				targets[to.a] = to
			}
		}
		targets[netip.MustParseAddr("10.0.255.254")] = end{}
		targets[netip.MustParseAddr("192.0.2.1")] = end{}
		for dst, to := range targets {
			n, out := c.send(from.n, from.r, from.a, dst)
			arrives := to.r.Tenant == from.r.Tenant
			switch {
			case !arrives && out.Drop == 0:
				c.t.Fatalf("from %v of %s to %v, not in its tenant: %+v", from.a, from.r.Tenant, dst, out)
			case arrives && (n != to.n || out.Drop != 0 || out.To != pipeline.Port(to.r.ID) ||
				out.Identity != uint16(from.r.App)):
				c.t.Fatalf(
					"from %v of %s on %v to %v on %v: %+v",
					from.a,
					from.r.Tenant,
					from.n.prefix,
					dst,
					to.n.prefix,
					out,
				)
			}
			if _, out := c.send(from.n, from.r, dst, from.a); !slices.Contains(from.r.Addresses(), dst) &&
				out.Drop == 0 {
				c.t.Fatalf("%v sends as %v: %+v", from.a, dst, out)
			}
		}
	}
}

// TestRandomClusters: containers of tenants with the same addresses start and end, and agents restart. After a restart,
// even before the agent receives updates, the tables of the nodes deliver exactly the packets between containers of one
// tenant. Without containers, the tables have no entries but the peer (NM1).
func TestRandomClusters(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			c := newCluster(
				t,
				4,
				tenantOf(
					7,
					overlay("10.0.0.0/16", 24),
				),
				tenantOf(8, overlay("10.0.0.0/16", 28), overlay("fd00:1::/48", 80)),
				tenantOf(
					9,
					overlay("10.0.0.0/16", 0),
				),
				tenantOf(10, overlay("fd00:1::/48", 0), overlay("10.0.0.0/20", 0)),
			)
			for range 150 {
				n := c.nodes[r.IntN(len(c.nodes))]
				switch of := c.tenants[r.IntN(len(c.tenants))]; {
				case r.IntN(20) == 0:
					n.start(n.config.Indexes)
					c.reach() // before it receives any update
					for _, t := range c.tenants {
						if n.hosts(t) {
							n.receive(t)
						}
					}
				case r.IntN(3) > 0 && len(n.record) < 6:
					n.add(of, address.AppID(1+r.IntN(9)))
				default:
					for _, r := range n.record {
						n.remove(r)
						break
					}
				}
			}
			c.reach()
			for _, n := range c.nodes {
				before := n.sw.applied
				n.start(n.config.Indexes)
				for _, t := range c.tenants {
					if n.hosts(t) {
						n.receive(t)
					}
				}
				if n.sw.applied != before {
					t.Errorf("a restart changed %d entries of a correct table", n.sw.applied-before)
				}
				for _, r := range n.record {
					n.must(n.Check(t.Context(), r))
					n.remove(r)
				}
				if got := n.sw.table().Entries; len(got) != 1 || got[0] != (pipeline.Peer{Nodes: plan.Base}) ||
					len(n.sw.ports) != 1 {
					t.Errorf("left over on a node without containers: %v, %v", got, n.sw.ports)
				}
			}
		})
	}
}

// TestEntryCounts: a node's entries for remote containers grow with the number of nodes if these have CIDRs, with the
// number of containers if not, and never with a product. At 80 containers a node, the paper's density, CIDRs need 80
// times fewer entries (NM3, §3.2).
func TestEntryCounts(t *testing.T) {
	measure := func(nodes, density, bits int) (remote, all int) {
		c := newCluster(t, nodes, tenantOf(7, overlay("10.0.0.0/8", bits)))
		for _, n := range c.nodes {
			for range density {
				n.add(c.tenants[0], 1)
			}
		}
		return c.nodes[0].sw.forwards(pipeline.VXLAN), len(c.nodes[0].sw.has)
	}
	const peerAndCIDR = 2
	for _, nodes := range []int{2, 4, 8} {
		for _, density := range []int{20, 80} {
			with, all := measure(nodes, density, 24)
			without, allWithout := measure(nodes, density, 0)
			if with != nodes-1 || all != with+2*density+peerAndCIDR {
				t.Errorf(
					"%d nodes with %d containers and CIDRs: %d of other nodes, %d in all",
					nodes,
					density,
					with,
					all,
				)
			}
			if without != (nodes-1)*density || allWithout != without+2*density+peerAndCIDR {
				t.Errorf(
					"%d nodes with %d containers, without CIDRs: %d of other nodes, %d in all",
					nodes,
					density,
					without,
					allWithout,
				)
			}
			if without != density*with {
				t.Errorf("CIDRs save %d entries of %d", without-with, without)
			}
		}
	}
}

// TestRepairBelievesTheSwitch: an agent that starts without a connection to the orchestrator keeps the entries that
// lead to other nodes, and removes entries without an owner.
func TestRepairBelievesTheSwitch(t *testing.T) {
	c := newCluster(t, 2, tenantOf(7, overlay("10.0.0.0/16", 24)))
	blue := c.tenants[0]
	a, b := c.nodes[0].add(blue, 1), c.nodes[1].add(blue, 2)
	n := c.nodes[0]
	n.sw.put(
		pipeline.Sender{Port: 99, Address: netip.MustParseAddr("10.0.0.99"), VNI: 7},
		pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.0.99/32"), Port: 99},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.0.0.0/16")},
		pipeline.Forward{
			VNI:  7,
			To:   netip.MustParsePrefix("10.9.0.0/16"),
			Port: pipeline.VXLAN,
			VTEP: pipeline.VTEP(plan.Node(9)),
		},
		pipeline.Peer{Nodes: netip.MustParsePrefix("fd00::/40")},
	)
	n.sw.ports[99] = "pil99"
	n.start(n.config.Indexes)
	c.reach()
	if len(n.sw.has) != 5 || len(n.sw.ports) != 2 || n.sw.ports[pipeline.Gateway] != "gateway" {
		t.Errorf("unexpected entries %v, ports %v", n.sw.table(), n.sw.ports)
	}
	if err := n.Apply(t.Context(), blue.Name, nil, nil); err == nil {
		t.Error("accepted a change to a tenant whose list was never received")
	}
	// From then on the orchestrator's list counts.
	n.must(n.Replace(t.Context(), blue.Name, nil))
	if _, out := c.send(n, a, a.Attachments[0].Address, b.Attachments[0].Address); out.Drop == 0 {
		t.Errorf("sent to a node that is not in the list of the cluster: %+v", out)
	}
}

// TestFailuresAreMadeGood: the next call for an object repeats what the switch rejected.
func TestFailuresAreMadeGood(t *testing.T) {
	c := newCluster(t, 2, tenantOf(7, overlay("10.0.0.0/16", 24)))
	blue, n := c.tenants[0], c.nodes[0]
	a := n.add(blue, 1)
	n.sw.fail = errors.New("test error")
	if err := n.Deactivate(t.Context(), a); err == nil {
		t.Error("the error was not returned")
	}
	n.sw.fail = nil
	n.remove(a)
	if len(n.sw.has) != 1 {
		t.Errorf("entries remain: %v", n.sw.table())
	}
	// When a DEL is repeated, another container may have the address.
	next := n.add(blue, 1)
	late := next
	late.ID = a.ID
	n.must(n.Deactivate(t.Context(), late))
	n.must(n.Check(t.Context(), next))
	c.reach()
	n.remove(next)
	r, err := n.tryAdd(blue, 1)
	n.must(err)
	n.sw.fail = errors.New("test error")
	other := []network.Mapping{{Tenant: blue.Name, To: netip.MustParsePrefix("10.0.77.0/24"), Node: plan.Node(2)}}
	if err := n.Apply(t.Context(), blue.Name, other, nil); err == nil {
		t.Error("the error was not returned")
	}
	n.sw.fail = nil
	n.must(n.Replace(t.Context(), blue.Name, append(other, c.where[blue.Name]...)))
	if _, out := c.send(n, r, r.Attachments[0].Address, netip.MustParseAddr("10.0.77.7")); out.Drop == 0 ||
		n.sw.forwards(pipeline.VXLAN) != 1 {
		t.Errorf("%+v; holds %v", out, n.sw.table())
	}
}

// TestForwardingHasMAC: the entry of a container has its MAC, except for the one that older builds gave to all. A start
// completes the entry of an older build.
func TestForwardingHasMAC(t *testing.T) {
	c := newCluster(t, 1, tenantOf(7, overlay("10.0.0.0/16", 24)))
	n := c.nodes[0]
	r := n.add(c.tenants[0], 1)
	entry := pipeline.Forward{VNI: 7, To: host(r.Attachments[0].Address), Port: pipeline.Port(r.ID)}
	has := func(when string, mac pipeline.MAC) {
		t.Helper()
		want := entry
		want.MAC = mac
		if got := n.sw.has[entry.Match()]; got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	has("without a MAC", pipeline.MAC{})
	for _, mac := range []net.HardwareAddr{pipeline.InsideMAC, {0x0a, 1, 2, 3, 4, 5}} {
		r.Device.ContainerMAC = mac
		n.record[r.ID] = r
		n.start(memory{})
		has(mac.String(), pipeline.NewMAC(mac))
	}
	if got := pipeline.NewMAC(pipeline.InsideMAC); got != (pipeline.MAC{}) {
		t.Errorf("the MAC of older builds is %v", got)
	}
}

func TestMappingsThatCannotBeAreRefused(t *testing.T) {
	c := newCluster(t, 1, tenantOf(7, overlay("10.0.0.0/16", 24)))
	blue, n := c.tenants[0], c.nodes[0]
	n.add(blue, 1)
	before := len(n.sw.has)
	hops := []netip.Addr{netip.MustParseAddr("2001:db8::1")}
	for _, m := range []network.Mapping{
		{Tenant: blue.Name, To: netip.MustParsePrefix("10.1.0.0/24"), Node: plan.Node(2)},
		{Tenant: blue.Name, To: netip.MustParsePrefix("10.0.0.0/16"), Node: plan.Node(2)}, // the complete CIDR
		{Tenant: blue.Name, To: netip.PrefixFrom(netip.MustParseAddr("10.0.3.1"), 24), Node: plan.Node(2)},
		{Tenant: blue.Name, To: netip.MustParsePrefix("fd00:1::/80"), Node: plan.Node(2)},
		{Tenant: blue.Name, To: netip.MustParsePrefix("10.0.3.0/24"), Node: netip.MustParsePrefix("2001:db8::/64")},
		{Tenant: blue.Name, To: netip.MustParsePrefix("10.0.3.0/24"), Node: plan.Node(2), NextHops: hops},
	} {
		if n.Replace(t.Context(), blue.Name, []network.Mapping{m}) == nil ||
			n.Apply(t.Context(), blue.Name, []network.Mapping{m}, nil) == nil {
			t.Errorf("accepted %v", m)
		}
	}
	// of another speaker, while the tenant moves from or to network evpn
	outside := network.Mapping{Tenant: blue.Name, To: netip.MustParsePrefix("10.0.3.0/24"), NextHops: hops}
	n.must(n.Replace(t.Context(), blue.Name, []network.Mapping{outside}))
	n.must(n.Apply(t.Context(), blue.Name, []network.Mapping{outside}, nil))
	if len(n.sw.has) != before {
		t.Errorf("holds %v", n.sw.table())
	}
	moved := func(to uint64) network.Mapping {
		return network.Mapping{Tenant: blue.Name, To: netip.MustParsePrefix("10.0.3.0/24"), Node: plan.Node(to)}
	}
	n.must(n.Apply(t.Context(), blue.Name, []network.Mapping{moved(2)}, nil))
	n.must(
		n.Apply(
			t.Context(),
			blue.Name,
			[]network.Mapping{moved(3)},
			[]network.Mapping{{Tenant: blue.Name, To: moved(2).To}},
		),
	)
	if f := n.sw.has[pipeline.Forward{VNI: 7, To: moved(3).To}]; f != (pipeline.Forward{VNI: 7, To: moved(3).To,
		Port: pipeline.VXLAN, VTEP: pipeline.VTEP(plan.Node(3))}) {
		t.Errorf("moved from node 2 to 3: %v", f)
	}
	n.must(n.Apply(t.Context(), blue.Name, nil, []network.Mapping{moved(3)}))
	if err := n.Replace(t.Context(), "elsewhere",
		[]network.Mapping{{Tenant: "elsewhere", To: netip.MustParsePrefix("10.0.3.0/24"),
			Node: plan.Node(2)}}); err != nil ||
		len(n.sw.has) != before {
		t.Errorf("unknown tenant: %v", err)
	}
}

// TestFullNodeRefuses: a full node rejects a container before it allocates addresses, names the tenant with the most
// entries, and keeps what is there.
func TestFullNodeRefuses(t *testing.T) {
	c := newCluster(t, 2, tenantOf(7, overlay("10.0.0.0/16", 24)), tenantOf(8, overlay("10.0.0.0/16", 0)))
	n := c.nodes[0]
	n.max = 6
	n.start(n.config.Indexes)
	n.add(c.tenants[0], 1) // and its CIDR
	for range 3 {
		n.add(c.tenants[1], 1)
	}
	_, err := n.tryAdd(c.tenants[0], 1)
	if !errors.Is(err, endpoint.ErrExhausted) ||
		!strings.Contains(err.Error(), "6 of 6 are in use, 4 of them by tenant t8") {
		t.Errorf("a full node: %v", err)
	}
	if i := n.config.Indexes.(memory)[endpoint.CursorKey{Tenant: 7,
		Subnet: netip.MustParsePrefix("10.0.0.0/24")}]; i.next != 2 {
		t.Errorf("an index was allocated: next is %d", i.next)
	}
	n.start(n.config.Indexes)
	n.receive(c.tenants[0])
	if _, err := n.tryAdd(c.tenants[0], 1); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("a full node after a restart: %v", err)
	}
	if err := n.Replace(t.Context(), "t7",
		[]network.Mapping{{Tenant: "t7", To: netip.MustParsePrefix("10.0.9.0/24"), Node: plan.Node(2)}}); !errors.Is(
		err,
		endpoint.ErrExhausted,
	) {
		t.Errorf("one more mapping: %v", err)
	}
	c.reach()
}

// TestSubnetAddresses: all addresses of a subnet are usable except the first and, in IPv4, the last. Released addresses
// are quarantined, and the cursor is on disk.
func TestSubnetAddresses(t *testing.T) {
	dir := t.TempDir()
	c := newCluster(t, 1, tenantOf(7, overlay("10.0.0.0/16", 29), overlay("fd00:1::/48", 80)))
	n, blue := c.nodes[0], c.tenants[0]
	open := func() *endpoint.Store {
		s, err := endpoint.OpenStore(endpoint.StoreConfig{Dir: dir})
		n.must(err)
		return s
	}
	n.start(open())
	seen := map[netip.Addr]bool{}
	for i := range 6 {
		r := n.add(blue, 1)
		want := []string{fmt.Sprint("10.0.0.", i+1), fmt.Sprintf("fd00:1::%x", i+1)}
		for j, a := range r.Attachments {
			if a.Address.String() != want[j] || a.Overhead != 70 || seen[a.Address] ||
				a.Gateway.Is4() != a.Address.Is4() {
				t.Errorf("attachment %+v, want %s", a, want[j])
			}
			seen[a.Address] = true
		}
		n.must(n.config.Indexes.(*endpoint.Store).Put(r))
	}
	n.remove(n.record[1])
	n.must(n.config.Indexes.(*endpoint.Store).Delete(1))
	n.start(open())
	if r, err := n.tryAdd(blue, 1); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("allocated while the only address is quarantined: %+v, %v", r.Attachments, err)
	}
	c.reach()
}

func TestRefusals(t *testing.T) {
	c := newCluster(t, 1, tenantOf(7, overlay("10.0.0.0/16", 0)))
	n, blue := c.nodes[0], c.tenants[0]
	if _, err := n.tryAdd(blue, address.FirstReservedApp); err == nil {
		t.Error("a reserved app got an address")
	}
	c.away = errors.New("away")
	if _, err := n.tryAdd(blue, 1); !errors.Is(err, c.away) {
		t.Errorf("without the orchestrator: %v", err)
	}
	c.away = nil
	sound := n.add(blue, 1)
	for name, spoil := range map[string]func(*endpoint.Record, *endpoint.Attachment){
		"the gateway's VNI": func(r *endpoint.Record, _ *endpoint.Attachment) { r.TenantID = 0xff },
		"a plaintext":       func(_ *endpoint.Record, a *endpoint.Attachment) { a.Plaintext = plan.Node(1).Addr() },
		"another gateway": func(_ *endpoint.Record,
			a *endpoint.Attachment) {
			a.Gateway = netip.MustParseAddr("10.0.0.1")
		},
		"index 0": func(_ *endpoint.Record, a *endpoint.Attachment) {
			a.Subnet = netip.PrefixFrom(a.Address, 32)
		},
	} {
		r, a := sound, sound.Attachments[0]
		spoil(&r, &a)
		r.Attachments = []endpoint.Attachment{a}
		if err := n.Validate(r); err == nil {
			t.Errorf("%s was accepted: %+v", name, r)
		}
	}
	missed := 0
	for match, e := range n.sw.has {
		delete(n.sw.has, match)
		if n.Check(t.Context(), sound) != nil {
			missed++
		}
		n.sw.put(e)
	}
	if missed != 2 {
		t.Errorf("CHECK reports %d missing entries of a container, not 2", missed)
	}
	delete(n.sw.ports, pipeline.Port(sound.ID))
	if n.Check(t.Context(), sound) == nil {
		t.Error("CHECK does not report a missing port")
	}
	if err := n.Check(t.Context(), endpoint.Record{ID: 1, Tenant: tenant.Netpila}); err == nil {
		t.Error("CHECK accepts an unknown tenant")
	}
}
