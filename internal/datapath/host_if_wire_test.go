package datapath

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// strangerAddress is the address of a machine on the link of a second NIC.
var strangerAddress = netip.MustParseAddr("2001:db8:99::2")

// guardedNIC adds a second NIC that carries ordinary traffic, and a machine on its link.
func (n *testNode) guardedNIC(t *testing.T, peer *testNode) (side, *testContainer) {
	t.Helper()
	s := n.secondNIC(t)
	must(t, n.datapath.GuardInterfaces(nil))
	h, err := s.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName(s.device)
	must(t, err)
	must(
		t,
		h.AddrAdd(
			eth0,
			&netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(strangerAddress, 64)), Flags: unix.IFA_F_NODAD},
		),
	)
	for _, to := range []netip.Prefix{n.prefix, netip.PrefixFrom(peer.underlay, 128)} {
		must(t, h.RouteAdd(&netlink.Route{Dst: host.IPNet(to), Gw: netip.MustParseAddr("2001:db8:99::1").AsSlice()}))
	}
	must(t, s.ns.WaitUp(t.Context(), s.device))
	stranger := n.self()
	stranger.ns = s.ns
	stranger.record.Attachments[0].Address = strangerAddress
	return s, stranger
}

// tagAs puts 802.1Q headers in front of what a frame carries.
func tagAs(frame []byte, vlans ...uint16) []byte {
	for _, v := range slices.Backward(vlans) {
		frame = tag(frame)
		frame[14], frame[15] = 0x60|byte(v>>8), byte(v) // with a priority
	}
	return frame
}

// TestStranger: through another interface no packet is accepted as a container's or the node's, and all others pass.
func TestStranger(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	s, _ := n.guardedNIC(t, peer)
	raw, err := packet.NewInjector(s.ns, s.device)
	must(t, err)
	defer raw.Close()
	arrived, err := packet.NewCapture(n.ns, "eth1", packet.IncomingOnly)
	must(t, err)
	defer arrived.Close()
	keepOrder(t)
	here := netip.MustParseAddr("2001:db8:99::1")
	for _, a := range []struct {
		name       string
		source, to netip.Addr
		vlans      []uint16
		why        string // "" for packets that pass
	}{
		{"container here", c.plain(), n.address(), nil, "own-source"},
		{"container here, to its sibling", c.plain(), c.plain(), nil, "own-source"},
		{"container here, to the interface", c.plain(), here, nil, "own-source"},
		{"the node itself", n.address(), here, nil, "own-source"},
		{"container elsewhere", far.plain(), n.address(), nil, "tenant-to-node"},
		{"container elsewhere, to the interface", far.plain(), here, nil, "tenant-to-node"},
		{"container elsewhere, to a container", far.plain(), c.plain(), nil, "tenant-to-node"},
		{"answer of a container", c.seen(), n.address(), nil, "private-outside"},
		{"to a container", strangerAddress, c.seen(), nil, "private-outside"},
		{"behind a priority", c.seen(), n.address(), []uint16{0}, "private-outside"},
		{"behind two priorities", c.seen(), n.address(), []uint16{0, 0}, "malformed"},
		{"in a VLAN", c.seen(), n.address(), []uint16{5}, ""},
		{"in a VLAN, behind a priority", c.seen(), n.address(), []uint16{0, 5}, ""},
	} {
		before := n.drops(t)
		frame := packet.Packet{Source: a.source, Destination: a.to, Body: gram}.Frame(s.to, raw.MAC())
		must(t, raw.Send(tagAs(frame, a.vlans...)))
		sentinelAfter(t, arrived, func(last packet.Sentinel) {
			must(t, raw.Send(packet.Packet{Source: strangerAddress, Destination: netip.MustParseAddr("2001:db8:99::3"),
				Body: packet.Raw{Proto: 253, Data: last[:]}}.Frame(s.to, raw.MAC())))
		})
		if got := droppedSince(before, n.drops(t)); !slices.Equal(got, named(a.why)) {
			t.Errorf("%s: dropped for %q, want %q", a.name, got, named(a.why))
		}
	}
	mustReach(t, far, c, "after all of it")
}

func named(why string) []string {
	if why == "" {
		return nil
	}
	return []string{why}
}

// droppedSince returns the reasons of the drops between two readings of the counters, one element for each packet. It
// leaves out nd-ignored and mld-ignored, because kernels send such packets by themselves.
func droppedSince(before, after map[string]uint64) (reasons []string) {
	for why, n := range after {
		for range n - before[why] {
			if why != "nd-ignored" && why != "mld-ignored" {
				reasons = append(reasons, why)
			}
		}
	}
	slices.Sort(reasons)
	return reasons
}

// TestProcessBySecondNIC: a process of the node cannot send as a container through any interface.
func TestProcessBySecondNIC(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	s, _ := n.guardedNIC(t, peer)
	raw, err := packet.NewInjector(n.ns, "eth1")
	must(t, err)
	defer raw.Close()
	eth1, err := n.datapath.Netlink.LinkByName("eth1")
	must(t, err)
	// So that nothing waits until the neighbour is found.
	must(t, n.datapath.Netlink.NeighSet(&netlink.Neigh{
		LinkIndex: eth1.Attrs().Index, Family: unix.AF_INET6, State: unix.NUD_PERMANENT, IP: strangerAddress.AsSlice(),
		HardwareAddr: s.to,
	}))
	for _, a := range []struct {
		name   string
		source netip.Addr
		why    string
	}{
		{"own container", c.plain(), "host-claims-tenant"},
		{"another node's container", far.plain(), "host-claims-tenant"},
		{"ciphertext", c.seen(), "private-outside"},
		{"guest", n.gateway(t, blue), "private-outside"},
	} {
		before := n.drops(t)
		for _, option := range []int{unix.IPV6_FREEBIND, unix.IPV6_TRANSPARENT} {
			must(t, n.ns.Do(func() error { return sendFrom(option, a.source, strangerAddress) }))
		}
		if err := raw.Send(packet.Packet{Source: a.source, Destination: strangerAddress, Body: gram}.Frame(s.to,
			raw.MAC())); err == nil {
			t.Errorf("%s: a packet socket got no error", a.name)
		}
		if got, want := droppedSince(before, n.drops(t)), []string{a.why, a.why, a.why}; !slices.Equal(got, want) {
			t.Errorf("%s: dropped for %q, want %q", a.name, got, want)
		}
	}
}

// TestOrdinaryTrafficBySecondNIC: neighbours are found, connections made both ways, and a router routes.
func TestOrdinaryTrafficBySecondNIC(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	s, stranger := n.guardedNIC(t, peer)
	n.forwards(t)
	must(t, withSettings(n.ns, func(s host.Sysctls) error {
		return s.Set("eth1", []host.Sysctl{{Family: "ipv6", Name: "forwarding", Value: "1"}})
	}))
	h, err := peer.ns.Netlink()
	must(t, err)
	defer h.Close()
	must(
		t,
		h.RouteAdd(&netlink.Route{Dst: host.IPNet(netip.PrefixFrom(strangerAddress, 128)), Gw: n.underlay.AsSlice()}),
	)
	before := n.drops(t)
	for name, pair := range map[string][2]*testContainer{
		"to the node": {stranger, n.self()}, "from the node": {n.self(), stranger}, "through the node": {stranger,
			peer.under()}, "back through the node": {peer.under(), stranger},
	} {
		transfer(t, pair[0], pair[1], 1<<20)
		datagram(t, pair[0], pair[1], 4000) // in fragments
		if t.Failed() {
			t.Fatalf("%s, by %s", name, s.device)
		}
	}
	if got := droppedSince(before, n.drops(t)); len(got) > 0 {
		t.Errorf("dropped for %q", got)
	}
}

// tun makes a device without Ethernet; what is written to it comes in, and what goes out is read.
func (n *testNode) tun(t testing.TB, name string) *os.File {
	t.Helper()
	var fd int
	must(t, n.ns.Do(func() (err error) {
		if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
			return err
		}
		request, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}))
	file := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { file.Close() })
	l, err := n.datapath.Netlink.LinkByName(name)
	must(t, err)
	must(
		t,
		n.datapath.Netlink.AddrAdd(
			l,
			&netlink.Addr{IPNet: host.IPNet(netip.MustParsePrefix("2001:db8:98::/64")), Flags: unix.IFA_F_NODAD},
		),
	)
	must(t, n.datapath.Netlink.LinkSetUp(l))
	return file
}

// TestWithoutEthernet: a tunnel's device is an interface like any other, and events report its packets.
func TestWithoutEthernet(t *testing.T) {
	n := newWire(t).nodes[0]
	c := n.add(t, blue, 1)
	tun := n.tun(t, "tun1")
	must(t, n.datapath.GuardInterfaces(nil))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	events, err := n.datapath.Events(ctx)
	must(t, err)
	there := netip.MustParseAddr("2001:db8:98::2")
	next := func(hook, why string, source, to netip.Addr) {
		t.Helper()
		for e := range events {
			if e.Reason == "nd-ignored" || e.Reason == "mld-ignored" {
				continue
			}
			if e.Hook != hook || e.Reason != why || e.Source != source || e.Destination != to ||
				e.Protocol != packet.ProtocolUDP ||
				e.DestinationPort == 0 ||
				e.Length != 40+8+len("it is me") {
				t.Errorf("%s: %+v, want a drop for %s from %v to %v", hook, e, why, source, to)
			}
			return
		}
		t.Fatalf("%s: no event", hook)
	}
	forged := packet.Packet{
		Source:      c.seen(),
		Destination: n.address(),
		Body:        packet.UDP{SourcePort: 1, DestinationPort: 9, Payload: []byte("it is me")},
	}.Marshal()
	_, err = tun.Write(forged)
	must(t, err)
	next("edge-in", "private-outside", c.seen(), n.address())
	must(t, n.ns.Do(func() error { return sendFrom(unix.IPV6_FREEBIND, c.plain(), there) }))
	next("edge-out", "host-claims-tenant", c.plain(), there)

	must(t, n.ns.Do(func() error { return sendFrom(unix.IPV6_FREEBIND, n.address(), there) }))
	buf := make([]byte, 2000)
	must(t, tun.SetReadDeadline(deadline()))
	for {
		size, err := tun.Read(buf)
		must(t, err)
		if source := netip.AddrFrom16([16]byte(buf[8:24])); source == n.address() {
			break
		} else if source == c.plain() {
			t.Fatalf("it left: %x", buf[:size])
		}
	}
	var ordinary *net.UDPConn
	must(t, n.ns.Do(func() (err error) {
		ordinary, err = net.ListenUDP("udp6", &net.UDPAddr{IP: n.address().AsSlice(), Port: 9})
		return err
	}))
	defer ordinary.Close()
	must(t, ordinary.SetDeadline(deadline()))
	_, err = tun.Write(
		packet.Packet{
			Source:      there,
			Destination: n.address(),
			Body:        packet.UDP{SourcePort: 1, DestinationPort: 9, Payload: []byte("hello")},
		}.Marshal(),
	)
	must(t, err)
	if size, from, err := ordinary.ReadFromUDPAddrPort(buf); err != nil || from.Addr() != there ||
		string(buf[:size]) != "hello" {
		t.Errorf("%q from %v, %v", buf[:size], from, err)
	}
}

// programs counts those of ours at both hooks of a device of a namespace.
func programs(t *testing.T, ns *netns.Namespace, device string) (all []string) {
	t.Helper()
	must(t, ns.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		for _, hook := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			chain, err := Chain(l, hook)
			if err != nil {
				return err
			}
			for _, p := range chain.Programs {
				all = append(all, p.Name)
			}
		}
		return nil
	}))
	return all
}

func (n *testNode) edgePins(t *testing.T) int {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(n.datapath.LinksDir(), "*_[0-9]*"))
	must(t, err)
	return len(pins)
}

// TestGuardFollowsInterfaces: our programs are on every interface where packets reach the stack, and on no other,
// whether an agent sees the change of an interface or finds it at its start.
func TestGuardFollowsInterfaces(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	d := func() *Datapath { return n.datapath }
	c := n.add(t, blue, 1)
	elsewhere := namespace(t, "elsewhere")
	for name, take := range map[string]func(l netlink.Link){
		"notified": func(l netlink.Link) { must(t, d().GuardInterfaces(l)) },
		"at the next start": func(netlink.Link) {
			n.reopen(t, d().config)
			n.restore(t, c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			expect := func(when string, ports int, guarded ...string) {
				t.Helper()
				status, err := d().Status()
				must(t, err)
				if slices.Sort(status.Guarded); !slices.Equal(status.Guarded, guarded) ||
					n.edgePins(t) != 1+2*len(guarded)+ports ||
					len(status.Problems) > 0 {
					t.Errorf(
						"%s: guarded %q with %d pins, want lo, %q and %d ports; %q",
						when,
						status.Guarded,
						n.edgePins(t),
						guarded,
						ports,
						status.Problems,
					)
				}
			}
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "eth1"
			must(t, d().Netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth2"}))
			eth1, err := d().Netlink.LinkByName("eth1")
			must(t, err)
			eth2, err := d().Netlink.LinkByName("eth2")
			must(t, err)
			if status, err := d().Status(); err != nil || !status.Healthy ||
				!says(status, "program edge_in is not on eth1") ||
				!says(status, "program edge_out is not on eth2") {
				t.Errorf("before: %+v, %v", status.Problems, err)
			}
			take(eth1)
			take(eth2)
			expect("new ones", 0, "eth1", "eth2")
			if got := programs(t, n.ns, "eth1"); !slices.Equal(got, []string{"pil_edge_in", "pil_edge_out"}) {
				t.Errorf("on eth1 stand %q", got)
			}

			attrs.Name = "br0"
			must(t, d().Netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
			br0, err := d().Netlink.LinkByName("br0")
			must(t, err)
			must(t, d().Netlink.LinkSetMaster(eth1, br0))
			take(br0)
			take(eth1)
			expect("a bridge and its port", 1, "br0", "eth2")
			must(t, d().Netlink.LinkSetNoMaster(eth1))
			must(t, d().Netlink.LinkSetName(eth1, "other"))
			take(eth1)
			expect("a port no more", 0, "br0", "eth2", "other")
			must(t, d().Netlink.LinkSetNsFd(eth2, elsewhere.FD()))
			take(eth2)
			expect("one in another namespace", 0, "br0", "other")
			if got := programs(t, elsewhere, "eth2"); len(got) > 0 {
				t.Errorf("it keeps %q", got)
			}
			must(t, d().Netlink.LinkDel(eth1))
			must(t, d().Netlink.LinkDel(br0))
			take(eth1)
			take(br0)
			expect("none left", 0)
		})
	}
}

// says reports whether a status lists a problem.
func says(s dpapi.Status, problem string) bool {
	return slices.ContainsFunc(s.Problems, func(p string) bool { return strings.Contains(p, problem) })
}

// TestEdgeProgramsOfOthers: programs of others on an interface stay, and Status reports one that runs before ours.
func TestEdgeProgramsOfOthers(t *testing.T) {
	n := newWire(t).nodes[0]
	n.secondNIC(t)
	must(t, n.datapath.GuardInterfaces(nil))
	must(t, n.ns.Do(func() error {
		eth1, err := net.InterfaceByName("eth1")
		must(t, err)
		other, err := link.AttachTCX(
			link.TCXOptions{
				Interface: eth1.Index,
				Program:   n.datapath.Objects.PilTryCipher,
				Attach:    ebpf.AttachTCXIngress,
				Anchor:    link.Head(),
			},
		)
		must(t, err)
		t.Cleanup(func() { other.Close() })
		return nil
	}))
	status, err := n.datapath.Status()
	must(t, err)
	if !says(status, "1 other program runs before edge_in on eth1") || !status.Healthy || !status.FirstInChain {
		t.Errorf("%+v", status)
	}
}
