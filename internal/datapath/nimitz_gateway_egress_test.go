package datapath

import (
	"net/netip"
	"testing"

	"github.com/google/nftables"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestGatewayLeaksNothing: whatever the gateway's stack sends, only packets from its own addresses reach the underlay,
// and with these addresses it reaches no container.
func TestGatewayLeaksNothing(t *testing.T) {
	w := newUnderlayWire(t)
	n := w.nodes[0]
	b := &nimitzBench{testNode: n}
	block, _ := address.DefaultPlan().GatewayBlock(n.prefix, false)
	own, virtual := tenant.UnderlayAddress(n.prefix, 1), nimitz.ContainerAddress(block, 1)
	inside, err := netns.Open(w.paths[0])
	must(t, err)
	defer inside.Close()
	inject, err := packet.NewInjector(inside, "underlay")
	must(t, err)
	defer inject.Close()
	frame := func(from, to netip.Addr) []byte {
		return packet.Packet{Source: from, Destination: to, Body: gram}.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
	}
	for _, c := range []struct {
		name  string
		frame []byte
		why   dropreason.Reason
	}{
		{"a container's virtual address", frame(virtual, w.hostAddr), dropreason.Untranslated},
		{"a container's overlay address", frame(netip.MustParseAddr("fd10:0:0:1::2"), w.hostAddr),
			dropreason.Untranslated},
		{"the node's address", frame(n.prefix.Addr().Next(), w.hostAddr), dropreason.Untranslated},
		{"a tunnel address", frame(pipeline.VTEP(n.prefix), pipeline.VTEP(w.nodes[1].prefix)), dropreason.Untranslated},
		{"a container's netpila address", frame(address.Plain{Node: n.prefix, Tenant: 1, App: address.GatewayApp,
			Index: 1}.Addr(), w.hostAddr), dropreason.Untranslated},
		{"another gateway's address", frame(tenant.UnderlayAddress(w.nodes[1].prefix, 1), w.hostAddr),
			dropreason.Untranslated},
		{"to a container of netpila", frame(own, address.Plain{Node: w.nodes[1].prefix, Tenant: 1, App: 1,
			Index: 1}.Addr()), dropreason.TenantMismatch},
		{"to the private prefix", frame(own, netip.MustParseAddr("fc00::7")), dropreason.PrivateOutside},
		{"to its own node", frame(own, n.prefix.Addr().Next()), dropreason.NoRoute},
		{"a tag", tag(frame(own, w.hostAddr)), dropreason.NotIp6},
		{"cut short", packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC, packet.EtherTypeIPv6, make([]byte, 10)),
			dropreason.Malformed},
		{"IPv4", packet.Packet{Source: own4, Destination: far4, Body: gram}.Frame(pipeline.OutsideMAC,
			pipeline.InsideMAC), dropreason.NotIp6},
	} {
		before := b.drops(t)
		must(t, inject.Send(c.frame))
		b.dropped(t, c.name, before, c.why)
	}

	// The gateway drops packets that match none of its rules.
	before := b.drops(t)
	ping := func(at netip.Addr) {
		r, err := packet.Ping(t.Context(), w.host, at, packet.PingOptions{Count: 1, Timeout: impatience})
		if err != nil || r.Received != 0 {
			t.Errorf("%v answers: %v", at, err)
		}
	}
	ping(tenant.UnderlayAddress(n.prefix, 7))
	if got := b.counted(t, before); len(got) != 0 {
		t.Errorf("what is not published: %v", got)
	}
	// Without its rules, what it forwards is dropped here.
	c := w.add(t, 1, 7, 2)
	service := netip.MustParseAddr("fd10:9::9")
	w.toService(t, 1, 7, c, service, w.hostAddr)
	nft, err := nftables.New(nftables.WithNetNSFd(inside.FD()))
	must(t, err)
	nft.FlushRuleset()
	must(t, nft.Flush())
	before = b.drops(t)
	if r, err := packet.Ping(t.Context(), c.ns, service, packet.PingOptions{Count: 1,
		Timeout: impatience}); err != nil ||
		r.Received != 0 {
		t.Errorf("the service answers without rules: %v", err)
	}
	b.dropped(t, "without rules", before, dropreason.Untranslated)
	// Without a gateway no device has its addresses.
	must(t, n.datapath.SetTunnelNode(func(v *bpfobj.PilasterNimitzNode) { v.Underlay = 0 }))
	before = b.drops(t)
	ping(own)
	b.dropped(t, "a node without a gateway", before, dropreason.NoEndpoint)
}
