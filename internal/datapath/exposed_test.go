package datapath

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// exposedBed has a host outside, and a service of a tenant with an external address and node ports. Backend i is on
// node i; the fabric routes the external address to node 0.
type exposedBed struct {
	*outsideWire
	of       tenant.Tenant
	backends [2]*testContainer
	external netip.AddrPort
}

func newExposedBed(t testing.TB, of tenant.Tenant) *exposedBed {
	t.Helper()
	b := &exposedBed{outsideWire: newOutsideWire(t), of: of}
	b.put(t, of)
	for i := range b.backends {
		b.backends[i] = b.nodes[i].addLeaving(t, of, 2)
		answerWho(t, b.backends[i], 8080, fmt.Sprint(i))
		answerUDP(t, b.backends[i], 8080, fmt.Sprint(i))
	}
	b.external = netip.MustParseAddrPort("[2001:db8:7::9]:80")
	b.ingress(t, 0)
	return b
}

// ingress has the fabric route the external address to a node.
func (b *exposedBed) ingress(t testing.TB, node int) {
	t.Helper()
	h, err := b.router.Netlink()
	must(t, err)
	defer h.Close()
	must(t, h.RouteReplace(&netlink.Route{
		Dst: host.IPNet(netip.PrefixFrom(b.external.Addr(), 128)), Gw: b.nodes[node].underlay.AsSlice(),
	}))
}

// expose gives the service some of the backends on all nodes, at the external address and, of each node, at port 30080.
func (b *exposedBed) expose(t testing.TB, active, draining []int) {
	t.Helper()
	at := func(all []int) (list []dpapi.Backend) {
		for _, i := range all {
			list = append(list, backendAt(b.backends[i], 8080))
		}
		return list
	}
	for _, n := range b.nodes {
		var all []dpapi.Frontend
		for _, protocol := range []uint8{6, 17} {
			for _, address := range []netip.AddrPort{b.external, b.nodePort(n)} {
				all = append(all, dpapi.Frontend{
					FrontendKey: dpapi.FrontendKey{Address: address, Protocol: protocol},
					Exposed:     dpapi.Exposed{Services: b.of.ServicesNumber, Node: address != b.external},
					Backends:    at(active), Draining: at(draining),
				})
			}
		}
		must(t, n.datapath.PutServices(all))
	}
}

func (b *exposedBed) nodePort(n *testNode) netip.AddrPort {
	return netip.AddrPortFrom(n.underlay, 30080)
}

// answerWho answers each connection with its name and the client's address, and then with what it receives.
func answerWho(t testing.TB, c *testContainer, port uint16, name string) {
	t.Helper()
	greetTCP(t, c, port, func(conn net.Conn) string { return fmt.Sprintln(name, addrPort(conn.RemoteAddr())) })
}

// connect connects from the host outside and returns the name of the backend, which must see the client's own address.
func (b *exposedBed) connect(t testing.TB, to netip.AddrPort) (string, net.Conn) {
	t.Helper()
	conn, err := dial(b.host, netip.Addr{}, to, patience)
	if err != nil {
		t.Fatalf("%v: %v; drops %v", to, err, b.allDrops(t))
	}
	t.Cleanup(func() { conn.Close() })
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	line, err := bufio.NewReaderSize(conn, 16).ReadString('\n')
	if err != nil && line == "" {
		t.Fatalf("%v: %v; drops %v", to, err, b.allDrops(t))
	}
	name, client, _ := strings.Cut(strings.TrimSpace(line), " ")
	if own := addrPort(conn.LocalAddr()).String(); client != own {
		t.Errorf("%v: the backend sees %s, the client is %s", to, client, own)
	}
	return name, conn
}

func (b *exposedBed) allDrops(t testing.TB) (all []map[string]uint64) {
	for _, n := range b.nodes {
		all = append(all, n.drops(t))
	}
	return all
}

// TestExposed: a host outside reaches the backends on both nodes by an external address and by node ports, over TCP and
// UDP; they see its own address, and it sees only the exposed one. Other ports of an external address are closed, those
// of a node are the node's.
func TestExposed(t *testing.T) {
	for _, of := range []tenant.Tenant{serving(blue, 7), serving(plain, 8)} {
		t.Run(of.Name, func(t *testing.T) {
			b := newExposedBed(t, of)
			b.expose(t, []int{0, 1}, nil)
			for _, to := range []netip.AddrPort{b.external, b.nodePort(b.nodes[0]), b.nodePort(b.nodes[2])} {
				seen := map[string]int{}
				for range 16 {
					name, conn := b.connect(t, to)
					if seen[name]++; seen[name] == 1 {
						exchange(t, conn, 1<<20)
					}
					conn.Close()
				}
				if len(seen) != 2 {
					t.Errorf("%v: backends %v, want both", to, seen)
				}
				var conn net.Conn
				must(t, b.host.Do(func() (err error) { conn, err = net.Dial("udp6", to.String()); return err }))
				for range 3 {
					if name, got, err := ask(conn, []byte("question")); err != nil || string(got) != "question" {
						t.Errorf("%v over UDP: %q %q, %v; drops %v", to, name, got, err, b.allDrops(t))
					}
				}
				conn.Close()
			}
			closed := netip.AddrPortFrom(b.external.Addr(), 81)
			if _, err := dial(b.host, netip.Addr{}, closed, patience); !isErrno(err, syscall.ECONNREFUSED) {
				t.Errorf("a port of the external address that is not exposed: %v", err)
			}
			own := netip.AddrPortFrom(b.nodes[0].underlay, 30081)
			watchedEcho(t, b.nodes[0].ns, own)
			conn, err := dial(b.host, netip.Addr{}, own, patience)
			if err != nil {
				t.Fatalf("a process of the node: %v", err)
			}
			exchange(t, conn, 1000)
			conn.Close()

			// A process of the node has the node port as the port of a connection of its own.
			from := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(b.nodePort(b.nodes[0]))}
			for _, peer := range []struct {
				name string
				ns   *netns.Namespace
				at   netip.Addr
			}{{"a host outside", b.host, b.hostAddr}, {"another node", b.nodes[1].ns, b.nodes[1].address()}} {
				to := netip.AddrPortFrom(peer.at, 7)
				watchedEcho(t, peer.ns, to)
				err := b.nodes[0].ns.Do(func() (err error) { conn, err = from.Dial("tcp6", to.String()); return err })
				if err != nil {
					t.Errorf("a connection of the node to %s: %v; drops %v", peer.name, err, b.allDrops(t))
					continue
				}
				exchange(t, conn, 1000)
				must(t, conn.(*net.TCPConn).SetLinger(0)) // the port is free at once
				conn.Close()
			}
		})
	}
}

// TestExposedChanges: established connections stay while other backends come and go and when the backend drains, and go
// on when the fabric sends their packets to another node; without backends, new ones are refused.
func TestExposedChanges(t *testing.T) {
	b := newExposedBed(t, serving(blue, 7))
	b.expose(t, []int{1}, nil)
	name, first := b.connect(t, b.external)
	if name != "1" {
		t.Fatalf("backend %s, want the only one, 1", name)
	}
	b.expose(t, []int{0, 1}, nil)
	exchange(t, first, 1000)
	b.expose(t, []int{0}, []int{1})
	exchange(t, first, 1000)
	for range 4 {
		name, conn := b.connect(t, b.external)
		if name != "0" {
			t.Errorf("a new connection goes to backend %s, which drains", name)
		}
		conn.Close()
	}

	b.expose(t, []int{0, 1}, nil)
	_, moved := b.connect(t, b.external)
	exchange(t, moved, 1000)
	b.ingress(t, 2)
	exchange(t, moved, 1000)

	b.expose(t, nil, nil)
	if _, err := dial(b.host, netip.Addr{}, b.external, patience); !isErrno(err, syscall.ECONNREFUSED) {
		t.Errorf("without backends: %v; drops %v", err, b.allDrops(t))
	}
	for _, n := range b.nodes {
		all, err := n.datapath.Services()
		must(t, err)
		must(t, n.datapath.DeleteServices(all))
	}
	if _, err := dial(b.host, netip.Addr{}, b.external, impatience); err == nil {
		t.Error("a connection to an address that is no longer exposed")
	}
}

// TestHostPort: a port of one node leads to a container of it, over one protocol: the other protocol, and the same port
// of other nodes, stay those of processes. If another container gets the port, connections of the first one end.
func TestHostPort(t *testing.T) {
	b := newExposedBed(t, serving(blue, 7))
	const port = 22
	to := netip.AddrPortFrom(b.nodes[0].underlay, port)
	second := b.nodes[0].addLeaving(t, b.of, 2)
	answerWho(t, second, 8080, "second")
	key := dpapi.FrontendKey{Address: to, Protocol: 6}
	publish := func(c *testContainer) {
		t.Helper()
		must(t, b.nodes[0].datapath.PutServices([]dpapi.Frontend{{
			FrontendKey: key, Exposed: dpapi.Exposed{Services: b.of.ServicesNumber, Node: true},
			Backends: []dpapi.Backend{backendAt(c, 8080)},
		}}))
	}
	publish(b.backends[0])
	name, conn := b.connect(t, to)
	exchange(t, conn, 1<<20)
	if name != "0" {
		t.Errorf("connected to %q, want container 0", name)
	}

	var process net.PacketConn
	must(t, b.nodes[0].ns.Do(func() (err error) { process, err = net.ListenPacket("udp6", to.String()); return err }))
	defer process.Close()
	var datagrams net.Conn
	must(t, b.host.Do(func() (err error) { datagrams, err = net.Dial("udp6", to.String()); return err }))
	defer datagrams.Close()
	if _, err := datagrams.Write([]byte("to the node")); err != nil {
		t.Fatal(err)
	}
	must(t, process.SetReadDeadline(time.Now().Add(patience)))
	if n, _, err := process.ReadFrom(make([]byte, 64)); err != nil || n != len("to the node") {
		t.Errorf("a datagram to the same port: %d bytes, %v; drops %v", n, err, b.allDrops(t))
	}
	other := netip.AddrPortFrom(b.nodes[1].underlay, port)
	watchedEcho(t, b.nodes[1].ns, other)
	toOther, err := dial(b.host, netip.Addr{}, other, patience)
	if err != nil {
		t.Fatalf("a process of another node: %v", err)
	}
	exchange(t, toOther, 1000)
	toOther.Close()

	must(t, b.nodes[0].datapath.DeleteServices([]dpapi.FrontendKey{key}))
	publish(second)
	if name, _ := b.connect(t, to); name != "second" {
		t.Errorf("connected to %q, want the second container", name)
	}
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	if _, err := conn.Write([]byte("more")); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 4)); !isErrno(err, syscall.ECONNRESET) {
		t.Errorf("a connection of the first container: %v, want a reset", err)
	}
}
