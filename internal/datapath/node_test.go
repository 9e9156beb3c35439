package datapath

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

func (n *testNode) address() netip.Addr { return n.prefix.Addr().Next() }

// self returns the node's stack as a testContainer, so that it can be an end of a test connection.
func (n *testNode) self() *testContainer {
	return &testContainer{
		node:   n,
		ns:     n.ns,
		record: endpoint.Record{Attachments: []endpoint.Attachment{{Address: n.address()}}},
	}
}

// gateway returns the node's address as its containers of a tenant see it.
func (n *testNode) gateway(t testing.TB, of tenant.Tenant) netip.Addr {
	t.Helper()
	guest, err := of.Gateway(n.datapath.config.Plan, n.prefix, of.Current())
	must(t, err)
	return guest.Address
}

// connect connects a socket of the node with one of a container, and returns both.
func (n *testNode) connect(t *testing.T, network string, to *testContainer) (node, container net.Conn) {
	t.Helper()
	at := netip.AddrPortFrom(to.seen(), 0)
	if network == "udp6" {
		var socket *net.UDPConn
		must(
			t,
			to.ns.Do(
				func() (err error) { socket, err = net.ListenUDP(network, net.UDPAddrFromAddrPort(at)); return err },
			),
		)
		must(t, n.ns.Do(func() (err error) { node, err = net.Dial(network, socket.LocalAddr().String()); return err }))
		container = socket
	} else {
		var listener net.Listener
		must(t, to.ns.Do(func() (err error) { listener, err = net.Listen(network, at.String()); return err }))
		defer listener.Close()
		must(t, n.ns.Do(func() (err error) {
			node, err = net.DialTimeout(network, listener.Addr().String(), patience)
			return err
		}))
		var err error
		container, err = listener.Accept()
		must(t, err)
	}
	t.Cleanup(func() { node.Close(); container.Close() })
	return node, container
}

func addrPort(a net.Addr) netip.AddrPort { return netip.MustParseAddrPort(a.String()) }

// TestNodeReachesItsContainers: health checks work, and containers see the node as a peer of their tenant.
func TestNodeReachesItsContainers(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	for _, of := range []tenant.Tenant{blue, plain} {
		c, gateway := n.add(t, of, 1), n.gateway(t, of)
		if r, err := packet.Ping(t.Context(), n.ns, c.seen(), packet.PingOptions{Count: 2, Timeout: patience,
			Size: 1000}); err != nil ||
			r.Received != 2 {
			t.Errorf("%s: %+v, %v", of.Name, r, err)
		}
		transfer(t, n.self(), c, 8<<20)
		_, inside := n.connect(t, "tcp6", c)
		if peer := addrPort(inside.RemoteAddr()).Addr(); peer != gateway {
			t.Errorf("%s: the container sees %v connect, not %v", of.Name, peer, gateway)
		}
		question, service := n.connect(t, "udp6", c)
		buf := make([]byte, 30000)
		must(t, question.SetDeadline(deadline()))
		must(t, service.SetDeadline(deadline()))
		for _, size := range []int{100, 20000} { // whole, and in fragments
			_, err := question.Write(buf[:size])
			must(t, err)
			k, from, err := service.(*net.UDPConn).ReadFromUDPAddrPort(buf)
			if err != nil || k != size || from.Addr() != gateway {
				t.Errorf("%s: %d bytes of %d from %v: %v", of.Name, k, size, from, err)
			}
			_, err = service.(*net.UDPConn).WriteToUDPAddrPort(buf[:100], from)
			must(t, err)
			if k, err := question.Read(buf); err != nil || k != 100 {
				t.Errorf("%s: an answer of %d bytes: %v", of.Name, k, err)
			}
		}
		must(t, service.Close())
		_, err := question.Write([]byte("anyone?"))
		must(t, err)
		if _, err := question.Read(buf); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: a closed port gave %v, want connection refused", of.Name, err)
		}
	}
	for r, count := range n.drops(t) {
		if r != "nd-ignored" && r != "mld-ignored" {
			t.Errorf("dropped %d packets: %s", count, r)
		}
	}
}

// TestNodeWithoutItsProgram: without its program, the node reaches no container, and no packet leaves the node.
func TestNodeWithoutItsProgram(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	c := n.add(t, blue, 1)
	onFar, err := packet.NewCapture(n.ns, hook.NodeFar, packet.IncomingOnly)
	must(t, err)
	defer onFar.Close()
	onWire, err := packet.NewCapture(w.nodes[1].ns, "eth0", packet.IncomingOnly)
	must(t, err)
	defer onWire.Close()
	must(t, n.datapath.Netlink.QdiscDel(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: n.datapath.NodeNear, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}))
	if s, err := n.datapath.Status(); err != nil || !s.Healthy || len(s.Problems) != 1 {
		t.Errorf("status without the node's program: %+v, %v", s, err)
	}
	must(t, n.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0) }))
	r, err := packet.Ping(t.Context(), n.ns, c.seen(), packet.PingOptions{Timeout: impatience})
	if must(t, err); r.Received != 0 {
		t.Error("the node was answered without its program")
	}
	for _, s := range sentinelAfter(t, onFar, func(s packet.Sentinel) {
		must(t,
			n.ns.Do(func() error { return sendUDP(c.seen(), s[:]) }))
	}) {
		if _, err := s.Packet(); err != nil {
			t.Errorf("the far end saw %x", s.Frame)
		}
	}
	for _, s := range sentinelAfter(t, onWire, func(s packet.Sentinel) {
		must(t, n.ns.Do(func() error { return sendUDP(w.nodes[1].underlay, s[:]) }))
	}) {
		if p, err := s.Packet(); err == nil && (p.Destination == c.seen() || p.Destination == c.plain()) {
			t.Errorf("leaked to the wire: %+v", p)
		}
	}
	must(t, n.datapath.AttachNode())
	transfer(t, n.self(), c, 1000)
}

// TestNodeRoutesComeAndGo: the node's routes to an endpoint are added and removed with it; other routes stay.
func TestNodeRoutesComeAndGo(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	routes := func() int {
		all, err := n.datapath.NodeRoutes(nil)
		must(t, err)
		return len(all)
	}
	a, b := n.add(t, blue, 1), n.add(t, plain, 1)
	if routes() != 2 {
		t.Errorf("%d routes for two containers", routes())
	}
	must(t, n.datapath.removeEndpoint(t.Context(), a.record))
	must(t, n.datapath.removeEndpoint(t.Context(), a.record))
	if routes() != 1 {
		t.Errorf("%d routes for one container", routes())
	}
	must(t, n.datapath.AddNodeRoutes(a.record)) // left by a crash
	n.restore(t, b)
	if routes() != 1 {
		t.Errorf("%d routes for one container after a start", routes())
	}
}

// TestNodeClaimsNobody: a process of the node cannot send as anything but the node, whatever address it binds to.
func TestNodeClaimsNobody(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a, b := n.add(t, blue, 1), n.add(t, blue, 1)
	for _, source := range []netip.Addr{a.seen(), n.gateway(t, blue), n.underlay, a.plain()} {
		before := n.drops(t)["src-not-own"]
		must(t, n.ns.Do(func() error { return sendFrom(unix.IPV6_FREEBIND, source, b.seen()) }))
		if got := n.drops(t)["src-not-own"] - before; got != 1 {
			t.Errorf("from %v: %d drops for src-not-own, want 1", source, got)
		}
	}
	raw, err := packet.NewInjector(n.ns, hook.NodeDevice)
	must(t, err)
	defer raw.Close()
	if err := raw.Send(packet.Frame(host.GatewayMAC, host.ContainerMAC, packet.EtherTypeIPv6, make([]byte,
		20))); !errors.Is(
		err,
		unix.ENOBUFS,
	) ||
		n.drops(t)["malformed"] != 1 {
		t.Errorf("half an IPv6 header: %v, %v", err, n.drops(t))
	}
}

// sendFrom sends a datagram from any source address, as every process can: IPV6_FREEBIND needs no privilege.
func sendFrom(option int, source, to netip.Addr) error {
	d := net.Dialer{
		LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)),
		Control: func(_, _ string, raw syscall.RawConn) (err error) {
			return errors.Join(
				raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, option, 1) }),
				err,
			)
		},
	}
	conn, err := d.Dial("udp6", netip.AddrPortFrom(to, 9).String())
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write([]byte("it is me"))
	return err
}

func deadline() time.Time { return time.Now().Add(patience) }
