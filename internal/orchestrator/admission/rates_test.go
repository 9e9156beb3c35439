package admission

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

func TestRatesRemoveIdleClients(t *testing.T) {
	r, now := newRates[client](1, 10), time.Now()
	r.now = func() time.Time { return now }
	allow := func(i int) bool {
		from, _ := source(fmt.Sprintf("[2001:db8:%x:%x::1]:1", i>>16, i&0xffff))
		return r.Allow(client{from: from})
	}
	for i := range maxClients {
		allow(i)
	}
	for range 10 {
		if !allow(maxClients) {
			t.Fatal("the shared limiter refused a call within its burst")
		}
	}
	if allow(maxClients+1) || len(r.by) != maxClients {
		t.Errorf("got %d limiters, want %d and a shared one", len(r.by), maxClients)
	}
	if !allow(1) {
		t.Error("a client with a limiter of its own was refused")
	}
	now = now.Add(1100 * time.Millisecond)
	if !allow(maxClients+2) || len(r.by) > 10 {
		t.Errorf("got %d limiters after a second, want those with a full burst removed", len(r.by))
	}
}

func TestSource(t *testing.T) {
	for remote, want := range map[string]string{
		"[2001:db8:1:2:3::4]:5": "2001:db8:1:2::/64",
		"[::ffff:192.0.2.1]:5":  "192.0.2.1/32", "192.0.2.1:5": "192.0.2.1/32",
		"[fe80::1%eth0]:5": "fe80::/64", "@": "invalid Prefix",
	} {
		from, _ := source(remote)
		if got := from.String(); got != want {
			t.Errorf("%s: %s, want %s", remote, got, want)
		}
	}
}

func TestLimitsWithinFiles(t *testing.T) {
	few, err := Limits{Connections: math.MaxInt}.WithinFiles()
	if err != nil || few.Connections == math.MaxInt || few.Connections < 100 {
		t.Errorf("got %+v, %v; want fewer connections", few, err)
	}
	if same, err := (Limits{Connections: 7, Joins: 8}).WithinFiles(); err != nil ||
		same != (Limits{Connections: 7, Joins: 8}) {
		t.Errorf("got %+v, %v; want the limits unchanged", same, err)
	}
}

// conn is a connection that has a remote address and nothing else.
type conn struct {
	net.Conn
	from net.Addr
}

func (c conn) RemoteAddr() net.Addr { return c.from }

func (c conn) Close() error { return nil }

type addr string

func (addr) Network() string { return "tcp" }

func (a addr) String() string { return string(a) }

// The default limits admit two connections of each of 100,000 nodes, also from one source. Strangers cannot use all
// connections.
func TestDefaultsFor100000Nodes(t *testing.T) {
	refused := map[string]int{}
	d := NewConnLimiter(
		Limits{}.WithDefaults(),
		func(limit string) { refused[limit]++ },
		slog.New(slog.NewTextHandler(io.Discard, nil)),
	)
	accept := func(from string) *limitedConn {
		c := conn{from: addr(from)}
		g, limit := d.admit(c)
		if limit != "" {
			d.refuse(c, limit)
		}
		return g
	}
	for i := range 30_000 {
		accept(fmt.Sprintf("[2001:db8:%x::1]:1", i))
	}
	if d.strangers.n != 25_000 || refused[LimitStrangers] != 5_000 {
		t.Fatalf("got %d strangers, refused %v; want 25000, and 5000 refused", d.strangers.n, refused)
	}
	d = NewConnLimiter(Limits{}.WithDefaults(), func(limit string) { refused[limit]++ }, slog.New(slog.DiscardHandler))
	clear(refused)
	var accepted []*limitedConn
	for i := range 200_000 {
		g := accept("192.0.2.1:1")
		if g == nil {
			t.Fatalf("connection %d was refused: %v", i, refused)
		}
		if err := g.identify(pki.Node{Name: fmt.Sprint(i % 100_000)}); err != nil {
			t.Fatal(err)
		}
		accepted = append(accepted, g)
	}
	if accept("192.0.2.2:1") != nil || refused[LimitConnections] != 1 {
		t.Errorf("refused %v, want one because of the limit of connections", refused)
	}
	for _, g := range accepted {
		g.Close()
		g.Close() // counts once
	}
	if d.all != 0 || d.strangers.n != 0 || len(d.sources) != 0 || len(d.nodes) != 0 {
		t.Errorf("after all were closed: got %d connections, %d strangers, %d sources, %d nodes; want none",
			d.all, d.strangers.n, len(d.sources), len(d.nodes))
	}
}
