package packettest

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// Here is the node of the switch under test, and There another node. Abroad and Farther are Edge Switches of other
// regions. Stranger is a node of another cluster.
var (
	Region   = netip.MustParsePrefix("fd70:696c:6100::/40")
	Here     = netip.MustParsePrefix("fd70:696c:6100:1::/64")
	There    = netip.MustParsePrefix("fd70:696c:6100:2::/64")
	Abroad   = netip.MustParsePrefix("fd80:0:0:1::/64")
	Farther  = netip.MustParsePrefix("fd90:0:0:1::/64")
	Stranger = netip.MustParsePrefix("fd00:1:2:3::/64")
)

// world holds the addresses of one family. Tenants 7 and 8 use the same addresses.
type world struct {
	name     string
	own      netip.Addr // port 2 of tenant 7, port 3 of tenant 8
	beside   netip.Addr // port 4 of tenant 7, on this node too
	far      netip.Addr // of both tenants, on There
	unused   netip.Addr // in the tenants' overlay, used by no container
	overlay  netip.Prefix
	there    netip.Prefix // of both tenants, on There
	service  netip.Addr   // tenant 7's address for storage
	storage  netip.Addr   // outside
	outside  netip.Addr   // outside, and no service
	shared   netip.Addr   // outside for tenant 7, a container on There for tenant 8
	gateway  netip.Addr   // of this node
	gateway2 netip.Addr   // of There
	virtual  netip.Addr   // virtual address of own of tenant 7
	virtual8 netip.Addr   // virtual address of own of tenant 8
	leads    netip.Addr   // a virtual address on this node for far of tenant 7
	abroad   netip.Addr   // of tenant 7, which has number 8 behind Abroad
	farther  netip.Addr   // of tenant 7, which has number 9 behind Farther
	request  packet.ICMP
	groups   []netip.Addr
	forLinks []uint8 // ICMP types that could redirect a container's packets
}

func worlds() []world {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	return []world{{
		name: "IPv4",
		own: a(
			"10.0.1.2",
		), beside: a("10.0.1.4"), far: a("10.0.2.2"), unused: a("10.0.7.7"), overlay: p("10.0.0.0/16"),
		there:   p("10.0.2.0/24"),
		service: a("10.9.9.9"), storage: a("192.0.2.9"), outside: a("192.0.2.1"), shared: a("198.51.100.9"),
		gateway: a(
			"100.64.1.1",
		), gateway2: a("100.64.2.1"), virtual: a("100.64.1.2"), virtual8: a("100.64.1.8"), leads: a("100.64.1.3"),
		abroad: a("10.1.3.4"), farther: a("10.2.3.4"),
		request:  packet.ICMP{Type: packet.EchoRequest4, Rest: packet.Echo(1, 2), Payload: []byte("odd")},
		groups:   []netip.Addr{a("224.0.0.1"), a("239.255.255.250"), a("255.255.255.255")},
		forLinks: []uint8{5, 9},
	}, {
		name: "IPv6",
		own: a(
			"fd10:0:0:1::2",
		), beside: a("fd10:0:0:1::4"), far: a("fd10:0:0:2::2"), unused: a("fd10:0:0:7::7"), overlay: p("fd10::/48"),
		there:   p("fd10:0:0:2::/64"),
		service: a("fd10:9::9"), storage: a("2001:db8:9::9"), outside: a("2001:db8:9::1"), shared: a("2001:db8:8::9"),
		gateway: a(
			"fd64:0:0:1::1",
		), gateway2: a("fd64:0:0:2::1"), virtual: a("fd64:0:0:1::2"), virtual8: a("fd64:0:0:1::8"),
		leads: a("fd64:0:0:1::3"), abroad: a("fd11::3:4"), farther: a("fd12::3:4"),
		request:  packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(1, 2), Payload: []byte("odd")},
		groups:   []netip.Addr{a("ff02::1"), a("ff0e::1234")},
		forLinks: []uint8{134, 136, 137},
	}}
}

// entries returns the entries of one family on Here.
func (w world) entries() []pipeline.Entry {
	one := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	sender := func(port pipeline.Port, a netip.Addr, vni pipeline.VNI, identity uint16) pipeline.Entry {
		return pipeline.Sender{Port: port, Address: a, VNI: vni, Identity: identity}
	}
	virtual := func(vni pipeline.VNI, a, real netip.Addr) []pipeline.Entry {
		return []pipeline.Entry{
			pipeline.DNAT{VNI: vni, Virtual: a, RealVNI: 7, Real: real}, pipeline.SNAT{VNI: 7, Real: real, Virtual: a},
		}
	}
	forward := func(vni pipeline.VNI, to netip.Prefix, port pipeline.Port) pipeline.Entry {
		f := pipeline.Forward{VNI: vni, To: to, Port: port, MAC: MACs[port]}
		if port == pipeline.VXLAN {
			f.VTEP = pipeline.VTEP(There)
		}
		return f
	}
	region := func(a netip.Addr, edge netip.Prefix, theirs pipeline.VNI) []pipeline.Entry {
		cidr := netip.PrefixFrom(a, 16).Masked()
		return []pipeline.Entry{
			pipeline.Foreign{Edge: edge, Theirs: theirs, Source: cidr, VNI: 7},
			pipeline.Forward{VNI: 7, To: cidr, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(edge), Outside: true},
		}
	}
	return slices.Concat([]pipeline.Entry{
		sender(2, w.own, 7, 70), sender(3, w.own, 8, 80), sender(4, w.beside, 7, 0),
		pipeline.NorthSouth{
			VNI: 7,
			To:  one(w.storage),
		}, pipeline.NorthSouth{VNI: 7, To: one(w.gateway)}, pipeline.NorthSouth{VNI: 7, To: one(w.shared)},
		forward(7, one(w.shared), pipeline.Gateway), forward(8, one(w.shared), pipeline.VXLAN),
		pipeline.DNAT{
			VNI:     pipeline.GatewayVNI,
			Virtual: w.virtual8,
			RealVNI: 8,
			Real:    w.own,
		}, pipeline.SNAT{VNI: 8, Real: w.own, Virtual: w.virtual8},
		forward(7, w.overlay, 0), forward(8, w.overlay, 0),
		forward(7, one(w.own), 2), forward(8, one(w.own), 3), forward(7, one(w.beside), 4),
		forward(7, w.there, pipeline.VXLAN), forward(8, w.there, pipeline.VXLAN),
		forward(
			pipeline.Any,
			one(w.storage),
			pipeline.Gateway,
		), forward(pipeline.Any, one(w.gateway), pipeline.Gateway),
		pipeline.Forward{
			VNI:     pipeline.Any,
			To:      one(w.gateway2),
			Port:    pipeline.VXLAN,
			VTEP:    pipeline.VTEP(There),
			Outside: true,
		},
	},
		virtual(7, w.service, w.storage),
		virtual(pipeline.GatewayVNI, w.virtual, w.own),
		virtual(pipeline.GatewayVNI, w.leads, w.far),
		region(w.abroad, Abroad, 8),
		region(w.farther, Farther, 9),
	)
}

// Entries returns the entries of the cases, in both families.
func Entries() []pipeline.Entry {
	all := []pipeline.Entry{pipeline.Peer{Nodes: Region}, pipeline.Peer{Nodes: Abroad}, pipeline.Peer{Nodes: Farther}}
	for _, w := range worlds() {
		all = append(all, w.entries()...)
	}
	return all
}

// Ports are the containers of the cases.
var Ports = []pipeline.Port{2, 3, 4}

// MACs are the MACs of their containers. The one of port 2 has the same MAC as containers of older builds.
var MACs = map[pipeline.Port]pipeline.MAC{3: {0x0a, 0, 0, 0, 0, 3}, 4: {0x0a, 0, 0, 0, 0, 4}}

// Cases returns all cases. Their payloads do not identify them, so run them one after the other.
func Cases() []Case {
	var all []Case
	table := pipeline.Table{Region: Region, Entries: Entries()}
	for _, w := range worlds() {
		for _, c := range slices.Concat(w.traffic(), w.drops(), w.forgeries(), w.insides()) {
			c.Name, c.Table = c.Name+", "+w.name, table
			all = append(all, c)
		}
	}
	arp := packet.Frame([]byte{255, 255, 255, 255, 255, 255}, pipeline.InsideMAC, packet.EtherTypeARP, make([]byte, 28))
	return append(all, Case{Name: "ARP", Table: table, From: 2, Frame: arp, Drop: dropreason.NotIp6})
}

// Moved returns entries of containers that have moved from Here to There, and cases of late packets to them. Only
// switches that can relay have such entries.
func Moved() (entries []pipeline.Entry, all []Case) {
	for _, w := range worlds() {
		entries = append(entries, pipeline.Forward{
			VNI: 7, To: netip.PrefixFrom(w.far, w.far.BitLen()), Port: pipeline.VXLAN, VTEP: pipeline.VTEP(There),
			Relays: true,
		})
	}
	table := pipeline.Table{Region: Region, Entries: slices.Concat(Entries(), entries)}
	for _, w := range worlds() {
		late := Case{
			From: pipeline.VXLAN, Outer: pipeline.VTEP(There), VNI: 7, Identity: 71,
			Packet: packet.Packet{Source: w.far.Next(), Destination: w.far},
		}
		var some []Case
		for _, b := range w.bodies() {
			c := late
			c.Name, c.Packet.Body, c.Packet.Extensions = "a late packet, "+b.name, b.Body, b.Extensions
			some = append(some, c)
		}
		other, last, again, often := late, late, late, late
		other.Name, other.VNI, other.Packet.Body = "a late packet of the other tenant", 8, gram
		last.Name, last.Packet.HopLimit, last.Packet.Body = "the last hop of a late packet", 1, gram
		again.Name, again.Relayed, again.Packet.Body = "a late packet that was passed on", 1, gram
		again.Identity = 0
		often.Name, often.Relayed, often.Packet.Body = "a late packet that was passed on twice", 2, gram
		for _, c := range append(some, other, last, again, often) {
			c.Name, c.Table = c.Name+", "+w.name, table
			all = append(all, c)
		}
	}
	return entries, all
}

// body is a packet without addresses.
type body struct {
	name string
	packet.Packet
}

// bodies returns the payloads whose checksums NAT has to correct.
func (w world) bodies() []body {
	return []body{
		{
			"TCP",
			packet.Packet{
				Body: packet.TCP{
					SourcePort:      1000,
					DestinationPort: 80,
					Sequence:        7,
					Flags:           packet.SYN,
					Window:          512,
					Payload:         []byte("odd"),
				},
			},
		},
		{"UDP", packet.Packet{Body: packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("odd")}}},
		{
			"UDP without a checksum",
			packet.Packet{Body: packet.Raw{Proto: packet.ProtocolUDP, Data: []byte{0, 1, 0, 2, 0, 10, 0, 0, 1, 2}}},
		},
		{"ICMP", packet.Packet{Body: w.request}},
		{"another protocol", packet.Packet{Body: packet.Raw{Proto: 50, Data: []byte("whatever is in it")}}},
		{
			"a first fragment",
			packet.Packet{Body: packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("12345678")},
				Extensions: []packet.Extension{packet.Fragment(0, true, 9)}},
		},
		{"a later fragment", packet.Packet{Body: packet.Raw{Proto: packet.ProtocolUDP, Data: []byte("12345678")},
			Extensions: []packet.Extension{packet.Fragment(16, false, 9)}}},
	}
}

// ways returns the traffic types of NIMITZ §3.1, split into each node's part.
func (w world) ways() []Case {
	at := func(name string, from pipeline.Port, source, destination netip.Addr) Case {
		return Case{Name: name, From: from, Packet: packet.Packet{Source: source, Destination: destination}}
	}
	by := func(name string, vni pipeline.VNI, identity uint16, source, destination netip.Addr) Case {
		c := at(name, pipeline.VXLAN, source, destination)
		c.Outer, c.VNI, c.Identity = pipeline.VTEP(There), vni, identity
		return c
	}
	abroad := func(name string, source, destination netip.Addr) Case {
		c := by(name, 8, 99, source, destination)
		c.Outer = pipeline.VTEP(Abroad)
		return c
	}
	return []Case{
		at("a, same node", 4, w.beside, w.own),
		at("a, to oneself", 2, w.own, w.own),
		at("b, leaves", 2, w.own, w.far),
		at("b, the other tenant's leaves", 3, w.own, w.far),
		at("b, to what is another tenant's service", 3, w.own, w.shared),
		by("b, arrives", 7, 71, w.far, w.own),
		by("b, the other tenant's arrives", 8, 81, w.far, w.own),
		at("c, to the service", 2, w.own, w.service),
		at("c, to what is another tenant's container", 2, w.own, w.shared),
		at("c, its answer", pipeline.Gateway, w.storage, w.virtual),
		at("d, to a container here", pipeline.Gateway, w.gateway, w.virtual),
		at("d, its answer", 2, w.own, w.gateway),
		at("d, to a container there", pipeline.Gateway, w.gateway, w.leads),
		by("d, its answer arrives", 7, 71, w.far, w.gateway),
		by("d, from a gateway there", 7, 0, w.gateway2, w.own),
		at("d, the answer to a gateway there", 2, w.own, w.gateway2),
		by("e, leaves the region", 7, 71, w.far, w.abroad),
		abroad("e, arrives", w.abroad, w.far),
		abroad("e, to a container here", w.abroad, w.own),
	}
}

// forgeries returns packets that nodes and other regions must not send to an Edge Switch.
func (w world) forgeries() []Case {
	by := func(name string, outer netip.Addr, vni pipeline.VNI, source, destination netip.Addr) Case {
		return Case{
			Name:     name,
			From:     pipeline.VXLAN,
			Outer:    outer,
			VNI:      vni,
			Identity: 99,
			Packet:   packet.Packet{Source: source, Destination: destination, Body: gram},
		}
	}
	there, abroad := pipeline.VTEP(There), pipeline.VTEP(Abroad)
	return []Case{
		by("a tenant that is not in the other region", there, 8, w.far, w.abroad),
		by("from abroad to abroad", abroad, 8, w.abroad, w.farther),
		by("from abroad and back", abroad, 8, w.abroad, w.abroad),
		by("from abroad to a missing container", abroad, 8, w.abroad, w.unused),
		by("from abroad to a service", abroad, 8, w.abroad, w.service),
		by("from abroad to the gateway", abroad, 8, w.abroad, w.gateway),
		by("a VNI of here from abroad", abroad, 7, w.abroad, w.far),
		by("a VNI of the third region from abroad", abroad, 9, w.farther, w.far),
		by("the gateway's VNI from abroad", abroad, pipeline.GatewayVNI, w.abroad, w.virtual),
		by("a source of here from abroad", abroad, 8, w.own, w.far),
		by("a source of the third region from abroad", abroad, 8, w.farther, w.far),
		by("not the tunnel address of the one abroad", Abroad.Addr().Next(), 8, w.abroad, w.far),
		by("a node abroad that is no Edge Switch", netip.MustParseAddr("fd80:0:0:2::2"), 8, w.abroad, w.far),
	}
}

func (w world) traffic() []Case {
	var all []Case
	for _, way := range w.ways() {
		for _, b := range w.bodies() {
			c := way
			c.Name += ", " + b.name
			c.Packet = b.Packet
			c.Packet.Source, c.Packet.Destination = way.Packet.Source, way.Packet.Destination
			all = append(all, c)
		}
	}
	return all
}

var gram = packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("odd")}

func (w world) drops() []Case {
	at := func(name string, from pipeline.Port, source, destination netip.Addr) Case {
		return Case{Name: name, From: from, Packet: packet.Packet{Source: source, Destination: destination, Body: gram}}
	}
	by := func(name string, outer netip.Addr, vni pipeline.VNI, destination netip.Addr) Case {
		c := at(name, pipeline.VXLAN, w.far, destination)
		c.Outer, c.VNI = outer, vni
		return c
	}
	all := []Case{
		at("another's source", 2, w.beside, w.far),
		at("a source of far away", 2, w.far, w.own),
		at("a source of the other tenant alone", 3, w.beside, w.far),
		at("no container is there", 2, w.own, w.unused),
		at("outside, and no service", 2, w.own, w.outside),
		at("the other tenant to the service", 3, w.own, w.service),
		at("who has no virtual address to the service", 4, w.beside, w.service),
		at("who has no virtual address to what is outside", 4, w.beside, w.storage),
		at("the other tenant to what is outside", 3, w.own, w.storage),
		by("who has no virtual address here to the gateway", pipeline.VTEP(There), 8, w.gateway),
		at("the other tenant to who is beside", 3, w.own, w.beside),
		at("from the gateway to nothing virtual", pipeline.Gateway, w.storage, w.own),
		at("from the gateway back to it", pipeline.Gateway, w.storage, w.storage),
		by("a node passes nothing on", pipeline.VTEP(There), 7, w.far),
		by("an unknown VNI", pipeline.VTEP(There), 9, w.own),
		by("the gateway's VNI", pipeline.VTEP(There), pipeline.GatewayVNI, w.own),
		by("no VNI", pipeline.VTEP(There), 0, w.own),
		by("not from a VTEP", There.Addr().Next(), 7, w.own),
		by("from another cluster's VTEP", pipeline.VTEP(Stranger), 7, w.own),
	}
	for _, kind := range w.forLinks {
		c := at(fmt.Sprintf("ICMP of type %d", kind), 4, w.beside, w.own)
		c.Packet.Body, c.Drop = packet.ICMP{Type: kind, Payload: make([]byte, 16)}, dropreason.NdForbidden
		all = append(all, c)
	}
	for _, group := range w.groups {
		c := at("to all of "+group.String(), 2, w.own, group)
		c.Drop = dropreason.Multicast
		all = append(all, c)
	}
	last := at("the last hop is not for a tunnel", 2, w.own, w.far)
	last.Packet.HopLimit = 1
	here := at("the last hop, same node", 4, w.beside, w.own)
	here.Packet.HopLimit = 1
	arrives := by("the last hop, arrived", pipeline.VTEP(There), 7, w.own)
	arrives.Packet.HopLimit = 1
	return append(all, last, here, arrives)
}
