package attack_test

import (
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// fabric returns attacks on a node from outside. The router's port sends them, after the fabric's source check, so that
// only the node can detect them.
func (b *bed) fabric(t *testing.T) []attack {
	b1, b2, r1, r2 := b.container(t, "b1"), b.container(t, "b2"), b.container(t, "r1"), b.container(t, "r2")
	n1, n2 := b.prefix(t, "n1"), b.prefix(t, "n2")
	blue := b.tenants["blue"].id
	plain := func(node netip.Prefix, tenant address.TenantID, app address.AppID, index address.Index) netip.Addr {
		return address.Plain{Node: node, Tenant: tenant, App: app, Index: index}.Addr()
	}
	frame := func(p []byte) []byte {
		return packet.Frame(b.inject[onNode+"n2"].MAC(), b.inject[onRouter+"n2"].MAC(), packet.EtherTypeIPv6, p)
	}
	raw := func(name string, why dropreason.Reason, packets ...[]byte) attack {
		a := attack{name: name, from: onRouter + "n2", why: why, at: "n2", ports: 1}
		for _, p := range packets {
			for range many {
				a.frames = append(a.frames, frame(p))
			}
		}
		return a
	}
	try := func(name string, why dropreason.Reason, packets ...packet.Packet) attack {
		var all [][]byte
		for _, p := range packets {
			all = append(all, p.Marshal())
		}
		return raw(name, why, all...)
	}
	stranger := netip.MustParseAddr("2001:db8:70:99::1")
	// An address of blue, except for its base prefix.
	strangerAsBlue := plain(netip.MustParsePrefix("fd70:696c:6000:1::/64"), blue, address.AppID(b1.App), 1)
	viaRouter := datagram(b1.Plaintext, b2.Plaintext)
	viaRouter.Extensions = []packet.Extension{routingHeader(0, b2.Plaintext)}
	advertisement := packet.Packet{Source: b1.Plaintext, Destination: b2.Plaintext, HopLimit: 255,
		Body: packet.ICMP{Type: packet.NeighborAdvertisement, Payload: make([]byte, 16)}}
	solicitation := packet.Packet{Source: b1.Plaintext, Destination: b2.Plaintext, HopLimit: 255,
		Body: packet.ICMP{Type: packet.NeighborSolicitation, Payload: make([]byte, 16)}}

	all := []attack{
		try("own /64 from outside", dropreason.OwnSource,
			datagram(b2.Plaintext, b2.Plaintext), datagram(r2.Plaintext, b2.Plaintext),
			datagram(n2.Addr().Next(), b2.Plaintext),
			datagram(plain(n2, blue, 1, unused), n2.Addr().Next())),
		try("forged source of another tenant", dropreason.TenantMismatch,
			datagram(r1.Plaintext, b2.Plaintext), datagram(b1.Plaintext, r2.Plaintext),
			datagram(plain(n1, b.tenants["green"].id, 1, 1), b2.Plaintext)),
		try("packet of a tunnel that is none of a gateway's", dropreason.GatewayDenied, packet.Packet{
			Source: tenant.EgressTunnel(n1), Destination: tenant.EgressTunnel(n2),
			Body: packet.Raw{Proto: 41, Data: datagram(stranger, b2.Plaintext).Marshal()},
		}),
		try("source that is no container", dropreason.TenantMismatch,
			datagram(n1.Addr().Next(), b2.Plaintext), datagram(stranger, b2.Plaintext),
			datagram(strangerAsBlue, b2.Plaintext),
			datagram(b1.Address, b2.Plaintext)),
		try("reserved app", dropreason.AppReserved,
			datagram(b1.Plaintext, plain(n2, blue, address.FirstReservedApp, 1)),
			datagram(plain(n1, blue, 0xffff, 1), b2.Plaintext)),
		try("absent and released", dropreason.NoEndpoint,
			datagram(b1.Plaintext, plain(n2, blue, address.AppID(b2.App), unused)),
			datagram(b1.Plaintext, b.released["gone2"].Plaintext),
			datagram(b1.Plaintext, plain(n2, address.MaxTenantID, 1, 1))),
		try("container to host", dropreason.TenantToNode, datagram(b1.Plaintext, n2.Addr()),
			datagram(b1.Plaintext, stranger)),
		try("routing header", dropreason.RoutingHeader, viaRouter),
		try("neighbour advertisement", dropreason.NdForbidden, advertisement),
		try("neighbour solicitation", dropreason.NdIgnored, solicitation),
		try("error about a packet of others", dropreason.IcmpQuote,
			quoting(b1.Plaintext, b2.Plaintext, datagram(b2.Plaintext, r1.Plaintext).Marshal()),
			quoting(b1.Plaintext, b2.Plaintext, datagram(b1.Plaintext, b2.Plaintext).Marshal())),
		raw("cut short", dropreason.Malformed, cutShort(b1.Plaintext, b2.Plaintext)...),
		try("ciphertext on the fabric", dropreason.PrivateOutside,
			datagram(b1.Plaintext, b2.Address), datagram(b1.Address, b2.Address),
			datagram(b1.Address, n2.Addr().Next())),
	}
	if labtest.Device() == endpoint.Macvlan {
		guess := attack{name: "a container's MAC", from: onRouter + "n2", why: dropreason.MacOutside, at: "n2",
			ports: 1}
		for range many {
			guess.frames = append(guess.frames,
				datagram(b1.Plaintext, b2.Plaintext).Frame(b.inject["b2"].MAC(), b.inject[onRouter+"n2"].MAC()))
		}
		all = append(all, guess)
	}
	return all
}

// nodes returns attacks of processes on a node, and of machines that are not nodes.
func (b *bed) nodes(t *testing.T) []attack {
	b1, b2, r2, n2 := b.container(t, "b1"), b.container(t, "b2"), b.container(t, "r2"), b.prefix(t, "n2")
	underlay := netip.MustParseAddr("2001:db8:70::2") // the outsider's own address
	return []attack{
		b.wire("process claims a container's address", onNode+"n3", onRouter+"n3", dropreason.HostClaimsTenant, "n3", 0,
			datagram(b1.Plaintext, b2.Plaintext), datagram(b.container(t, "b3").Plaintext, b2.Plaintext),
			datagram(r2.Plaintext, b2.Plaintext)),
		b.wire("process sends to a ciphertext, and as one", onNode+"n3", onRouter+"n3", dropreason.PrivateOutside, "n3",
			0,
			datagram(b.prefix(t, "n3").Addr().Next(), b2.Address),
			datagram(b.container(t, "b3").Address, n2.Addr().Next())),
		b.wire("outsider claims a container's address", outsider, onRouter+outsider, 0, "", 0,
			datagram(b1.Plaintext, b2.Plaintext)),
		b.wire("outsider sends to a container", outsider, onRouter+outsider, dropreason.TenantMismatch, "n2", 1,
			datagram(underlay, b2.Plaintext), datagram(underlay, r2.Plaintext)),
	}
}
