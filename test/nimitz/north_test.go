package nimitz_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// outside is the namespace of the lab's orchestrator, which serves as a host on the underlay without a container
// network.
const outside = lab.Orchestrator

// services are the virtual addresses at which the tenants reach the host outside.
var services = map[string]netip.Addr{"green": netip.MustParseAddr("fd09::7"), "gold": netip.MustParseAddr("fd09::8")}

// north is a lab of two tenants with the same addresses. Their containers reach the host outside at a service of their
// own tenant. n1's gateway publishes containers of green, which are on both nodes.
type north struct {
	*testing.T
	*lab.Lab
	ctx  context.Context
	host netip.Addr
	port uint16 // port of the echo servers
}

// TestNorthSouth covers traffic (c) and (d) (NIMITZ §3.1, appendix A), with the same switch on both nodes and with
// different switches.
func TestNorthSouth(t *testing.T) {
	for _, on := range pairs {
		t.Run(on[0]+"-"+on[1], func(t *testing.T) {
			t.Parallel() // most of the time it waits
			newNorth(t, on).test()
		})
	}
}

func newNorth(t *testing.T, on [2]string) north {
	spec := lab.Spec{Name: fmt.Sprintf("n%s-%s-%d", on[0], on[1], os.Getpid()), Nodes: []string{"n1", "n2"},
		LabKeys: labtest.Switch("", lab.Switches{"n1": on[0], "n2": on[1]})}
	for _, name := range slices.Sorted(maps.Keys(services)) {
		spec.Tenants = append(spec.Tenants,
			lab.Tenant{Name: name, Network: tenant.Nimitz, CIDRs: []netip.Prefix{own4, own6}})
		spec.Containers = append(spec.Containers, lab.Container{Name: name + "1", Node: "n1", Tenant: name},
			lab.Container{Name: name + "2", Node: "n2", Tenant: name})
	}
	n := north{T: t, Lab: labtest.New(t, spec), ctx: labtest.Context(t), port: 7}
	n.host = n.serve(outside)
	for _, c := range spec.Containers {
		n.serve(c.Name)
	}
	return n
}

func (n north) test() {
	published := n.provide()
	n.toServices()
	for name, at := range published {
		n.toPublished(name, at)
	}
	n.strangers(published)
	n.killed(published)
	n.ended(published)
}

// provide creates services and publications, and waits until the nodes forward to them.
func (n north) provide() map[string]netip.Addr {
	n.Helper()
	for _, of := range slices.Sorted(maps.Keys(services)) {
		_, err := n.Operator().CreateUnderlayService(n.ctx, connect.NewRequest(&pilasterv1.CreateUnderlayServiceRequest{
			Service: &pilasterv1.UnderlayService{Tenant: of, Name: "host", Virtual: services[of].String(),
				Real: n.host.String()},
		}))
		must(n.T, err)
	}
	published := map[string]netip.Addr{}
	for _, c := range []string{"green1", "green2"} {
		resp, err := n.Operator().CreatePublication(n.ctx, connect.NewRequest(&pilasterv1.CreatePublicationRequest{
			Publication: &pilasterv1.Publication{Tenant: "green", Name: c, Container: n.six(c).String(), Node: "n1"},
		}))
		must(n.T, err)
		published[c] = netip.MustParseAddr(resp.Msg.Publication.Underlay)
	}
	for _, at := range slices.Collect(maps.Values(published)) {
		for n.pings(outside, at, time.Second) == 0 {
			pause(n.ctx, n.T)
		}
	}
	for of, name := range services {
		for _, from := range []string{of + "1", of + "2"} {
			for n.pings(from, name, time.Second) == 0 {
				pause(n.ctx, n.T)
			}
		}
	}
	return published
}

// toServices makes all containers send to the host concurrently, first streams and then echoes. The host must see the
// gateway of the sender's node as the source.
func (n north) toServices() {
	var streams, echoes sync.WaitGroup
	for of, name := range services {
		for i, node := range []string{"n1", "n2"} {
			from := fmt.Sprint(of, i+1)
			streams.Go(func() {
				if seen, by, err := n.stream(from, name); err != nil || by != outside ||
					seen.String() != n.gateway(node).Own {
					n.Errorf("%s to its service: got a response of %s, which sees source %v: %v", from, by, seen, err)
				}
			})
		}
	}
	streams.Wait()
	for of, name := range services {
		for i := range 2 {
			from := fmt.Sprint(of, i+1)
			echoes.Go(func() {
				if err := n.echoes(from, name); err != nil {
					n.Errorf("%s to its service: %v", from, err)
				}
			})
		}
	}
	echoes.Wait()
}

// toPublished sends from the host to a published container, which must see the gateway as the source.
func (n north) toPublished(name string, at netip.Addr) {
	seen, by, err := n.stream(outside, at)
	if err == nil {
		err = n.echoes(outside, at)
	}
	if err != nil || by != name || seen.String() != n.gateway("n1").Virtual {
		n.Errorf("published %s at %v: got a response of %s, which sees source %v: %v", name, at, by, seen, err)
	}
}

// strangers checks that containers of another tenant cannot reach a service or a published container.
func (n north) strangers(published map[string]netip.Addr) {
	for _, c := range []struct {
		from string
		to   netip.Addr
	}{
		{"green1", services["gold"]}, {"gold1", services["green"]}, {"gold2", services["green"]},
		{"gold1", published["green2"]}, {"gold2", published["green1"]},
		{"gold1", netip.MustParseAddr(n.gateway("n1").Virtual)}, {outside, netip.MustParseAddr(n.gateway("n1").Own)},
		{outside, netip.MustParseAddr(n.gateway("n2").Own)},
		{outside, tenant.UnderlayAddress(n.prefix("n1"), 99)},
	} {
		if n.pings(c.from, c.to, 200*time.Millisecond) > 0 {
			n.Errorf("%s reaches %v, want no response", c.from, c.to)
		}
	}
}

// killed checks that connections and echoes continue while agents are killed and no orchestrator runs. The connections
// transfer data only after the last echo (see echoes).
func (n north) killed(published map[string]netip.Addr) {
	ways := map[string]netip.Addr{"green1": services["green"], "gold2": services["gold"]}
	must(n.T, n.Stop(n.ctx, lab.Orchestrator))
	var echoes, streams sync.WaitGroup
	watch := func(from string, to netip.Addr) {
		ns, err := n.Namespace(from)
		must(n.T, err)
		conn, err := dial(n.ctx, ns, "tcp", to, n.port)
		must(n.T, err)
		_, _, err = greeting(conn)
		must(n.T, err)
		echoes.Add(1)
		streams.Go(func() {
			defer ns.Close()
			r, err := packet.Ping(n.ctx, ns, to, packet.PingOptions{Count: 60, Interval: 25 * time.Millisecond})
			if err != nil || r.Sent != 60 || r.Received != r.Sent {
				n.Errorf("got %d of %d echo replies for %s from %v while agents were killed: %v", r.Received, r.Sent,
					from, to, err)
			}
			echoes.Done()
			echoes.Wait()
			defer conn.Close()
			if err := comesBack(conn, 64<<10); err != nil {
				n.Errorf("the connection of %s to %v: %v", from, to, err)
			}
		})
	}
	for from, to := range ways {
		watch(from, to)
	}
	for _, at := range published {
		watch(outside, at)
	}
	for _, node := range []string{"n1", "n2"} {
		_, err := n.Kill(n.ctx, lab.AgentProcess(node))
		must(n.T, err)
	}
	streams.Wait()
	for from, to := range ways {
		_, _, err := n.stream(from, to)
		if err == nil {
			err = n.echoes(from, to)
		}
		if err != nil {
			n.Errorf("%s after agents were killed: %v", from, err)
		}
	}
	for name, at := range published {
		n.toPublished(name, at)
	}
	if g := n.gateway("n1"); g.UnderlayServices != 2 || g.Publications != 2 {
		n.Errorf("unexpected entries of n1's gateway: %v", g)
	}
	must(n.T, n.Start(n.ctx, lab.Orchestrator))
}

// ended deletes services and publications, and checks that they are unreachable and leave no state.
func (n north) ended(published map[string]netip.Addr) {
	for name, at := range published {
		_, err := n.Operator().DeletePublication(n.ctx,
			connect.NewRequest(&pilasterv1.DeletePublicationRequest{Tenant: "green", Name: name}))
		must(n.T, err)
		for n.pings(outside, at, 100*time.Millisecond) > 0 {
			pause(n.ctx, n.T)
		}
	}
	for _, of := range []string{"green", "gold"} {
		_, err := n.Operator().DeleteUnderlayService(n.ctx,
			connect.NewRequest(&pilasterv1.DeleteUnderlayServiceRequest{Tenant: of, Name: "host"}))
		must(n.T, err)
		for n.pings(of+"1", services[of], 100*time.Millisecond) > 0 {
			pause(n.ctx, n.T)
		}
		if other := "gold1"; of == "green" && n.pings(other, services["gold"], 5*time.Second) == 0 {
			n.Errorf("%s lost its service when green's was deleted", other)
		}
	}
	for _, node := range []string{"n1", "n2"} {
		for n.nat(node) > 0 {
			pause(n.ctx, n.T)
		}
		if g := n.gateway(node); g.UnderlayServices+g.Publications > 0 {
			n.Errorf("entries of %s's gateway remain: %v", node, g)
		}
	}
}

// nat returns the number of entries of a switch's NAT stage.
func (n north) nat(node string) uint32 {
	for _, e := range n.status(node).Datapath.GetEntries() {
		if e.Table == "nimitz-nat" {
			return e.Used
		}
	}
	n.Fatalf("%s has no NAT stage", node)
	return 0
}

func (n north) status(node string) *pilasterv1.StatusResponse {
	n.Helper()
	s, err := n.Agent(node).Status(n.ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	must(n.T, err)
	return s.Msg
}

func (n north) gateway(node string) *pilasterv1.Gateway { return n.status(node).Gateway }

func (n north) prefix(node string) netip.Prefix {
	p, err := n.Prefix(node)
	must(n.T, err)
	return p
}

// six returns a container's IPv6 address.
func (n north) six(name string) netip.Addr {
	c, err := n.Container(name)
	must(n.T, err)
	all := c.Addresses()
	return all[slices.IndexFunc(all, netip.Addr.Is6)]
}

func (n north) pings(from string, to netip.Addr, timeout time.Duration) int {
	n.Helper()
	_, answered := echo(n.ctx, n.T, n.Lab, from, to, timeout)
	if answered {
		return 1
	}
	return 0
}

// serve runs an echo server for TCP and UDP in a namespace. The server first sends its name and the source that it
// sees, and then echoes.
func (n north) serve(name string) netip.Addr {
	n.Helper()
	ns, err := n.Namespace(name)
	must(n.T, err)
	defer ns.Close()
	var l net.Listener
	var p net.PacketConn
	must(n.T, ns.Do(func() (err error) {
		at := fmt.Sprintf("[::]:%d", n.port)
		if l, err = net.Listen("tcp", at); err == nil {
			p, err = net.ListenPacket("udp", at)
		}
		return err
	}))
	var serving sync.WaitGroup
	n.Cleanup(func() { l.Close(); p.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(labtest.Patience))
				io.WriteString(conn, hello(name, conn.RemoteAddr()))
				io.Copy(conn, conn)
			})
		}
	})
	serving.Go(func() {
		b := make([]byte, 2000)
		for {
			size, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			p.WriteTo(append([]byte(hello(name, from)), b[:size]...), from)
		}
	})
	var addr netip.Addr
	must(n.T, ns.Do(func() error {
		interfaces, err := net.InterfaceAddrs()
		for _, a := range interfaces {
			if ip, _ := netip.ParsePrefix(a.String()); ip.Addr().Is6() && ip.Addr().IsGlobalUnicast() {
				addr = ip.Addr()
			}
		}
		return err
	}))
	return addr
}
