package datapath

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// outsideWire has three nodes, a host outside of the cluster, and a router between them, which checks that each node
// sends with sources of its own /64s only.
type outsideWire struct {
	nodes    [3]*testNode
	router   *netns.Namespace
	host     *netns.Namespace
	hostAddr netip.Addr
}

func newOutsideWire(t testing.TB) *outsideWire {
	t.Helper()
	w := &outsideWire{host: namespace(t, "host"), router: namespace(t, "router")}
	must(t, withSettings(w.router, func(s host.Sysctls) error {
		return s.Set("all", []host.Sysctl{{Family: "ipv6", Name: "forwarding", Value: "1"}})
	}))
	for i := range w.nodes {
		w.nodes[i] = &testNode{
			ns:     namespace(t, fmt.Sprint("node", i)),
			prefix: netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
		}
		w.nodes[i].underlay = joinRouter(t, w.router, w.nodes[i].ns, i+1, w.nodes[i].prefix)
	}
	w.hostAddr = joinRouter(t, w.router, w.host, 9, netip.Prefix{})
	checkSources(t, w.router)
	openAll(t, joined, w.nodes[:]...)
	return w
}

// leaving returns a tenant that may send to hosts outside by a rule.
func leaving(of tenant.Tenant, rules ...tenant.EgressRule) tenant.Tenant {
	of.Network = tenant.Netpila
	of.Egress = rules
	return of
}

var everywhere = tenant.EgressRule{To: endpoint.DefaultRoute, Allow: true}

// via returns a rule by gateways, which have an address of their own each.
func (w *outsideWire) via(gateways ...int) tenant.EgressRule {
	r := everywhere
	for _, i := range gateways {
		r.Via = append(r.Via, tenant.EgressGateway{
			Node: fmt.Sprint("n", i), Prefix: w.nodes[i].prefix,
			Address: tenant.EgressAddress(w.nodes[i].prefix, tenant.FirstGatewayIndex),
		})
	}
	return r
}

// put installs a tenant on all nodes.
func (w *outsideWire) put(t testing.TB, of tenant.Tenant) {
	t.Helper()
	for _, n := range w.nodes {
		must(t, n.datapath.putTenant(of))
	}
}

// addLeaving makes a container with an egress address and a default route.
func (n *testNode) addLeaving(t testing.TB, of tenant.Tenant, app address.AppID) *testContainer {
	t.Helper()
	c := n.create(t, of, app)
	a := &c.record.Attachments[0]
	a.Egress = tenant.EgressAddress(n.prefix, tenant.FirstEgressIndex+address.Index(n.ids))
	a.Routes = append(a.Routes, endpoint.DefaultRoute)
	must(t, c.ns.Do(func() error {
		h, err := netlink.NewHandle()
		if err != nil {
			return err
		}
		defer h.Close()
		l, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return h.RouteAdd(&netlink.Route{
			LinkIndex: l.Attrs().Index, Dst: host.IPNet(endpoint.DefaultRoute), Gw: a.Gateway.AsSlice(),
			Flags: int(netlink.FLAG_ONLINK), Src: a.Address.AsSlice(),
		})
	}))
	must(t, n.datapath.activate(c.record))
	return c
}

func (c *testContainer) egress() netip.Addr { return c.record.Attachments[0].Egress }

// watchedEcho answers each connection with what it receives, and reports who connects.
func watchedEcho(t testing.TB, ns *netns.Namespace, at netip.AddrPort) <-chan netip.AddrPort {
	t.Helper()
	var l net.Listener
	must(t, ns.Do(func() (err error) { l, err = net.Listen("tcp6", at.String()); return err }))
	t.Cleanup(func() { l.Close() })
	clients := make(chan netip.AddrPort, 64)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			clients <- addrPort(c.RemoteAddr())
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
	return clients
}

// dial dials over TCP, from an address if it is valid.
func dial(ns *netns.Namespace, from netip.Addr, to netip.AddrPort, limit time.Duration) (c net.Conn, err error) {
	d := net.Dialer{Timeout: limit}
	if from.IsValid() {
		d.LocalAddr = &net.TCPAddr{IP: from.AsSlice()}
	}
	doErr := ns.Do(func() error { c, err = d.Dial("tcp6", to.String()); return nil })
	if doErr != nil {
		return nil, doErr
	}
	return c, err
}

// exchange sends and receives n bytes over an echoing connection.
func exchange(t testing.TB, c net.Conn, n int) {
	t.Helper()
	must(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	sent := make([]byte, n)
	for i := range sent {
		sent[i] = byte(i * 7)
	}
	failed := make(chan error, 1)
	go func() { _, err := c.Write(sent); failed <- err }()
	got := make([]byte, n)
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatalf("read %d bytes: %v", n, err)
	}
	must(t, <-failed)
	if string(got) != string(sent) {
		t.Fatal("the bytes that came back are others")
	}
}

// TestEgress: a container reaches a host outside with an address of its own, by TCP, UDP and ping; nothing comes in
// without a session.
func TestEgress(t *testing.T) {
	w := newOutsideWire(t)
	for _, of := range []tenant.Tenant{blue, plain} {
		w.put(t, leaving(of, everywhere))
		c := w.nodes[0].addLeaving(t, leaving(of, everywhere), 1)
		at := netip.AddrPortFrom(w.hostAddr, 80+uint16(of.IDs[0].ID))
		clients := watchedEcho(t, w.host, at)
		conn, err := dial(c.ns, netip.Addr{}, at, patience)
		if err != nil {
			t.Fatalf("%s: %v; drops %v", of.Name, err, w.nodes[0].drops(t))
		}
		exchange(t, conn, 1<<20)
		if seen := <-clients; seen.Addr() != c.egress() {
			t.Errorf("%s: the host sees %v, want %v", of.Name, seen, c.egress())
		}
		own, found, err := w.nodes[0].datapath.LookupEgress(c.record.ID)
		must(t, err)
		if !found || own != c.egress() {
			t.Errorf("%s: the table has %v, %t; want %v", of.Name, own, found, c.egress())
		}
		base, found, err := w.nodes[0].datapath.LookupAccess(0, w.nodes[1].prefix.Addr())
		must(t, err)
		if plan := address.DefaultPlan().Base; !found || base.To != plan || base.Action != dpapi.AccessDeny {
			t.Errorf("%s: nodes are protected by %+v, %t; want %v", of.Name, base, found, plan)
		}
		if r := c.ping(t, w.hostAddr, 1000, patience); r.Received != 2 {
			t.Errorf("%s: ping: %+v; drops %v", of.Name, r, w.nodes[0].drops(t))
		}
		before := w.nodes[0].drops(t)["no-session"]
		r, err := packet.Ping(t.Context(), w.host, c.egress(), packet.PingOptions{Count: 2, Timeout: impatience})
		must(t, err)
		if r.Received != 0 || w.nodes[0].drops(t)["no-session"] != before+2 {
			t.Errorf("%s: the host pings the container: %+v, drops %v", of.Name, r, w.nodes[0].drops(t))
		}
		conn.Close()
	}
}

// TestEgressAddressChanges: an active container gets, changes and loses its egress address, and no entry of an earlier
// one stays.
func TestEgressAddressChanges(t *testing.T) {
	w := newOutsideWire(t)
	w.put(t, leaving(plain, everywhere))
	c, n := w.nodes[0].addLeaving(t, leaving(plain, everywhere), 1), w.nodes[0]
	r := c.record
	for i, addr := range []netip.Addr{c.egress(), c.egress().Next(), {}, c.egress(), c.egress()} {
		r.Attachments = slices.Clone(r.Attachments)
		r.Attachments[0].Egress = addr
		must(t, n.datapath.activate(r))
		must(t, n.datapath.Netpila().Check(t.Context(), r))
		want := 0
		if addr.IsValid() {
			want = 1
		}
		for name, m := range map[string]*ebpf.Map{
			"sources": n.datapath.Objects.PilEsourcesV1, "locals": n.datapath.Objects.PilElocalsV1,
		} {
			got := 0
			key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
			for all := m.Iterate(); all.Next(&key, &value); {
				got++
			}
			if got != want {
				t.Errorf("step %d: %d %s of egress, want %d", i, got, name, want)
			}
		}
	}
}

// TestEgressDenied: without a rule packets are dropped, and with rules that do not allow a destination the container
// gets an error at once.
func TestEgressDenied(t *testing.T) {
	w := newOutsideWire(t)
	c := w.nodes[0].addLeaving(t, leaving(blue), 1)
	at := netip.AddrPortFrom(w.hostAddr, 80)
	watchedEcho(t, w.host, at)
	if r := c.ping(t, w.hostAddr, 100, impatience); r.Received != 0 || w.nodes[0].drops(t)["dst-not-private"] < 2 {
		t.Errorf("without rules: %+v, drops %v", r, w.nodes[0].drops(t))
	}
	host := netip.PrefixFrom(w.hostAddr, 128)
	for name, rules := range map[string][]tenant.EgressRule{
		"another prefix":      {{To: netip.MustParsePrefix("2001:db8:9::/48"), Allow: true}},
		"a longer denial":     {everywhere, {To: host}},
		"only another denial": {{To: netip.MustParsePrefix("2001:db8:9::/48")}},
	} {
		must(t, w.nodes[0].datapath.putTenant(leaving(blue, rules...)))
		began := time.Now()
		_, err := dial(c.ns, netip.Addr{}, at, patience)
		if err == nil || !isErrno(err, syscall.EACCES) || time.Since(began) > 2*time.Second {
			t.Errorf("%s: %v after %v; want EACCES with the first retransmission", name, err, time.Since(began))
		}
	}
	// Protected: by the cluster, and the router's own address if the node has it.
	must(t, w.nodes[0].datapath.putTenant(leaving(blue, everywhere)))
	if conn, err := dial(c.ns, netip.Addr{}, at, patience); err != nil {
		t.Errorf("with a rule: %v", err)
	} else {
		conn.Close()
	}
	protected := leaving(blue, everywhere)
	protected.Protected = []netip.Prefix{host}
	must(t, w.nodes[0].datapath.putTenant(protected))
	if _, err := dial(c.ns, netip.Addr{}, at, patience); !isErrno(err, syscall.EACCES) {
		t.Errorf("protected: %v", err)
	}
	protected.Egress = append(protected.Egress, tenant.EgressRule{To: host, Allow: true})
	must(t, w.nodes[0].datapath.putTenant(protected))
	if conn, err := dial(c.ns, netip.Addr{}, at, patience); err != nil {
		t.Errorf("protected, but with a rule of its own: %v", err)
	} else {
		conn.Close()
	}
	must(t, w.nodes[0].datapath.SetOwnAddresses([]netip.Addr{w.hostAddr}))
	if _, err := dial(c.ns, netip.Addr{}, at, patience); !isErrno(err, syscall.EACCES) {
		t.Errorf("an address of the node: %v", err)
	}
}

func isErrno(err error, want syscall.Errno) bool {
	op, ok := err.(*net.OpError)
	if !ok {
		return false
	}
	sys, ok := op.Err.(*os.SyscallError)
	return ok && sys.Err == want
}

// TestEgressGateway: a container reaches a host outside with the address of a gateway, in both directions with packets
// of full size.
func TestEgressGateway(t *testing.T) {
	w := newOutsideWire(t)
	for i, of := range []tenant.Tenant{blue, plain, blue, plain} {
		of = leaving(of, w.via([]int{1, 1, 0, 0}[i])) // the last ones are of the container's own node
		w.put(t, of)
		c := w.nodes[0].addLeaving(t, of, 1)
		at := netip.AddrPortFrom(w.hostAddr, 80+uint16(i))
		clients := watchedEcho(t, w.host, at)
		conn, err := dial(c.ns, netip.Addr{}, at, patience)
		if err != nil {
			t.Fatalf("%s: %v; drops %v, gateway %v", of.Name, err, w.nodes[0].drops(t), w.nodes[1].drops(t))
		}
		if seen := <-clients; seen.Addr() != of.Egress[0].Via[0].Address {
			t.Errorf("%s: the host sees %v, want %v", of.Name, seen, of.Egress[0].Via[0].Address)
		}
		exchange(t, conn, 1<<20)
		conn.Close()
		if r := c.ping(t, w.hostAddr, 1000, patience); r.Received != 2 {
			t.Errorf("%s: ping: %+v; drops %v, gateway %v", of.Name, r, w.nodes[0].drops(t), w.nodes[1].drops(t))
		}
		w.put(t, leaving(of))
	}
}

// TestNodes: processes of another node reach containers whose tenant allows it, and are reached; without it neither.
func TestNodes(t *testing.T) {
	w := newOutsideWire(t)
	for _, of := range []tenant.Tenant{blue, plain} {
		of.Network = tenant.Netpila
		allowed := of
		allowed.Nodes = []netip.Prefix{address.DefaultPlan().Base}
		c := w.nodes[0].add(t, of, 1)
		for i, n := range w.nodes[:2] {
			seen, err := of.Gateway(address.DefaultPlan(), n.prefix, of.Current())
			must(t, err)
			at := netip.AddrPortFrom(netip.IPv6Unspecified(), 8000+uint16(of.IDs[0].ID))
			clients := watchedEcho(t, n.ns, at)
			to := netip.AddrPortFrom(seen.Address, at.Port())
			must(t, w.nodes[0].datapath.putTenant(of))
			if _, err := dial(c.ns, netip.Addr{}, to, impatience); err == nil {
				t.Errorf("%s: the container reaches node %d without permission", of.Name, i)
			}
			must(t, w.nodes[0].datapath.putTenant(allowed))
			conn, err := dial(c.ns, netip.Addr{}, to, patience)
			if err != nil {
				t.Errorf("%s: to node %d: %v; drops %v and %v", of.Name, i, err, w.nodes[0].drops(t), n.drops(t))
				continue
			}
			exchange(t, conn, 100_000)
			conn.Close()
			want := c.seen()
			if i > 0 {
				want = c.plain()
			}
			if got := <-clients; got.Addr() != want {
				t.Errorf("%s: node %d sees %v, want %v", of.Name, i, got, want)
			}
		}
		// the other way
		at := netip.AddrPortFrom(c.seen(), 9000)
		clients := watchedEcho(t, c.ns, at)
		alias, err := of.Gateway(address.DefaultPlan(), w.nodes[1].prefix, of.Current())
		must(t, err)
		for _, is := range []tenant.Tenant{of, allowed} {
			must(t, w.nodes[0].datapath.putTenant(is))
			to := netip.AddrPortFrom(c.plain(), at.Port())
			conn, err := dial(w.nodes[1].ns, w.nodes[1].address(), to, time.Second)
			if (err == nil) != (len(is.Nodes) > 0) {
				t.Errorf("%s: from node 1 with %v: %v; drops %v", of.Name, is.Nodes, err, w.nodes[0].drops(t))
			}
			if err == nil {
				exchange(t, conn, 100_000)
				conn.Close()
				if got := <-clients; got.Addr() != alias.Address {
					t.Errorf("%s: the container sees %v, want %v", of.Name, got, alias.Address)
				}
			}
		}
	}
}

// TestTwoGateways: new connections go to both gateways; after one is silent, to the other; each connection stays at its
// gateway, also when the other answers again.
func TestTwoGateways(t *testing.T) {
	w := newOutsideWire(t)
	of := leaving(blue, w.via(1, 2))
	w.put(t, of)
	c := w.nodes[0].addLeaving(t, of, 1)
	at := netip.AddrPortFrom(w.hostAddr, 80)
	clients := watchedEcho(t, w.host, at)
	source := w.nodes[0].datapath
	for _, i := range []int{1, 2} {
		for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
			must(t, source.ProbeGateway(w.nodes[i].prefix))
			ago, ok, err := source.GatewayAnswered(w.nodes[i].prefix)
			must(t, err)
			if ok && ago < time.Second {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("gateway %d does not answer probes: %v, %v; drops %v", i, ago, ok, w.nodes[i].drops(t))
			}
		}
	}
	connect := func(n int) (conns map[netip.Addr][]net.Conn) {
		conns = map[netip.Addr][]net.Conn{}
		for range n {
			conn, err := dial(c.ns, netip.Addr{}, at, patience)
			must(t, err)
			t.Cleanup(func() { conn.Close() })
			seen := (<-clients).Addr()
			conns[seen] = append(conns[seen], conn)
		}
		return conns
	}
	first, second := of.Egress[0].Via[0].Address, of.Egress[0].Via[1].Address
	began := connect(24)
	if len(began[first]) == 0 || len(began[second]) == 0 {
		t.Fatalf("connections by %d and %d of the gateways", len(began[first]), len(began[second]))
	}
	must(t, source.SetGatewayAlive(w.nodes[1].prefix, false))
	later := connect(12)
	rule, found, err := source.LookupAccess(of.IDs[0].ID, w.hostAddr)
	must(t, err)
	want := []dpapi.GatewayEntry{{Node: w.nodes[1].prefix, Silent: true}, {Node: w.nodes[2].prefix}}
	if !found || rule.To != everywhere.To || rule.Action != dpapi.AccessGateway || !slices.Equal(rule.Gateways, want) {
		t.Errorf("the rule is %+v, %t; want gateways %v", rule, found, want)
	}
	own, found, err := w.nodes[1].datapath.LookupGateway(of.IDs[0].ID)
	must(t, err)
	if !found || own != first {
		t.Errorf("the gateway's address is %v, %t; want %v", own, found, first)
	}
	if len(later[second]) != 12 {
		t.Errorf("%d of 12 connections by the gateway that answers", len(later[second]))
	}
	for _, conn := range began[first] { // established connections stay, whatever probes say
		exchange(t, conn, 1000)
	}
	must(t, source.SetGatewayAlive(w.nodes[1].prefix, true))
	for _, conns := range []map[netip.Addr][]net.Conn{began, later} {
		for _, of := range conns {
			for _, conn := range of {
				exchange(t, conn, 1000)
			}
		}
	}
	if again := connect(24); len(again[first]) == 0 {
		t.Error("no connection by the gateway that answers again")
	}
}

// TestGatewayClampsSegments: a host outside that ignores Packet Too Big, as behind a firewall that drops ICMPv6, sends
// segments that fit into the tunnel.
func TestGatewayClampsSegments(t *testing.T) {
	w := newOutsideWire(t)
	of := leaving(blue, w.via(1))
	w.put(t, of)
	c := w.nodes[0].addLeaving(t, of, 1)
	at := netip.AddrPortFrom(w.hostAddr, 80)
	ignores := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		failed := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_INTERFACE)
		})
		return cmp.Or(failed, err)
	}}
	var l net.Listener
	must(t, w.host.Do(func() (err error) { l, err = ignores.Listen(t.Context(), "tcp6", at.String()); return err }))
	defer l.Close()
	const size = 1_000_000
	go func() {
		if s, err := l.Accept(); err == nil {
			defer s.Close()
			s.Write(make([]byte, size))
		}
	}()
	conn, err := dial(c.ns, netip.Addr{}, at, patience)
	must(t, err)
	defer conn.Close()
	must(t, conn.SetReadDeadline(time.Now().Add(patience)))
	if n, err := io.Copy(io.Discard, conn); n != size || err != nil {
		t.Errorf("got %d of %d bytes: %v; drops of the gateway: %v", n, size, err, w.nodes[1].drops(t))
	}
	if n := w.nodes[1].drops(t)["too-big"]; n > 0 {
		t.Errorf("%d packets were too big for the tunnel", n)
	}
}

// TestFollowOutside: live traces report a packet that leaves by an egress address or by a gateway, and the answer, at
// the container's node and at the gateway.
func TestFollowOutside(t *testing.T) {
	w := newOutsideWire(t)
	for _, rule := range []tenant.EgressRule{everywhere, w.via(1)} {
		of := leaving(blue, rule)
		w.put(t, of)
		c := w.nodes[0].addLeaving(t, of, 1)
		a, host := c.record.Attachments[0], w.hostAddr
		seen, uplink := a.Egress, [2]netip.Addr{a.Egress, host}
		if len(rule.Via) > 0 {
			seen, uplink[0] = rule.Via[0].Address, a.Plaintext
		}
		way := func(from, to netip.Addr) string { return fmt.Sprintf(" %v→%v", from, to) }
		out, back := way(uplink[0], host), way(host, uplink[0])
		wanted := [2]string{strings.Join([]string{
			"enter container miss" + way(a.Address, host), "policy container miss" + way(a.Address, host),
			"leave container redirect" + out, "enter uplink-out" + out, "leave uplink-out pass" + out,
			"enter uplink-in miss" + back, "policy uplink-in miss" + back,
			"leave uplink-in redirect" + way(host, a.Address),
		}, "\n")}
		if len(rule.Via) > 0 {
			out, back := way(seen, host), way(host, seen)
			wanted[1] = strings.Join([]string{
				"enter uplink-in miss" + way(a.Plaintext, host), "leave uplink-in redirect" + out,
				"enter uplink-out" + out, "leave uplink-out pass" + out,
				"enter uplink-in miss" + back, "leave uplink-in redirect" + way(host, a.Plaintext),
				"enter uplink-out" + way(host, a.Plaintext), "leave uplink-out pass" + way(host, a.Plaintext),
			}, "\n")
		}
		ctx, cancel := context.WithCancel(t.Context())
		ends := []netip.Addr{a.Address, a.Plaintext, seen, host}
		var events [2]<-chan dpapi.PacketEvent
		for i := range events {
			filter := dpapi.PacketFilter{Sources: ends, Destinations: ends, Protocol: packet.ProtocolICMPv6}
			if i == 0 {
				filter.Senders = []endpoint.Record{c.record}
			}
			var err error
			events[i], err = w.nodes[i].datapath.Follow(ctx, filter)
			must(t, err)
		}
		if r := c.ping(t, host, 100, patience); r.Received == 0 {
			t.Errorf("ping during a trace: %+v", r)
		}
		for i := range events {
			got := traced(drainTrace(events[i]))
			if !strings.HasPrefix(got, wanted[i]) || wanted[i] == "" && got != "" {
				t.Errorf("node %d:\n%s\nwant\n%s", i, got, wanted[i])
			}
		}
		cancel()
		for i := range events {
			for range events[i] {
			}
		}
		if r := c.ping(t, host, 100, patience); r.Received == 0 {
			t.Errorf("ping after a trace: %+v", r)
		}
	}
}
