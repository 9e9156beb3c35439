package attack_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// many is the number of repetitions of each small attack. It is small enough that the monitor shows every repetition.
const many = 3

// floodSize is the number of random ciphertexts.
const floodSize = 100_000

func TestAttacks(t *testing.T) {
	t.Parallel()
	b := newBed(t, spec, sentinels)
	monitors := b.startMonitors(t)
	type side struct {
		name    string
		attacks []attack
	}
	sides := []side{
		{"chosen", b.chosenPlaintexts(t)},
		{"ciphertexts", b.ciphertexts(t)},
		{"sources", b.sources(t)},
		{"headers", b.headers(t)},
		{"malformed", b.malformed(t)},
		{"frames", b.notIPv6(t)},
		{"fabric", b.fabric(t)},
		{"node", b.nodes(t)},
	}
	if hasNimitz() {
		sides = append(sides, side{"nimitz", b.nimitz(t)}, side{"ila", b.ila(t)}, side{"evpn", b.evpn(t)})
	}
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			for _, a := range side.attacks {
				t.Run(a.name, func(t *testing.T) { b.try(t, a) })
			}
		})
	}
	t.Run("policies", b.policies) // last, because afterwards a later fragment of blue needs a first fragment
	t.Run("every reason", b.testEveryReason)
	t.Run("monitor", func(t *testing.T) { b.judgeMonitors(t, monitors) })
}

// testEveryReason checks that every drop reason has an attack.
func (b *bed) testEveryReason(t *testing.T) {
	// No sender can cause these reasons: they need a node with wrong routes, tenants or programs.
	except := []dropreason.Reason{dropreason.NoRoute, dropreason.NoKey, dropreason.NoProgram}
	except = append(except, dropreason.LaterFragment)   // Open vSwitch only
	except = append(except, dropreason.ConnectionLimit) // gateways only
	except = append(except, dropreason.SessionLimit)    // only with more connections than a test opens
	// Only with a peer of EVPN.
	except = append(except, dropreason.ReplicationLimit)
	// Only with egress rules: TestEgressAttacks, and the tests of gateways in internal/datapath.
	except = append(except, dropreason.EgressDenied, dropreason.NoSession, dropreason.NoEgressAddress,
		dropreason.GatewayFull, dropreason.GatewayProtocol)
	// only with services; TestService… and TestExposed… of internal/datapath have these packets
	except = append(except, dropreason.NoService, dropreason.NoBackend, dropreason.ServiceProtocol,
		dropreason.ExposedSource)
	// Only among members of an offload: TestFrontendMessages and TestFrontendDrops of internal/datapath.
	except = append(except, dropreason.NshMalformed, dropreason.NshUnknown, dropreason.NshForged, dropreason.NshStale,
		dropreason.NshSegments, dropreason.NoFrontend)
	if labtest.Device() == endpoint.Macvlan {
		except = append(except, dropreason.PeerUnknown, dropreason.TunnelForged, dropreason.Untranslated,
			dropreason.NoMapping, dropreason.LocatorMismatch, dropreason.MacMismatch, dropreason.NotReplicated,
			dropreason.ForeignUnknown)
		except = append(except, dropreason.TooBig) // the kernel limits a macvlan's MTU to its uplink's
	} else {
		except = append(except, dropreason.MacOutside) // no frame on the fabric has a container's MAC
	}
	for _, r := range dropreason.All() {
		if slices.Contains(except, r) {
			continue
		}
		if !slices.ContainsFunc(spec.Nodes, func(node string) bool { return b.sent[node+" "+r.String()] > 0 }) {
			t.Errorf("no attack was dropped as %s", r)
		}
	}
}

// gateway is the MAC of the node's end of every container's link. Frames of attacks come from container, which older
// builds gave to all containers; the programs ignore it.
var (
	gateway   = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
	container = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
)

func toGateway(ip []byte) []byte {
	return packet.Frame(gateway, container, packet.EtherTypeIPv6, ip)
}

func datagram(from, to netip.Addr) packet.Packet {
	return packet.Packet{Source: from, Destination: to,
		Body: packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: []byte("this must not arrive")}}
}

// from is an attack of packets from a container, repeated many times.
func from(name, sender string, why dropreason.Reason, at string, ports int, packets ...packet.Packet) attack {
	a := attack{name: name, from: sender, why: why, at: at, ports: ports}
	for _, p := range packets {
		for range many {
			a.frames = append(a.frames, p.Frame(gateway, container))
		}
	}
	return a
}

// wire is an attack of packets that a sender on the fabric sends to the device of another one, repeated many times.
func (b *bed) wire(name, sender, receiver string, why dropreason.Reason, at string, ports int,
	packets ...packet.Packet) attack {
	a := attack{name: name, from: sender, why: why, at: at, ports: ports}
	for _, p := range packets {
		for range many {
			a.frames = append(a.frames, p.Frame(b.inject[receiver].MAC(), b.inject[sender].MAC()))
		}
	}
	return a
}

// draw returns a ciphertext under a tenant's key that is in the private prefix, so that containers can send to it. For
// this it may choose a higher index.
func (b *bed) draw(t *testing.T, tenant string, p address.Plain) netip.Addr {
	t.Helper()
	_, ciphertext, err := b.tenants[tenant].cipher.Draw(address.DefaultPlan().Private, p)
	if err != nil {
		t.Fatal(err)
	}
	return ciphertext
}

// unused is an index far above the allocated ones.
const unused = address.Index(0x800000)

// chosenPlaintexts returns attacks that are possible with the key of mallory's tenant.
func (b *bed) chosenPlaintexts(t *testing.T) []attack {
	self, blue := b.container(t, "mallory"), b.tenants["blue"].id
	app := address.AppID(self.App)
	n1, n2 := b.prefix(t, "n1"), b.prefix(t, "n2")
	foreign := netip.MustParsePrefix("2001:db8:1:2::/64")
	try := func(name string, why dropreason.Reason, at string, ports int, plain ...address.Plain) attack {
		var packets []packet.Packet
		for _, p := range plain {
			packets = append(packets, datagram(self.Address, b.draw(t, "blue", p)))
		}
		return from(name, "mallory", why, at, ports, packets...)
	}
	return []attack{
		try("foreign base", dropreason.DstUndecryptable, "n1", 0,
			address.Plain{Node: foreign, Tenant: blue, App: app, Index: unused},
			address.Plain{Node: netip.MustParsePrefix("fd70:696c:6000:1::/64"), Tenant: blue, App: app, Index: unused}),
		try("another tenant's id, here and there", dropreason.TenantMismatch, "n1", 0,
			address.Plain{Node: n1, Tenant: b.tenants["red"].id, App: app, Index: 1},
			address.Plain{Node: n2, Tenant: b.tenants["red"].id, App: app, Index: 1}),
		try("id of a tenant that is not here, and of none", dropreason.TenantMismatch, "n1", 0,
			address.Plain{Node: n2, Tenant: b.tenants["green"].id, App: app, Index: 1},
			address.Plain{Node: n2, Tenant: address.MaxTenantID, App: app, Index: 1}),
		try("an alias of a node, here and there", dropreason.ToNode, "n1", 0,
			address.Plain{Node: n1, Tenant: blue, App: address.FirstReservedApp, Index: unused},
			address.Plain{Node: n2, Tenant: blue, App: address.FirstReservedApp, Index: unused}),
		try("a node, here and there", dropreason.ToNode, "n1", 0,
			address.Plain{Node: n1, App: 0, Index: 1}, address.Plain{Node: n2, App: 0, Index: 1}),
		try("reserved app", dropreason.AppReserved, "n1", 0,
			address.Plain{Node: n1, Tenant: blue, App: address.EgressApp, Index: unused},
			address.Plain{Node: n2, Tenant: blue, App: 0xffff, Index: unused}),
		try("absent here", dropreason.NoEndpoint, "n1", 0,
			address.Plain{Node: n1, Tenant: blue, App: app, Index: unused},
			address.Plain{Node: n1, Tenant: blue, App: 0x1234, Index: 1}),
		try("absent there", dropreason.NoEndpoint, "n2", 2,
			address.Plain{Node: n2, Tenant: blue, App: app, Index: unused},
			address.Plain{Node: n2, Tenant: blue, App: 0x1234, Index: 1}),
		from("released here", "mallory", dropreason.NoEndpoint, "n1", 0,
			datagram(self.Address, b.released["gone1"].Address)),
		from("released there", "mallory", dropreason.NoEndpoint, "n2", 2,
			datagram(self.Address, b.released["gone2"].Address)),
	}
}

// ciphertexts returns attacks on destinations that mallory has learned elsewhere or chosen at random.
func (b *bed) ciphertexts(t *testing.T) []attack {
	self := b.container(t, "mallory")
	random := rand.New(rand.NewPCG(1, 2))
	flood := attack{name: "random ciphertexts", from: "mallory", why: dropreason.DstUndecryptable, at: "n1"}
	for range floodSize {
		var to [16]byte
		binary.BigEndian.PutUint64(to[:], random.Uint64())
		binary.BigEndian.PutUint64(to[8:], random.Uint64())
		to[0] = 0xfc
		flood.frames = append(flood.frames, toGateway(datagram(self.Address, netip.AddrFrom16(to)).Marshal()))
	}
	var outside []packet.Packet
	for _, to := range []string{"::", "::1", "fe80::1", "2001:db8:70:2::2", "2001:4860:4860::8888", "fd00::1",
		"fe00::1"} {
		outside = append(outside, datagram(self.Address, netip.MustParseAddr(to)))
	}
	for _, to := range []netip.Addr{
		self.Plaintext, b.container(t, "b2").Plaintext, b.container(t, "r2").Plaintext, b.prefix(t, "n1").Addr().Next(),
		b.prefix(t, "n2").Addr().Next(),
	} {
		outside = append(outside, datagram(self.Address, to))
	}
	return []attack{
		from("another tenant's", "mallory", dropreason.DstUndecryptable, "n1", 0,
			datagram(self.Address, b.container(t, "r1").Address), datagram(self.Address, b.container(t, "r2").Address)),
		flood,
		from("no ciphertext at all", "mallory", dropreason.DstNotPrivate, "n1", 0, outside...),
		from("multicast", "mallory", dropreason.Multicast, "n1", 0,
			datagram(self.Address, netip.MustParseAddr("ff02::1")),
			datagram(self.Address, netip.MustParseAddr("ff05::1:3"))),
	}
}

// sources returns attacks with source addresses of others, and with mallory's source address at devices of others.
func (b *bed) sources(t *testing.T) []attack {
	self, b1, b2 := b.container(t, "mallory"), b.container(t, "b1"), b.container(t, "b2")
	var foreign []packet.Packet
	for _, source := range []netip.Addr{
		b1.Address, b2.Address, b.container(t, "r1").Address, b.released["gone1"].Address, self.Plaintext, b1.Plaintext,
		self.Address.Next(),
		netip.IPv6Unspecified(), netip.IPv6Loopback(), netip.MustParseAddr("fe80::1"),
		netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("ff02::1"),
	} {
		foreign = append(foreign, datagram(source, b1.Address), datagram(source, b2.Address))
	}
	mine := []packet.Packet{datagram(self.Address, b1.Address), datagram(self.Address, b2.Address)}
	return []attack{
		from("foreign source", "mallory", dropreason.SrcNotOwn, "n1", 0, foreign...),
		from("own source from a neighbour's device", "b1", dropreason.SrcNotOwn, "n1", 0, mine...),
		from("own source from another tenant's device", "r1", dropreason.SrcNotOwn, "n1", 0, mine...),
		from("own source from another node", "b2", dropreason.SrcNotOwn, "n2", 0, mine...),
	}
}

// longest is the longest packet that the node accepts from a container whose MTU was 1,500: it always allows for a tag.
const longest = 1504

// netlink opens a place's devices and routes for the test.
func (b *bed) netlink(t *testing.T, place string) *netlink.Handle {
	t.Helper()
	ns, err := b.Namespace(place)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

// widen raises a container's MTU, as root in the container may.
func (b *bed) widen(t *testing.T, container string, mtu int) {
	t.Helper()
	h := b.netlink(t, container)
	link, err := h.LinkByName(lab.Interface)
	if err == nil {
		err = h.LinkSetMTU(link, mtu)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// headers returns attacks with valid packets that the node must drop.
func (b *bed) headers(t *testing.T) []attack {
	self, b1, b2 := b.container(t, "mallory"), b.container(t, "b1"), b.container(t, "b2")
	with := func(to netip.Addr, e ...packet.Extension) packet.Packet {
		p := datagram(self.Address, to)
		p.Extensions = e
		return p
	}
	var routing []packet.Packet
	for _, to := range []netip.Addr{b1.Address, b2.Address} {
		for _, kind := range []byte{0, 2, 3, 4} {
			routing = append(routing, with(to, routingHeader(kind, b1.Address)))
		}
		hop := packet.Extension{Type: packet.HopByHop, Data: []byte{1, 4, 0, 0, 0, 0}}
		routing = append(routing,
			with(to, hop, routingHeader(0, b1.Address)),
			with(to, packet.Fragment(0, true, 1), routingHeader(0, b1.Address)),
			with(to, homeAddress(b1.Address)))
	}
	discovery := func(kind byte, to ...netip.Addr) (all []packet.Packet) {
		for _, to := range to {
			for _, source := range []netip.Addr{self.Address, netip.MustParseAddr("fe80::2")} {
				target := b1.Address.As16()
				all = append(all, packet.Packet{Source: source, Destination: to, HopLimit: 255,
					Body: packet.ICMP{Type: kind, Rest: [4]byte{0xe0},
						Payload: append(target[:], 2, 1, 2, 3, 4, 5, 6, 7)}})
			}
		}
		return all
	}
	everywhere := []netip.Addr{b1.Address, b2.Address, netip.MustParseAddr("fe80::1"), netip.MustParseAddr("ff02::1")}
	report := packet.Packet{Source: self.Address, Destination: netip.MustParseAddr("ff02::16"), HopLimit: 1,
		Extensions: []packet.Extension{{Type: packet.HopByHop,
			Data: []byte{5, 2, 0, 0, 1, 0}}}, Body: packet.ICMP{Type: 143}}
	hops := func(option ...byte) packet.Packet {
		p := datagram(self.Address, b2.Address)
		p.Extensions = []packet.Extension{{Type: packet.HopByHop, Data: option}}
		return p
	}
	// The node as mallory sees it: the first usable index of the gateway's app.
	node := b.draw(t, "blue", address.Plain{
		Node: b.prefix(t, "n1"), Tenant: b.tenants["blue"].id, App: address.GatewayApp, Index: 1,
	})
	fragmented := func(p packet.Packet) packet.Packet {
		p.Extensions = []packet.Extension{packet.Fragment(0, true, 9)}
		return p
	}
	spent := datagram(self.Address, b2.Address)
	spent.HopLimit = 1
	all := []attack{
		from("routing headers and home address", "mallory", dropreason.RoutingHeader, "n1", 0, routing...),
		from("hop-by-hop options: router alert, padding, jumbo", "mallory", dropreason.HopOptions, "n1", 0,
			hops(5, 2, 0, 0, 1, 0), hops(1, 4, 0, 0, 0, 0), hops(0xc2, 4, 0, 0, 0, 28)),
		from("router advertisement", "mallory", dropreason.NdForbidden, "n1", 0,
			discovery(packet.RouterAdvertisement, everywhere...)...),
		from("neighbour advertisement", "mallory", dropreason.NdForbidden, "n1", 0,
			discovery(packet.NeighborAdvertisement, everywhere...)...),
		from("redirect", "mallory", dropreason.NdForbidden, "n1", 0, discovery(137, everywhere...)...),
		from("solicitations", "mallory", dropreason.NdIgnored, "n1", 0,
			append(discovery(packet.RouterSolicitation, everywhere...),
				discovery(packet.NeighborSolicitation, everywhere...)...)...),
		from("listener report", "mallory", dropreason.MldIgnored, "n1", 0, report),
		from("hop limit", "mallory", dropreason.HopLimit, "n1", 0, spent),
		from("fragments that the node would have to reassemble", "mallory", dropreason.ToNode, "n1", 0,
			fragmented(packet.Packet{Source: self.Address, Destination: node, Body: packet.ICMP{
				Type: packet.EchoReply, Payload: make([]byte, 1200),
			}}),
			fragmented(quoting(self.Address, node, datagram(node, self.Address).Marshal()))),
		from("error about a packet of others", "mallory", dropreason.IcmpQuote, "n1", 0,
			quoting(self.Address, b2.Address, datagram(b2.Address, b1.Address).Marshal()),
			quoting(self.Address, b2.Address, datagram(b1.Address, self.Address).Marshal()),
			quoting(self.Address, b2.Address, []byte{0x60, 0, 0, 0})),
		from("error about a packet of others, same node", "mallory", dropreason.IcmpQuote, "n1", 0,
			quoting(self.Address, b1.Address, datagram(b1.Address, b2.Address).Marshal()),
			quoting(self.Address, b1.Address, []byte{0x60, 0, 0, 0})),
	}
	if labtest.Device() != endpoint.Macvlan { // a macvlan's MTU cannot be raised
		b.widen(t, "mallory", longest)
		long := datagram(self.Address, b2.Address)
		long.Body = packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: make([]byte, longest-40-8)}
		all = append(all, from("length", "mallory", dropreason.TooBig, "n1", 0, long))
	}
	return all
}

func quoting(from, to netip.Addr, quote []byte) packet.Packet {
	return packet.Packet{Source: from, Destination: to,
		Body: packet.ICMP{Type: packet.DestinationUnreachable, Code: 4, Payload: quote}}
}

func routingHeader(kind byte, via netip.Addr) packet.Extension {
	a := via.As16()
	return packet.Extension{Type: packet.Routing, Data: slices.Concat([]byte{kind, 1, 0, 0, 0, 0}, a[:])}
}

func homeAddress(home netip.Addr) packet.Extension {
	a := home.As16()
	return packet.Extension{Type: packet.DestinationOptions, Data: slices.Concat([]byte{1, 2, 0, 0, 0xc9, 16}, a[:])}
}

// malformed returns attacks with packets that are truncated or inconsistent.
func (b *bed) malformed(t *testing.T) []attack {
	self := b.container(t, "mallory").Address
	var frames [][]byte
	for _, to := range []netip.Addr{b.container(t, "b1").Address, b.container(t, "b2").Address} {
		for _, p := range cutShort(self, to) {
			frames = append(frames, toGateway(p))
		}
	}
	whole := datagram(self, b.container(t, "b1").Address).Marshal()
	for _, n := range []int{0, 1, 20, 39} { // shorter than an IPv6 header
		frames = append(frames, toGateway(whole[:n]))
	}
	return []attack{{name: "cut short", from: "mallory", frames: frames, why: dropreason.Malformed, at: "n1"}}
}

// cutShort returns packets with a complete IPv6 header and an error after it.
func cutShort(from, to netip.Addr) [][]byte {
	cut := func(protocol uint8, n int, e ...packet.Extension) []byte {
		return packet.Packet{Source: from, Destination: to, Extensions: e,
			Body: packet.Raw{Proto: protocol, Data: make([]byte, n)}}.Marshal()
	}
	whole := datagram(from, to).Marshal()
	beyond, none, version := slices.Clone(whole), slices.Clone(whole), slices.Clone(whole)
	binary.BigEndian.PutUint16(beyond[4:], uint16(len(whole)-40+1))
	binary.BigEndian.PutUint16(none[4:], 0)
	version[0] = 0x40
	long := cut(packet.NoNextHeader, 8,
		packet.Extension{Type: packet.DestinationOptions, Data: []byte{1, 4, 0, 0, 0, 0}})
	long[41] = 200 // length of the destination options
	first := packet.Fragment(0, true, 7)
	padding := packet.Extension{Type: packet.DestinationOptions, Data: []byte{1, 4, 0, 0, 0, 0}}
	const sctp = 132
	return [][]byte{
		beyond, none, version, long, whole[:44],
		cut(packet.ProtocolUDP, 7), cut(packet.ProtocolTCP, 19), cut(packet.ProtocolICMPv6, 7),
		cut(packet.FragmentHeader, 4), cut(packet.DestinationOptions, 4), cut(packet.HopByHop, 0),
		cut(packet.ProtocolUDP, 4, first), cut(packet.ProtocolTCP, 8, first), cut(packet.ProtocolICMPv6, 4, first),
		cut(sctp, 11), cut(sctp, 8, first), cut(sctp, 0, first, padding),
	}
}

// notIPv6 returns attacks with other protocols.
func (b *bed) notIPv6(t *testing.T) []attack {
	whole := datagram(b.container(t, "mallory").Address, b.container(t, "b1").Address).Marshal()
	tagged := func(kind uint16) []byte {
		return packet.Frame(gateway, container, kind, slices.Concat([]byte{0, 5, 0x86, 0xdd}, whole))
	}
	a := attack{name: "other protocols", from: "mallory", why: dropreason.NotIp6, at: "n1", frames: [][]byte{
		packet.Frame(gateway, container, packet.EtherTypeIPv4, append([]byte{0x45, 0, 0, 20}, make([]byte, 16)...)),
		packet.Frame(gateway, container, packet.EtherTypeARP, make([]byte, 28)),
		packet.Frame(gateway, container, 0x8847, whole), // MPLS
		packet.Frame(gateway, container, 0x88cc, whole), // LLDP
		packet.Frame(gateway, container, 40, whole),     // 802.3
		tagged(0x8100), tagged(0x88a8),
	}}
	return []attack{a}
}
