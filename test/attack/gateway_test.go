package attack_test

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

var gatewaySpec = lab.Spec{
	Nodes:   []string{"n1", "n2", "n3"}, // n2 is violet's gateway
	Outside: []lab.OutsideHost{{Name: "internet"}},
	Tenants: []lab.Tenant{
		{Name: "violet", Egress: []lab.EgressRule{
			{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress, Via: []string{"n2"}}}},
		{Name: "blue", Egress: []lab.EgressRule{{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress}}},
		{Name: "red"},
	},
	Containers: []lab.Container{
		{Name: "mallory", Node: "n1", Tenant: "violet"}, {Name: "v1", Node: "n1", Tenant: "violet"},
		{Name: "v2", Node: "n2", Tenant: "violet"}, {Name: "v3", Node: "n3", Tenant: "violet"},
		{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b2", Node: "n2", Tenant: "blue"},
		{Name: "r1", Node: "n1", Tenant: "red"}, {Name: "r3", Node: "n3", Tenant: "red"},
	},
}

// TestGatewayAttacks attacks egress gateways and the nodes that use them.
func TestGatewayAttacks(t *testing.T) {
	t.Parallel()
	b := newBed(t, gatewaySpec, [][2]string{
		{"mallory", "v1"}, {"mallory", "v2"}, {"v2", "v3"}, {"b1", "b2"}, {"b2", "b1"},
		{"r1", "r3"}, {"r3", "r1"},
	})
	b.open(t, "internet", "internet", lab.Uplink, false)
	b.open(t, onRouter+"internet", lab.Router, "internet", false)
	stable := b.seenOutside(t, "mallory")
	b.openAgain(t)
	for _, a := range b.gateways(t, stable) {
		t.Run(a.name, func(t *testing.T) { b.try(t, a) })
	}
	// The gateway is alive, whatever hosts outside have said, and connections go on.
	if now := b.seenOutside(t, "mallory"); now != stable {
		t.Errorf("a host outside sees %v after the attacks, and %v before", now, stable)
	}
}

// tunnelled is a packet in the tunnel between two addresses.
func tunnelled(from, to netip.Addr, inner packet.Packet) packet.Packet {
	return packet.Packet{Source: from, Destination: to, Body: packet.Raw{Proto: 41, Data: inner.Marshal()}}
}

// gateways returns the attacks. stable is the gateway's address for violet.
func (b *bed) gateways(t *testing.T, stable netip.Addr) []attack {
	t.Helper()
	const uplink = "2001:db8:70:2::2" // of the gateway's node
	mallory, v1, v2, v3 := b.container(t, "mallory"), b.container(t, "v1"), b.container(t, "v2"), b.container(t, "v3")
	b1, r1 := b.container(t, "b1"), b.container(t, "r1")
	n1, n2, n3 := b.prefix(t, "n1"), b.prefix(t, "n2"), b.prefix(t, "n3")
	t1, t2, t3 := tenant.EgressTunnel(n1), tenant.EgressTunnel(n2), tenant.EgressTunnel(n3)
	internet, err := b.Address("internet")
	if err != nil {
		t.Fatal(err)
	}
	// outside is an attack of the host outside; ports says whether the router lets its packets through.
	outside := func(name string, why dropreason.Reason, at string, ports int, packets ...packet.Packet) attack {
		return attack{name: name, from: "internet", why: why, at: at, ports: ports,
			frames: frames(b.inject[onRouter+"internet"], b.inject["internet"], packets)}
	}
	probe := func(from, to netip.Addr) packet.Packet {
		const magic, alive = 0x50475750, 2
		return packet.Packet{Source: from, Destination: to,
			Body: packet.Raw{Proto: packet.NoNextHeader,
				Data: append(binary.BigEndian.AppendUint32(nil, magic), alive, 0, 0, 0)}}
	}
	var protected []packet.Packet
	for _, to := range []string{"::1", "fd00:ec2::254", "fe80::1", "ff02::1", "64:ff9b::a00:1", "64:ff9b:1::1",
		uplink} {
		protected = append(protected, tunnelled(t1, t2, datagram(mallory.Plaintext, netip.MustParseAddr(to))))
	}
	for _, to := range []netip.Addr{
		n1.Addr().Next(), n2.Addr().Next(), n3.Addr().Next(), t2, t3, stable, v2.Plaintext, v3.Plaintext, v2.Address,
	} {
		protected = append(protected, tunnelled(t1, t2, datagram(mallory.Plaintext, to)))
	}
	elsewhere := address.Plain{Node: n1, Tenant: b.tenants["violet"].id, App: address.GatewayApp, Index: 1}.Addr()
	notAnswered := datagram(stable, internet)
	notAnswered.Body = packet.UDP{SourcePort: 999, DestinationPort: 999}
	return []attack{
		from("a container, to a tunnel", "mallory", dropreason.DstNotPrivate, "n1", 0,
			tunnelled(mallory.Address, t2, datagram(b1.Plaintext, internet)),
			tunnelled(mallory.Address, t1, datagram(internet, b1.Plaintext)), probe(mallory.Address, t1),
			probe(mallory.Address, t2), datagram(mallory.Address, stable)),
		from("a container, as a node", "mallory", dropreason.SrcNotOwn, "n1", 0,
			tunnelled(t1, t2, datagram(b1.Plaintext, internet)), tunnelled(mallory.Plaintext, t2,
				datagram(mallory.Plaintext, internet)), probe(t2, t1), datagram(stable, internet),
			datagram(mallory.Plaintext, internet)),
		from("a container without the rule", "r1", dropreason.DstNotPrivate, "n1", 0, datagram(r1.Address, internet)),
		outside("a host outside, in a tunnel", dropreason.GatewayDenied, "n2", 1,
			tunnelled(internet, t2, datagram(mallory.Plaintext, internet)),
			tunnelled(internet, t2, datagram(b1.Plaintext, internet)),
			tunnelled(internet, t2, datagram(internet, v2.Plaintext)), probe(internet, t2)),
		outside("a host outside, as a gateway", dropreason.GatewayDenied, "n1", 1,
			tunnelled(internet, t1, datagram(internet, mallory.Plaintext)), probe(internet, t1)),
		outside("a host outside, with the source of a node", 0, "", 0, // the router drops it
			tunnelled(t1, t2, datagram(mallory.Plaintext, internet)),
			tunnelled(t2, t1, datagram(internet, mallory.Plaintext))),
		outside("inbound without a session", dropreason.NoSession, "n2", 1,
			datagram(internet, stable), packet.Packet{Source: internet, Destination: stable,
				Body: packet.TCP{SourcePort: 443, DestinationPort: 443, Flags: packet.SYN}}),
		outside("an error about no connection", dropreason.NoSession, "n2", 1,
			quoting(internet, stable, notAnswered.Marshal())),
		outside("an error about a packet of others", dropreason.IcmpQuote, "n2", 1,
			quoting(internet, stable, datagram(mallory.Plaintext, internet).Marshal()),
			quoting(internet, stable, datagram(internet, stable).Marshal())),
		b.hosted("n1", "a host process, in a tunnel", dropreason.HostClaimsTenant,
			tunnelled(t1, t2, datagram(b1.Plaintext, internet)), tunnelled(t2, t3, datagram(internet, v3.Plaintext)),
			probe(t1, t2), probe(t2, t3)),
		b.hosted("n2", "a host process, with the gateway's address", dropreason.HostClaimsTenant,
			datagram(stable, internet), tunnelled(t2, t1, datagram(internet, mallory.Plaintext))),
		b.hosted("n3", "a process of another node, with the gateway's address", dropreason.HostClaimsTenant,
			datagram(stable, internet)),
		b.routed("n2", "another node, for containers of others", dropreason.GatewayDenied,
			tunnelled(t3, t2, datagram(mallory.Plaintext, internet)),
			tunnelled(t3, t2, datagram(b1.Plaintext, internet)),
			tunnelled(t3, t2, datagram(v2.Plaintext, internet))),
		b.routed("n2", "a tenant without the gateway", dropreason.GatewayDenied,
			tunnelled(t1, t2, datagram(r1.Plaintext, internet)), tunnelled(t1, t2, datagram(b1.Plaintext, internet)),
			tunnelled(t1, t2, datagram(elsewhere, v2.Plaintext)),
			tunnelled(t1, t2, datagram(n1.Addr().Next(), internet))),
		b.routed("n2", "the gateway's own tunnel address as source", dropreason.OwnSource,
			tunnelled(t2, t2, datagram(v2.Plaintext, internet)), probe(t2, t2)),
		b.routed("n2", "protected, by the gateway", dropreason.GatewayDenied, protected...),
		b.routed("n1", "another node, as a gateway", dropreason.GatewayDenied,
			tunnelled(t3, t1, datagram(internet, mallory.Plaintext)),
			tunnelled(t3, t1, datagram(internet, v1.Plaintext)),
			tunnelled(t3, t1, quoting(internet, mallory.Plaintext, datagram(mallory.Plaintext, internet).Marshal()))),
		b.routed("n1", "the gateway, for a tenant without it", dropreason.GatewayDenied,
			tunnelled(t2, t1, datagram(internet, b1.Plaintext)), tunnelled(t2, t1, datagram(internet, r1.Plaintext)),
			tunnelled(t2, t1, datagram(netip.MustParseAddr("fd00:ec2::254"), v1.Plaintext))),
		b.routed("n1", "the gateway, without a session", dropreason.NoSession,
			tunnelled(t2, t1, datagram(internet, v1.Plaintext)),
			tunnelled(t2, t1, datagram(internet, mallory.Plaintext))),
		b.routed("n1", "the gateway's address as source", dropreason.TenantMismatch, datagram(stable, v1.Plaintext)),
	}
}
