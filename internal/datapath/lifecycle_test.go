package datapath

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

func mustReach(t *testing.T, from, to *testContainer, when string) {
	t.Helper()
	if r := from.ping(t, to.seen(), 56, patience); r.Received != r.Sent {
		t.Errorf("%s: %d of %d pings answered", when, r.Received, r.Sent)
	}
}

// TestWorksWithoutAgent: packets need no agent, and a new agent takes over the existing packet path.
func TestWorksWithoutAgent(t *testing.T) {
	w := newWire(t)
	n1, n2 := w.nodes[0], w.nodes[1]
	a, b := n1.add(t, blue, 1), n2.add(t, blue, 1)
	mustReach(t, a, b, "before")
	dir := n1.datapath.config.BPFFS
	must(t, n1.datapath.Close())
	mustReach(t, a, b, "with the datapath closed")

	must(t, n1.ns.Do(func() (err error) {
		config := n1.datapath.config
		config.BPFFS = dir
		n1.datapath, err = Open(config)
		return err
	}))
	mustReach(t, a, b, "reopened")
	must(t, n1.datapath.putTenant(blue))
	n1.restore(t, a)
	must(t, n1.datapath.checkEndpoint(t.Context(), a.record))
	mustReach(t, a, b, "taken over")
	if s, err := n1.datapath.Status(); err != nil || !s.Healthy || !s.FirstInChain {
		t.Errorf("status %+v, %v", s, err)
	}
}

// TestSeesWhoStandsBeforeIt: Status reports if another program runs before ours, or if ours was detached.
func TestSeesWhoStandsBeforeIt(t *testing.T) {
	n := newWire(t).nodes[0]
	says := func(healthy, first bool, problem string) {
		t.Helper()
		s, err := n.datapath.Status()
		must(t, err)
		if s.Healthy != healthy || s.FirstInChain != first ||
			!strings.Contains(strings.Join(s.Problems, "\n"), problem) {
			t.Errorf(
				"healthy %v, first %v, %q; want %v, %v, %q",
				s.Healthy,
				s.FirstInChain,
				s.Problems,
				healthy,
				first,
				problem,
			)
		}
	}
	says(true, true, "")
	for _, h := range n.datapath.UplinkHooks() {
		if h.After == nil {
			var other link.Link
			must(t, n.ns.Do(func() (err error) {
				other, err = link.AttachTCX(link.TCXOptions{
					Interface: n.datapath.Uplinks[0].Attrs().Index, Program: n.datapath.Objects.PilTryCipher,
					Attach: h.Attach, Anchor: link.Head(),
				})
				return err
			}))
			says(true, false, "1 other program runs before "+h.Name)
			must(t, other.Close())
			says(true, true, "")
		}
		ours, err := link.LoadPinnedLink(filepath.Join(n.datapath.LinksDir(), h.Name), nil)
		must(t, err)
		must(t, ours.Detach())
		must(t, ours.Close())
		says(false, false, "program "+h.Name+" is not on eth0")
		n.restore(t)
		says(true, true, "")
	}
}

// TestOnePacketPathOnAnUplink: an agent that was started with the wrong state directory must not remove containers that
// it does not know, whether the agent that knows them runs or not.
func TestOnePacketPathOnAnUplink(t *testing.T) {
	w := newWire(t)
	n1, n2 := w.nodes[0], w.nodes[1]
	a, b := n1.add(t, blue, 1), n2.add(t, blue, 1)
	second := n1.datapath.config
	second.BPFFS, second.NodePrefix = bpffs(t), netip.MustParsePrefix("fd70:696c:6100:9::/64")
	must(t, n1.datapath.Close())
	must(t, n1.ns.Do(func() error {
		d, err := Open(second)
		if err == nil {
			t.Errorf("a second packet path was opened: %v", d.Close())
		} else if !strings.Contains(err.Error(), "another agent") {
			t.Error(err)
		}
		return nil
	}))
	if _, err := os.Stat(second.BPFFS); !os.IsNotExist(err) {
		t.Errorf("%s was made: %v", second.BPFFS, err)
	}
	mustReach(t, a, b, "after a second agent was refused")
}

// TestNothingFlowsBeforeActive: a container that exists and is not active neither sends nor receives.
func TestNothingFlowsBeforeActive(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].create(t, blue, 1)
	for _, pair := range [][2]*testContainer{{a, b}, {b, a}} {
		if r := pair[0].ping(t, pair[1].seen(), 56, impatience); r.Received != 0 {
			t.Errorf("%v reached %v", pair[0].seen(), pair[1].seen())
		}
	}
	// b has no program yet, so the kernel drops its packets, and our counters do not count them.
	if got := w.nodes[1].drops(t); got["no-endpoint"] != 2 {
		t.Errorf("counted %v, not what was sent", got)
	}
	must(t, w.nodes[1].datapath.activate(b.record))
	mustReach(t, a, b, "active")
	mustReach(t, b, a, "active, back")
}

// TestMissingProgramDrops: without its program a hook lets nothing pass (design rule: drop, never leak).
func TestMissingProgramDrops(t *testing.T) {
	w := newWireOf(t, paired)
	n1, n2 := w.nodes[0], w.nodes[1]
	a, b := n1.add(t, blue, 1), n2.add(t, blue, 1)
	// A node that forwards for others must not forward for us.
	must(t, n1.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0) }))
	must(t, n1.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/eth0/forwarding", []byte("1"), 0) }))
	mustReach(t, a, b, "with every program")

	onWire := capture(t, n2.ns)
	inB := capture(t, b.ns)

	must(t, n1.detachContainer(a.record))
	if r := a.ping(t, b.seen(), 56, impatience); r.Received != 0 {
		t.Errorf("answered without the container program")
	}
	for _, c := range sentinelAfter(t, onWire, func(s packet.Sentinel) {
		must(t, n1.ns.Do(func() error { return sendUDP(n2.underlay, s[:]) }))
	}) {
		if p, err := c.Packet(); err == nil &&
			(p.Source == a.seen() || p.Source == a.plain() || p.Destination == b.seen() || p.Destination == b.plain()) {
			t.Errorf("leaked to the wire: %+v", p)
		}
	}
	must(t, n1.datapath.activate(a.record))
	mustReach(t, a, b, "attached again")

	l, err := link.LoadPinnedLink(filepath.Join(n2.datapath.LinksDir(), "uplink_in"), nil)
	must(t, err)
	must(t, l.Unpin())
	must(t, l.Close())
	if s, err := n2.datapath.Status(); err != nil || s.Healthy {
		t.Errorf("a missing program is healthy: %+v, %v", s, err)
	}
	before := len(drain(t, inB, b))
	if r := a.ping(t, b.seen(), 56, impatience); r.Received != 0 {
		t.Errorf("answered without the uplink program")
	}
	if after := len(drain(t, inB, b)); before == 0 || after != 1 {
		t.Errorf("%d frames reached the container beside the sentinel (%d before)", after-1, before)
	}
}

// TestMissingProgramDropsIPv4: without the program, a node that forwards IPv4 accepts no IPv4 packet of a container.
func TestMissingProgramDropsIPv4(t *testing.T) {
	w := newWireOf(t, endpoint.Veth)
	n := w.nodes[0]
	a := n.add(t, blue, 1)
	own := netip.MustParseAddrPort("192.0.2.1:9")
	var service *net.UDPConn
	must(t, n.ns.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		eth0, err := n.datapath.Netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := n.datapath.Netlink.AddrAdd(eth0, &netlink.Addr{IPNet: host.HostNet(own.Addr())}); err != nil {
			return err
		}
		service, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(own))
		return err
	}))
	defer service.Close()
	must(t, n.detachContainer(a.record))

	onHost, err := packet.NewCapture(n.ns, a.record.Device.HostName)
	must(t, err)
	defer onHost.Close()
	raw := injector(t, a.ns)
	// UDP from 192.0.2.2, which no host has, and an ARP request for the node's address.
	must(t, raw.Send(packet.Frame(host.GatewayMAC, host.ContainerMAC, packet.EtherTypeIPv4, []byte{
		0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0xf6, 0xc9, 192, 0, 2, 2, 192, 0, 2, 1,
		0, 7, 0, 9, 0, 12, 0, 0, 'e', 'v', 'i', 'l',
	})))
	must(
		t,
		raw.Send(
			packet.Frame(
				net.HardwareAddr{255, 255, 255, 255, 255, 255},
				host.ContainerMAC,
				packet.EtherTypeARP,
				append(append(
					[]byte{0, 1, 8, 0, 6, 4, 0, 1}, host.ContainerMAC...), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 192, 0, 2, 1),
			),
		),
	)
	for _, c := range sentinelAfter(t, onHost, func(s packet.Sentinel) {
		must(t, raw.Send(packet.Frame(host.GatewayMAC, host.ContainerMAC, 0x88b5, s[:])))
	}) {
		if c.Outgoing {
			t.Errorf("the node answered: %x", c.Frame)
		}
	}
	must(t, n.ns.Do(func() error {
		client, err := net.Dial("udp4", own.String())
		if err != nil {
			return err
		}
		defer client.Close()
		_, err = client.Write([]byte("node"))
		return err
	}))
	must(t, service.SetReadDeadline(time.Now().Add(5*time.Second)))
	got := make([]byte, 8)
	if k, from, err := service.ReadFrom(got); err != nil || string(got[:k]) != "node" {
		t.Errorf("the node's service got %q from %v, %v", got[:k], from, err)
	}
}

// sentinelAfter returns what a capture saw before a sentinel it is sure to see.
func sentinelAfter(t *testing.T, c *packet.Capture, send func(packet.Sentinel)) []packet.Captured {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	s := packet.NewSentinel()
	send(s)
	seen, err := c.Until(ctx, s.In)
	must(t, err)
	return seen
}

// drain returns the packets that have reached a container. The last one is a sentinel that drain sends into the
// container's device; with a macvlan, the node's stack sends it to the container.
func drain(t *testing.T, c *packet.Capture, to *testContainer) []packet.Captured {
	t.Helper()
	if to.record.Device.Kind == endpoint.Macvlan {
		return sentinelAfter(t, c, func(s packet.Sentinel) {
			must(t, to.node.ns.Do(func() error { return sendUDP(to.seen(), s[:]) }))
		})
	}
	hostLink, err := packet.NewInjector(to.node.ns, to.record.Device.HostName)
	must(t, err)
	defer hostLink.Close()
	return sentinelAfter(t, c, func(s packet.Sentinel) {
		must(
			t,
			hostLink.Send(
				packet.Packet{
					Source:      to.seen(),
					Destination: to.seen(),
					Body:        packet.Raw{Proto: 253, Data: s[:]},
				}.Frame(
					to.record.Device.ContainerMAC,
					host.GatewayMAC,
				),
			),
		)
	})
}

func (n *testNode) detachContainer(r endpoint.Record) error {
	if r.Device.Kind == endpoint.Netkit {
		return n.ns.Do(func() error {
			return link.RawDetachProgram(link.RawDetachProgramOptions{
				Target: r.Device.HostIfindex, Program: n.datapath.Objects.PilContainer, Attach: ebpf.AttachNetkitPeer,
			})
		})
	}
	return n.datapath.Netlink.QdiscDel(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: r.Device.HostIfindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
}

// TestRefuses: what cannot work is refused before anything is changed.
func TestRefuses(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	taken := n.add(t, blue, 1)
	again := taken.record
	again.ID++
	if _, err := n.datapath.CreateDevice(t.Context(), again); err == nil ||
		!strings.Contains(err.Error(), "already has a device eth0") {
		t.Errorf("a second eth0: %v", err)
	}
	if _, err := n.datapath.Netlink.LinkByName(host.DeviceName(again.ID)); err == nil {
		t.Errorf("%s is left", host.DeviceName(again.ID))
	}
	// Another interface of the same container, of whatever tenant, would take the routes of the first.
	again.Interface = "net1"
	if _, err := n.datapath.CreateDevice(t.Context(), again); err == nil ||
		!strings.Contains(err.Error(), "already has a route fc00::/8 through its device") {
		t.Errorf("a second interface: %v", err)
	}
	if _, err := n.datapath.Netlink.LinkByName(host.DeviceName(again.ID)); err == nil {
		t.Errorf("%s is left", host.DeviceName(again.ID))
	}
	must(t, n.datapath.checkEndpoint(t.Context(), taken.record))
	if err := n.datapath.putTenant(tenant.Tenant{Name: "empty"}); err == nil {
		t.Error("a tenant without ids was taken")
	}
	wrong := n.datapath.config
	wrong.Uplinks = []string{"nothing0"}
	if err := n.ns.Do(func() error { _, err := Open(wrong); return err }); err == nil ||
		!strings.Contains(err.Error(), "--uplink") {
		t.Errorf("an uplink that is not there: %v", err)
	}
	wrong.Uplinks = []string{"tun0"} // its packets have no Ethernet header, which the programs expect
	attrs := netlink.NewLinkAttrs()
	attrs.Name = wrong.Uplinks[0]
	must(
		t,
		n.ns.Do(
			func() error { return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TUN}) },
		),
	)
	if err := n.ns.Do(func() error { _, err := Open(wrong); return err }); err == nil ||
		!strings.Contains(err.Error(), "is no Ethernet device") {
		t.Errorf("an uplink without MACs: %v", err)
	}
}

// TestEventsNameTheDrop: the ring has an event for each drop that the counters count.
func TestEventsNameTheDrop(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a, r := n.add(t, blue, 1), n.add(t, red, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	events, err := n.datapath.Events(ctx)
	must(t, err)
	spoofs := 0
	spoof := injector(t, r.ns)
	must(
		t,
		spoof.Send(
			packet.Packet{
				Source:      a.seen(),
				Destination: a.seen(),
				Body:        echo,
			}.Frame(
				host.GatewayMAC,
				host.ContainerMAC,
			),
		),
	)
	must(t, a.ns.Do(func() error { return sendUDP(r.seen(), []byte("hello")) }))
	for e := range events {
		switch e.Reason {
		case "src-not-own":
			if e.Endpoint != r.record.ID || e.Source != a.seen() {
				t.Errorf("event %+v", e)
			}
			spoofs++
			continue
		case "dst-undecryptable":
		default:
			continue
		}
		if spoofs != 1 {
			t.Errorf("%d events of one spoofed packet", spoofs)
		}
		if e.Source != a.seen() || e.Destination != r.seen() || e.Endpoint != a.record.ID || e.Count != 1 ||
			e.Hook != "container" ||
			e.Protocol != 17 ||
			e.DestinationPort != 9 ||
			time.Since(e.Time) > time.Minute {
			t.Errorf("event %+v", e)
		}
		return
	}
	t.Error("no event came")
}

// TestDeviceThatIsGone: packets for a container whose device is gone are lost without a reason until the agent notices.
// Then the programs drop them with a reason.
func TestDeviceThatIsGone(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	c, sibling, far := n.add(t, blue, 1), n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	if lost, err := n.datapath.MissingDevices([]endpoint.Record{c.record}); len(lost) != 0 || err != nil {
		t.Fatalf("while it is there: %v, %v", lost, err)
	}
	mustReach(t, far, c, "while it is there")
	c.unplug(t)
	dead := c.record
	dead.Netns += "-gone"
	for _, r := range []endpoint.Record{c.record, dead} { // the second time there is nothing left to do
		all, err := n.datapath.MissingDevices([]endpoint.Record{r, sibling.record})
		lost := all[r.ID]
		// Behind a macvlan the namespace is found wherever it is.
		noNamespace := r.Netns == dead.Netns && joined != endpoint.Macvlan
		if errors.Is(lost, dpapi.ErrNoNamespace) != noNamespace || lost == nil || len(all) != 1 || err != nil {
			t.Errorf("%s: %v, %v", r.Netns, all, err)
		}
		must(t, n.datapath.deactivate(r))
	}
	for _, from := range []*testContainer{far, sibling} {
		before := n.drops(t)["no-endpoint"]
		r := from.ping(t, c.seen(), 56, impatience)
		if got := n.drops(t)["no-endpoint"] - before; r.Received != 0 || got != uint64(r.Sent) {
			t.Errorf("from %v: %d sent, %d answered, %d drops for no-endpoint", from.seen(), r.Sent, r.Received, got)
		}
	}
	if err := n.ns.Do(func() error { return sendUDP(c.seen(), []byte("anyone?")) }); err == nil {
		t.Error("the node has a route to it")
	}
	mustReach(t, far, sibling, "the other one")
	must(t, n.datapath.removeEndpoint(t.Context(), c.record))
}
