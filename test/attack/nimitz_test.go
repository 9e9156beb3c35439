package attack_test

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// hasNimitz reports whether the nodes support networks nimitz, ila and evpn: with macvlans they do not.
func hasNimitz() bool { return labtest.Device() != endpoint.Macvlan }

// withOthers adds tenants of the networks that need devices on the node, if containers have these.
func withOthers(spec lab.Spec) lab.Spec {
	if !hasNimitz() {
		return spec
	}
	return addEVPN(addILA(addNimitz(spec)))
}

// addNimitz adds two tenants with the same addresses, v1 and a1 on n1, v2 and a2 on n2.
func addNimitz(spec lab.Spec) lab.Spec {
	for _, name := range []string{"violet", "amber"} {
		spec.Tenants = append(spec.Tenants, lab.Tenant{Name: name, Network: tenant.Nimitz,
			CIDRs: []netip.Prefix{netip.MustParsePrefix("fd12::/48"), netip.MustParsePrefix("10.12.0.0/16")}})
		for i, node := range []string{"n1", "n2"} {
			spec.Containers = append(spec.Containers,
				lab.Container{Name: name[:1] + string('1'+rune(i)), Node: node, Tenant: name})
		}
	}
	return spec
}

// storage is a service's real address on the underlay. No host has this address.
var storage = netip.MustParseAddr("2001:db8:70::99")

// serve creates a service for storage, and waits until the nodes have received it.
func (b *bed) serve(t *testing.T, name string, nodes ...string) {
	t.Helper()
	service := &pilasterv1.UnderlayService{Tenant: name, Name: "storage", Virtual: "fd09::7", Real: storage.String()}
	if _, err := b.Operator().CreateUnderlayService(b.ctx,
		connect.NewRequest(&pilasterv1.CreateUnderlayServiceRequest{Service: service})); err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		labtest.Until(t, labtest.Patience, "the service is on "+node, func() bool {
			got, err := b.Agent(node).Status(b.ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
			if err != nil {
				t.Fatal(err)
			}
			return got.Msg.GetGateway().GetUnderlayServices() > 0
		})
	}
}

// nimitz returns attacks with packets from containers on network nimitz to other networks, and with VXLAN packets,
// which only nodes may send (NIMITZ §3.1).
func (b *bed) nimitz(t *testing.T) []attack {
	v1, v2, b1, n1, n2, n3 := b.container(t, "v1"), b.container(t, "v2"), b.container(t, "b1"), b.prefix(t,
		"n1"), b.prefix(t, "n2"), b.prefix(t, "n3")
	at6, at4 := v1.Address, v1.Addresses()[1]
	unused6, unused4 := netip.MustParseAddr("fd12::ffff:0:1"), netip.MustParseAddr("10.12.250.1")
	inside := func(name string, why dropreason.Reason, packets ...packet.Packet) attack {
		return from(name, "v1", why, "n1", 0, packets...)
	}
	violet, err := b.Operator().GetTenant(b.ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "violet"}))
	if err != nil {
		t.Fatal(err)
	}
	vni := violet.Msg.Tenant.Ids[0].Id
	b.serve(t, "violet", "n1", "n2")
	carry := func(from, to netip.Addr, vni uint32, inner packet.Packet) packet.Packet {
		payload := append(binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, vni<<8), inner.Frame(container, gateway)...)
		return packet.Packet{Source: from, Destination: to,
			Body: packet.UDP{SourcePort: 50000, DestinationPort: 4789, Payload: payload}}
	}
	// tunnel is the VXLAN packet that the source's node would send to the container's node.
	tunnel := func(from, to netip.Addr, vni uint32) packet.Packet {
		return carry(from, to, vni, datagram(at6, v2.Address))
	}
	fabric := func(name string, why dropreason.Reason, packets ...packet.Packet) attack {
		return b.wire(name, onRouter+"n2", onNode+"n2", why, "n2", 1, packets...)
	}
	to := pipeline.VTEP(n2)
	routed, meddling := datagram(at6, v2.Address), datagram(at6, v2.Address)
	routed.Extensions = []packet.Extension{{Type: packet.Routing, Data: make([]byte, 6)}}
	meddling.Body = packet.ICMP{Type: packet.TimeExceeded, Payload: datagram(v2.Address, unused6).Marshal()}
	half := datagram(at4, v2.Addresses()[1])
	half.Body = packet.Raw{Proto: packet.ProtocolTCP, Data: make([]byte, 12)}
	return []attack{
		inside("another source", dropreason.SrcNotOwn, datagram(v2.Address, v2.Address),
			datagram(v2.Addresses()[1], v2.Addresses()[1]),
			datagram(unused6, v2.Address), datagram(pipeline.VTEP(n1), v2.Address)),
		inside("no container is there", dropreason.NoEndpoint, datagram(at6, unused6), datagram(at4, unused4)),
		inside("another network", dropreason.NoRoute, datagram(at6, b1.Address), datagram(at6, b1.Plaintext),
			datagram(at6, n2.Addr().Next()),
			datagram(at6, netip.MustParseAddr("2001:db8:70::2")), datagram(at4, netip.MustParseAddr("192.0.2.1"))),
		inside("VXLAN of its own", dropreason.NoRoute, tunnel(at6, to, vni)),
		inside("many", dropreason.Multicast, datagram(at6, netip.MustParseAddr("ff02::1")),
			datagram(at4, netip.MustParseAddr("224.0.0.1")), datagram(at4, netip.MustParseAddr("255.255.255.255"))),
		from("a container of netpila to one of nimitz", "mallory", dropreason.DstNotPrivate, "n1", 0,
			datagram(b.container(t, "mallory").Address, at6)),
		fabric("VXLAN of a stranger", dropreason.PeerUnknown, tunnel(netip.MustParseAddr("fd00::2"), to, vni),
			tunnel(n1.Addr().Next(), to, vni)),
		fabric("VXLAN as this node", dropreason.OwnSource, tunnel(to, to, vni)),
		fabric("VXLAN in a VNI of no tenant", dropreason.NoRoute, tunnel(pipeline.VTEP(n1), to, 4242),
			tunnel(pipeline.VTEP(n1), to, uint32(pipeline.GatewayVNI))),
		fabric("VXLAN to a service, from who has no name there", dropreason.Untranslated,
			carry(pipeline.VTEP(n1), to, vni, datagram(at6, storage))),
		fabric("VXLAN of a node that looks at no headers, with a routing header inside", dropreason.RoutingHeader,
			carry(pipeline.VTEP(n1), to, vni, routed)),
		fabric("VXLAN of a node that looks at no headers, with half a header inside", dropreason.Malformed,
			carry(pipeline.VTEP(n1), to, vni, half)),
		fabric("VXLAN of a node that looks at no quotes, with an error about another endpoint's packet",
			dropreason.IcmpQuote, carry(pipeline.VTEP(n1), to, vni, meddling)),
		b.wire("VXLAN of a process", onNode+"n3", onRouter+"n3", dropreason.TunnelForged, "n3", 0,
			tunnel(pipeline.VTEP(n3), to, vni)),
	}
}

// onOVS returns a lab whose nodes have Open vSwitch, with a tenant of netpila and the tenants of addNimitz.
func onOVS() lab.Spec {
	spec := lab.Spec{
		Nodes: []string{"n1", "n2", "n3"}, LabKeys: labtest.Switch(lab.OVS, nil), Device: endpoint.Veth,
		Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{{Name: "mallory", Node: "n1", Tenant: "blue"},
			{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b3", Node: "n3", Tenant: "blue"}},
	}
	return addNimitz(spec)
}

// TestAttacksOnOpenVSwitch runs the attacks on network nimitz with Open vSwitch as the switch.
func TestAttacksOnOpenVSwitch(t *testing.T) {
	t.Parallel()
	b := newBed(t, onOVS(), [][2]string{{"mallory", "b1"}, {"b1", "b3"}, {"v1", "v2"}, {"a2", "a1"}})
	for _, a := range b.nimitz(t) {
		t.Run(a.name, func(t *testing.T) { b.try(t, a) })
	}
}
