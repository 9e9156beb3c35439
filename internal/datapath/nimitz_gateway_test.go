package datapath

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/gateway"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// underlayWire has two nodes, a host without container networks, and a router between them. The router drops packets
// that come from another device than the one to their source.
type underlayWire struct {
	*nimitzWire
	host     *netns.Namespace
	hostAddr netip.Addr
	gateways [2]*gateway.Gateway
	paths    [2]string // of the gateways' namespaces
}

func newUnderlayWire(t testing.TB) *underlayWire {
	t.Helper()
	w := &underlayWire{nimitzWire: &nimitzWire{wire: &wire{}}, host: namespace(t, "host")}
	router := namespace(t, "router")
	must(t, withSettings(router, func(s host.Sysctls) error {
		return s.Set("all", []host.Sysctl{{Family: "ipv6", Name: "forwarding", Value: "1"}})
	}))
	for i := range w.nodes {
		w.nodes[i] = &testNode{
			ns:     namespace(t, fmt.Sprint("node", i)),
			prefix: netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
		}
		w.nodes[i].underlay = joinRouter(t, router, w.nodes[i].ns, i+1, w.nodes[i].prefix)
	}
	w.hostAddr = joinRouter(t, router, w.host, 3, netip.Prefix{})
	checkSources(t, router)
	openAll(t, endpoint.Veth, w.nodes[:]...)
	w.mesh(t)
	for i, n := range w.nodes {
		must(t, n.ns.Do(func() error { return w.openGateway(t, i) }))
	}
	return w
}

func (w *underlayWire) openGateway(t testing.TB, i int) (err error) {
	if w.gateways[i] == nil {
		w.paths[i] = filepath.Join(t.TempDir(), "gateway")
		t.Cleanup(func() { must(t, gateway.Remove(w.paths[i])) })
	}
	if w.gateways[i], err = gateway.Open(t.Context(), w.gatewayConfig(i)); err != nil {
		return err
	}
	t.Cleanup(func() { w.gateways[i].Close() })
	if err := w.switches[i].Plug(t.Context(), pipeline.Gateway,
		pipeline.Device{Name: pipeline.GatewayDevice}); err != nil {
		return err
	}
	return w.nodes[i].datapath.PlugUnderlay(pipeline.UnderlayDevice)
}

func (w *underlayWire) gatewayConfig(i int) gateway.Config {
	prefix := w.nodes[i].prefix
	block, _ := address.DefaultPlan().GatewayBlock(prefix, false)
	return gateway.Config{
		Path: w.paths[i], Switch: pipeline.GatewayDevice, Fabric: pipeline.UnderlayDevice,
		Block: block, Virtual: nimitz.GatewayAddress(block), Own: tenant.UnderlayAddress(prefix, 1), MTU: 1500,
	}
}

// joinRouter gives a namespace an uplink to the router, and a prefix behind it.
func joinRouter(t testing.TB, router, ns *netns.Namespace, number int, behind netip.Prefix) netip.Addr {
	t.Helper()
	h, err := router.Netlink()
	must(t, err)
	defer h.Close()
	inside, err := ns.Netlink()
	must(t, err)
	defer inside.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = fmt.Sprint("to", number), 100+number
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(ns.FD())
	must(t, h.LinkAdd(pair))
	subnet := netip.MustParsePrefix(fmt.Sprintf("2001:db8:70:%d::/64", number))
	first := subnet.Addr().Next()
	own := first.Next()
	for _, end := range []struct {
		ns   *netns.Namespace
		h    *netlink.Handle
		name string
		addr netip.Addr
	}{{router, h, attrs.Name, first}, {ns, inside, "eth0", own}} {
		must(
			t,
			withSettings(
				end.ns,
				func(s host.Sysctls) error {
					return s.Set(end.name, []host.Sysctl{{Family: "ipv6", Name: "accept_dad", Value: "0"}})
				},
			),
		)
		l, err := end.h.LinkByName(end.name)
		must(t, err)
		must(
			t,
			end.h.AddrAdd(l, &netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(end.addr, 64)), Flags: unix.IFA_F_NODAD}),
		)
		must(t, end.h.LinkSetUp(l))
	}
	must(t, ns.WaitUp(t.Context(), "eth0"))
	must(t, router.WaitUp(t.Context(), attrs.Name))
	must(t, inside.RouteAdd(&netlink.Route{Dst: host.IPNet(netip.MustParsePrefix("::/0")), Gw: first.AsSlice()}))
	if behind.IsValid() {
		must(t, h.RouteAdd(&netlink.Route{Dst: host.IPNet(behind), Gw: own.AsSlice()}))
	}
	return own
}

// checkSources makes a router drop packets that come from another device than the one to their source.
func checkSources(t testing.TB, router *netns.Namespace) {
	t.Helper()
	nft, err := nftables.New(nftables.WithNetNSFd(router.FD()))
	must(t, err)
	table := nft.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv6, Name: "fabric"})
	chain := nft.AddChain(
		&nftables.Chain{
			Table:    table,
			Name:     "sources",
			Type:     nftables.ChainTypeFilter,
			Hooknum:  nftables.ChainHookForward,
			Priority: nftables.ChainPriorityFilter,
		},
	)
	nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Fib{Register: 1, ResultOIF: true, FlagSADDR: true, FlagIIF: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}})
	must(t, nft.Flush())
}

// echoServer answers each TCP connection with the client's address, then with the data that it receives.
func echoServer(t testing.TB, ns *netns.Namespace, at netip.AddrPort) netip.AddrPort {
	t.Helper()
	var l net.Listener
	must(t, ns.Do(func() (err error) {
		l, err = net.Listen("tcp", at.String())
		return err
	}))
	var serving sync.WaitGroup
	t.Cleanup(func() { l.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(20 * time.Second))
				from := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().As16()
				conn.Write(from[:])
				io.Copy(conn, conn)
			})
		}
	})
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// converse sends n bytes over TCP and reads them back. It returns the address as which the server sees it.
func converse(ctx context.Context, ns *netns.Namespace, to netip.AddrPort, n int) (seen netip.Addr, err error) {
	var conn net.Conn
	if err := ns.Do(func() (err error) {
		conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", to.String())
		return err
	}); err != nil {
		return seen, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	var from [16]byte
	if _, err := io.ReadFull(conn, from[:]); err != nil {
		return seen, err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(make([]byte, n))
		sent <- err
	}()
	if _, err := io.ReadFull(conn, make([]byte, n)); err != nil {
		return seen, err
	}
	return netip.AddrFrom16(from), <-sent
}

// toService lets a container reach the underlay address real by the address virtual, in IPv6.
func (w *underlayWire) toService(t testing.TB, node int, vni pipeline.VNI, c *testContainer, virtual, real netip.Addr) {
	t.Helper()
	block, _ := address.DefaultPlan().GatewayBlock(w.nodes[node-1].prefix, false)
	a, v := c.record.Attachments[1].Address, nimitz.ContainerAddress(block, c.record.ID)
	must(t, w.switches[node-1].Apply(t.Context(), nil, []pipeline.Entry{
		pipeline.NorthSouth{VNI: vni, To: netip.PrefixFrom(real, 128)},
		pipeline.DNAT{VNI: vni, Virtual: virtual, RealVNI: vni, Real: real},
		pipeline.SNAT{VNI: vni, Real: real, Virtual: virtual},
		pipeline.Forward{VNI: vni, To: netip.PrefixFrom(real, 128), Port: pipeline.Gateway},
		pipeline.SNAT{VNI: vni, Real: a, Virtual: v},
		pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: v, RealVNI: vni, Real: a},
	}))
}

// TestGatewayToServices is traffic (c): containers of two tenants with the same address use one service at once, each
// by its own tenant's virtual address, over TCP and ping. The service sees this node's gateway (NIMITZ §3.1).
func TestGatewayToServices(t *testing.T) {
	w := newUnderlayWire(t)
	seven, eight := w.add(t, 1, 7, 2), w.add(t, 1, 8, 2)
	v7, v8 := netip.MustParseAddr("fd10:9::9"), netip.MustParseAddr("fd10:8::8")
	w.toService(t, 1, 7, seven, v7, w.hostAddr)
	w.toService(t, 1, 8, eight, v8, w.hostAddr)
	port := echoServer(t, w.host, netip.AddrPortFrom(w.hostAddr, 0)).Port()
	fabric := capture(t, w.host)

	var both sync.WaitGroup
	for _, c := range []struct {
		*testContainer
		to netip.Addr
	}{{seven, v7}, {eight, v8}} {
		both.Go(func() {
			seen, err := converse(t.Context(), c.ns, netip.AddrPortFrom(c.to, port), 4<<20)
			if want := tenant.UnderlayAddress(w.nodes[0].prefix, 1); err != nil || seen != want {
				t.Errorf("to %v: seen as %v, not %v: %v", c.to, seen, want, err)
			}
		})
	}
	both.Wait()
	for _, size := range []int{56, 1300} {
		if r := seven.ping(t, v7, size, patience); r.Received != r.Sent {
			t.Errorf("%d of %d pings of %d bytes were answered", r.Received, r.Sent, size)
		}
	}
	// The other tenant's virtual address of the service does not work, nor does the service's real address.
	for _, to := range []netip.Addr{v8, netip.MustParseAddr("2001:db8:70:3::3")} {
		if r := seven.ping(t, to, 56, impatience); r.Received != 0 {
			t.Errorf("%v answers", to)
		}
	}
	onlyGateways(t, fabric, w.nodes[0].prefix)
	if got := w.nodes[0].counted(t, map[string]uint64{"no-route": w.nodes[0].drops(t)["no-route"]}); len(got) != 0 {
		t.Errorf("dropped %v", got)
	}
}

// onlyGateways checks that all packets captured on the fabric until now come from the underlay or from the gateway's
// address, and that there is at least one.
func onlyGateways(t testing.TB, c *packet.Capture, node netip.Prefix) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), impatience)
	defer cancel()
	n := 0
	for {
		got, err := c.Next(ctx)
		if err != nil {
			break
		}
		p, err := packet.DecodeFrame(got.Frame)
		if err != nil || !p.Source.Is6() || p.Source.IsLinkLocalUnicast() {
			continue
		}
		if n++; p.Source != tenant.UnderlayAddress(node, 1) &&
			!netip.MustParsePrefix("2001:db8:70::/48").Contains(p.Source) {
			t.Fatalf("%v was on the fabric", p.Source)
		}
	}
	if n == 0 {
		t.Error("nothing was on the fabric")
	}
}

// TestGatewayPublishes is traffic (d): a host of the underlay reaches a container on node 2 by an address of node 1's
// gateway. Answers return through that gateway (appendix A); the router would drop others.
func TestGatewayPublishes(t *testing.T) {
	w := newUnderlayWire(t)
	near, far := w.add(t, 1, 7, 2), w.add(t, 2, 7, 2)
	w.add(t, 2, 8, 2) // with far's address
	one, _ := address.DefaultPlan().GatewayBlock(w.nodes[0].prefix, false)
	client := nimitz.GatewayAddress(one)
	var entries []pipeline.Entry
	publish := map[netip.Addr]netip.Addr{}
	for i, c := range []*testContainer{far, near} {
		at, a := address.Index(i+2), c.record.Attachments[1].Address
		v := nimitz.PublishedAddress(one, at)
		publish[tenant.UnderlayAddress(w.nodes[0].prefix, at)] = v
		entries = append(
			entries,
			pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: v, RealVNI: 7, Real: a},
			pipeline.SNAT{VNI: 7, Real: a, Virtual: v},
		)
	}
	entries = append(
		entries,
		pipeline.NorthSouth{VNI: 7, To: netip.PrefixFrom(client, 128)},
		pipeline.Forward{VNI: 7, To: netip.PrefixFrom(client, 128), Port: pipeline.Gateway},
	)
	must(t, w.switches[0].Apply(t.Context(), nil, entries))
	must(t, w.switches[1].Apply(t.Context(), nil, []pipeline.Entry{
		pipeline.Forward{
			VNI:  7,
			To:   netip.PrefixFrom(client, 128),
			Port: pipeline.VXLAN,
			VTEP: pipeline.VTEP(w.nodes[0].prefix),
		},
	}))
	must(t, w.gateways[0].Publish(t.Context(), publish))
	fabric := capture(t, w.host)
	for i, c := range []*testContainer{far, near} {
		at := tenant.UnderlayAddress(w.nodes[0].prefix, address.Index(i+2))
		port := echoServer(t, c.ns, netip.AddrPortFrom(c.record.Attachments[1].Address, 0)).Port()
		if seen, err := converse(t.Context(), w.host, netip.AddrPortFrom(at, port), 4<<20); err != nil ||
			seen != client {
			t.Errorf("to %v: seen as %v: %v", at, seen, err)
		}
		r, err := packet.Ping(t.Context(), w.host, at, packet.PingOptions{Count: 2, Timeout: patience, Size: 1300})
		if err != nil || r.Received != r.Sent {
			t.Errorf("%d of %d pings to %v: %v", r.Received, r.Sent, at, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), impatience)
	defer cancel()
	for {
		got, err := fabric.Next(ctx)
		if err != nil {
			break
		}
		p, err := packet.DecodeFrame(got.Frame)
		if err == nil && (w.nodes[1].prefix.Contains(p.Source) || one.Contains(p.Source)) {
			t.Fatalf("%v sends to the client", p.Source)
		}
	}
	// A new process of the agent finds the gateway in operation and changes nothing.
	at := netip.AddrPortFrom(
		tenant.UnderlayAddress(w.nodes[0].prefix, 2),
		echoServer(t, far.ns, netip.AddrPortFrom(far.record.Attachments[1].Address, 0)).Port(),
	)
	var conn, other net.Conn
	must(t, w.host.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", at.String(), 10*time.Second)
		return err
	}))
	defer conn.Close()
	must(t, w.gateways[0].Close())
	must(t, w.nodes[0].ns.Do(func() error { return w.openGateway(t, 0) }))
	must(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	_, err := conn.Write(make([]byte, 1000))
	must(t, err)
	if _, err := io.ReadFull(conn, make([]byte, 16+1000)); err != nil {
		t.Errorf("a connection from before: %v", err)
	}
	if _, err := converse(t.Context(), w.host, at, 1000); err != nil {
		t.Errorf("a connection from after: %v", err)
	}
	// When a publication ends, the connections to it end, and no others.
	must(t, w.host.Do(func() (err error) {
		other, err = net.DialTimeout(
			"tcp",
			netip.AddrPortFrom(tenant.UnderlayAddress(w.nodes[0].prefix, 3), echoServer(t, near.ns,
				netip.AddrPortFrom(near.record.Attachments[1].Address, 0)).Port()).
				String(),
			10*time.Second,
		)
		return err
	}))
	defer other.Close()
	if _, err := io.ReadFull(other, make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	used := map[netip.Addr]bool{}
	withdrawn := tenant.UnderlayAddress(w.nodes[0].prefix, 2)
	for at, v := range publish {
		used[v] = at != withdrawn
	}
	delete(publish, withdrawn)
	must(t, w.gateways[0].Publish(t.Context(), publish))
	must(t, w.gateways[0].Keep(t.Context(), publish, used))
	for c, lives := range map[net.Conn]bool{conn: false, other: true} {
		timeout := impatience
		if lives {
			timeout = patience
		}
		must(t, c.SetDeadline(time.Now().Add(timeout)))
		_, err := c.Write([]byte("more"))
		must(t, err)
		if _, err = io.ReadFull(c, make([]byte, 4)); (err == nil) != lives {
			t.Errorf("a connection to %v lives: %v, want %v (%v)", c.RemoteAddr(), err == nil, lives, err)
		}
	}
	// Addresses that are not published cannot be reached, including that of the gateway itself.
	for _, at := range []address.Index{1, 9} {
		r, err := packet.Ping(
			t.Context(),
			w.host,
			tenant.UnderlayAddress(w.nodes[0].prefix, at),
			packet.PingOptions{Count: 2, Timeout: impatience},
		)
		if err != nil || r.Received != 0 {
			t.Errorf("index %d of the gateway answers: %v", at, err)
		}
	}
	for _, n := range w.nodes {
		if got := n.counted(t, nil); len(got) != 0 {
			t.Errorf("%v dropped %v", n.prefix, got)
		}
	}
}
