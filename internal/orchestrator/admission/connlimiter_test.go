package admission

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// limiterBed is a ConnLimiter with a clock of its own. It never replaces by chance, unless a test sets random.
type limiterBed struct {
	*ConnLimiter
	t   *testing.T
	now time.Time
}

func newLimiterBed(t *testing.T, l Limits) *limiterBed {
	b := &limiterBed{t: t, now: time.Unix(0, 0)}
	b.ConnLimiter = NewConnLimiter(l, func(string) {}, slog.New(slog.DiscardHandler))
	b.ConnLimiter.now = func() time.Time { return b.now }
	b.random = func(n int) int { return n - 1 }
	return b
}

// accept returns nil if the connection is refused.
func (b *limiterBed) accept(address string) *limitedConn {
	g, _ := b.admit(conn{from: addr(address)})
	return g
}

// call makes an HTTP call without a certificate on a connection.
func (b *limiterBed) call(g *limitedConn, path string) {
	r := httptest.NewRequestWithContext(WithConn(b.t.Context(), g), http.MethodPost, path, http.NoBody)
	r.RemoteAddr, r.TLS = g.RemoteAddr().String(), &tls.ConnectionState{}
	calls := NewCallLimiter(Limits{}.WithDefaults(), func(string) {})
	next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	Authenticate(time.Now, calls, next).ServeHTTP(httptest.NewRecorder(), r)
}

func (b *limiterBed) closed(g *limitedConn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return g.closed
}

// A source that holds its limit of connections keeps no node out, also if each of them makes calls without a
// certificate. Connections with a valid token or node certificate stay.
func TestStrangersAreReplaced(t *testing.T) {
	b := newLimiterBed(t, Limits{Strangers: 8, Connections: 1000})
	var all []*limitedConn
	for i := range 8 {
		g := b.accept(fmt.Sprintf("[2001:db8::%x]:1", i+1))
		if g == nil {
			t.Fatalf("connection %d was refused", i)
		}
		all = append(all, g)
	}
	if b.accept("[2001:db8::9]:1") != nil {
		t.Error("a connection replaced one of a client with as few, which may be in its handshake")
	}
	b.now = b.now.Add(2 * handshakeGrace)
	for _, path := range []string{pilasterv1connect.NodeServiceJoinProcedure, "/healthz", "/none",
		pilasterv1connect.NodeServiceRegisterProcedure} {
		b.call(all[0], path)
	}
	if b.accept("[2001:db8::9]:1") == nil || !b.closed(all[0]) {
		t.Error("a connection whose calls had neither certificate nor token was not replaced")
	}
	all[1].protect()
	if err := all[2].identify(pki.Node{Name: "n1"}); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		b.accept("[2001:db8::a]:1")
		b.now = b.now.Add(handshakeGrace)
	}
	if b.closed(all[1]) || b.closed(all[2]) || !b.closed(all[3]) {
		t.Errorf("closed: token %t, certificate %t, neither %t; want only the last",
			b.closed(all[1]), b.closed(all[2]), b.closed(all[3]))
	}
	if b.accept("[2001:db8:0:1::1]:1") == nil {
		t.Error("another source was refused")
	}
	if b.strangers.n != 9 || b.sources[netip.MustParsePrefix("2001:db8::/64")].n != 8 {
		t.Errorf("%d strangers, want 9, of which 8 of the first source", b.strangers.n)
	}
}

// However many connections a few addresses open per second, a client with another address gets in at once. An address
// beyond its limit replaces only its own connections.
func TestFullSourceReplacesTheLargestAddress(t *testing.T) {
	b := newLimiterBed(t, Limits{Strangers: 256, Connections: 10_000})
	for i := range 1000 {
		b.accept(fmt.Sprintf("[2001:db8::%x]:%d", i%4+1, i+1))
	}
	node := b.accept("[2001:db8::5]:1")
	if node == nil {
		t.Fatal("the connection of another address was refused")
	}
	b.random = rand.IntN
	for i := range 10_000 {
		b.accept(fmt.Sprintf("[2001:db8::%x]:%d", i%4+1, i+1))
		b.now = b.now.Add(handshakeGrace / 20_000)
	}
	if b.closed(node) {
		t.Error("the only connection of an address was closed for those of addresses with many")
	}
	// The same among sources: many connections of a few /64s fill what strangers may have.
	b = newLimiterBed(t, Limits{Strangers: 256, Connections: 8 * 512})
	for i := range 2000 {
		b.accept(fmt.Sprintf("[2001:db8:0:%x::%x]:1", i%2, i))
	}
	if b.strangers.n != 512 {
		t.Fatalf("%d strangers, want 512", b.strangers.n)
	}
	if b.accept("[2001:db8:0:5::1]:1") == nil {
		t.Error("the connection of another source was refused")
	}
}

// 10,000 new connections per second, each of another address of one /64, delay a node by a few tries only. Its
// handshake takes 10 ms.
func TestFloodOfAddressesDelaysNode(t *testing.T) {
	const seed = 1
	random := rand.New(rand.NewPCG(seed, seed))
	b := newLimiterBed(t, Limits{Strangers: 256, Connections: 10_000})
	b.random = random.IntN
	next := 0
	flood := func(connections int) {
		for range connections {
			next++
			b.accept(fmt.Sprintf("[2001:db8::1:%x:%x]:1", next>>16, next&0xffff))
			b.now = b.now.Add(100 * time.Microsecond)
		}
	}
	flood(10_000)
	tries, most := 0, 0
	const nodes = 20
	for range nodes {
		for n := 1; ; n++ {
			flood(random.IntN(1000)) // until the node tries again
			tries, most = tries+1, max(most, n)
			g := b.accept("[2001:db8::2]:1")
			if g == nil {
				continue
			}
			if flood(100); !b.closed(g) {
				g.Close()
				break
			}
		}
		if most > 200 {
			t.Fatal("a node did not get in with 200 tries")
		}
	}
	t.Logf("seed %d: %d tries of %d nodes, %d at most of one", seed, tries, nodes, most)
	if tries > 20*nodes || most > 100 {
		t.Errorf("%d tries of %d nodes, %d of one; want at most 20 a node and 100", tries, nodes, most)
	}
}

func TestConnOfNothing(t *testing.T) {
	connOf(context.Background()).protect() // a call inside the process
}
