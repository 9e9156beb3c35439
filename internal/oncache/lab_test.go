package oncache

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// node is one of two nodes with a container each. The overlay is Flannel's: the kernel routes between the container and
// a VXLAN device with static entries.
type node struct {
	*Cache
	ns, container  *netns.Namespace
	number         int
	inner4, inner6 netip.Addr // of the container
	underlay       netip.Addr
	mac            net.HardwareAddr // of the VXLAN device
	bridged        bool             // one bridge over both nodes instead of routes
	ttl            time.Duration
}

// lab has two nodes, whose caches are open.
type lab struct{ a, b *node }

const overlayPort = 8472

// newLab creates the nodes, with IPv4 or IPv6 outside. rules are iptables commands for both families, on each node.
func newLab(t *testing.T, outer4 bool, rules ...string) *lab {
	t.Helper()
	return setUp(t, &lab{newNode(t, 1, outer4), newNode(t, 2, outer4)}, outer4, rules...)
}

// newBridgedLab creates nodes whose VXLAN devices are ports of the containers' bridges.
func newBridgedLab(t *testing.T, outer4 bool) *lab {
	t.Helper()
	l := &lab{newNode(t, 1, outer4), newNode(t, 2, outer4)}
	l.a.bridged, l.b.bridged = true, true
	return setUp(t, l, outer4)
}

func setUp(t *testing.T, l *lab, outer4 bool, rules ...string) *lab {
	t.Helper()
	must(t, wire(l.a.ns, "eth0", l.b.ns, "eth0"))
	for _, n := range []*node{l.a, l.b} {
		peer := l.b
		if n == l.b {
			peer = l.a
		}
		must(t, wire(n.ns, "container", n.container, "eth0"))
		must(t, n.container.Do(n.configureContainer))
		must(t, n.ns.Do(func() error { return n.configure(peer, outer4) }))
		for _, rule := range rules {
			n.iptables(t, "iptables", rule)
			n.iptables(t, "ip6tables", rule)
		}
		n.open(t)
	}
	return l
}

func newNode(t *testing.T, i int, outer4 bool) *node {
	n := &node{
		number: i, mac: net.HardwareAddr{2, 0, 0, 0, 2, byte(i)},
		inner4: netip.AddrFrom4([4]byte{10, 1, byte(i), 1}), inner6: netip.MustParseAddr(fmt.Sprintf("fd00:%d::1", i)),
		underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i)),
	}
	if outer4 {
		n.underlay = netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
	}
	for _, ns := range []**netns.Namespace{&n.ns, &n.container} {
		made, err := netns.Create(filepath.Join(t.TempDir(), "ns"))
		must(t, err)
		t.Cleanup(func() { made.Close(); netns.Remove(made.Path()) })
		*ns = made
	}
	return n
}

// open opens the node's cache, with the conntrack that is there.
func (n *node) open(t *testing.T) {
	must(t, n.ns.Do(func() error {
		tracks, err := Tracking()
		if err != nil {
			return err
		}
		bridged, err := Bridged("overlay")
		if err != nil {
			return err
		}
		n.Cache, err = Open(Config{
			Uplink: "eth0", Device: "overlay", Address: n.underlay, VNI: 1, Port: overlayPort, Tracks: tracks,
			Bridged: bridged, TTL: n.ttl,
		})
		if err != nil {
			return err
		}
		container, err := linkByName("container")
		if err != nil {
			return err
		}
		return n.Join("container", container.Attrs().Index)
	}))
	t.Cleanup(func() { must(t, n.Close()) })
	must(t, n.Renew())
}

func wire(a *netns.Namespace, nameA string, b *netns.Namespace, nameB string) error {
	return a.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = nameA, 1500
		if nameA == "container" {
			attrs.MTU = 1430
		}
		return netns.Retry(func() error {
			return netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: attrs, PeerName: nameB, PeerNamespace: netlink.NsFd(b.FD()),
			})
		})
	})
}

// up sets a device up and gives it addresses.
func up(device string, addresses ...string) (netlink.Link, error) {
	d, err := linkByName(device)
	if err != nil {
		return nil, err
	}
	for _, a := range addresses {
		p := netip.MustParsePrefix(a)
		err = errors.Join(err, netlink.AddrAdd(d, &netlink.Addr{
			IPNet: ipNet(p), Flags: map[bool]int{false: unix.IFA_F_NODAD}[p.Addr().Is4()],
		}))
	}
	return d, errors.Join(err, netlink.LinkSetUp(d))
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func sysctl(name, value string) error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }

func (n *node) configureContainer() error {
	if n.bridged {
		eth0, err := up("eth0", n.inner4.String()+"/16", n.inner6.String()+"/16")
		return errors.Join(err, netlink.LinkSetMTU(eth0, 1430))
	}
	eth0, err := up("eth0", n.inner4.String()+"/32", n.inner6.String()+"/128")
	if err != nil {
		return err
	}
	index := eth0.Attrs().Index
	gateway4 := netip.MustParsePrefix("169.254.1.1/32")
	return errors.Join(
		netlink.LinkSetMTU(eth0, 1430),
		netlink.RouteAdd(&netlink.Route{LinkIndex: index, Dst: ipNet(gateway4), Scope: netlink.SCOPE_LINK}),
		netlink.RouteAdd(&netlink.Route{LinkIndex: index, Gw: gateway4.Addr().AsSlice()}),
		netlink.RouteAdd(&netlink.Route{LinkIndex: index, Gw: net.ParseIP("fe80::1")}))
}

func (n *node) configure(peer *node, outer4 bool) error {
	bits := map[bool]string{true: "/24", false: "/64"}[outer4]
	eth0, err := up("eth0", n.underlay.String()+bits)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = "overlay", 1430, n.mac
	err = netns.Retry(func() error {
		return netlink.LinkAdd(&netlink.Vxlan{
			LinkAttrs: attrs, VxlanId: 1, VtepDevIndex: eth0.Attrs().Index, SrcAddr: n.underlay.AsSlice(),
			Port: overlayPort, UDPCSum: true, UDP6ZeroCSumTx: true, UDP6ZeroCSumRx: true,
		})
	})
	if err != nil {
		return err
	}
	if n.bridged {
		return n.bridge(peer)
	}
	container, err := up("container", "169.254.1.1/32", "fe80::1/64")
	if err != nil {
		return err
	}
	overlay, err := up("overlay", fmt.Sprintf("10.1.%d.0/32", n.number), fmt.Sprintf("fd00:%d::/128", n.number))
	if err != nil {
		return err
	}
	err = errors.Join(
		sysctl("ipv4/ip_forward", "1"), sysctl("ipv6/conf/all/forwarding", "1"),
		netlink.RouteAdd(&netlink.Route{LinkIndex: container.Attrs().Index, Dst: ipNet(netip.PrefixFrom(n.inner4, 32)),
			Scope: netlink.SCOPE_LINK}),
		netlink.RouteAdd(&netlink.Route{
			LinkIndex: container.Attrs().Index, Dst: ipNet(netip.PrefixFrom(n.inner6, 128)),
		}),
		netlink.NeighAppend(&netlink.Neigh{
			LinkIndex: overlay.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
			State: netlink.NUD_PERMANENT, HardwareAddr: peer.mac, IP: peer.underlay.AsSlice(),
		}))
	for _, to := range []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("10.1.%d.0/24", peer.number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:%d::/64", peer.number)),
	} {
		err = errors.Join(err, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: overlay.Attrs().Index, State: netlink.NUD_PERMANENT, HardwareAddr: peer.mac,
			IP: to.Addr().AsSlice(), Family: map[bool]int{true: unix.AF_INET, false: unix.AF_INET6}[to.Addr().Is4()],
		}), netlink.RouteAdd(&netlink.Route{
			LinkIndex: overlay.Attrs().Index, Dst: ipNet(to), Gw: to.Addr().AsSlice(), Flags: int(netlink.FLAG_ONLINK),
		}))
	}
	return err
}

// bridge joins container and VXLAN device, which floods to the peer and learns.
func (n *node) bridge(peer *node) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "bridge", 1430
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := netns.Retry(func() error { return netlink.LinkAdd(bridge) }); err != nil {
		return err
	}
	errs := []error{netlink.LinkSetUp(bridge)}
	for _, port := range []string{"container", "overlay"} {
		d, err := up(port)
		errs = append(errs, err, netlink.LinkSetMaster(d, bridge))
		if port == "overlay" {
			errs = append(errs, netlink.NeighAppend(&netlink.Neigh{
				LinkIndex: d.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
				State: netlink.NUD_PERMANENT, HardwareAddr: make(net.HardwareAddr, 6), IP: peer.underlay.AsSlice(),
			}))
		}
	}
	return errors.Join(errs...)
}

// iptables runs a rule in the node's namespace; the command's arguments have no quotes.
func (n *node) iptables(t *testing.T, command, rule string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command, append([]string{"-w"}, strings.Fields(rule)...)...)
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := n.ns.Run(cmd); err != nil {
		t.Fatalf("%v: %v: %s", cmd.Args, err, said.String())
	}
}

// addr is the container's address of a family.
func (n *node) addr(inner4 bool) netip.Addr {
	if inner4 {
		return n.inner4
	}
	return n.inner6
}

// renewed keeps the leases of both nodes until the test ends.
func (l *lab) renewed(t *testing.T) {
	must(t, errors.Join(l.a.Renew(), l.b.Renew()))
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(time.Second / 4) // a lease is void after 3 s
		defer tick.Stop()
		var err error
		for {
			select {
			case <-tick.C:
				err = errors.Join(err, l.a.Renew(), l.b.Renew())
			case <-stop:
				done <- err
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		must(t, <-done)
	})
}

// listen opens a UDP socket in a container; connect one of a connection.
func (n *node) listen(t *testing.T, inner4 bool, port int) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	must(t, n.container.Do(func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{IP: n.addr(inner4).AsSlice(), Port: port})
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return c
}

// send sends a datagram from one socket to the other and tells whether it arrives.
func send(t *testing.T, from, to *net.UDPConn, payload string, wait time.Duration) bool {
	t.Helper()
	_, err := from.WriteTo([]byte(payload), to.LocalAddr())
	must(t, err)
	must(t, to.SetReadDeadline(time.Now().Add(wait)))
	got := make([]byte, 2000)
	n, err := to.Read(got)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	must(t, err)
	if string(got[:n]) != payload {
		t.Fatalf("got %q, want %q", got[:n], payload)
	}
	return true
}

// long is longer than a packet that is not lost needs, short is how long a lost one is waited for.
const (
	long  = 10 * time.Second
	short = 200 * time.Millisecond
)

// talk exchanges datagrams in both directions.
func talk(t *testing.T, a, b *net.UDPConn, times int) {
	t.Helper()
	for i := range times {
		if !send(t, a, b, fmt.Sprint("there ", i), long) || !send(t, b, a, fmt.Sprint("back ", i), long) {
			t.Fatalf("exchange %d: a packet is lost", i)
		}
	}
}

// hits returns how many packets the node's cache has handled, by direction.
func (n *node) hits(t *testing.T) (out, in uint64) {
	t.Helper()
	s, err := n.Stats()
	must(t, err)
	return s.Out.Hits, s.In.Hits
}
