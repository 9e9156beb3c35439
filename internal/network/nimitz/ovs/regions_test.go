package ovs

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestRegions: containers of a tenant in two regions exchange data through both Edge Switches, on four nodes with Open
// vSwitch. Each hop has its own tunnel addresses, and after the last Edge Switch the VNI is the other region's (§3.1;
// NM6). TCP verifies the data.
func TestRegions(t *testing.T) {
	p := netip.MustParsePrefix
	east := p("fd71:696c:6100::/40")
	way := []*bed{
		newNode(t, packettest.Here),
		newNode(t, packettest.There),
		newNode(t, p("fd71:696c:6100:1::/64")),
		newNode(t, p("fd71:696c:6100:2::/64")),
	}
	way[2].config.Region, way[3].config.Region = east, east
	connect(t, way)
	var captures []*packet.Capture
	for _, b := range way {
		b.start(t)
		c, err := packet.NewCapture(b.node, "eth0", packet.IncomingOnly)
		must(t, err)
		t.Cleanup(func() { c.Close() })
		captures = append(captures, c)
	}
	near := way[0].contain(t, netip.MustParseAddr("10.0.1.2"), netip.MustParseAddr("fd10:0:0:1::2"))
	far := way[3].contain(t, netip.MustParseAddr("10.0.2.2"), netip.MustParseAddr("fd10:0:0:2::2"))
	must(t, way[0].s.Apply(limit(t), nil, near.entries(far, way[1].config.Node)))
	must(t, way[1].s.Apply(limit(t), nil, way[1].edge(7, near, way[0], 12, far, way[2])))
	must(t, way[2].s.Apply(limit(t), nil, way[2].edge(12, far, way[3], 7, near, way[1])))
	must(t, way[3].s.Apply(limit(t), nil, renumbered(far.entries(near, way[2].config.Node), 12, east)))
	for i := range near.addresses {
		transfer(t, near, far, far.addresses[i])
		transfer(t, far, near, near.addresses[i])
	}
	vtep := func(i int) string { return pipeline.VTEP(way[i].config.Node).String() }
	for i, want := range [][]string{
		{vtep(1) + " 7 0"},
		{vtep(0) + " 7 70", vtep(2) + " 12 70"},
		{vtep(1) + " 7 70", vtep(3) + " 12 70"},
		{vtep(2) + " 12 0"},
	} {
		if got := tunnels(limit(t), captures[i], len(want)); !slices.Equal(got, want) {
			t.Errorf("node %d of the path has tunnels %v, want %v", i, got, want)
		}
	}
	// Without its peer Edge Switch, a node sends nothing to the other region.
	must(t, way[1].s.Apply(limit(t), []pipeline.Entry{pipeline.Peer{Nodes: way[2].config.Node}}, nil))
	if routes, err := way[1].s.control(limit(t), "ovs/route/show"); err != nil ||
		!strings.Contains(routes, way[1].config.Region.String()) ||
		strings.Contains(routes, way[2].config.Node.String()+" dev "+underlayName) {
		t.Errorf("routes of Open vSwitch: %s, %v", routes, err)
	}
}

// connect joins nodes by a bridge, and gives each node routes to the others.
func connect(t *testing.T, nodes []*bed) {
	t.Helper()
	ns, err := netns.Create(folder(t) + "/fabric")
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	bridge := netlink.NewLinkAttrs()
	bridge.Name = "fabric"
	must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: bridge}))
	fabric, err := h.LinkByName("fabric")
	must(t, err)
	must(t, h.LinkSetUp(fabric))
	mac := func(i int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 1, byte(i)} }
	for i, b := range nodes {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index, attrs.MasterIndex = fmt.Sprint("to", i), 2000+i, fabric.Attrs().Index
		must(
			t,
			h.LinkAdd(
				&netlink.Veth{
					LinkAttrs:        attrs,
					PeerName:         "eth0",
					PeerHardwareAddr: mac(i),
					PeerNamespace:    netlink.NsFd(b.node.FD()),
				},
			),
		)
		inside, err := b.node.Netlink()
		must(t, err)
		defer inside.Close()
		eth0, err := inside.LinkByName("eth0")
		must(t, err)
		must(t, sysctl(b.node, "eth0/router_solicitations", "0"))
		must(t, inside.LinkSetUp(eth0))
		port, err := h.LinkByName(attrs.Name)
		must(t, err)
		must(t, h.LinkSetUp(port))
		must(t, b.node.WaitUp(limit(t), "eth0"))
		for j, other := range nodes {
			if j != i {
				hop := netip.MustParseAddr(fmt.Sprintf("fe80::1:%d", j))
				neighbour(t, inside, eth0, hop, mac(j))
				must(
					t,
					inside.RouteReplace(
						&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: ipNet(other.config.Node), Gw: hop.AsSlice()},
					),
				)
			}
		}
	}
}

// edge returns the entries of an Edge Switch between a container of its region and one of another region.
func (b *bed) edge(
	vni pipeline.VNI,
	near container,
	node *bed,
	theirs pipeline.VNI,
	far container,
	peer *bed,
) []pipeline.Entry {
	all := []pipeline.Entry{pipeline.Peer{Nodes: b.config.Region}, pipeline.Peer{Nodes: peer.config.Node}}
	for i, a := range near.addresses {
		here, there := netip.PrefixFrom(a, a.BitLen()), netip.PrefixFrom(far.addresses[i], a.BitLen())
		all = append(
			all,
			pipeline.Forward{VNI: vni, To: here, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(node.config.Node)},
			pipeline.Forward{VNI: vni, To: there, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(peer.config.Node)},
			pipeline.Foreign{Edge: peer.config.Node, Theirs: theirs, Source: there, VNI: vni},
		)
	}
	return all
}

// renumbered returns a node's entries with the numbers of another region.
func renumbered(all []pipeline.Entry, vni pipeline.VNI, region netip.Prefix) []pipeline.Entry {
	for i, e := range all {
		switch e := e.(type) {
		case pipeline.Peer:
			all[i] = pipeline.Peer{Nodes: region}
		case pipeline.Sender:
			e.VNI = vni
			all[i] = e
		case pipeline.Forward:
			e.VNI = vni
			all[i] = e
		}
	}
	return all
}

// tunnels returns the tunnels from which a node has received packets: sender, VNI and identity. It waits for a known
// number of them.
func tunnels(ctx context.Context, c *packet.Capture, known int) []string {
	seen := map[string]bool{}
	for len(seen) < known {
		got, err := c.Next(ctx)
		if err != nil {
			break
		}
		p, err := packet.DecodeFrame(got.Frame)
		if udp, ok := p.Body.(packet.UDP); err == nil && ok && udp.DestinationPort == outerUDP && len(udp.Payload) > 8 {
			head := binary.BigEndian.Uint64(udp.Payload)
			seen[fmt.Sprintf("%v %d %d", p.Source, head>>8&0xffffff, uint16(head>>32))] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}
