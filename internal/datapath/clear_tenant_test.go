package datapath

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// TestClearTenantsStayInside: packets of a clear tenant are not translated, but the programs check them like others.
func TestClearTenantsStayInside(t *testing.T) {
	b := newProgBench(t)
	p := b.add(t, plain, 1)
	far := func(change func(*address.Plain)) netip.Addr {
		a := address.Split(p.plain())
		a.Node = b.far.prefix
		change(&a)
		return a.Addr()
	}
	for _, c := range []struct {
		name, reason string
		to           netip.Addr
	}{
		{"the internet", "dst-not-private", netip.MustParseAddr("2001:db8::1")},
		{"the tenant's id outside the base", "dst-not-private",
			far(func(a *address.Plain) { a.Node = netip.MustParsePrefix("fd70:696c:6200:2::/64") })},
		{"what an encrypted tenant's containers see", "dst-not-private", b.b1.seen()},
		{"another tenant", "tenant-mismatch", b.b3.Addr()},
		{"a node", "to-node", b.far.prefix.Addr().Next()},
		{"the alias of a node", "to-node", far(func(a *address.Plain) { a.App = 0xff00 })},
		{"a reserved app", "app-reserved", far(func(a *address.Plain) { a.App = 0xff02 })},
	} {
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: p.ifindex()}, progCase{
			name: c.name, reason: c.reason, frame: b.frame(packet.Packet{Source: p.seen(), Destination: c.to,
				Body: echo}),
		})
	}
}

// TestOnlyTheUplinkLeadsOut: a route through any other device of the node is none for containers.
func TestOnlyTheUplinkLeadsOut(t *testing.T) {
	b := newProgBench(t)
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "other0"
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "other1"}))
	other, err := h.LinkByName("other0")
	must(t, err)
	must(t, h.LinkSetUp(other))
	elsewhere := b.b3
	elsewhere.Node = netip.MustParsePrefix("fd70:696c:6100:98::/64")
	must(t, h.RouteAdd(&netlink.Route{Dst: host.IPNet(elsewhere.Node), LinkIndex: other.Attrs().Index}))
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, progCase{
		name: "through another device", frame: b.frame(b.sent(sees(allocated(elsewhere).Addr()), echo)),
		reason: "no-route",
	})
}
