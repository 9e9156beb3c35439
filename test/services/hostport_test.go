package services_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

const (
	containerPort = 8081
	hostPort      = 8080
)

// within opens something in the namespace of a container or host.
func within[T any](t *testing.T, l *lab.Lab, name string, open func() (T, error)) (is T, err error) {
	t.Helper()
	ns, err := l.Namespace(name)
	must(t, err)
	defer ns.Close()
	err = ns.Do(func() (err error) { is, err = open(); return err })
	return is, err
}

// tellClients runs servers in a container that answer with the client's address: each TCP connection, which then
// echoes, and each datagram.
func tellClients(t *testing.T, l *lab.Lab, container string) {
	t.Helper()
	at := fmt.Sprintf("[::]:%d", containerPort)
	tcp, err := within(t, l, container, func() (net.Listener, error) { return net.Listen("tcp6", at) })
	must(t, err)
	udp, err := within(t, l, container, func() (net.PacketConn, error) { return net.ListenPacket("udp6", at) })
	must(t, err)
	t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintln(c, c.RemoteAddr())
				io.Copy(c, c)
			}()
		}
	}()
	go func() {
		b := make([]byte, 64)
		for {
			_, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			udp.WriteTo([]byte(from.String()+"\n"), from)
		}
	}()
}

// call connects from the host outside. It returns the connection and the client's address as the container sees it.
func call(t *testing.T, l *lab.Lab, network, to string) (c net.Conn, seen string, err error) {
	t.Helper()
	c, err = within(t, l, internet, func() (net.Conn, error) { return net.DialTimeout(network, to, connectTime) })
	if err != nil {
		return nil, "", err
	}
	c.SetDeadline(time.Now().Add(connectTime))
	if network == "udp6" {
		_, err = c.Write([]byte("?"))
	}
	if err == nil {
		seen, err = bufio.NewReader(c).ReadString('\n')
	}
	if err != nil {
		c.Close()
	}
	return c, strings.TrimSpace(seen), err
}

// startsWith reports whether all lines begin with some text.
func startsWith(lines map[string]int, text string) bool {
	for line := range lines {
		if !strings.HasPrefix(line, text) {
			return false
		}
	}
	return true
}

// TestHostPort: a host outside reaches a container by host ports of its node, over TCP and UDP, and the container sees
// the client's own address. A connection goes on while the agent is dead, and with the next agent. Another container
// does not get the port before DEL; then it gets it, and the connections of the first one have ended.
func TestHostPort(t *testing.T) {
	first := lab.Container{Name: "first", Node: "n1", Tenant: shop, Publish: []string{
		fmt.Sprintf("%d:%d", hostPort, containerPort), fmt.Sprintf("%d:%d/udp", hostPort, containerPort),
	}}
	l := labtest.New(t, lab.Spec{
		Nodes: []string{"n1"}, Device: labtest.Device(), Tenants: []lab.Tenant{{Name: shop}},
		Outside: []lab.OutsideHost{{Name: internet}}, Containers: []lab.Container{first},
	})
	ctx := labtest.Context(t)
	tellClients(t, l, "first")
	node, err := l.Address("n1")
	must(t, err)
	to := netip.AddrPortFrom(node, hostPort).String()
	reach := func(when string) (kept net.Conn) {
		t.Helper()
		for _, network := range []string{"udp6", "tcp6"} {
			c, seen, err := call(t, l, network, to)
			if err != nil {
				t.Fatalf("%s: %s: %v", when, network, err)
			}
			t.Cleanup(func() { c.Close() })
			if seen != c.LocalAddr().String() {
				t.Errorf("%s: %s: the container sees %s, the client is %v", when, network, seen, c.LocalAddr())
			}
			kept = c
		}
		return kept
	}
	goesOn := func(when string, c net.Conn) {
		t.Helper()
		if err := echo(c); err != nil {
			t.Errorf("%s: the connection ended: %v", when, err)
		}
	}
	kept := reach("at first")
	b := &bed{Lab: l, T: t}
	at := netip.AddrPortFrom(node, hostPort)
	if all := b.processOf("n1", "tcp6", at); len(all) != 30 || !startsWith(all, at.String()) {
		t.Errorf("processes of the node at %v: %v", at, all)
	}
	at = netip.AddrPortFrom(netip.IPv6Loopback(), hostPort) // ports of ::1 are those of processes
	for line := range b.processOf("n1", "tcp6", at) {
		if !strings.Contains(line, "connection refused") {
			t.Errorf("processes of the node at %v: %s, want connection refused", at, line)
		}
	}
	must(t, l.CheckContainer(ctx, "first"))

	must(t, l.KillNoRestart(ctx, lab.AgentProcess("n1")))
	goesOn("without an agent", kept)
	reach("without an agent")
	must(t, l.Start(ctx, lab.AgentProcess("n1")))
	goesOn("with a new agent", kept)
	reach("with a new agent")
	must(t, l.CheckContainer(ctx, "first"))
	got, err := l.Agent("n1").GetEndpoint(ctx, connect.NewRequest(&pilasterv1.GetEndpointRequest{
		Key: l.ContainerID("first"),
	}))
	must(t, err)
	if n := len(got.Msg.Endpoint.HostPorts); n != 2 {
		t.Errorf("the new agent knows %d host ports of the container, want 2", n)
	}

	second := first
	second.Name = "second"
	if err := l.AddContainer(ctx, second); err == nil || !strings.Contains(err.Error(),
		"host port 8080/TCP of this node is that of container "+l.ContainerID("first")) {
		t.Errorf("ADD of a host port that is taken: %v", err)
	}
	goesOn("after a refused ADD", kept)
	must(t, l.RemoveContainer(ctx, "first"))
	if _, err := within(t, l, internet, func() (net.Conn, error) {
		return net.DialTimeout("tcp6", to, connectTime)
	}); err == nil {
		t.Error("the host port works after DEL")
	}
	must(t, l.AddContainer(ctx, second))
	tellClients(t, l, "second")
	reach("by the second container")
	if err := echo(kept); err == nil {
		t.Error("a connection to the removed container goes on")
	}
}
