package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
)

// network returns the addresses, routes and static neighbours in a container.
func (c *testContainer) network(t testing.TB) (all []string) {
	t.Helper()
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName(c.record.Interface)
	must(t, err)
	addresses, err := h.AddrList(l, unix.AF_UNSPEC)
	must(t, err)
	for _, a := range addresses {
		all = append(all, "address "+a.IPNet.String())
	}
	routes, err := h.RouteList(l, unix.AF_UNSPEC)
	must(t, err)
	for _, r := range routes {
		if r.Gw != nil {
			all = append(all, fmt.Sprintf("route %v by %v", host.PrefixOf(r.Dst), r.Gw))
		}
	}
	neighbours, err := h.NeighList(l.Attrs().Index, unix.AF_UNSPEC)
	must(t, err)
	for _, n := range neighbours {
		if n.State == netlink.NUD_PERMANENT {
			all = append(all, "neighbour "+n.IP.String())
		}
	}
	slices.Sort(all)
	return all
}

// TestReaddress: a running container gets a second attachment, then keeps only that one. Each step runs twice, as after
// a crash of the agent. If an attachment would take another device's route, nothing is changed.
func TestReaddress(t *testing.T) {
	w := newNimitzWire(t)
	c, n := w.add(t, 1, 7, 2), w.nodes[0]
	was := c.record
	more := endpoint.Attachment{
		Network: "netpila", Plaintext: netip.MustParseAddr("fd70:696c:6100:1:0:700:1:1"),
		Address: netip.MustParseAddr("fc00::7"),
		Gateway: netip.MustParseAddr("fe80::1"), Routes: []netip.Prefix{netip.MustParsePrefix("fc00::/8")},
	}
	both, only := was, was
	both.Attachments = append(slices.Clone(was.Attachments), more)
	only.Attachments = []endpoint.Attachment{more}
	nodeLeads := func(to endpoint.Attachment) bool {
		t.Helper()
		routes, err := n.datapath.Netlink.RouteList(nil, device.FamilyOf(to))
		must(t, err)
		return slices.ContainsFunc(routes, func(r netlink.Route) bool {
			return host.PrefixOf(r.Dst) == netip.PrefixFrom(to.Address, to.Address.BitLen())
		})
	}
	before := c.network(t)
	added := []string{"address fc00::7/128", "route fc00::/8 by fe80::1"}
	left := slices.Sorted(slices.Values(append([]string{"neighbour fe80::1"}, added...)))
	all := slices.Sorted(slices.Values(append(slices.Clone(before), added...)))
	for _, step := range []struct {
		name    string
		is, was endpoint.Record
		want    []string
	}{{"both", both, was, all}, {"both again", both, was, all}, {"one left", only, both, left}, {"one left again",
		only, both, left}, {"back", both, only, all}, {"without it", was, both, before}} {
		must(t, n.datapath.Readdress(t.Context(), step.was, step.is))
		if got := c.network(t); !slices.Equal(got, step.want) {
			t.Errorf("%s: it has %q, want %q", step.name, got, step.want)
		}
		for _, a := range both.Attachments {
			wanted := a.Network == "netpila" &&
				slices.ContainsFunc(
					step.is.Attachments,
					func(o endpoint.Attachment) bool { return o.Address == a.Address },
				)
			if got := nodeLeads(a); a.Network == "netpila" && got != wanted {
				t.Errorf("%s: the node leads to %v: %v", step.name, a.Address, got)
			}
		}
	}

	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	must(t, err)
	must(t, h.LinkSetUp(lo))
	must(t, n.datapath.CanReaddress(was, both))
	must(t, h.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: host.IPNet(more.Routes[0])}))
	for _, err := range []error{n.datapath.CanReaddress(was, both), n.datapath.Readdress(t.Context(), was, both)} {
		if err == nil || !strings.Contains(err.Error(), "fc00::/8 through its device") ||
			!strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("a route of another device was taken: %v", err)
		}
	}
	if got := c.network(t); !slices.Equal(got, before) || nodeLeads(more) {
		t.Errorf("refused, it has %q, and had %q", got, before)
	}
}

// TestDefaultRoute: a running container gets the default route and loses it again. Another interface that has one, or
// gets one later, keeps it and is preferred, and is no difference to the record.
func TestDefaultRoute(t *testing.T) {
	w := newNimitzWire(t)
	c, n := w.add(t, 1, 7, 2), w.nodes[0]
	only := c.record
	only.Attachments = []endpoint.Attachment{{
		Network: "netpila", Plaintext: netip.MustParseAddr("fd70:696c:6100:1:0:700:1:1"),
		Address: netip.MustParseAddr("fc00::7"),
		Gateway: netip.MustParseAddr("fe80::1"), Routes: []netip.Prefix{netip.MustParsePrefix("fc00::/8")},
	}}
	must(t, n.datapath.Readdress(t.Context(), c.record, only))
	leaves := only
	leaves.Attachments = slices.Clone(only.Attachments)
	leaves.Attachments[0].Routes = append(slices.Clone(only.Attachments[0].Routes), endpoint.DefaultRoute)
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1"}, PeerName: "peer"}))
	second, err := h.LinkByName("eth1")
	must(t, err)
	peer, err := h.LinkByName("peer")
	must(t, err)
	must(t, h.LinkSetUp(peer))
	must(t, h.LinkSetUp(second))
	own, err := h.LinkByName(c.record.Interface)
	must(t, err)
	outside := netip.MustParseAddr("2001:db8::1")
	leadsTo := func(want netlink.Link) {
		t.Helper()
		routes, err := h.RouteGet(outside.AsSlice())
		if want == nil {
			if err == nil && routes[0].Type != unix.RTN_UNREACHABLE {
				t.Errorf("%v leads to device %d", outside, routes[0].LinkIndex)
			}
			return
		}
		if err != nil || routes[0].LinkIndex != want.Attrs().Index {
			t.Errorf("%v leads to %v, %v; want %s", outside, routes, err, want.Attrs().Name)
		}
	}
	before := c.network(t)
	with := slices.Sorted(slices.Values(append(slices.Clone(before), "route ::/0 by fe80::1")))
	other := &netlink.Route{
		LinkIndex: second.Attrs().Index, Dst: host.IPNet(endpoint.DefaultRoute),
		Gw: netip.MustParseAddr("fe80::9").AsSlice(),
	}
	for _, step := range []struct {
		name    string
		change  func() error
		was, is endpoint.Record
		leads   netlink.Link
		want    []string
	}{
		{"added", nil, only, leaves, own, with},
		{"added again", nil, only, leaves, own, with},
		{"removed", nil, leaves, only, nil, before},
		{"removed again", nil, leaves, only, nil, before},
		{"beside another", func() error { return h.RouteAdd(other) }, only, leaves, second, with},
		{"removed beside another", nil, leaves, only, second, before},
		{"without another", func() error { return h.RouteDel(other) }, only, leaves, own, with},
		{"another later", func() error { return h.RouteAdd(other) }, leaves, leaves, second, with},
	} {
		if step.change != nil {
			must(t, step.change())
		}
		must(t, n.datapath.CanReaddress(step.was, step.is))
		must(t, n.datapath.Readdress(t.Context(), step.was, step.is))
		if got := c.network(t); !slices.Equal(got, step.want) {
			t.Errorf("%s: it has %q, want %q", step.name, got, step.want)
		}
		leadsTo(step.leads)
		if err := n.datapath.Check(t.Context(), step.is); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}
}
