package egress_test

import (
	"context"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// TestNodes: processes of other nodes reach containers, and containers reach them, only if their tenant allows nodes.
func TestNodes(t *testing.T) {
	b := newBed(t, spec())
	ctx := labtest.Context(t)
	for name, container := range tenants {
		t.Run(name, func(t *testing.T) { b.of(t).nodeTraffic(ctx, name, container) })
	}
}

// node is the address of a node.
func (b bed) node(name string) netip.Addr {
	b.Helper()
	p, err := b.Prefix(name)
	must(b.T, err)
	return p.Addr().Next()
}

// alias is the address at which a container sees the processes of a node that connect to it.
func (b bed) alias(node, container string) netip.Addr {
	b.Helper()
	var seen netip.Addr
	labtest.Until(b.T, patience, node+" reaches "+container, func() bool {
		f, err := b.connect(node, b.node(node), b.plaintext(container), silence)
		if err != nil {
			return false
		}
		defer f.Close()
		seen = f.seen
		return true
	})
	return seen
}

// nodeTraffic is for a tenant with a container on n1.
func (b bed) nodeTraffic(ctx context.Context, tenantName, container string) {
	to := b.plaintext(container)
	if is := b.try("n2", b.node("n2"), to); is == reached {
		b.Errorf("n2 reaches %s, whose tenant allows no nodes", container)
	}
	if is := b.try("n1", netip.Addr{}, b.address(container)); is != reached {
		b.Errorf("n1 to its own container %s: %s", container, is)
	}
	pings := func(reached bool, pairs ...[2]string) {
		b.Helper()
		for _, p := range pairs {
			e, err := b.Ping(ctx, p[0], p[1], packet.PingOptions{Count: 2, Timeout: patience / 10})
			if err != nil || e.Reached() != reached || (e.ToNode == tenantName) != (!reached && p[0] == container) ||
				p[0] == "n2" && e.Address != to {
				b.Errorf("ping from %s to %s: %+v, %v; want an answer: %t", p[0], p[1], e, err, reached)
			}
		}
	}
	pings(false, [2]string{container, "n2"}, [2]string{"n2", container}, [2]string{container, "n1"})
	must(b.T, b.SetNodes(ctx, tenantName, "allow"))
	alias := b.alias("n2", container)
	if encrypted := tenantName == "blue"; encrypted == (alias == b.node("n2")) {
		b.Errorf("%s sees n2 as %v", container, alias)
	}
	pings(true, [2]string{container, "n2"}, [2]string{container, "n1"}, [2]string{"n1", container})
	if seen := b.reaches(container, alias); seen != to {
		b.Errorf("n2 sees %s as %v, want %v", container, seen, to)
	}
	if is := b.try("n2", b.node("n2"), b.address(container)); is == reached && tenantName == "blue" {
		b.Errorf("n2 reaches %s by its ciphertext", container)
	}
	if is := b.try("internet", netip.Addr{}, to); is == reached {
		b.Errorf("a host outside reaches %s", container)
	}
	third := b.alias("n3", container)
	n2, err := b.Prefix("n2")
	must(b.T, err)
	must(b.T, b.SetNodes(ctx, tenantName, n2.String()))
	labtest.Until(b.T, patience, "n3 is denied", func() bool { return b.try("n3", b.node("n3"), to) != reached })
	b.alias("n2", container)
	if is := b.try(container, netip.Addr{}, third); is == reached || is == outcome(unix.ECONNREFUSED.Error()) {
		b.Errorf("%s reaches n3: %s", container, is)
	}
	f, err := b.connect("n2", b.node("n2"), to, patience)
	must(b.T, err)
	defer f.Close()
	must(b.T, b.SetNodes(ctx, tenantName, "deny"))
	labtest.Until(b.T, patience, "n2 is denied", func() bool { return b.try("n2", b.node("n2"), to) != reached })
	labtest.Until(b.T, patience, "the connection of n2 ends", func() bool { return f.echo(silence) != nil })
	if is := b.try(container, netip.Addr{}, alias); is == reached || is == outcome(unix.ECONNREFUSED.Error()) {
		b.Errorf("%s reaches n2: %s", container, is)
	}
	if is := b.try("n1", netip.Addr{}, b.address(container)); is != reached {
		b.Errorf("n1 to its own container %s: %s", container, is)
	}
}
