package datapath

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// broadcastMAC is the broadcast MAC, which every device accepts.
var broadcastMAC = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// edgeDevices are an interface with Ethernet beside the uplink, and one without.
func (b *progBench) edgeDevices(t testing.TB) map[string]uint32 {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth1"
	must(t, b.datapath.Netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth2"}))
	b.tun(t, "tun1")
	all := map[string]uint32{}
	for _, name := range []string{"eth1", "tun1"} {
		l, err := b.datapath.Netlink.LinkByName(name)
		must(t, err)
		all[name] = uint32(l.Attrs().Index)
	}
	return all
}

// fromEdge are packets that come in by an interface beside the uplink and every verdict on them.
func (b *progBench) fromEdge() []progCase {
	stranger, node := netip.MustParseAddr("2001:db8:99::2"), b.address()
	from := func(source, to netip.Addr) []byte {
		return packet.Packet{Source: source, Destination: to, Body: gram}.Frame(broadcastMAC, host.ContainerMAC)
	}
	ours := func(change func(*address.Plain)) netip.Addr { return changed(b.b1.plain(), change) }
	service := ours(func(p *address.Plain) { p.Tenant, p.App, p.Index = 0, 0, 53 })
	return []progCase{
		{name: "a stranger to the node", frame: from(stranger, node), next: true},
		{name: "a stranger to another", frame: from(stranger, b.far.underlay), next: true},
		{name: "a stranger to a container, which the route refuses", frame: from(stranger, b.b1.plain()), next: true},
		{name: "another node", frame: from(b.far.address(), node), next: true},
		{name: "a service in our /64", frame: from(service, node), next: true},
		{name: "a container of network ila", frame: from(atLocator, node), reason: "tenant-to-node"},
		{name: "an address that reads like a tenant's", frame: from(tenantLike, node), next: true},
		{
			name: "neighbour discovery",
			frame: packet.Packet{
				Source:      netip.MustParseAddr("fe80::2"),
				Destination: netip.MustParseAddr("ff02::1:ff00:1"),
				Body:        packet.ICMP{Type: packet.NeighborSolicitation},
			}.Frame(
				broadcastMAC,
				host.ContainerMAC,
			),
			next: true,
		},

		{name: "a container here", frame: from(b.b1.plain(), node), reason: "own-source"},
		{
			name:   "no container here",
			frame:  from(ours(func(p *address.Plain) { p.Index++ }), b.far.underlay),
			reason: "own-source",
		},
		{name: "the node itself", frame: from(node, b.underlay), reason: "own-source"},
		{name: "another node's container", frame: from(b.b3.Addr(), node), reason: "tenant-to-node"},
		{
			name:   "another node's container, to the underlay",
			frame:  from(b.b3.Addr(), b.underlay),
			reason: "tenant-to-node",
		},
		{
			name:   "another node's container, to a container",
			frame:  from(b.b3.Addr(), b.b1.plain()),
			reason: "tenant-to-node",
		},
		{name: "what containers see", frame: from(b.b1.seen(), node), reason: "private-outside"},
		{name: "to what containers see", frame: from(stranger, b.b1.seen()), reason: "private-outside"},
		{name: "an egress address of this node", frame: from(egressOf(b.prefix), stranger), reason: "own-source"},
		{
			name:   "another node's egress address",
			frame:  from(egressOf(b.far.prefix), stranger),
			reason: "tenant-to-node",
		},
	}
}

// toEdge are packets that leave by an interface beside the uplink and every verdict on them.
func (b *progBench) toEdge() []progCase {
	stranger := netip.MustParseAddr("2001:db8:99::2")
	to := func(source, to netip.Addr) []byte {
		return packet.Packet{Source: source, Destination: to, Body: gram}.Frame(host.ContainerMAC, b.uplinkMAC)
	}
	return []progCase{
		{name: "the node", frame: to(b.address(), stranger), next: true},
		{name: "the underlay", frame: to(b.underlay, stranger), next: true},
		{name: "an address that reads like a tenant's", frame: to(tenantLike, stranger), next: true},

		{name: "a container here", frame: to(b.b1.plain(), stranger), reason: "host-claims-tenant"},
		{name: "a container of network ila", frame: to(atLocator, stranger), reason: "host-claims-tenant"},
		{name: "another node's container", frame: to(b.b3.Addr(), b.b3.Addr()), reason: "host-claims-tenant"},
		{name: "what containers see", frame: to(b.b1.seen(), stranger), reason: "private-outside"},
		{name: "to what containers see", frame: to(b.address(), sees(b.b3.Addr())), reason: "private-outside"},
		{name: "an egress address of this node", frame: to(egressOf(b.prefix), stranger), reason: "host-claims-tenant"},
		{
			name:   "another node's egress address",
			frame:  to(egressOf(b.far.prefix), stranger),
			reason: "host-claims-tenant",
		},
	}
}

// TestFromEdge: through another interface no packet comes in as a container's or as the node's, and all others do.
func TestFromEdge(t *testing.T) {
	b := newProgBench(t)
	devices := b.edgeDevices(t)
	all := b.fromEdge()
	for device, index := range devices {
		for _, c := range all {
			c.name += ", by " + device
			b.check(t, b.datapath.Objects.PilEdgeIn, skb{Ifindex: index}, c)
		}
	}
	own := all[slices.IndexFunc(all, func(c progCase) bool { return c.name == "a container here" })].frame
	version := append(append(bytes.Clone(own[:14]), 0x40), own[15:]...)
	for _, c := range []struct {
		device string
		progCase
	}{
		{"eth1", progCase{name: "IPv4 that reads like our own /64", frame: packet.Frame(broadcastMAC, host.ContainerMAC,
			packet.EtherTypeIPv4, own[14:]), next: true}},
		{"eth1", progCase{name: "for another machine on the link", frame: append(bytes.Clone(host.GatewayMAC),
			own[6:]...), next: true}},
		{"tun1", progCase{name: "IPv4 without Ethernet that reads like our own /64", frame: version, next: true}},
	} {
		b.check(t, b.datapath.Objects.PilEdgeIn, skb{Ifindex: devices[c.device]}, c.progCase)
	}
}

// TestFromPort: at the port of a bridge, the program checks only the frames that the bridge does not forward.
func TestFromPort(t *testing.T) {
	b := newProgBench(t)
	index := b.edgeDevices(t)["eth1"]
	for _, c := range b.fromEdge() {
		forward := c
		forward.name, forward.reason, forward.next = c.name+", through the bridge", "", true
		b.check(t, b.datapath.Objects.PilPortIn, skb{Ifindex: index}, forward)
		for _, last := range []byte{0x00, 0x0f} {
			c := c
			c.name = fmt.Sprintf("%s, to reserved address %x", c.name, last)
			c.frame = append(append(bytes.Clone(lldp[:5]), last), c.frame[6:]...)
			b.check(t, b.datapath.Objects.PilPortIn, skb{Ifindex: index}, c)
		}
		forward.name, forward.frame = c.name+", to an address that is not reserved", append(
			append(bytes.Clone(lldp[:5]), 0x10),
			c.frame[6:]...)
		b.check(t, b.datapath.Objects.PilPortIn, skb{Ifindex: index}, forward)
	}
}

// TestToEdge: on another interface, the same packets of the host's stack are dropped as on the uplink. Our mark does
// not change the verdict there.
func TestToEdge(t *testing.T) {
	b := newProgBench(t)
	for device, index := range b.edgeDevices(t) {
		for _, c := range b.toEdge() {
			c.name += ", by " + device
			b.check(t, b.datapath.Objects.PilEdgeOut, skb{Ifindex: index}, c)
			c.name += ", marked"
			b.check(
				t,
				b.datapath.Objects.PilEdgeOut,
				skb{Ifindex: index, IngressIfindex: b.b1.ifindex(), Mark: b.mark(t)},
				c,
			)
		}
	}
}

// FuzzFromEdge: a packet that comes in by another interface is dropped if it claims to be from a container or the node.
// All others pass.
func FuzzFromEdge(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilEdgeIn
	b.fuzzEdge(f, b.fromEdge(), func(frame []byte) bool { return frame[0]&1 != 0 }, b.forgedInward)
}

func (b *fuzzBench) forgedInward(source, destination netip.Addr) bool {
	here := b.node.Contains(source) && (address.Split(source).Tenant != 0 || source == b.address())
	return here || claimsTenant(source) || isEgress(source) || onlyInside(source) || onlyInside(destination)
}

// FuzzFromPort: at a bridge's port, the same holds for the frames that no bridge forwards. All other frames pass.
func FuzzFromPort(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilPortIn
	cases := b.fromEdge()
	for i, c := range cases {
		cases[i].frame = append(bytes.Clone(lldp[:6]), c.frame[6:]...)
	}
	b.fuzzEdge(
		f,
		cases,
		func(frame []byte) bool { return bytes.Equal(frame[:5], lldp[:5]) && frame[5] <= 0x0f },
		b.forgedInward,
	)
}

// FuzzToEdge: the host's stack sends no packet by any interface from or to a container's address.
func FuzzToEdge(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilEdgeOut
	b.fuzzEdge(f, b.toEdge(), func([]byte) bool { return true }, func(source, destination netip.Addr) bool {
		return claimsTenant(source) || isEgress(source) || onlyInside(source) || onlyInside(destination)
	})
}

// fuzzEdge uses an interface whose MAC no frame has as its destination, except broadcasts.
func (b *fuzzBench) fuzzEdge(
	f *testing.F,
	cases []progCase,
	judged func(frame []byte) bool,
	forged func(source, destination netip.Addr) bool,
) {
	eth1 := b.edgeDevices(f)["eth1"]
	for _, frame := range frames(cases) {
		f.Add(frame, byte(0), byte(0), byte(0))
		f.Add(priorityTag(frame), byte(0), byte(0), byte(0))
	}
	f.Fuzz(func(t *testing.T, frame []byte, source, destination, how byte) {
		if len(frame) < ipv6At+1 {
			t.Skip("shorter than any frame")
		}
		frame = b.shape(frame, source, destination, how)
		verdict, _ := b.send(t, frame, &skb{Ifindex: eth1})
		drops := false
		if len(frame) >= ipv6At+40 && judged(frame) {
			drops = hidesInTag(frame) || frame[12] == 0x86 && frame[13] == 0xdd &&
				forged(netip.AddrFrom16([16]byte(frame[ipv6At+8:])), netip.AddrFrom16([16]byte(frame[ipv6At+24:])))
		}
		if want := map[bool]uint32{true: verdictDrop, false: verdictNext}[drops]; verdict != want {
			t.Fatalf("verdict %d, not %d:\n%x", verdict, want, frame)
		}
	})
}
