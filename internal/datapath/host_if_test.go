package datapath

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// side is another way into a node than its uplink.
type side struct {
	ns     *netns.Namespace // of the sender
	device string
	to     net.HardwareAddr
}

// secondNIC gives the node a second NIC, with a machine at the other end.
func (n *testNode) secondNIC(t *testing.T) side {
	t.Helper()
	stranger := namespace(t, "stranger")
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "eth1", 200
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(stranger.FD())
	must(t, n.datapath.Netlink.LinkAdd(pair))
	h, err := stranger.Netlink()
	must(t, err)
	defer h.Close()
	far, err := h.LinkByName("eth0")
	must(t, err)
	must(t, h.LinkSetUp(far))
	return side{stranger, "eth0", n.up(t, "eth1", "2001:db8:99::1")}
}

func (n *testNode) up(t *testing.T, device, address string) net.HardwareAddr {
	t.Helper()
	l, err := n.datapath.Netlink.LinkByName(device)
	must(t, err)
	must(
		t,
		n.datapath.Netlink.AddrAdd(
			l,
			&netlink.Addr{
				IPNet: host.IPNet(netip.PrefixFrom(netip.MustParseAddr(address), 64)),
				Flags: unix.IFA_F_NODAD,
			},
		),
	)
	must(t, n.datapath.Netlink.LinkSetUp(l))
	must(t, n.ns.WaitUp(t.Context(), device))
	return l.Attrs().HardwareAddr
}

// forwards makes the node a router, which is the hardest case: its stack forwards all packets that it can route.
func (n *testNode) forwards(t *testing.T) {
	t.Helper()
	for _, device := range []string{"all", "eth0"} {
		must(t, n.ns.Do(func() error {
			return os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", device, "forwarding"), []byte("1"), 0)
		}))
	}
}

// defaultRoute adds a default route, so that every packet that nothing else stops leaves the node.
func (n *testNode) defaultRoute(t *testing.T, via *testNode) {
	t.Helper()
	must(
		t,
		n.datapath.Netlink.RouteAdd(
			&netlink.Route{Dst: host.IPNet(netip.MustParsePrefix("::/0")), Gw: via.underlay.AsSlice()},
		),
	)
}

// claims returns forged packets for a node's container, which do not come from the fabric.
func (n *testNode) claims(t *testing.T, c, sibling, far *testContainer) (all []packet.Packet) {
	t.Helper()
	for _, source := range []netip.Addr{
		far.plain(), far.seen(), sibling.plain(), sibling.seen(), n.address(), n.gateway(t, blue), far.node.address(),
		netip.MustParseAddr("2001:db8:99::2"),
	} {
		for _, to := range []netip.Addr{c.plain(), c.seen()} {
			all = append(all, packet.Packet{Source: source, Destination: to, Body: gram})
		}
	}
	return all
}

// TestOtherWaysIn: packets for a container come in only by the uplink, from the fabric, even if no agent has attached
// programs to another interface yet. (With programs: TestStranger. Tags on the uplink: TestTaggedFramesStayOut.)
func TestOtherWaysIn(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	c, sibling, far := n.add(t, blue, 1), n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	s := n.secondNIC(t)
	n.forwards(t)
	inside, err := packet.NewCapture(c.ns, "eth0", packet.IncomingOnly)
	must(t, err)
	defer inside.Close()
	arrived, err := packet.NewCapture(n.ns, "eth1", packet.IncomingOnly)
	must(t, err)
	defer arrived.Close()
	raw, err := packet.NewInjector(s.ns, s.device)
	must(t, err)
	defer raw.Close()
	for _, p := range n.claims(t, c, sibling, far) {
		must(t, raw.Send(p.Frame(s.to, raw.MAC())))
	}
	sentinelAfter(t, arrived, func(last packet.Sentinel) {
		must(
			t,
			raw.Send(
				packet.Packet{
					Source:      netip.MustParseAddr("2001:db8:99::2"),
					Destination: netip.MustParseAddr("2001:db8:99::3"),
					Body:        packet.Raw{Proto: 253, Data: last[:]},
				}.Frame(
					s.to,
					raw.MAC(),
				),
			),
		)
	})
	if seen := drain(t, inside, c); len(seen) != 1 {
		t.Errorf("%d packets came in", len(seen)-1)
	}
	// Those for the address that containers see were routed to them, and ended there.
	if got := n.drops(t)["src-not-own"]; got != 8 {
		t.Errorf("%d drops for src-not-own, want 8", got)
	}
	mustReach(t, far, c, "after all of it")
	transfer(t, n.self(), c, 100000)
}

// TestHostNetworkProcess: a process of the node without privileges, or root with transparent sockets, cannot send as a
// container.
func TestHostNetworkProcess(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	n.defaultRoute(t, peer)
	for _, a := range []struct {
		name       string
		source, to netip.Addr
		why        string
	}{
		{"own container to a container", c.plain(), far.plain(), "host-claims-tenant"},
		{"own container to a node", c.plain(), peer.underlay, "host-claims-tenant"},
		{"another node's container", far.plain(), far.plain(), "host-claims-tenant"},
		{"ciphertext", c.seen(), peer.underlay, "private-outside"},
		{"guest", n.gateway(t, blue), peer.underlay, "private-outside"},
		{"plaintext inward", far.plain(), c.seen(), "src-not-own"},
	} {
		for _, option := range []int{unix.IPV6_FREEBIND, unix.IPV6_TRANSPARENT} {
			before := n.drops(t)[a.why]
			must(t, n.ns.Do(func() error { return sendFrom(option, a.source, a.to) }))
			if got := n.drops(t)[a.why] - before; got != 1 {
				t.Errorf(
					"%s: option %d, from %v to %v: %d drops for %s, want 1",
					a.name,
					option,
					a.source,
					a.to,
					got,
					a.why,
				)
			}
		}
	}
	// The private prefix leads nowhere but to its own containers.
	for _, to := range []netip.Addr{far.seen(), c.plain(), n.gateway(t, blue)} {
		if err := n.ns.Do(func() error { return sendUDP(to, []byte("anyone?")) }); err == nil {
			t.Errorf("a packet for %v was sent", to)
		}
	}
	// Packets from the node's own addresses pass, also those of services and of a router.
	for _, to := range []*testContainer{peer.self(), peer.under()} {
		transfer(t, n.self(), to, 100000)
		transfer(t, n.under(), to, 100000)
	}
}

// TestAnotherNode: an attacker controls another node and has removed the program on its way out. This node accepts only
// packets from that node's containers, and only to containers of the same tenant.
func TestAnotherNode(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	c, sibling, other := n.add(t, blue, 1), n.add(t, blue, 1), n.add(t, red, 1)
	far, farRed := peer.add(t, blue, 1), peer.add(t, red, 1)
	peer.detach(t, "uplink_out")
	raw, inside := injector(t, peer.ns), capture(t, c.ns)
	keepOrder(t)
	reserved, absent := address.Split(far.plain()), address.Split(c.plain())
	reserved.App = firstReserved
	absent.Index++
	about := packet.ICMP{
		Type:    packet.PacketTooBig,
		Rest:    [4]byte{2: 5},
		Payload: packet.Packet{Source: c.plain(), Destination: sibling.plain(), Body: gram}.Marshal(),
	}
	for _, a := range []struct {
		name       string
		source, to netip.Addr
		body       packet.Body
		why        string
	}{
		{"this node's container", sibling.plain(), c.plain(), gram, "own-source"},
		{"this node", n.address(), c.plain(), gram, "own-source"},
		{"this node, to the node", n.address(), n.underlay, gram, "own-source"},
		{"another tenant's container", farRed.plain(), c.plain(), gram, "tenant-mismatch"},
		{"its own container, to another tenant", far.plain(), other.plain(), gram, "tenant-mismatch"},
		{"as itself", peer.address(), c.plain(), gram, "tenant-mismatch"},
		{"guest", reserved.Addr(), c.plain(), gram, "app-reserved"},
		{"its own container, to a missing container", far.plain(), absent.Addr(), gram, "no-endpoint"},
		{"its own container, to the node", far.plain(), n.address().Next(), gram, "tenant-to-node"},
		{"its own container, to the underlay", far.plain(), n.underlay, gram, "tenant-to-node"},
		{"ciphertext, to the node", far.seen(), n.address(), gram, "private-outside"},
		{"ciphertext, to the underlay", far.seen(), n.underlay, gram, "private-outside"},
		{"as a router, about what never left", peer.address(), c.plain(), about, "icmp-quote"},
	} {
		before := n.drops(t)[a.why]
		must(t, raw.Send(packet.Packet{Source: a.source, Destination: a.to, Body: a.body}.Frame(n.mac(t), raw.MAC())))
		if seen := drain(t, inside, c); len(seen) != 1 {
			t.Errorf("%s: the container got %x", a.name, seen[0].Frame)
		}
		if got := n.drops(t)[a.why] - before; got != 1 {
			t.Errorf("%s: %d drops for %s, want 1", a.name, got, a.why)
		}
	}
	peer.restore(t, far, farRed) // with macvlans, far needs the program uplink_out to send
	mustReach(t, far, c, "after all of it")
}

// detach detaches a program from the uplink.
func (n *testNode) detach(t *testing.T, hook string) {
	t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(n.datapath.LinksDir(), hook), nil)
	must(t, err)
	must(t, l.Detach())
	must(t, l.Close())
}

// under returns the node's stack as a container with the node's address on the fabric.
func (n *testNode) under() *testContainer {
	c := n.self()
	c.record.Attachments[0].Address = n.underlay
	return c
}

// TestEachProgramMissing: whichever program is missing, packets of containers reach no container of another tenant, and
// no packet with a ciphertext address leaves the node.
func TestEachProgramMissing(t *testing.T) {
	hooks := map[string]bool{"uplink_in": false, "uplink_out": true} // whether packets go on without it
	if joined == endpoint.Macvlan {
		hooks = map[string]bool{"uplink_in": false, "uplink_out": false, "guard_in": true, "guard_out": true}
	}
	for hook, goesOn := range hooks {
		t.Run(hook, func(t *testing.T) {
			w := newWire(t)
			n, peer := w.nodes[0], w.nodes[1]
			c, far, red1, red2 := n.add(t, blue, 1), peer.add(t, blue, 1), n.add(t, red, 1), peer.add(t, red, 1)
			n.forwards(t)
			n.defaultRoute(t, peer)
			mustReach(t, c, far, "before")
			n.detach(t, hook)
			onWire, err := packet.NewCapture(peer.ns, "eth0", packet.IncomingOnly)
			must(t, err)
			defer onWire.Close()
			got := c.ping(t, far.seen(), 56, map[bool]time.Duration{false: impatience, true: patience}[goesOn])
			if want := map[bool]int{true: got.Sent}[goesOn]; got.Received != want {
				t.Errorf("%d of %d answered, want %d", got.Received, got.Sent, want)
			}
			for _, pair := range [][2]*testContainer{{c, red1}, {c, red2}, {red2, c}, {far, red1}} {
				if r := pair[0].ping(t, pair[1].seen(), 56, impatience); r.Received != 0 {
					t.Errorf("%v reached %v", pair[0].seen(), pair[1].seen())
				}
			}
			if err := n.ns.Do(func() error { return sendUDP(far.seen(), []byte("anyone?")) }); err == nil {
				t.Error("the node asked the fabric for a ciphertext")
			}
			for _, s := range sentinelAfter(t, onWire, func(s packet.Sentinel) {
				must(t, n.ns.Do(func() error { return sendUDP(peer.underlay, s[:]) }))
			}) {
				if p, err := s.Packet(); err == nil &&
					(address.DefaultPlan().Private.Contains(p.Source) ||
						address.DefaultPlan().Private.Contains(p.Destination)) {
					t.Errorf("leaked to the wire: %+v", p)
				}
			}
			n.restore(t, c, red1)
			mustReach(t, c, far, "attached again")
		})
	}
}
