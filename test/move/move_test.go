// Package move_test moves containers between nodes of a lab (IL; NZ12): address, connections and sessions stay, on each
// network with address keys.
package move_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

// mode is a network, and how its nodes learn mappings.
type mode struct {
	name, network string
	args          []string // of the agents
	maxLost       int      // datagrams that a move may lose, at 1,000 a second
}

const tenMilliseconds = 10 // datagrams (NZ12)

// each runs a test on each network with address keys.
func each(t *testing.T, test func(*testing.T, mode)) {
	all := []mode{
		{"ila", tenant.ILA, []string{"--ila-mappings", "push"}, tenMilliseconds},
		// The new node gets the mappings of the container's peers by their first packets, which it drops.
		{"ila-pull", tenant.ILA, []string{"--ila-mappings", "pull"}, 10 * tenMilliseconds},
		{"nimitz", tenant.Nimitz, nil, tenMilliseconds},
	}
	for _, m := range all {
		t.Run(m.name, func(t *testing.T) { test(t, m) })
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience is a limit for what takes milliseconds on an idle machine.
const patience = 60 * time.Second

type bed struct {
	*lab.Lab
	*testing.T
}

func (b bed) address(name string) netip.Addr {
	b.Helper()
	c, err := b.Container(name)
	must(b.T, err)
	return c.Address
}

func (m mode) spec() lab.Spec {
	silver := lab.Tenant{Name: "silver", Network: m.network}
	if m.network == tenant.Nimitz {
		silver.CIDRs, silver.NoNodeCIDRs = []netip.Prefix{netip.MustParsePrefix("fd12::/48")}, true
	}
	s := lab.Spec{
		Nodes:   []string{"n1", "n2", "n3"},
		Tenants: []lab.Tenant{silver, {Name: "green"}},
		Containers: []lab.Container{
			{Name: "web", Node: "n1", Tenant: "silver", Labels: map[string]string{"app": "web"}},
			{Name: "db", Node: "n2", Tenant: "silver", Labels: map[string]string{"app": "db"}, AddressKey: "db-0"},
			{Name: "db1", Node: "n2", Tenant: "silver", Labels: map[string]string{"app": "db"}},
			{Name: "g1", Node: "n1", Tenant: "green"},
		},
	}
	s.ILA = m.network == tenant.ILA
	return s
}

// onlyServes is a policy under which db accepts connections at two ports and opens none, so that what it sends passes
// by sessions only.
const onlyServes = `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "db"},
	"spec": {"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress", "Egress"],
		"ingress": [{"ports": [{"protocol": "TCP", "port": 7}, {"protocol": "UDP", "port": 9}]}]}}`

// newMoving starts the lab, with the policy.
func newMoving(t *testing.T, m mode) bed {
	b := bed{labtest.New(t, m.spec(), func(o *lab.Options) { o.AgentArgs = m.args }), t}
	_, err := b.Operator().ApplyPolicies(labtest.Context(t), connect.NewRequest(
		&pilasterv1.ApplyPoliciesRequest{Tenant: "silver", Documents: []string{onlyServes}}))
	must(t, err)
	return b
}

// traffic is a connection and a stream of datagrams to db, while it moves.
type traffic struct {
	sent, received, last atomic.Int64  // datagrams
	gap                  atomic.Int64  // longest time between two datagrams that arrived, in ns
	echoes               atomic.Int64  // on the connection
	stall                atomic.Int64  // longest time until an echo, in ns
	arrived              chan struct{} // at least one datagram has, since the last look
	failed               chan error    // of the connection
	begun                [2]int64      // sent and received before the measurement

	mu   sync.Mutex
	seen map[int64]bool // datagrams that arrived
}

// start begins the traffic; it ends with ctx.
func (b bed) start(ctx context.Context, every time.Duration) *traffic {
	b.Helper()
	f := &traffic{arrived: make(chan struct{}, 1), failed: make(chan error, 1), seen: map[int64]bool{}}
	var before atomic.Int64
	to := labtest.ReceiveNumbered(b.T, b.Lab, "db", 9, 1<<20, func(n int) {
		now := time.Now().UnixNano()
		if was := before.Swap(now); was != 0 {
			f.gap.Store(max(f.gap.Load(), now-was))
		}
		f.mu.Lock()
		f.seen[int64(n)] = true
		f.mu.Unlock()
		f.received.Add(1)
		f.last.Store(int64(n))
		select {
		case f.arrived <- struct{}{}:
		default:
		}
	})
	at := netip.AddrPortFrom(to, 7)
	must(b.T, <-labtest.RunIn(b.T, b.Lab, "db", func() error {
		l, err := net.Listen("tcp", at.String())
		if err != nil {
			return err
		}
		go echo(l)
		b.Cleanup(func() { l.Close() })
		return nil
	}))
	connected := make(chan net.Conn, 1)
	must(b.T, <-labtest.RunIn(b.T, b.Lab, "web", func() error {
		c, err := net.DialTimeout("tcp", at.String(), patience)
		if err == nil {
			connected <- c
		}
		return err
	}))
	go f.echo(ctx, <-connected)
	ended := labtest.RunIn(b.T, b.Lab, "web", func() error {
		fd, err := labtest.OpenFlow(9)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		ticks := time.NewTicker(every)
		defer ticks.Stop()
		for ctx.Err() == nil {
			<-ticks.C
			// An error is one about an earlier datagram.
			_ = labtest.SendNumbered(fd, int(f.sent.Load()), &unix.SockaddrInet6{Port: 9, Addr: to.As16()})
			f.sent.Add(1)
		}
		return nil
	})
	b.Cleanup(func() { must(b.T, <-ended) })
	return f
}

func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() { io.Copy(c, c); c.Close() }()
	}
}

// echo sends bytes on a connection, one after the echo of the other.
func (f *traffic) echo(ctx context.Context, c net.Conn) {
	defer c.Close()
	one := make([]byte, 1)
	for ctx.Err() == nil {
		began := time.Now()
		c.SetDeadline(began.Add(patience))
		_, err := c.Write(one)
		if err == nil {
			_, err = io.ReadFull(c, one)
		}
		if err != nil {
			f.failed <- fmt.Errorf("the connection after %d echoes: %w", f.echoes.Load(), err)
			return
		}
		f.stall.Store(max(f.stall.Load(), int64(time.Since(began))))
		f.echoes.Add(1)
		time.Sleep(time.Millisecond)
	}
	f.failed <- nil
}

// next waits until a datagram arrives after which ok is true. It returns false after the limit.
func (f *traffic) next(limit time.Duration, ok func() bool) bool {
	end := time.After(limit)
	for {
		select {
		case <-f.arrived:
			if ok() {
				return true
			}
		case <-end:
			return false
		}
	}
}

// forget begins the measurement anew.
func (f *traffic) forget() {
	f.gap.Store(0)
	f.stall.Store(0)
	f.begun = [2]int64{f.sent.Load(), f.received.Load()}
}

// lost returns how many datagrams, of those that were sent since forget, did not arrive although a later one did.
func (f *traffic) lost() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := f.begun[0]; i < f.last.Load(); i++ {
		if !f.seen[i] {
			n++
		}
	}
	return n
}

func (f *traffic) String() string {
	ms := func(of *atomic.Int64) time.Duration { return time.Duration(of.Load()).Round(100 * time.Microsecond) }
	sent, received := f.sent.Load()-f.begun[0], f.received.Load()-f.begun[1]
	return fmt.Sprintf("%d datagrams sent, %d received, %d lost, longest time without one %v, until an echo %v",
		sent, received, f.lost(), ms(&f.gap), ms(&f.stall))
}

// more waits until further datagrams and echoes arrive.
func (b bed) more(f *traffic) {
	b.Helper()
	received, echoes := f.received.Load()+5, f.echoes.Load()+5
	labtest.Until(b.T, patience, "further echoes and datagrams", func() bool {
		select {
		case err := <-f.failed:
			b.Fatal(err)
		default:
		}
		return f.received.Load() > received && f.echoes.Load() > echoes
	})
}

// TestMove: a container keeps its address and its connections on another node, under a policy that its sessions pass
// (issue J: mobility).
func TestMove(t *testing.T) { each(t, testMove) }

func testMove(t *testing.T, m mode) {
	b := newMoving(t, m)
	b.refused()
	ctx, cancel := context.WithCancel(labtest.Context(t))
	defer cancel()
	f := b.start(ctx, 5*time.Millisecond)
	b.more(f)
	f.forget()
	moved, err := b.Move(ctx, "db", "n3")
	must(t, err)
	b.more(f)
	t.Logf("%+v: %v", moved, f)
	if c, err := b.Container("db"); err != nil || c.Node != "n3" || moved.Sessions == 0 ||
		moved.Later < moved.Sessions || moved.Left != 0 || moved.Address != c.Address {
		t.Errorf("moved: %+v; container %+v, %v", moved, c, err)
	}
	if lost := f.lost(); lost > m.maxLost {
		t.Errorf("%d datagrams lost, want at most %d", lost, m.maxLost)
	}
	must(t, b.CheckContainer(ctx, "db"))
	b.forwarded(ctx, f)
	cancel()
	must(t, <-f.failed)
	b.returns()
}

// refused: what cannot move is refused, and an address key has one container.
func (b bed) refused() {
	ctx := labtest.Context(b.T)
	add := func(c lab.Container) error { return b.AddContainer(ctx, c) }
	move := func(name, to string) error { _, err := b.Move(ctx, name, to); return err }
	for want, err := range map[string]error{
		"is on network netpila": move("g1", "n2"),
		"has no address key":    move("db1", "n3"),
		"is on n2 already":      move("db", "n2"),
		`no node "n9"`:          move("db", "n9"),
		"in use by container":   add(lab.Container{Name: "x", Node: "n2", Tenant: "silver", AddressKey: "db-0"}),
		"stays on its node":     add(lab.Container{Name: "x", Node: "n2", Tenant: "green", AddressKey: "db-0"}),
		"letters, digits":       add(lab.Container{Name: "x", Node: "n2", Tenant: "silver", AddressKey: "db 0"}),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			b.Errorf("got %v, want %q", err, want)
		}
	}
}

// forwarded: the node that the container leaves forwards what a node sends there that does not know of the move, for a
// time.
func (b bed) forwarded(ctx context.Context, f *traffic) {
	b.Helper()
	must(b.T, b.Stop(ctx, lab.AgentProcess("n1")))
	// On a loaded machine the move can take longer than the former node forwards.
	for range 5 {
		_, err := b.Move(ctx, "db", "n2")
		must(b.T, err)
		after := f.sent.Load() // web's node sends to n3, which has no device any more
		if f.next(4*time.Second, func() bool { return f.last.Load() > after }) {
			labtest.Until(b.T, patience, "the end of forwarding", func() bool {
				return !f.next(500*time.Millisecond, func() bool { return true })
			})
			must(b.T, b.Start(ctx, lab.AgentProcess("n1")))
			b.more(f)
			return
		}
		_, err = b.Move(ctx, "db", "n3")
		must(b.T, err)
	}
	b.Fatal("no datagram came by the former node in 5 moves")
}

// returns: a container that is removed leaves its address to the next one with its key, also on another node.
func (b bed) returns() {
	ctx := labtest.Context(b.T)
	was := b.address("db")
	must(b.T, b.RemoveContainer(ctx, "db"))
	must(b.T, b.AddContainer(ctx, lab.Container{Name: "db2", Node: "n3", Tenant: "silver", AddressKey: "db-0"}))
	must(b.T, b.AddContainer(ctx, lab.Container{Name: "db3", Node: "n3", Tenant: "silver", AddressKey: "db-1"}))
	if is, other := b.address("db2"), b.address("db3"); is != was || other == was {
		b.Errorf("address key db-0 has %v, before %v; db-1 has %v", is, was, other)
	}
}

// Limits of a move under load (issue J).
const (
	maxGap   = 100 * time.Millisecond
	maxStall = 500 * time.Millisecond
)

// TestMoveGap: at 1,000 datagrams a second, no move delays delivery by more than 100 ms, nor a connection by more than
// 500 ms.
func TestMoveGap(t *testing.T) { each(t, testMoveGap) }

func testMoveGap(t *testing.T, m mode) {
	b := newMoving(t, m)
	ctx, cancel := context.WithCancel(labtest.Context(t))
	defer cancel()
	f := b.start(ctx, time.Millisecond)
	for i, to := range []string{"n3", "n2", "n3", "n2", "n3"} {
		b.more(f)
		f.forget()
		moved, err := b.Move(ctx, "db", to)
		must(t, err)
		b.more(f)
		t.Logf("move %d, attached in %v, removed in %v: %v", i+1, moved.Attach, moved.Remove, f)
		if lost := f.lost(); lost > m.maxLost {
			t.Errorf("move %d lost %d datagrams, want at most %d", i+1, lost, m.maxLost)
		}
		if f.gap.Load() > int64(maxGap) || f.stall.Load() > int64(maxStall) {
			t.Errorf("move %d exceeds %v without a datagram, or %v until an echo", i+1, maxGap, maxStall)
		}
	}
	cancel()
	must(t, <-f.failed)
}
