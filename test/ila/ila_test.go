// Package ila_test tests tenants of network ila in a lab together with one of netpila (IL1 to IL3): containers reach
// only containers of their own tenant, wherever these are; on the fabric their packets have locators and no tunnel; and
// they stay connected while no agent and no orchestrator runs.
package ila_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

var spec = lab.Spec{
	Nodes: []string{"n1", "n2", "n3"},
	Tenants: []lab.Tenant{
		{Name: "silver", Network: tenant.ILA}, {Name: "tin", Network: tenant.ILA}, {Name: "green"},
	},
	Containers: []lab.Container{
		{Name: "s1", Node: "n1", Tenant: "silver"}, {Name: "s2", Node: "n2", Tenant: "silver"},
		{Name: "s3", Node: "n3", Tenant: "silver"}, {Name: "s4", Node: "n1", Tenant: "silver"},
		{Name: "t1", Node: "n1", Tenant: "tin"}, {Name: "t2", Node: "n2", Tenant: "tin"},
		{Name: "g1", Node: "n1", Tenant: "green"}, {Name: "g2", Node: "n2", Tenant: "green"},
	},
}

var use, _ = address.DefaultPlan().ILA()

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type bed struct {
	*lab.Lab
	*testing.T
	mode // of the lab's agents
}

// mode is how nodes learn mappings: a value of --ila-mappings.
type mode string

const (
	push mode = "push"
	pull mode = "pull"
)

// each runs a test with both modes.
func each(t *testing.T, test func(*testing.T, mode)) {
	for _, m := range []mode{push, pull} {
		t.Run(string(m), func(t *testing.T) { test(t, m) })
	}
}

func (m mode) lab(t *testing.T, s lab.Spec) bed {
	s.ILA = true
	return bed{labtest.New(t, s, func(o *lab.Options) { o.AgentArgs = []string{"--ila-mappings", string(m)} }), t, m}
}

func (b bed) address(name string) netip.Addr {
	b.Helper()
	c, err := b.Container(name)
	must(b.T, err)
	return c.Address
}

// TestTenants has one lab for all tests of a mode, because most of them change nothing.
func TestTenants(t *testing.T) {
	each(t, func(t *testing.T, m mode) {
		b := m.lab(t, spec)
		b.warm()
		b.isolated("at first")
		t.Run("transfers", func(t *testing.T) { bed{b.Lab, t, m}.transfers() })
		t.Run("fabric", func(t *testing.T) { bed{b.Lab, t, m}.fabric() })
		t.Run("router", func(t *testing.T) { bed{b.Lab, t, m}.routerErrors() })
		t.Run("agents", func(t *testing.T) { bed{b.Lab, t, m}.killed() })
		t.Run("containers", func(t *testing.T) { bed{b.Lab, t, m}.comeAndGo() })
	})
}

// warm waits until each node that pulls has the mappings of what its containers reach. A node that gets all needs no
// packet for that.
func (b bed) warm() {
	b.Helper()
	if b.mode == push {
		return
	}
	for _, from := range b.Containers() {
		ns, err := b.Namespace(from.Name)
		must(b.T, err)
		for _, to := range b.Containers() {
			if reaches, err := b.MustReach(from.Name, to.Name); err != nil || !reaches || from.Name == to.Name {
				continue
			}
			labtest.Until(b.T, patience, from.Name+" reaches "+to.Name, func() bool {
				r, err := packet.Ping(labtest.Context(b.T), ns, to.Address, packet.PingOptions{
					Timeout: 100 * time.Millisecond,
				})
				return err == nil && r.Received == 1
			})
		}
		must(b.T, ns.Close())
	}
}

// isolated pings from every container to every container.
func (b bed) isolated(when string) { b.Helper(); labtest.Isolated(b.T, b.Lab, when) }

// patience is a limit for what takes milliseconds on an idle machine.
const patience = 60 * time.Second

// transfers sends bytes by TCP, and datagrams with and without fragments, within a node and between nodes.
func (b bed) transfers() {
	content := bytes.Repeat([]byte("pilaster"), 1<<19)
	for _, to := range []string{"s2", "s4"} {
		listening := make(chan struct{})
		at := netip.AddrPortFrom(b.address(to), 7)
		server := labtest.RunIn(b.T, b.Lab, to, func() error {
			defer close(listening)
			l, err := net.Listen("tcp", at.String())
			if err != nil {
				return err
			}
			u, err := net.ListenPacket("udp", at.String())
			if err != nil {
				return err
			}
			go echoBytes(l)
			go echoDatagrams(u)
			b.Cleanup(func() { l.Close(); u.Close() })
			return nil
		})
		<-listening
		must(b.T, <-server)
		must(b.T, <-labtest.RunIn(b.T, b.Lab, "s1", func() error {
			c, err := net.DialTimeout("tcp", at.String(), patience)
			if err != nil {
				return err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			go func() { c.Write(content); c.(*net.TCPConn).CloseWrite() }()
			got, err := io.ReadAll(c)
			if err == nil && !bytes.Equal(got, content) {
				b.Errorf("%d bytes of %d came back from %s, or others", len(got), len(content), to)
			}
			return err
		}))
		for _, size := range []int{1, 1400, 20_000} {
			must(b.T, <-labtest.RunIn(b.T, b.Lab, "s1", func() error {
				c, err := net.Dial("udp", at.String())
				if err != nil {
					return err
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(patience))
				if _, err := c.Write(content[:size]); err != nil {
					return err
				}
				got := make([]byte, size+1)
				n, err := c.Read(got)
				if err == nil && !bytes.Equal(got[:n], content[:size]) {
					b.Errorf("a datagram of %d bytes came back from %s with %d", size, to, n)
				}
				return err
			}))
		}
	}
}

func echoBytes(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() { io.Copy(c, c); c.Close() }()
	}
}

func echoDatagrams(u net.PacketConn) {
	buffer := make([]byte, 65536)
	for {
		n, from, err := u.ReadFrom(buffer)
		if err != nil {
			return
		}
		u.WriteTo(buffer[:n], from)
	}
}

// fabric: on the fabric, packets of containers are plain IPv6 from a locator to a locator.
func (b bed) fabric() {
	router, err := b.Namespace(lab.Router)
	must(b.T, err)
	defer router.Close()
	capture, err := packet.NewCapture(router, "n2", packet.IncomingOnly)
	must(b.T, err)
	defer capture.Close()
	ns, err := b.Namespace("s2")
	must(b.T, err)
	defer ns.Close()
	inject, err := packet.NewInjector(ns, lab.Interface)
	must(b.T, err)
	defer inject.Close()
	sentinel := packet.NewSentinel()
	p := packet.Packet{
		Source: b.address("s2"), Destination: b.address("s1"), HopLimit: 9,
		Body: packet.UDP{SourcePort: 9, DestinationPort: 9, Payload: sentinel[:]},
	}
	gateway, err := b.Gateway("s2")
	must(b.T, err)
	must(b.T, inject.Send(p.Frame(gateway, inject.MAC())))
	all, err := capture.Until(labtest.Context(b.T), sentinel.In)
	must(b.T, err)
	got, err := all[len(all)-1].Packet()
	must(b.T, err)
	want := p
	want.HopLimit = 8
	want.Source, want.Destination = b.onFabric("s2", "n2"), b.onFabric("s1", "n1")
	if !bytes.Equal(got.Marshal(), want.Marshal()) || !packet.ChecksumOK(all[len(all)-1].Frame[14:]) {
		b.Errorf("on the fabric:\n got %+v\nwant %+v", got, want)
	}
}

func (b bed) onFabric(container, node string) netip.Addr {
	b.Helper()
	prefix, err := b.Prefix(node)
	must(b.T, err)
	locator, err := use.Locator(prefix)
	must(b.T, err)
	return use.ToWire(b.address(container), locator)
}

// routerErrors: the error of a router on the way reaches the sender, as if the peer had sent it, and quotes what the
// container sent.
func (b bed) routerErrors() {
	ns, err := b.Namespace("s1")
	must(b.T, err)
	defer ns.Close()
	capture, err := packet.NewCapture(ns, lab.Interface, packet.IncomingOnly)
	must(b.T, err)
	defer capture.Close()
	inject, err := packet.NewInjector(ns, lab.Interface)
	must(b.T, err)
	defer inject.Close()
	gateway, err := b.Gateway("s1")
	must(b.T, err)
	sentinel := packet.NewSentinel()
	p := packet.Packet{
		Source: b.address("s1"), Destination: b.address("s3"), HopLimit: 2, // the router's
		Body: packet.UDP{SourcePort: 9, DestinationPort: 33434, Payload: sentinel[:]},
	}
	must(b.T, inject.Send(p.Frame(gateway, inject.MAC())))
	all, err := capture.Until(labtest.Context(b.T), sentinel.In)
	must(b.T, err)
	frame := all[len(all)-1].Frame
	got, err := packet.DecodeFrame(frame)
	must(b.T, err)
	failed, is := got.Body.(packet.ICMP)
	if !is || failed.Type != packet.TimeExceeded || got.Source != p.Destination || got.Destination != p.Source ||
		!packet.ChecksumOK(frame[14:]) {
		b.Fatalf("the router's error: %+v", got)
	}
	quoted, err := packet.Decode(failed.Payload)
	if err != nil || quoted.Source != p.Source || quoted.Destination != p.Destination ||
		!packet.ChecksumOK(failed.Payload) {
		b.Errorf("quoted: %+v, %v", quoted, err)
	}
}

// killed: while agents are killed and no orchestrator runs, no packet is lost, and a starting agent keeps all mappings.
func (b bed) killed() {
	ctx := labtest.Context(b.T)
	ns, err := b.Namespace("s1")
	must(b.T, err)
	defer ns.Close()
	to := b.address("s2")
	must(b.T, b.Stop(ctx, lab.Orchestrator))
	lost := make(chan packet.PingResult, 1)
	go func() {
		r, err := packet.Ping(ctx, ns, to, packet.PingOptions{Count: 60, Interval: 25 * time.Millisecond})
		if err != nil {
			b.Error(err)
		}
		lost <- r
	}()
	for _, node := range spec.Nodes {
		_, err := b.Kill(ctx, lab.AgentProcess(node))
		must(b.T, err)
	}
	if r := <-lost; r.Sent != 60 || r.Received != r.Sent {
		b.Errorf("%d of %d packets arrived while agents were killed", r.Received, r.Sent)
	}
	b.isolated("without an orchestrator")
	for _, c := range b.Containers() {
		must(b.T, b.CheckContainer(ctx, c.Name))
	}
	must(b.T, b.Start(ctx, lab.Orchestrator))
}

// comeAndGo: the mapping of a new container is on all nodes that host its tenant, or on those that use it, and that of
// a removed one on none.
func (b bed) comeAndGo() {
	ctx := labtest.Context(b.T)
	must(b.T, b.AddContainer(ctx, lab.Container{Name: "s5", Node: "n2", Tenant: "silver"}))
	if b.mode == push {
		b.await(ctx, map[string]uint32{"n1": 4, "n2": 4, "n3": 4})
	} else {
		b.await(ctx, map[string]uint32{"n1": 3, "n2": 4, "n3": 3})
		b.pullsOnce(ctx)
	}
	must(b.T, b.RemoveContainer(ctx, "s5"))
	b.await(ctx, map[string]uint32{"n1": 3, "n2": 4, "n3": 3})
	must(b.T, b.RemoveContainer(ctx, "s3"))
	b.await(ctx, map[string]uint32{"n1": 2, "n2": 3, "n3": 0})
}

// pullsOnce: packets from s3 to s5 make both nodes, and no other one, subscribe to the other end. An address without a
// container takes no mapping.
func (b bed) pullsOnce(ctx context.Context) {
	b.Helper()
	ns, err := b.Namespace("s3")
	must(b.T, err)
	defer ns.Close()
	absent := b.address("s5").As16()
	absent[13]++
	before := b.drops(ctx, "n3", "no-mapping")
	_, err = packet.Ping(ctx, ns, netip.AddrFrom16(absent),
		packet.PingOptions{Timeout: 100 * time.Millisecond, Count: 3})
	must(b.T, err)
	if n := b.drops(ctx, "n3", "no-mapping") - before; n != 3 {
		b.Errorf("%d of 3 packets to an unknown address were dropped with reason no-mapping", n)
	}
	labtest.Until(b.T, patience, "s3 reaches s5", func() bool {
		r, err := packet.Ping(ctx, ns, b.address("s5"), packet.PingOptions{Timeout: 100 * time.Millisecond})
		return err == nil && r.Received == 1
	})
	b.await(ctx, map[string]uint32{"n1": 3, "n2": 4, "n3": 4})
}

func (b bed) drops(ctx context.Context, node, reason string) (n uint64) {
	b.Helper()
	s, err := b.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	must(b.T, err)
	return dropped(s.Msg, reason)
}

func dropped(s *pilasterv1.StatusResponse, reason string) (n uint64) {
	for _, d := range s.Drops {
		if d.Reason == reason {
			n = d.Packets
		}
	}
	return n
}

// await waits until nodes have so many mappings.
func (b bed) await(ctx context.Context, want map[string]uint32) {
	b.Helper()
	for node, n := range want {
		for {
			s, err := b.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
			must(b.T, err)
			var has uint32
			for _, e := range s.Msg.Datapath.GetEntries() {
				if e.Table == "ila-mappings" {
					has = e.Used
				}
			}
			if has == n {
				break
			}
			select {
			case <-ctx.Done():
				b.Fatalf("%s has %d mappings, want %d", node, has, n)
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
}

// TestReservation: nodes without network ila protect the prefix of its addresses as soon as the first tenant uses it,
// without a restart by anyone. No packet of other containers is lost meanwhile.
func TestReservation(t *testing.T) {
	b := bed{labtest.New(t, lab.Spec{
		Nodes: []string{"n1", "n2"}, Tenants: []lab.Tenant{{Name: "green"}},
		Containers: []lab.Container{
			{Name: "g1", Node: "n1", Tenant: "green"}, {Name: "g2", Node: "n2", Tenant: "green"},
		},
	}), t, push}
	ctx := labtest.Context(t)
	router, err := b.Namespace(lab.Router)
	must(t, err)
	defer router.Close()
	inject, err := packet.NewInjector(router, "n1")
	must(t, err)
	defer inject.Close()
	node, err := b.Prefix("n1")
	must(t, err)
	n1, err := b.Namespace("n1")
	must(t, err)
	defer n1.Close()
	var uplink *net.Interface
	must(t, n1.Do(func() (err error) {
		uplink, err = net.InterfaceByName(lab.Uplink)
		return err
	}))
	mac := uplink.HardwareAddr
	forged := packet.Packet{
		Source: use.SIR.Addr().Next(), Destination: node.Addr().Next(), HopLimit: 9,
		Body: packet.UDP{SourcePort: 9, DestinationPort: 9, Payload: []byte("forged")},
	}
	const reason = "tenant-to-node"
	must(t, inject.Send(forged.Frame(mac, inject.MAC())))
	if n := b.drops(ctx, "n1", reason); n != 0 {
		t.Errorf("before the first tenant, %d packets were dropped with reason %s", n, reason)
	}
	ns, err := b.Namespace("g1")
	must(t, err)
	defer ns.Close()
	pinging, stop := context.WithCancel(ctx)
	lost := make(chan packet.PingResult, 1)
	go func() {
		var all packet.PingResult
		for pinging.Err() == nil {
			r, err := packet.Ping(ctx, ns, b.address("g2"),
				packet.PingOptions{Count: 10, Interval: 10 * time.Millisecond, Timeout: 5 * time.Second})
			if err != nil {
				t.Error(err)
			}
			all.Sent, all.Received = all.Sent+r.Sent, all.Received+r.Received
		}
		lost <- all
	}()
	_, err = b.Operator().CreateTenant(ctx, connect.NewRequest(
		&pilasterv1.CreateTenantRequest{Name: "silver", Network: tenant.ILA}))
	must(t, err)
	labtest.Until(t, patience, "forged packets are dropped", func() bool {
		must(t, inject.Send(forged.Frame(mac, inject.MAC())))
		s, err := b.Agent("n1").Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		return err == nil && s.Msg.Ready && dropped(s.Msg, reason) > 0 // the agent may just start
	})
	stop()
	if r := <-lost; r.Received != r.Sent || r.Sent == 0 {
		t.Errorf("%d of %d packets between containers arrived", r.Received, r.Sent)
	}
}
