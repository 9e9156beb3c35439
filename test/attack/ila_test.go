package attack_test

import (
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// addILA adds two tenants of network ila, s1 and t1 on n1, s2 and t2 on n2.
func addILA(spec lab.Spec) lab.Spec {
	for _, name := range []string{"silver", "tin"} {
		spec.Tenants = append(spec.Tenants, lab.Tenant{Name: name, Network: tenant.ILA})
		for i, node := range []string{"n1", "n2"} {
			spec.Containers = append(spec.Containers,
				lab.Container{Name: name[:1] + string('1'+rune(i)), Node: node, Tenant: name})
		}
	}
	return spec
}

// ila returns attacks with packets from containers on network ila, and with packets on the fabric, where only their
// nodes may send them (IL1, IL3).
func (b *bed) ila(t *testing.T) []attack {
	use, err := address.DefaultPlan().ILA()
	if err != nil {
		t.Fatal(err)
	}
	s1, s2, t1, t2 := b.container(t, "s1").Address, b.container(t, "s2").Address, b.container(t, "t1").Address,
		b.container(t, "t2").Address
	mallory, b1, b2 := b.container(t, "mallory"), b.container(t, "b1"), b.container(t, "b2")
	at := func(a netip.Addr, node string) netip.Addr {
		locator, err := use.Locator(b.prefix(t, node))
		if err != nil {
			t.Fatal(err)
		}
		return use.ToWire(a, locator)
	}
	bytes := s1.As16()
	bytes[12], bytes[15] = 0xee, 1
	absent := netip.AddrFrom16(bytes)
	meddling := func(source, to, quotedFrom, quotedTo netip.Addr) packet.Packet {
		return packet.Packet{Source: source, Destination: to,
			Body: packet.ICMP{Type: packet.TimeExceeded, Payload: datagram(quotedFrom, quotedTo).Marshal()}}
	}
	fabric := func(name string, why dropreason.Reason, packets ...packet.Packet) attack {
		return b.wire(name, onRouter+"n2", onNode+"n2", why, "n2", 1, packets...)
	}
	stranger := netip.MustParseAddr("2001:db8:70:99::1")
	return []attack{
		from("another source", "s1", dropreason.SrcNotOwn, "n1", 0, datagram(s2, s2), datagram(t1, s2),
			datagram(at(s1, "n1"), s2), datagram(b1.Address, s2)),
		from("another tenant, here and there", "s1", dropreason.TenantMismatch, "n1", 0, datagram(s1, t1),
			datagram(s1, t2)),
		from("no container is there", "s1", dropreason.NoMapping, "n1", 0, datagram(s1, absent)),
		from("another network", "s1", dropreason.DstNotPrivate, "n1", 0, datagram(s1, b1.Address),
			datagram(s1, b1.Plaintext), datagram(s1, at(s2, "n2")), datagram(s1, b.prefix(t, "n2").Addr().Next()),
			datagram(s1, stranger)),
		from("many", "s1", dropreason.Multicast, "n1", 0, datagram(s1, netip.MustParseAddr("ff02::1"))),
		from("error about a packet of others", "s1", dropreason.IcmpQuote, "n1", 0, meddling(s1, s2, s2, absent)),
		from("a container of netpila to one of ila", "mallory", dropreason.DstNotPrivate, "n1", 0,
			datagram(mallory.Address, s1), datagram(mallory.Address, at(s2, "n2"))),
		fabric("from another node", dropreason.LocatorMismatch, datagram(at(s1, "n3"), at(s2, "n2"))),
		fabric("from this node", dropreason.OwnSource, datagram(at(s1, "n2"), at(s2, "n2"))),
		fabric("of another tenant, of another network, of a host", dropreason.TenantMismatch,
			datagram(at(t1, "n1"), at(s2, "n2")), datagram(b1.Plaintext, at(s2, "n2")),
			datagram(stranger, at(s2, "n2")), datagram(s1, at(s2, "n2")), datagram(at(s1, "n1"), b2.Plaintext)),
		fabric("of no container", dropreason.NoMapping, datagram(at(absent, "n1"), at(s2, "n2"))),
		fabric("to no container", dropreason.NoEndpoint, datagram(at(s1, "n1"), at(absent, "n2")),
			datagram(at(s1, "n1"), at(s1, "n2"))),
		fabric("to a node", dropreason.TenantToNode, datagram(at(s1, "n1"), b.prefix(t, "n2").Addr().Next())),
		fabric("error about a packet of others, of a router", dropreason.IcmpQuote,
			meddling(stranger, at(s2, "n2"), at(t2, "n2"), at(s1, "n1"))),
		b.wire("a process as a container", onNode+"n3", onRouter+"n3", dropreason.HostClaimsTenant, "n3", 0,
			datagram(at(s1, "n3"), at(s2, "n2"))),
	}
}
