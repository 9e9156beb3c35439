package egress_test

import (
	"context"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestEgressPrefix: egress addresses may be of a prefix of their own, for which node, fabric, preflight and reset do
// what they do for the node's prefix.
func TestEgressPrefix(t *testing.T) {
	s := spec()
	s.EgressPrefix = netip.MustParsePrefix("2001:db8:e::/48")
	b := newBed(t, s)
	ctx := labtest.Context(t)
	t.Run("fabric", func(t *testing.T) { b.of(t).egressFabric(ctx) })
	t.Run("node", func(t *testing.T) { b.of(t).egressRoute(ctx) })
	t.Run("traffic", func(t *testing.T) { b.of(t).egressTraffic(ctx) })
	t.Run("reset", func(t *testing.T) { b.of(t).egressReset(ctx) })
}

// egressFabric: the router routes each node's /64 to the node, and accepts sources of it from this node only.
func (b bed) egressFabric(ctx context.Context) {
	n2, err := b.Namespace("n2")
	must(b.T, err)
	defer n2.Close()
	capture, err := packet.NewCapture(n2, b.Uplinks()[len(b.Uplinks())-1], packet.IncomingOnly)
	must(b.T, err)
	defer capture.Close()
	to := netip.MustParseAddr("2001:db8:e:2::1")
	send := func(node, source string) packet.Sentinel {
		ns, err := b.Namespace(node)
		must(b.T, err)
		defer ns.Close()
		inject, err := packet.NewInjector(ns, lab.Uplink)
		must(b.T, err)
		defer inject.Close()
		sentinel := packet.NewSentinel()
		p := packet.Packet{Source: netip.MustParseAddr(source), Destination: to, HopLimit: 9,
			Body: packet.UDP{SourcePort: 9, DestinationPort: 9, Payload: sentinel[:]}}
		must(b.T, inject.Send(p.Frame(b.routerMAC(node), inject.MAC())))
		return sentinel
	}
	forged := send("n3", "2001:db8:e:1::7")
	fromOutside := send("internet", "2001:db8:e:1::7")
	// A packet has passed the router, or not, when the send call returns, because all devices are veths.
	own := send("internet", b.address("internet").String())
	seen, err := capture.Until(ctx, own.In)
	must(b.T, err)
	if slices.ContainsFunc(seen, forged.In) || slices.ContainsFunc(seen, fromOutside.In) {
		b.Error("a forged packet passed the router")
	}
}

// routerMAC is the MAC of the router's device to a place.
func (b bed) routerMAC(place string) []byte {
	b.Helper()
	router, err := b.Namespace(lab.Router)
	must(b.T, err)
	defer router.Close()
	h, err := router.Netlink()
	must(b.T, err)
	defer h.Close()
	link, err := h.LinkByName(place)
	must(b.T, err)
	return link.Attrs().HardwareAddr
}

// egressRoute: the node has an unreachable route for its /64, and preflight finds the fabric's route.
func (b bed) egressRoute(ctx context.Context) {
	routes, err := b.Output(ctx, "n1", "ip", "-6", "route", "show", "2001:db8:e:1::/64")
	if err != nil || !strings.HasPrefix(routes, "unreachable 2001:db8:e:1::/64 ") {
		b.Errorf("route of n1: %q, %v", routes, err)
	}
	said, err := b.Output(ctx, "n1", "pilaster", "preflight", "--uplink", strings.Join(b.Uplinks(), ","), "-o", "json")
	var checks []struct{ Check, State, Says string }
	if err := json.Unmarshal([]byte(said), &checks); err != nil {
		b.Fatal(err)
	}
	names := []string{"route of egress addresses", "egress prefix", "route to this node", "source check"}
	if len(b.Uplinks()) > 1 {
		names = append(names, "source check, to hosts outside")
	}
	for _, name := range names {
		i := slices.IndexFunc(checks, func(c struct{ Check, State, Says string }) bool { return c.Check == name })
		if i < 0 || checks[i].State != "ok" {
			b.Errorf("preflight says nothing about %s, or is not content: %s, %v", name, said, err)
		}
	}
}

// egressTraffic: hosts outside see addresses of the prefix.
func (b bed) egressTraffic(ctx context.Context) {
	b.allow(ctx, "blue", everywhere)
	for container, node := range map[string]string{"b1": "2001:db8:e:1::/64", "b2": "2001:db8:e:2::/64"} {
		seen := b.reaches(container, b.address("internet"))
		if !netip.MustParsePrefix(node).Contains(seen) || !tenant.IsEgressAddress(seen) {
			b.Errorf("the server sees %s as %v, want an egress address of %s", container, seen, node)
		}
	}
	b.allow(ctx, "blue", everywhere, "n3")
	labtest.Until(b.T, patience, "the gateway has an address of the prefix", func() bool {
		return netip.MustParsePrefix("2001:db8:e:3::/64").Contains(b.reaches("b1", b.address("internet")))
	})
	b.inbound()
}

// egressReset: a reset of the node removes the route.
func (b bed) egressReset(ctx context.Context) {
	for _, c := range b.Containers() {
		if c.Node == "n1" {
			must(b.T, b.RemoveContainer(ctx, c.Name))
		}
	}
	must(b.T, b.Stop(ctx, lab.AgentProcess("n1")))
	if _, err := b.Output(ctx, "n1", "pilaster", "node", "reset", "--yes"); err != nil {
		b.Error(err)
	}
	routes, err := b.Output(ctx, "n1", "ip", "-6", "route", "show", "type", "unreachable")
	if err != nil || routes != "" {
		b.Errorf("after the reset, n1 has %q, %v", routes, err)
	}
}
