package datapath

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
)

// macCase is a packet that a program sends to a container or to the node.
type macCase struct {
	name    string
	program *ebpf.Program
	ctx     skb
	frame   []byte
	to      *testContainer // nil: the node
}

func (b *progBench) macCases(t *testing.T) []macCase {
	far := b.b3.Addr()
	last := packet.Packet{Source: b.b1.seen(), Destination: sees(far), HopLimit: 1, Body: gram}
	reply := packet.ICMP{Type: packet.EchoReply, Rest: packet.Echo(1, 1)}
	objects := b.datapath.Objects
	from := func(p packet.Packet, to net.HardwareAddr) []byte { return p.Frame(to, host.ContainerMAC) }
	return []macCase{
		{"from the fabric", objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()},
			from(packet.Packet{Source: far, Destination: b.b1.plain(), Body: gram}, b.uplinkMAC), b.b1},
		{"on the same node", objects.PilContainer, skb{Ifindex: b.b1.ifindex()},
			b.frame(b.sent(b.b2.seen(), gram)), b.b2},
		{"from the node", objects.PilNode, skb{Ifindex: uint32(b.datapath.NodeNear)},
			from(packet.Packet{Source: b.address(), Destination: b.b1.seen(), Body: gram}, host.ContainerMAC), b.b1},
		{"an error", objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, b.frame(last), b.b1},
		{"to the node", objects.PilContainer, skb{Ifindex: b.b1.ifindex()},
			b.frame(b.sent(b.gateway(t, blue), reply)), nil},
	}
}

// haveMACs sends each packet twice, past the flow cache and from it.
func (b *progBench) haveMACs(t *testing.T, when string, macOf func(*testContainer) net.HardwareAddr) {
	t.Helper()
	must(t, b.datapath.InvalidateFlows())
	for _, c := range b.macCases(t) {
		want := host.ContainerMAC
		if c.to != nil {
			want = macOf(c.to)
		}
		for _, how := range []string{"a miss", "a hit"} {
			verdict, out, _ := b.run(t, c.program, c.frame, c.ctx)
			if header := packet.Frame(want, host.GatewayMAC, packet.EtherTypeIPv6, nil); verdict != verdictRedirect ||
				!bytes.HasPrefix(out, header) {
				t.Errorf("%s, %s, %s: verdict %d, %x; want %x", c.name, when, how, verdict, out[:14], header)
			}
		}
	}
}

func ownMAC(c *testContainer) net.HardwareAddr { return c.record.Device.ContainerMAC }

func sharedMAC(*testContainer) net.HardwareAddr { return host.ContainerMAC }

// TestContainerMAC: each container has a MAC of its own, which every packet to it has. A container of an older build
// keeps the MAC that they all had, and so does one whose entry is missing.
func TestContainerMAC(t *testing.T) {
	b := newProgBench(t)
	for i, c := range []*testContainer{b.b1, b.b2, b.r1} {
		if want := address.MAC("", 1, uint16(i+1)); !slices.Equal(ownMAC(c), want) {
			t.Errorf("container %d has MAC %v, want %v", i+1, ownMAC(c), want)
		}
		if inside := c.macInside(t); !slices.Equal(inside, ownMAC(c)) {
			t.Errorf("eth0 of container %d has MAC %v, want %v", i+1, inside, ownMAC(c))
		}
	}
	b.haveMACs(t, "with MACs", ownMAC)

	b.b1.record.Device.ContainerMAC = host.ContainerMAC
	b.restore(t, b.b1, b.b2, b.r1)
	must(t, b.datapath.checkEndpoint(t.Context(), b.b1.record))
	b.haveMACs(t, "one of an older build", ownMAC)

	must(t, b.datapath.Objects.PilMacsV1.Delete(b.b2.ifindex()))
	b.haveMACs(t, "one without an entry", sharedMAC)

	for _, c := range []*testContainer{b.b1, b.b2} {
		must(t, b.datapath.removeEndpoint(t.Context(), c.record))
		if err := b.datapath.Objects.PilMacsV1.Lookup(c.ifindex(), new([8]byte)); err == nil {
			t.Errorf("container %d is removed, and its MAC is not", c.record.ID)
		}
	}
	if err := b.datapath.Objects.PilMacsV1.Lookup(b.r1.ifindex(), new([8]byte)); err != nil {
		t.Errorf("the MAC of the container that stays: %v", err)
	}
}

func (c *testContainer) macInside(t *testing.T) net.HardwareAddr {
	t.Helper()
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	return eth0.Attrs().HardwareAddr
}

// TestMACsOfOlderBuilds: a container with the MAC of older builds reaches one with its own. Their node reaches both.
func TestMACsOfOlderBuilds(t *testing.T) {
	w := newWireOf(t, paired)
	n, far := w.nodes[0], w.nodes[1].add(t, blue, 1)
	older, newer := n.add(t, blue, 1), n.add(t, blue, 1)
	older.record.Device.ContainerMAC = host.ContainerMAC
	n.restore(t, older, newer)
	if inside := older.macInside(t); !slices.Equal(inside, host.ContainerMAC) {
		t.Fatalf("the older one has MAC %v", inside)
	}
	for _, pair := range [][2]*testContainer{{older, newer}, {newer, older}, {older, far}, {far, newer}} {
		mustReach(t, pair[0], pair[1], "with MACs of two builds")
	}
	for _, c := range []*testContainer{older, newer} {
		if got := n.ping(t, c.seen()); got != 1 {
			t.Errorf("their node got %d answers of 1", got)
		}
	}
}

// TestProgramsOfOlderBuilds: older programs give their one MAC to every packet. A veth that has another MAC receives
// what enters its namespace directly, and drops what crosses it, which is what its node sends.
func TestProgramsOfOlderBuilds(t *testing.T) {
	w := newWireOf(t, endpoint.Veth)
	n, far := w.nodes[0], w.nodes[1].add(t, blue, 1)
	a, b := n.add(t, blue, 1), n.add(t, blue, 1)
	for _, c := range []*testContainer{a, b} { // without entries the programs do what older ones did
		must(t, n.datapath.Objects.PilMacsV1.Delete(c.ifindex()))
	}
	must(t, n.datapath.InvalidateFlows())
	mustReach(t, a, b, "on the same node")
	mustReach(t, far, a, "from the fabric")
	if got := n.ping(t, a.seen()); got != 0 {
		t.Errorf("the node got %d answers, want none", got)
	}
}

// ping returns how many answers the node gets to one echo request.
func (n *testNode) ping(t *testing.T, to netip.Addr) int {
	t.Helper()
	r, err := packet.Ping(t.Context(), n.ns, to, packet.PingOptions{Count: 1, Timeout: impatience})
	must(t, err)
	return r.Received
}
