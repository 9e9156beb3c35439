package egress_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestGateways has one lab for rules with gateways.
func TestGateways(t *testing.T) {
	b := newBed(t, spec())
	ctx := labtest.Context(t)
	t.Run("one", func(t *testing.T) { b.of(t).oneGateway(ctx) })
	t.Run("own node", func(t *testing.T) { b.of(t).ownNode(ctx) })
	t.Run("killed", func(t *testing.T) { b.of(t).killed(ctx) })
}

// seenAs connects the containers to a host, and checks that it sees one address of the gateway's node for a tenant.
func (b bed) seenAs(container, gateway string) netip.Addr {
	b.Helper()
	prefix, err := b.Prefix(gateway)
	must(b.T, err)
	seen := b.reaches(container, b.address("internet"))
	if !tenant.IsEgressAddress(seen) || !prefix.Contains(seen) {
		b.Errorf("the server sees %s as %v, want an egress address of %s", container, seen, gateway)
	}
	return seen
}

// oneGateway: a host sees one address of the gateway for all containers of a tenant, and another for another tenant.
func (b bed) oneGateway(ctx context.Context) {
	seen := map[string]netip.Addr{}
	for name := range tenants {
		b.allow(ctx, name, everywhere, "n3")
	}
	for _, c := range b.Containers() {
		is := b.seenAs(c.Name, "n3")
		if was := seen[c.Tenant]; was.IsValid() && was != is {
			b.Errorf("the server sees %v and %v for tenant %s", was, is, c.Tenant)
		}
		seen[c.Tenant] = is
	}
	if seen["blue"] == seen["glass"] {
		b.Errorf("the server sees both tenants as %v", seen["blue"])
	}
	for _, c := range b.Containers() {
		by, err := b.datagram(c.Name, netip.Addr{}, b.address("internet"), patience)
		if err != nil || by != seen[c.Tenant] {
			b.Errorf("by UDP, the server sees %s as %v (%v), want %v", c.Name, by, err, seen[c.Tenant])
		}
		e, err := b.Ping(ctx, c.Name, "internet", packet.PingOptions{Count: 3, Timeout: patience, Size: 1000})
		if err != nil || e.Received != 3 {
			b.Errorf("%s by the gateway: ping: %+v, %v", c.Name, e, err)
		}
		if is := b.try("internet", netip.Addr{}, seen[c.Tenant]); is == reached {
			b.Errorf("the server connects to the gateway's address %v", seen[c.Tenant])
		}
	}
	n1, err := b.Prefix("n1")
	must(b.T, err)
	n3, err := b.Prefix("n3")
	must(b.T, err)
	for name, container := range tenants {
		b.judged(container, seen[name], fmt.Sprintf("%v,%v>%v,%v", tenant.EgressTunnel(n1), b.plaintext(container),
			tenant.EgressTunnel(n3), b.address("internet")))
	}
	b.inbound()
	b.pathMTU()
}

// ownNode: the gateway is the container's own node.
func (b bed) ownNode(ctx context.Context) {
	b.allow(ctx, "blue", everywhere, "n1")
	labtest.Until(b.T, patience, "the gateway is n1", func() bool {
		prefix, err := b.Prefix("n1")
		must(b.T, err)
		return prefix.Contains(b.reaches("b2", b.address("internet")))
	})
	if one, two := b.seenAs("b1", "n1"), b.seenAs("b2", "n1"); one != two {
		b.Errorf("the server sees %v and %v", one, two)
	}
}

// drop makes the router drop all packets to a prefix, or no longer.
func (b bed) drop(to netip.Prefix, drops bool) error {
	router, err := b.Namespace(lab.Router)
	if err != nil {
		return err
	}
	defer router.Close()
	h, err := router.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	first := &netlink.Route{
		Dst:  &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), 128)},
		Type: unix.RTN_BLACKHOLE, Priority: 1,
	}
	if drops {
		return h.RouteAdd(first)
	}
	return h.RouteDel(first)
}

// killed: of two gateways, one disappears. Connections by the other go on; those that begin a second later use it.
func (b bed) killed(ctx context.Context) {
	b.allow(ctx, "blue", everywhere, "n2", "n3")
	to := b.address("internet")
	flows := map[string][]*flow{} // by the gateway's node
	gateway := func(seen netip.Addr) string {
		for _, node := range []string{"n2", "n3"} {
			if prefix, err := b.Prefix(node); err == nil && prefix.Contains(seen) {
				return node
			}
		}
		return ""
	}
	// A connection that begins before n1 has the new rule uses the old rule's gateway, and ends with it.
	labtest.Until(b.T, patience, "the rule with both gateways is in force", func() bool {
		return gateway(b.reaches("b1", to)) != ""
	})
	labtest.Until(b.T, patience, "both gateways have connections", func() bool {
		f, err := b.connect("b1", netip.Addr{}, to, patience)
		must(b.T, err)
		flows[gateway(f.seen)] = append(flows[gateway(f.seen)], f)
		return len(flows["n2"]) >= 3 && len(flows["n3"]) >= 3
	})
	lost, err := b.Prefix("n3")
	must(b.T, err)
	must(b.T, b.drop(lost, true))
	time.Sleep(time.Second) // the promise
	for i := range 20 {
		f, err := b.connect("b1", netip.Addr{}, to, time.Second)
		if err != nil {
			b.Errorf("connection %d, a second after gateway n3 was lost: %v", i, err)
			continue
		}
		if by := gateway(f.seen); by != "n2" {
			b.Errorf("connection %d uses %q", i, by)
		}
		f.Close()
	}
	for _, f := range flows["n2"] {
		if err := f.echo(patience); err != nil {
			b.Errorf("a connection by the other gateway: %v", err)
		}
	}
	must(b.T, b.drop(lost, false))
	labtest.Until(b.T, patience, "gateway n3 has new connections", func() bool {
		f, err := b.connect("b1", netip.Addr{}, to, time.Second)
		if err != nil {
			return false
		}
		defer f.Close()
		return gateway(f.seen) == "n3"
	})
}
