package restart_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

const internet = "internet" // the host outside of the cluster

// TestKillsOfEgress kills the agents of three nodes, also for another build, and the orchestrator, while containers
// send to a host outside of the cluster: with an egress address of its own, by a gateway of another node, by one of the
// container's node, and by one of two gateways. No datagram is lost, and the connections that were there before go on.
func TestKillsOfEgress(t *testing.T) {
	if labtest.Network() != tenant.Netpila {
		t.Setenv(labtest.NetworkVariable, tenant.Netpila)
	}
	kills := setting(t, "PILASTER_RESTART_KILLS", 8)
	seed := uint64(rand.Uint32())
	t.Logf("seed %d", seed)
	builds := newBuilds(t)
	everywhere := netip.MustParsePrefix("::/0")
	l := labtest.New(t, lab.Spec{
		Nodes:   []string{"n1", "n2", "n3"},
		Outside: []lab.OutsideHost{{Name: internet}},
		Device:  labtest.Device(),
		Tenants: []lab.Tenant{
			{Name: "direct", Egress: []lab.EgressRule{{To: everywhere, Action: "allow"}}},
			{Name: "relayed", Egress: []lab.EgressRule{{To: everywhere, Action: "allow", Via: []string{"n3"}}}},
			{Name: "paired", Egress: []lab.EgressRule{{To: everywhere, Action: "allow", Via: []string{"n1", "n3"}}}},
		},
		Containers: []lab.Container{
			{Name: "own-address", Node: "n1", Tenant: "direct"},
			{Name: "by-gateway", Node: "n2", Tenant: "relayed"},
			{Name: "at-gateway", Node: "n3", Tenant: "relayed"},
			{Name: "by-two", Node: "n2", Tenant: "paired"},
		},
	}, func(o *lab.Options) { o.Binary = builds.binary })
	k := &killer{T: t, lab: l, builds: builds, running: map[string]int{}, random: rand.New(rand.NewPCG(seed, 0)),
		start: time.Now()}
	at := echoOutside(t, l)
	sending, stop := context.WithCancel(t.Context())
	defer stop()
	conns := map[string]net.Conn{}
	var streams []*stream
	for i, c := range l.Containers() {
		conns[c.Name] = connectOutside(t, l, c.Name, at)
		streams = append(streams, startStreamTo(sending, t, l, c.Name, internet, port+i))
	}
	nodes := []string{"n1", "n2", "n3"}
	for turn := 0; k.kills < kills; turn++ {
		node := nodes[turn%len(nodes)]
		if !OtherCanLeave() || turn%2 == 0 {
			k.young(node)
		} else {
			k.duringUpgrade(node)
		}
		if turn%4 == 3 {
			_, err := l.Crash(t.Context(), lab.Orchestrator)
			k.must(err)
			k.must(l.Await(t.Context(), lab.Orchestrator))
		}
		k.ready(node)
	}
	stop()
	for _, s := range streams {
		s.finish(t, k.start)
	}
	for name, conn := range conns {
		if err := echoes(conn); err != nil {
			t.Errorf("connection of %s after %d kills: %v", name, k.kills, err)
		}
	}
}

// OtherCanLeave reports whether the other build of the upgrade knows egress: that from this tree does.
func OtherCanLeave() bool { return !labtest.OtherIsRelease() }

// echoOutside starts a TCP server that echoes on the host outside.
func echoOutside(t *testing.T, l *lab.Lab) netip.AddrPort {
	t.Helper()
	a, err := l.Address(internet)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(a, 7000)
	var server net.Listener
	if err := <-labtest.RunIn(t, l, internet, func() (err error) {
		server, err = net.Listen("tcp6", at.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	go func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	return at
}

// connectOutside returns a connection of a container that has echoed.
func connectOutside(t *testing.T, l *lab.Lab, from string, to netip.AddrPort) (conn net.Conn) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := <-labtest.RunIn(t, l, from, func() (err error) {
			conn, err = net.DialTimeout("tcp6", to.String(), time.Second)
			return err
		})
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not reach %v: %v", from, to, err)
		}
	}
	t.Cleanup(func() { conn.Close() })
	if err := echoes(conn); err != nil {
		t.Fatalf("%s: %v", from, err)
	}
	return conn
}

func echoes(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("still there?")); err != nil {
		return err
	}
	b := make([]byte, 12)
	if _, err := io.ReadFull(conn, b); err != nil {
		return fmt.Errorf("no echo: %w", err)
	}
	return nil
}
