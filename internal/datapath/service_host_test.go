package datapath

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/tenant"
)

// enterCgroup moves this process into a cgroup until the test ends: sockets belong to the cgroup that they were made
// in.
func enterCgroup(t testing.TB, dir string) {
	t.Helper()
	all, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	_, was, ok := strings.Cut("\n"+string(all), "\n0::")
	if !ok {
		t.Fatalf("no cgroup of version 2: %s", all)
	}
	was, _, _ = strings.Cut(was, "\n")
	move := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0)
	}
	must(t, move(dir))
	t.Cleanup(func() { must(t, move(filepath.Join(filepath.Dir(dir), was))) })
}

// hostBed is a serviceBed whose client is the node of the first backend.
type hostBed struct {
	*serviceBed
	*testing.T
	self *testNode
}

func newHostBed(t *testing.T, of tenant.Tenant) *hostBed {
	t.Helper()
	w := newLink(t)
	dir := cgroup(t)
	w.nodes[0].cgroup = dir
	openAll(t, joined, w.nodes[:]...)
	b := &hostBed{serviceBed: newServiceBedOn(t, w, of), T: t, self: w.nodes[0]}
	h, err := b.self.ns.Netlink()
	must(t, err)
	defer h.Close()
	// As the howto about nodes says.
	must(t, h.RouteReplace(&netlink.Route{
		Dst: host.IPNet(w.nodes[1].prefix), Gw: w.nodes[1].underlay.AsSlice(), Src: b.self.address().AsSlice(),
	}))
	b.outside()
	enterCgroup(t, dir)
	return b
}

// outside checks what a socket outside of the cgroup meets.
func (b *hostBed) outside() {
	b.put(b, []int{0}, nil)
	if _, err := dial(b.self.ns, netip.Addr{}, b.tcp.Address, patience); !errors.Is(err, unix.EHOSTUNREACH) {
		b.Errorf("TCP of another cgroup: %v", err)
	}
	if _, err := b.socket().WriteToUDPAddrPort([]byte("?"), b.udp.Address); !errors.Is(err, unix.EHOSTUNREACH) {
		b.Errorf("UDP of another cgroup: %v", err)
	}
}

// reachNodes has the tenant reach the nodes, or not.
func (b *hostBed) reachNodes(nodes ...netip.Prefix) {
	b.Helper()
	of := b.of
	of.Nodes = nodes
	for _, n := range b.nodes {
		must(b, n.datapath.putTenant(of))
	}
}

// frontend has all backends, at an address.
func (b *hostBed) frontend(at string, protocol uint8) dpapi.Frontend {
	f := dpapi.Frontend{FrontendKey: dpapi.FrontendKey{Address: netip.MustParseAddrPort(at), Protocol: protocol}}
	for _, c := range b.backends {
		f.Backends = append(f.Backends, backendAt(c, 8080))
	}
	return f
}

// connections connects the node several times, and reports unless these backends have answered, and the peer is the
// address that the node has asked for.
func (b *hostBed) connections(name string, to netip.AddrPort, backends ...int) {
	b.Helper()
	seen := map[int]bool{}
	for range 40 { // with 40 connections one of three backends is left out once in 3.7 million runs
		conn, err := dial(b.self.ns, netip.Addr{}, to, patience)
		if err != nil {
			b.Errorf("%s: %v; drops %v", name, err, b.drops())
			return
		}
		got := make([]byte, 1)
		conn.SetDeadline(time.Now().Add(patience))
		_, err = io.ReadFull(conn, got)
		conn.Close()
		if peer := addrPort(conn.RemoteAddr()); err != nil || peer != to {
			b.Errorf("%s: connected to %v: %v; drops %v", name, peer, err, b.drops())
			return
		}
		seen[int(got[0]-'0')] = true
	}
	if len(seen) != len(backends) || slices.ContainsFunc(backends, func(i int) bool { return !seen[i] }) {
		b.Errorf("%s: backends %v, want %v", name, seen, backends)
	}
}

func (b *hostBed) drops() string { return fmt.Sprint(b.nodes[0].drops(b), b.nodes[1].drops(b)) }

// refused reports unless a socket of the node is refused.
func (b *hostBed) refused(name string, err error) {
	b.Helper()
	if !errors.Is(err, unix.ECONNREFUSED) {
		b.Errorf("%s: %v, want connection refused; drops %v", name, err, b.drops())
	}
}

func (b *hostBed) connectionRefused(name string, to netip.AddrPort) {
	b.Helper()
	_, err := dial(b.self.ns, netip.Addr{}, to, patience)
	b.refused(name, err)
}

// socket makes a socket of the node that is not connected.
func (b *hostBed) socket() (conn *net.UDPConn) {
	b.Helper()
	must(b, b.self.ns.Do(func() (err error) { conn, err = net.ListenUDP("udp6", nil); return err }))
	b.Cleanup(func() { conn.Close() })
	return conn
}

func dialDatagrams(t testing.TB, c *testContainer, to netip.AddrPort) (conn *net.UDPConn, err error) {
	must(t, c.ns.Do(func() error {
		conn, err = net.DialUDP("udp6", nil, net.UDPAddrFromAddrPort(to))
		return nil
	}))
	return conn, err
}

// answer returns the backend that answers a datagram to an address, or, without one, of a connected socket. It reports
// unless the datagram comes from this address.
func (b *hostBed) answer(name string, conn *net.UDPConn, to, from netip.AddrPort) (backend string) {
	b.Helper()
	conn.SetDeadline(time.Now().Add(patience))
	var err error
	if to.IsValid() {
		_, err = conn.WriteToUDPAddrPort([]byte("?"), to)
	} else {
		_, err = conn.Write([]byte("?"))
	}
	buf := make([]byte, 10)
	var got netip.AddrPort
	if err == nil {
		_, got, err = conn.ReadFromUDPAddrPort(buf)
	}
	if err != nil || got != from {
		b.Errorf("%s: an answer of %v, %v, want one of %v; drops %v", name, got, err, from, b.drops())
		return ""
	}
	return string(buf[:1])
}

// TestServiceHost: processes of the node are clients of services of a tenant: over TCP, with the endpoints that the
// node reaches.
func TestServiceHost(t *testing.T) {
	for _, of := range []tenant.Tenant{serving(blue, 7), serving(plain, 8)} {
		t.Run(of.Name, func(t *testing.T) {
			b := newHostBed(t, of)
			b.put(t, []int{0, 1, 2}, nil)
			b.connections("on this node", b.tcp.Address, 0)
			b.put(t, []int{1, 2}, nil)
			b.connectionRefused("on nodes that the tenant does not reach", b.tcp.Address)
			b.reachNodes(b.nodes[0].datapath.config.Plan.Base)
			before, err := b.self.datapath.ServiceCounts()
			must(t, err)
			b.put(t, []int{0, 1, 2}, nil)
			b.connections("on all nodes", b.tcp.Address, 0, 1, 2)
			after, err := b.self.datapath.ServiceCounts()
			must(t, err)
			if n := after[b.tcp].Flows - before[b.tcp].Flows; n != 40 || before[b.tcp].Refused != 1 {
				t.Errorf("counts: %+v, then %d of 40 flows", before[b.tcp], n)
			}
			f := b.frontend(b.tcp.Address.String(), 6)
			f.Affinity, f.Backends = time.Hour, f.Backends[1:]
			must(t, b.self.datapath.PutServices([]dpapi.Frontend{f}))
			b.affine("affinity", b.tcp.Address)
			f.Backends = f.Backends[:1]
			must(t, b.self.datapath.PutServices([]dpapi.Frontend{f}))
			b.connections("affinity to another node", b.tcp.Address, 1)
			f.Backends = b.frontend(b.tcp.Address.String(), 6).Backends
			must(t, b.self.datapath.PutServices([]dpapi.Frontend{f}))
			b.connections("affinity to another node", b.tcp.Address, 1)
			b.reachNodes()
			b.connections("affinity to a node that the tenant no longer reaches", b.tcp.Address, 0)
			b.connectionRefused("another port", netip.AddrPortFrom(b.tcp.Address.Addr(), 81))
			b.put(t, nil, []int{0})
			b.connectionRefused("without endpoints", b.tcp.Address)
			must(t, b.self.datapath.DeleteServices([]dpapi.FrontendKey{b.tcp}))
			b.connectionRefused("without the service", b.tcp.Address)
		})
	}
}

// affine reports unless all connections reach one backend.
func (b *hostBed) affine(name string, to netip.AddrPort) {
	b.Helper()
	seen := map[string]bool{}
	for range 20 {
		conn, err := dial(b.self.ns, netip.Addr{}, to, patience)
		if err != nil {
			b.Errorf("%s: %v", name, err)
			return
		}
		conn.SetDeadline(time.Now().Add(patience))
		got := make([]byte, 1)
		io.ReadFull(conn, got)
		seen[string(got)] = true
		conn.Close()
	}
	if len(seen) != 1 {
		b.Errorf("%s: backends %v, want one", name, seen)
	}
}

// TestServiceHostDatagrams: the same over UDP, by sockets that are connected and by others. Those of containers take
// the packet path.
func TestServiceHostDatagrams(t *testing.T) {
	b := newHostBed(t, serving(blue, 7))
	b.reachNodes(b.nodes[0].datapath.config.Plan.Base)
	b.put(t, []int{0, 1, 2}, nil)
	to, no := b.udp.Address, netip.AddrPort{}

	node := b.self.self()
	seen := map[string]bool{}
	for range 40 {
		conn, err := dialDatagrams(t, node, to)
		must(t, err)
		if peer := addrPort(conn.RemoteAddr()); peer != to {
			t.Errorf("connected: to %v, want %v", peer, to)
		}
		seen[b.answer("connected", conn, no, to)] = true
		conn.Close()
	}
	if len(seen) != 3 {
		t.Errorf("connected: backends %v, want all", seen)
	}
	both := b.socket()
	connectTo(t, both, &to)
	for range 20 {
		if b.answer("connected, with an address", both, to, to) == "" {
			break
		}
	}
	clear(seen)
	for range 40 {
		conn := b.socket()
		name := b.answer("not connected", conn, to, to)
		if again := b.answer("not connected", conn, to, to); again != name {
			t.Errorf("not connected: backend %q after %q", again, name)
		}
		seen[name] = true
		conn.Close()
	}
	if len(seen) != 3 {
		t.Errorf("not connected: backends %v, want all", seen)
	}

	b.put(t, []int{1}, nil)
	connected, err := dialDatagrams(t, node, to)
	must(t, err)
	free := b.socket()
	b.answer("not connected", free, to, to)
	b.put(t, []int{0}, []int{1})
	if got := b.answer("an endpoint that drains", free, to, to); got != "1" {
		t.Errorf("an endpoint that drains: the socket has changed to %q", got)
	}
	b.put(t, []int{0}, nil)
	if got := b.answer("an endpoint that is gone", free, to, to); got != "0" {
		t.Errorf("an endpoint that is gone: the socket has changed to %q", got)
	}
	if got := b.answer("connected, without its endpoint", connected, no, to); got != "1" {
		t.Errorf("connected, without its endpoint: the socket has changed to %q", got)
	}
	b.put(t, []int{1}, nil)
	moved := b.socket()
	b.answer("not connected", moved, to, to)
	b.put(t, []int{0, 1}, nil)
	b.reachNodes()
	if got := b.answer("a node that the tenant no longer reaches", moved, to, to); got != "0" {
		t.Errorf("a node that the tenant no longer reaches: the socket has changed to %q", got)
	}
	b.put(t, []int{0}, nil)
	// Another service with the same endpoint, by the same socket.
	other := b.frontend(netip.AddrPortFrom(to.Addr(), 81).String(), 17)
	other.Backends = other.Backends[:1]
	must(t, b.self.datapath.PutServices([]dpapi.Frontend{other}))
	b.answer("two services", free, other.Address, other.Address)
	b.answer("two services", free, to, to)

	b.put(t, nil, nil)
	free.SetDeadline(time.Now().Add(patience))
	_, err = free.WriteToUDPAddrPort([]byte("?"), to)
	b.refused("not connected, without endpoints", err)
	_, err = dialDatagrams(t, node, to)
	b.refused("connected, without endpoints", err)

	// A socket that connects elsewhere. The endpoint is on this node, so the node sees it as containers do.
	b.put(t, []int{0}, nil)
	direct := netip.AddrPortFrom(b.backends[0].seen(), 8080)
	conn, err := dialDatagrams(t, node, to)
	must(t, err)
	connectTo(t, conn, &direct)
	b.answer("connected elsewhere", conn, no, direct)
	conn.Close()
	conn, err = dialDatagrams(t, node, to)
	must(t, err)
	connectTo(t, conn, &other.Address)
	b.answer("connected to another service", conn, no, other.Address)
	conn.Close()
	b.reachNodes(b.nodes[0].datapath.config.Plan.Base) // else no unconnected socket gets answers but those of services
	loose := b.socket()
	connectTo(t, loose, &to)
	connectTo(t, loose, nil)
	answerUDP(t, b.backends[0], 8081, "0")
	direct = netip.AddrPortFrom(direct.Addr(), 8081) // of another address the kernel accepts nothing
	b.answer("another port after a connection", loose, direct, direct)
	answerUDP(t, b.backends[0], 8082, "9")
	f := b.frontend(to.String(), 17)
	f.Backends = []dpapi.Backend{backendAt(b.backends[0], 8082)}
	must(t, b.self.datapath.PutServices([]dpapi.Frontend{f}))
	if got := b.answer("the service after a connection", loose, to, to); got != "9" {
		t.Errorf("the service after a connection: the answer of %q", got)
	}
	b.put(t, []int{0}, nil)

	conn, err = dialDatagrams(t, b.client, to)
	must(t, err)
	b.answer("a container, connected", conn, no, to)
	conn.Close()
	must(t, b.client.ns.Do(func() (err error) { conn, err = net.ListenUDP("udp6", nil); return err }))
	b.answer("a container, not connected", conn, to, to)
	conn.Close()
}

// connectTo connects a socket, or ends its connection.
func connectTo(t testing.TB, conn *net.UDPConn, to *netip.AddrPort) {
	t.Helper()
	raw, err := conn.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) {
		if to != nil {
			must(t, unix.Connect(int(fd), &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}))
			return
		}
		none := unix.RawSockaddrInet6{Family: unix.AF_UNSPEC}
		_, _, errno := unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none))
		if errno != 0 {
			t.Fatal(errno)
		}
	}))
}

// TestServiceHostExposed: processes of the node reach exposed ports: node ports at the node's addresses and at ::1, and
// external addresses. Other ports of these addresses are those of processes, and so are host ports at ::1.
func TestServiceHostExposed(t *testing.T) {
	b := newHostBed(t, serving(blue, 7))
	b.reachNodes(b.nodes[0].datapath.config.Plan.Base)
	at := netip.AddrPortFrom(b.self.address(), 30080)
	all := []string{at.String(), fmt.Sprintf("[%v]:30080", b.self.underlay), "[2001:db8:7::9]:80"}
	names := []string{"the node's address", "an address of an uplink", "an external address", "loopback"}
	put := func(affinity time.Duration, backends int) {
		t.Helper()
		var list []dpapi.Frontend
		for i, address := range all {
			for _, protocol := range []uint8{6, 17} {
				f := b.frontend(address, protocol)
				f.Exposed = dpapi.Exposed{Services: b.of.ServicesNumber, Node: i < 2}
				f.Affinity, f.Backends = affinity, f.Backends[:backends]
				list = append(list, f)
			}
		}
		must(t, b.self.datapath.PutServices(list))
	}
	put(0, 3)
	for i, address := range append(slices.Clone(all), "[::1]:30080") {
		to := netip.MustParseAddrPort(address)
		b.connections("TCP to "+names[i], to, 0, 1, 2)
		b.answer("UDP to "+names[i], b.socket(), to, to)
	}
	put(time.Hour, 3)
	b.affine("affinity of an exposed port", at)
	b.reachNodes()
	put(0, 3)
	b.connections("an exposed port, on this node", at, 0)
	put(0, 0)
	watchedEcho(t, b.self.ns, netip.MustParseAddrPort("[::]:30080"))
	b.connectionRefused("a node port without endpoints", netip.MustParseAddrPort("[::1]:30080"))

	put(0, 3)
	hostPort := b.frontend(netip.AddrPortFrom(b.self.address(), 8080).String(), 6)
	hostPort.Exposed = dpapi.Exposed{Services: b.of.ServicesNumber, Node: true}
	must(t, b.self.datapath.PutServices([]dpapi.Frontend{hostPort}))
	// The external address is also that of another host.
	external := netip.MustParseAddr("2001:db8:7::9")
	it := host.IPNet(netip.PrefixFrom(external, 128))
	lo, err := b.nodes[1].datapath.Netlink.LinkByName("lo")
	must(t, err)
	must(t, b.nodes[1].datapath.Netlink.AddrAdd(lo, &netlink.Addr{IPNet: it, Flags: unix.IFA_F_NODAD}))
	must(t, b.self.datapath.Netlink.RouteReplace(&netlink.Route{Dst: it, Gw: b.nodes[1].underlay.AsSlice()}))
	for name, own := range map[string]netip.AddrPort{
		"another port of loopback":            netip.MustParseAddrPort("[::1]:30081"),
		"a host port at loopback":             netip.MustParseAddrPort("[::1]:8080"),
		"another port of the node":            netip.AddrPortFrom(b.self.address(), 30081),
		"another port of an external address": netip.AddrPortFrom(external, 81),
	} {
		ns := b.self.ns
		if own.Addr() == external {
			ns = b.nodes[1].ns
		}
		clients := watchedEcho(t, ns, own)
		conn, err := dial(b.self.ns, netip.Addr{}, own, patience)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		select {
		case <-clients:
		case <-time.After(patience):
			t.Errorf("%s: the process that listens there has no connection", name)
		}
		conn.Close()
	}
	// An IPv4 address of an IPv6 socket is left alone.
	var l net.Listener
	must(t, b.self.ns.Do(func() (err error) { l, err = net.Listen("tcp4", "127.0.0.1:30080"); return err }))
	defer l.Close()
	must(t, b.self.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(fd)
		to := &unix.SockaddrInet6{Port: 30080, Addr: netip.MustParseAddr("::ffff:127.0.0.1").As16()}
		if err := unix.Connect(fd, to); err != nil {
			t.Errorf("an IPv4 address: %v", err)
		}
		return nil
	}))
}
