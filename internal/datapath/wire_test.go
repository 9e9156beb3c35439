package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// wire has two nodes, each with its own Datapath and without an agent, to test only the packet path.
type wire struct {
	nodes [2]*testNode
}

type testNode struct {
	ns       *netns.Namespace
	prefix   netip.Prefix
	underlay netip.Addr
	datapath *Datapath
	ids      endpoint.ID
	vtep4    netip.Prefix // of Config
	direct   bool         // DirectTunnel of Config
	reserve  int          // MTUReserve of Config
	room     int          // MaxSessions of Config
	cgroup   string       // CgroupRoot of Config
}

type testContainer struct {
	node   *testNode
	ns     *netns.Namespace
	record endpoint.Record
	cipher *address.Cipher
}

var (
	blue = tenant.Tenant{
		Name:       "blue",
		Addressing: tenant.Encrypted,
		IDs:        []tenant.ID{{ID: 1, Key: address.Key{1, 2, 3}}},
	}
	red = tenant.Tenant{
		Name:       "red",
		Addressing: tenant.Encrypted,
		IDs:        []tenant.ID{{ID: 2, Key: address.Key{4, 5, 6}}},
	}
	plain = tenant.Tenant{Name: "plain", Addressing: tenant.Clear, IDs: []tenant.ID{{ID: 3}}}

	// renewed is blue with another key, and the old one still accepted.
	renewed = tenant.Tenant{
		Name:       "blue",
		Addressing: tenant.Encrypted,
		IDs:        []tenant.ID{blue.IDs[0], {ID: 9, Key: address.Key{7, 8, 9}}},
	}
)

func namespace(t testing.TB, name string) *netns.Namespace {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	ns, err := netns.Create(path)
	must(t, err)
	t.Cleanup(func() {
		ns.Close()
		must(t, netns.Remove(path))
	})
	return ns
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// joined is the device kind of the containers in these tests: PILASTER_TEST_DEVICE, or the default.
var joined = cmp.Or(os.Getenv("PILASTER_TEST_DEVICE"), device.DeviceKinds()[0])

// paired is joined, or veth if containers of that kind have no device on the node.
var paired = cmp.Or(map[string]string{endpoint.Netkit: endpoint.Netkit}[joined], endpoint.Veth)

func newWire(t testing.TB) *wire { return newWireOf(t, joined) }

// newWireOf is for tests of one kind of device alone.
func newWireOf(t testing.TB, kind string) *wire { return newWireWith(t, kind, false) }

func newWireWith(t testing.TB, kind string, direct bool) *wire {
	t.Helper()
	w := newLink(t)
	for _, n := range w.nodes {
		n.direct = direct
	}
	openAll(t, kind, w.nodes[:]...)
	return w
}

// newLink makes the two nodes without a Datapath, because loading the programs takes most of these tests' time.
func newLink(t testing.TB) *wire {
	t.Helper()
	w := &wire{}
	for i := range w.nodes {
		w.nodes[i] = &testNode{
			ns:       namespace(t, fmt.Sprint("node", i)),
			prefix:   netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
			underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
		}
	}
	a, b := w.nodes[0], w.nodes[1]
	h, err := a.ns.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	// A veth whose peer has the same index looks to the kernel like one without a peer: its carrier
	// is then noticed up to a second late, and packets are lost until it is.
	attrs.Name, attrs.Index = "eth0", 100
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(b.ns.FD())
	must(t, h.LinkAdd(pair))
	a.configure(t, b)
	b.configure(t, a)
	for _, n := range w.nodes {
		must(t, n.ns.WaitUp(t.Context(), "eth0"))
	}
	return w
}

func (n *testNode) configure(t testing.TB, peer *testNode) {
	t.Helper()
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	must(
		t,
		h.AddrAdd(eth0, &netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(n.underlay, 64)), Flags: unix.IFA_F_NODAD}),
	)
	// Neighbour discovery is silent while the link-local address is still being checked.
	must(t, withSettings(n.ns, func(s host.Sysctls) error {
		return s.Set("eth0", []host.Sysctl{{Family: "ipv6", Name: "accept_dad", Value: "0"}})
	}))
	must(t, h.LinkSetUp(eth0))
	must(t, h.RouteAdd(&netlink.Route{Dst: host.IPNet(peer.prefix), Gw: peer.underlay.AsSlice()}))
}

func (n *testNode) open(t testing.TB, kind string) {
	t.Helper()
	openAll(t, kind, n)
}

// openAll loads the programs of several nodes at the same time: that takes most of these tests' time.
func openAll(t testing.TB, kind string, nodes ...*testNode) {
	t.Helper()
	results := make(chan error)
	for _, n := range nodes {
		pins := bpffs(t)
		go func() { results <- n.load(t.Context(), kind, pins) }()
	}
	var err error
	for range nodes {
		err = errors.Join(err, <-results)
	}
	for _, n := range nodes {
		if n.datapath != nil {
			t.Cleanup(func() { n.datapath.Close() })
		}
	}
	must(t, err)
}

func (n *testNode) load(ctx context.Context, kind, pins string) error {
	plan := address.DefaultPlan()
	plan.Identifiers = true
	plan.Base = netip.PrefixFrom(n.prefix.Addr(), plan.Base.Bits()).Masked() // that of its region
	err := n.ns.Do(func() (err error) {
		n.datapath, err = Open(Config{
			Uplinks: []string{"eth0"}, NodePrefix: n.prefix, Plan: plan, MaxEndpoints: 100,
			BPFFS: pins, Log: slog.New(slog.DiscardHandler), Device: kind, VTEP4: n.vtep4, DirectTunnel: n.direct,
			MTUReserve: n.reserve, MaxSessions: n.room, CgroupRoot: n.cgroup,
		})
		return err
	})
	if err != nil {
		return err
	}
	_, err = n.datapath.restoreAll(ctx, nil)
	return err
}

// bpffs returns a folder with its own bpffs, so that tests share no pins.
func bpffs(t testing.TB) string {
	dir := filepath.Join(t.TempDir(), "bpf")
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func (n *testNode) add(t testing.TB, of tenant.Tenant, app address.AppID) *testContainer {
	t.Helper()
	c := n.create(t, of, app)
	must(t, n.datapath.activate(c.record))
	return c
}

// create makes a container that is not active yet.
func (n *testNode) create(t testing.TB, of tenant.Tenant, app address.AppID) *testContainer {
	t.Helper()
	n.ids++
	c := &testContainer{node: n, ns: namespace(t, fmt.Sprint("container", n.ids))}
	p := address.Plain{Node: n.prefix, Tenant: of.Current().ID, App: app, Index: address.Index(n.ids) * 0x10000}
	seen, route := p.Addr(), address.DefaultPlan().Base
	if of.Addressing == tenant.Encrypted {
		var err error
		c.cipher = address.NewCipher(of.Current().Key)
		p, seen, err = c.cipher.Draw(address.DefaultPlan().Private, p)
		must(t, err)
		route = address.DefaultPlan().Private
	}
	c.record = endpoint.Record{
		ID: n.ids, State: endpoint.Active, Interface: "eth0", Netns: c.ns.Path(), Tenant: of.Name,
		TenantID: of.Current().ID, App: app,
		Attachments: []endpoint.Attachment{{
			Network: "netpila", Plaintext: p.Addr(), Address: seen, Gateway: netip.MustParseAddr("fe80::1"),
			Routes: []netip.Prefix{route},
		}},
	}
	var err error
	must(t, n.datapath.putTenant(of))
	c.record.Device, err = n.datapath.CreateDevice(t.Context(), c.record)
	must(t, err)
	return c
}

func (c *testContainer) seen() netip.Addr  { return c.record.Attachments[0].Address }
func (c *testContainer) plain() netip.Addr { return c.record.Attachments[0].Plaintext }

// capture captures the packets that come in by eth0 from now on.
func capture(t testing.TB, ns *netns.Namespace) *packet.Capture {
	t.Helper()
	c, err := packet.NewCapture(ns, "eth0", packet.IncomingOnly)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// sender is an injector at eth0. Send hides the error that a container with a macvlan gets if a program drops its
// packet on the way out, because with a veth there is none.
type sender struct {
	*packet.Injector
	container bool
}

func (s sender) Send(frame []byte) error {
	err := s.Injector.Send(frame)
	if s.container && errors.Is(err, unix.ENOBUFS) {
		return nil
	}
	return err
}

func injector(t testing.TB, ns *netns.Namespace) sender {
	t.Helper()
	i, err := packet.NewInjector(ns, "eth0")
	must(t, err)
	t.Cleanup(func() { i.Close() })
	return sender{i, strings.HasPrefix(filepath.Base(ns.Path()), "container")}
}

// How long to wait for an answer that must come, however busy the machine, and for one that must not.
const (
	patience   = 3 * time.Second
	impatience = 300 * time.Millisecond
)

func (c *testContainer) ping(t *testing.T, to netip.Addr, size int, timeout time.Duration) packet.PingResult {
	t.Helper()
	r, err := packet.Ping(t.Context(), c.ns, to, packet.PingOptions{Count: 2, Timeout: timeout, Size: size})
	must(t, err)
	return r
}

// drops returns the node's drop counters that are not 0, by reason.
func (n *testNode) drops(t testing.TB) map[string]uint64 {
	t.Helper()
	all, err := n.datapath.drops()
	must(t, err)
	counts := map[string]uint64{}
	for _, d := range all {
		if d.Packets > 0 {
			counts[d.Reason] = d.Packets
		}
	}
	return counts
}

func TestWhoReachesWhom(t *testing.T) {
	w := newWire(t)
	n1, n2 := w.nodes[0], w.nodes[1]
	b1, b2, b3 := n1.add(t, blue, 1), n1.add(t, blue, 2), n2.add(t, blue, 1)
	r1, r2 := n1.add(t, red, 1), n2.add(t, red, 1)
	p1, p2, p3 := n1.add(t, plain, 1), n1.add(t, plain, 1), n2.add(t, plain, 1)
	for _, c := range []struct {
		name     string
		from, to *testContainer
		want     bool
	}{
		{"same node", b1, b2, true},
		{"across nodes", b1, b3, true},
		{"across nodes, back", b3, b2, true},
		{"other tenant, same node", b1, r1, false},
		{"other tenant, across nodes", b1, r2, false},
		{"red across nodes", r1, r2, true},
		{"clear, same node", p1, p2, true},
		{"clear, across nodes", p3, p1, true},
	} {
		for _, size := range []int{56, 1400, 4000} {
			got := c.from.ping(t, c.to.seen(), size, map[bool]time.Duration{true: patience, false: impatience}[c.want])
			if want := map[bool]int{true: got.Sent, false: 0}[c.want]; got.Received != want {
				t.Errorf("%s, %d bytes: %d of %d answered, want %d", c.name, size, got.Received, got.Sent, want)
			}
		}
	}
	t.Logf("drops: %v and %v", n1.drops(t), n2.drops(t))
}

// TestIdsOfOneTenant: containers with a tenant's old id and key reach those with the new id and key.
func TestIdsOfOneTenant(t *testing.T) {
	w := newWire(t)
	n1, n2 := w.nodes[0], w.nodes[1]
	old1, new1, new2, old2 := n1.add(t, blue, 1), n1.add(t, renewed, 1), n2.add(t, renewed, 1), n2.add(t, blue, 1)
	must(t, n2.datapath.putTenant(renewed))
	all := []*testContainer{old1, new1, new2, old2}
	for _, from := range all {
		for _, to := range all {
			if from != to {
				mustReach(t, from, to, fmt.Sprintf("%v to %v", from.plain(), to.plain()))
			}
		}
	}
	transfer(t, old1, new2, 1<<20)
	transfer(t, new1, old2, 1<<20)

	// Addresses of an id are encrypted with the id's own key; with another key of the tenant they are invalid.
	crossed, _, err := address.NewCipher(blue.Current().Key).
		Draw(address.DefaultPlan().Private, address.Split(new2.plain()))
	must(t, err)
	before := n1.drops(t)["tenant-mismatch"]
	must(t, old1.ns.Do(func() error { return sendUDP(sees(crossed.Addr()), []byte("hello")) }))
	mustReach(t, old1, new2, "afterwards")
	if got := n1.drops(t)["tenant-mismatch"] - before; got != 1 {
		t.Errorf("an address under the key of another id: %d drops", got)
	}

	five := renewed
	five.IDs = append(slices.Clone(five.IDs), tenant.ID{ID: 10}, tenant.ID{ID: 11}, tenant.ID{ID: 12})
	if err := n1.datapath.putTenant(five); err == nil || !strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a tenant of five ids: %v", err)
	}
}

func TestTCPAndUDPAcrossNodes(t *testing.T) {
	w := newWire(t)
	for _, of := range []tenant.Tenant{blue, plain} {
		a, b, c := w.nodes[0].add(t, of, 1), w.nodes[1].add(t, of, 1), w.nodes[0].add(t, of, 1)
		for _, pair := range [][2]*testContainer{{a, b}, {b, a}, {a, c}} {
			transfer(t, pair[0], pair[1], 8<<20)
			datagram(t, pair[0], pair[1], 100)
			datagram(t, pair[0], pair[1], 20000)
		}
	}
	for i, n := range w.nodes {
		for r, count := range n.drops(t) {
			if r != "nd-ignored" && r != "mld-ignored" {
				t.Errorf("node %d dropped %d packets: %s", i+1, count, r)
			}
		}
	}
}

// transfer sends n bytes over TCP and checks that all arrive.
func transfer(t *testing.T, from, to *testContainer, n int) {
	t.Helper()
	var listener net.Listener
	must(t, to.ns.Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(to.seen(), 0).String())
		return err
	}))
	defer listener.Close()
	received := make(chan int, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			received <- -1
			return
		}
		defer conn.Close()
		buf, sum := make([]byte, 1<<16), 0
		for {
			k, err := conn.Read(buf)
			sum += k
			if err != nil {
				break
			}
		}
		received <- sum
	}()
	var conn net.Conn
	must(t, from.ns.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", listener.Addr().String(), 10*time.Second)
		return err
	}))
	must(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	if peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(); peer != to.seen() {
		t.Errorf("connected to %v, not %v", peer, to.seen())
	}
	_, err := conn.Write(make([]byte, n))
	must(t, err)
	must(t, conn.Close())
	if got := <-received; got != n {
		t.Errorf("%d of %d bytes arrived", got, n)
	}
}

func datagram(t *testing.T, from, to *testContainer, n int) {
	t.Helper()
	listen := func(c *testContainer) (conn *net.UDPConn) {
		must(t, c.ns.Do(func() (err error) {
			conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.seen(), 0)))
			return err
		}))
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	a, b := listen(from), listen(to)
	must(t, b.SetDeadline(time.Now().Add(2*time.Second)))
	_, err := a.WriteTo(make([]byte, n), b.LocalAddr())
	must(t, err)
	buf := make([]byte, n+1)
	got, source, err := b.ReadFromUDPAddrPort(buf)
	if err != nil || got != n || source.Addr().Unmap() != from.seen() {
		t.Errorf("%d bytes of %d from %v: %v", got, n, source, err)
	}
}

func TestPortUnreachableComesBack(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	var conn net.Conn
	must(t, a.ns.Do(func() (err error) {
		conn, err = net.Dial("udp6", netip.AddrPortFrom(b.seen(), 9).String())
		return err
	}))
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(2*time.Second)))
	_, err := conn.Write([]byte("anyone?"))
	must(t, err)
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("reading gave %v, want connection refused", err)
	}
}

// sendUDP sends a datagram to a closed port, from the calling thread's namespace.
func sendUDP(to netip.Addr, payload []byte) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, payload, 0, &unix.SockaddrInet6{Port: 9, Addr: to.As16()})
}

func withSettings(ns *netns.Namespace, f func(host.Sysctls) error) error {
	return ns.Do(func() error {
		s, err := host.OpenSysctls("ipv6")
		if err != nil {
			return err
		}
		return errors.Join(f(s), s.Close())
	})
}

// unplug removes the container's device, as a process in the container can.
func (c *testContainer) unplug(t testing.TB) {
	t.Helper()
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	must(t, h.LinkDel(eth0))
}
