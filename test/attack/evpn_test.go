package attack_test

import (
	"net"
	"net/netip"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/lab"
	module "pilaster.io/pilaster/internal/modules/evpn"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// addEVPN adds two tenants of network evpn with the same addresses, o1 and p1 on n1, o2 and p2 on n2.
func addEVPN(spec lab.Spec) lab.Spec {
	for _, name := range []string{"ochre", "pewter"} {
		spec.Tenants = append(spec.Tenants, lab.Tenant{Name: name, Network: tenant.EVPN,
			CIDRs: []netip.Prefix{netip.MustParsePrefix("fd13::/48"), netip.MustParsePrefix("10.13.0.0/16")}})
		for i, node := range []string{"n1", "n2"} {
			spec.Containers = append(spec.Containers,
				lab.Container{Name: name[:1] + string('1'+rune(i)), Node: node, Tenant: name})
		}
	}
	return spec
}

// evpn returns attacks with frames from containers on network evpn, and with VXLAN packets, which only nodes and the
// VTEPs of peers may send (EV1).
func (b *bed) evpn(t *testing.T) []attack {
	o1, o2, b1 := b.container(t, "o1"), b.container(t, "o2"), b.container(t, "b1")
	ochre, err := b.Operator().GetTenant(b.ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "ochre"}))
	if err != nil {
		t.Fatal(err)
	}
	vni := ochre.Msg.Tenant.Ids[0].Id
	vtep := func(node string) netip.Addr {
		a, ok := address.VTEP4(module.Pool{}.Prefix(), address.DefaultPlan().NodeNumber(b.prefix(t, node)))
		if !ok {
			t.Fatalf("%s has no tunnel address", node)
		}
		return a
	}
	own4, far4, absent4 := o1.Addresses()[1], o2.Addresses()[1], netip.MustParseAddr("10.13.250.1")
	router := evpn.RouterMAC(vtep("n2"))
	// tunnel is a packet to n2, which is sent there by a VTEP.
	tunnel := func(from netip.Addr, vni uint32, inner []byte) packet.Packet {
		return packet.Packet{Source: from, Destination: vtep("n2"), Body: packet.UDP{
			SourcePort: 50000, DestinationPort: pipeline.UDPPort, Payload: packet.VXLAN(vni, 1, inner),
		}}
	}
	inner := func(to net.HardwareAddr, p packet.Packet) []byte { return p.Frame(to, gateway) }
	good := inner(router[:], datagram(own4, far4))
	fabric := func(name string, why dropreason.Reason, packets ...packet.Packet) attack {
		return b.wire(name, onRouter+"n2", onNode+"n2", why, "n2", 1, packets...)
	}
	inside := func(name string, why dropreason.Reason, packets ...packet.Packet) attack {
		return from(name, "o1", why, "n1", 0, packets...)
	}
	question := func(from netip.Addr) []byte {
		target := far4.As4()
		body := append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, container...)
		body = append(append(body, from.AsSlice()...), make([]byte, 6)...)
		return packet.Frame(net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, container, packet.EtherTypeARP,
			append(body, target[:]...))
	}
	spoof := attack{name: "a question as another container", from: "o1", why: dropreason.SrcNotOwn, at: "n1"}
	for range many {
		spoof.frames = append(spoof.frames, question(absent4))
	}
	return []attack{
		inside("another source", dropreason.SrcNotOwn, datagram(o2.Address, o2.Address), datagram(far4, far4),
			datagram(vtep("n1"), far4)),
		spoof,
		inside("no container is there", dropreason.NoEndpoint, datagram(own4, absent4),
			datagram(o1.Address, netip.MustParseAddr("fd13::ffff:0:1"))),
		inside("another network", dropreason.NoRoute, datagram(o1.Address, b1.Address), datagram(own4, vtep("n2")),
			datagram(own4, netip.MustParseAddr("192.0.2.1")), datagram(o1.Address, b.prefix(t, "n2").Addr().Next())),
		inside("many", dropreason.NotReplicated, datagram(o1.Address, netip.MustParseAddr("ff02::1")),
			datagram(own4, netip.MustParseAddr("224.0.0.1")), datagram(own4, netip.MustParseAddr("255.255.255.255"))),
		from("a container of netpila to one of evpn", "mallory", dropreason.DstNotPrivate, "n1", 0,
			datagram(b.container(t, "mallory").Address, o1.Address)),
		fabric("VXLAN of a stranger", dropreason.ForeignUnknown, tunnel(netip.MustParseAddr("192.0.2.9"), vni, good)),
		fabric("VXLAN as this node", dropreason.OwnSource, tunnel(vtep("n2"), vni, good)),
		fabric("VXLAN in a VNI of no tenant", dropreason.NoRoute, tunnel(vtep("n1"), 4242, good)),
		fabric("VXLAN for another MAC", dropreason.MacMismatch,
			tunnel(vtep("n1"), vni, inner(container, datagram(own4, far4)))),
		fabric("VXLAN with a question", dropreason.NotReplicated, tunnel(vtep("n1"), vni, question(own4))),
		fabric("VXLAN to no container", dropreason.NoEndpoint,
			tunnel(vtep("n1"), vni, inner(router[:], datagram(own4, absent4)))),
		b.wire("VXLAN of a process", onNode+"n3", onRouter+"n3", dropreason.TunnelForged, "n3", 0,
			tunnel(vtep("n3"), vni, good)),
	}
}
