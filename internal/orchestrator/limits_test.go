package orchestrator

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

func wantRefusals(t *testing.T, s *Server, limit string, want int) {
	t.Helper()
	if n := metric(t, s.config.RunDir, fmt.Sprintf("pilaster_orchestrator_refused_total{limit=%q}", limit)); n != want {
		t.Errorf("%d refusals are counted for %s, want %d", n, limit, want)
	}
}

func TestSizeOfRequests(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := registered(t, s, testNode(1))
	_, err := n1.Register(
		t.Context(),
		connect.NewRequest(&pilasterv1.RegisterRequest{Version: strings.Repeat("x", 8<<20+100)}),
	)
	wantCode(t, err, connect.CodeResourceExhausted)
	wantText(t, err, "may have 8388608 bytes")
	_, err = n1.Resolve(
		t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: strings.Repeat("x", 64<<10+100)}),
	)
	wantCode(t, err, connect.CodeResourceExhausted)
	wantRefusals(t, s, limitRequest, 2)

	// Each message of a stream may be as long as the first; one that only says to be longer is ended, too.
	long := func(n int) *pilasterv1.FollowRequest {
		return &pilasterv1.FollowRequest{IncompleteTenants: []string{strings.Repeat("x", n)}}
	}
	f := follow(t, n1, long(10<<20))
	f.next(t)
	f.send(t, long(10<<20))
	f.send(t, long(10<<20))
	createTenant(t, s, "blue")
	f.send(t, hosting("blue"))
	if d := f.next(t).GetDelta(); len(d.GetTenants()) != 1 {
		t.Errorf("after many long messages: %v", d)
	}
	f.Send(long(16 << 20))
	f.ended(t, connect.CodeResourceExhausted)
	wantRefusals(t, s, limitRequest, 3)
}

// What is compressed may be a thousand times as long.
func TestCompressedRequests(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	for name, protocol := range map[string]connect.ClientOption{"gRPC": connect.WithGRPC(), "gRPC-Web": connect.WithGRPCWeb(), "Connect": connect.WithClientOptions()} {
		client := pilasterv1connect.NewNodeServiceClient(
			&http.Client{Transport: transport(t, s, pki.Node{})},
			s.url(),
			connect.WithSendGzip(),
			protocol,
		)
		_, err := client.Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{Csr: make([]byte, 63<<10)}))
		if connect.CodeOf(err) != connect.CodeUnimplemented || !strings.Contains(err.Error(), "send it as it is") {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantRefusals(t, s, limitCompressed, 3)
}

func TestSizeOfAnswers(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := registered(t, s, testNode(1))
	createTenant(t, s, "blue")
	f := follow(t, n1, hosting("blue"))
	f.next(t)
	s.cache.mu.Lock()
	revision := s.cache.revision
	s.cache.mu.Unlock()
	s.cache.apply(
		store.Batch{
			Revision: revision,
			Events: []store.Event{
				{
					App: &pilasterv1.App{
						Tenant: "blue",
						Id:     1,
						Labels: map[string]string{"app": strings.Repeat("x", maxAnswer)},
					},
				},
			},
		},
	)
	_, err := f.Receive()
	for err == nil {
		_, err = f.Receive()
	}
	wantCode(t, err, connect.CodeResourceExhausted)
	wantText(t, err, "host fewer tenants")
	wantRefusals(t, s, limitAnswer, 1)
}

func TestJoinsOfOneSource(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Joins = 1
	s := start(t, c)
	n1 := registered(t, s, testNode(1))
	stranger := pilasterv1connect.NewNodeServiceClient(&http.Client{Transport: transport(t, s, pki.Node{})}, s.url())
	try := func() error {
		_, err := stranger.Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{}))
		return err
	}
	admitted := 0
	err := try()
	for ; connect.CodeOf(err) == connect.CodeUnauthenticated && admitted < 1000; admitted++ {
		err = try()
	}
	if connect.CodeOf(err) != connect.CodeUnavailable || admitted < 9 {
		t.Fatalf("after %d tries: %v", admitted, err)
	}
	wantText(t, err, "::/64 tries to join more than 1 times a second")
	wantRefusals(t, s, limitJoins, 1)
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{})); err != nil {
		t.Errorf("a node of the same source: %v", err)
	}
	for end := time.Now().Add(20 * time.Second); connect.CodeOf(try()) != connect.CodeUnauthenticated; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is refused for ever")
		}
	}
}

func TestRatesForget(t *testing.T) {
	r, now := newRates[client](1, 10), time.Now()
	r.now = func() time.Time { return now }
	allow := func(i int) bool {
		return r.allow(client{from: source(fmt.Sprintf("[2001:db8:%x:%x::1]:1", i>>16, i&0xffff))})
	}
	for i := range maxClients {
		allow(i)
	}
	for range 10 {
		if !allow(maxClients) {
			t.Fatal("refused early")
		}
	}
	if allow(maxClients+1) || len(r.by) != maxClients {
		t.Errorf("%d sources are told apart; the others share", len(r.by))
	}
	if !allow(1) {
		t.Error("one that is told apart pays for the others")
	}
	now = now.Add(1100 * time.Millisecond)
	if !allow(maxClients+2) || len(r.by) > 10 {
		t.Errorf("%d sources are remembered for nothing", len(r.by))
	}
}

// A certificate may call as often as an agent ever does, and no oftener; others notice nothing.
func TestCallsOfOneNode(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	register := func(n *join.Client) error {
		_, err := n.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
		return err
	}
	rate, calls := allowances[pilasterv1connect.NodeServiceRegisterProcedure].rate, 1
	began := time.Now()
	err := register(n1)
	for ; err == nil; err = register(n1) {
		if calls++; calls > 100*rate {
			t.Fatalf("%d calls were let through", calls)
		}
	}
	if most := 10*rate + int(time.Since(began).Seconds()+1)*rate; calls < 10*rate || calls > most {
		t.Errorf("%d calls were let through, at least %d and at most %d should be", calls, 10*rate, most)
	}
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "node n1 calls /pilaster.v1.NodeService/Register more than 10 times a second")
	wantRefusals(t, s, limitRate, 1)
	if err := register(n2); err != nil {
		t.Errorf("another node: %v", err)
	}
	if _, err := n1.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "none"})); connect.CodeOf(
		err,
	) != connect.CodeNotFound {
		t.Errorf("another procedure: %v", err)
	}
	for end := time.Now().Add(20 * time.Second); register(n1) != nil; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is refused for ever")
		}
	}
}

// Messages of a stream that come too fast wait, and are heard.
func TestMessagesOfOneNode(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	s := start(t, testConfig(t))
	f := follow(t, registered(t, s, testNode(1)), hosting())
	f.next(t)
	createTenant(t, s, "blue")
	const excess = 3 * messageRate
	began := time.Now()
	for range 10*messageRate + excess {
		f.send(t, hosting())
	}
	f.send(t, hosting("blue"))
	if d := f.next(t).GetDelta(); len(d.GetTenants()) != 1 {
		t.Errorf("the last message was answered with %v", d)
	}
	if took := time.Since(began); took < excess/messageRate*time.Second-time.Second/2 {
		t.Errorf("%d messages were heard in %v", 10*messageRate+excess, took)
	}
}

func TestSource(t *testing.T) {
	for remote, want := range map[string]string{
		"[2001:db8:1:2:3::4]:5": "2001:db8:1:2::/64", "[::ffff:192.0.2.1]:5": "192.0.2.1/32", "192.0.2.1:5": "192.0.2.1/32",
		"[fe80::1%eth0]:5": "fe80::/64", "@": "invalid Prefix",
	} {
		if got := source(remote).String(); got != want {
			t.Errorf("%s: %s, want %s", remote, got, want)
		}
	}
}

// shut is a connection that the other side ends without a word.
func shut(t *testing.T, s *Server) {
	t.Helper()
	c := knock(t, s)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || isTimeout(err) {
		t.Errorf("read %d, %v; it was to be ended", n, err)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

func knock(t *testing.T, s *Server) net.Conn {
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (d *connLimiter) await(t *testing.T, all, strangers int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		d.mu.Lock()
		isAll, isStrangers, sources := d.all, d.strangers, len(d.sources)
		d.mu.Unlock()
		if isAll == all && isStrangers == strangers && (sources == 0) == (strangers == 0) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf(
				"%d connections, %d of strangers, of %d sources; want %d and %d",
				isAll,
				isStrangers,
				sources,
				all,
				strangers,
			)
		}
	}
}

func TestStrangers(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Strangers = 4
	c.patience = time.Minute // so that they are slow to leave
	s := start(t, c)
	f := follow(t, registered(t, s, testNode(1)), hosting())
	f.next(t)
	s.connLimiter.await(t, 1, 0)
	var silent []net.Conn
	for range 4 {
		silent = append(silent, knock(t, s))
	}
	s.connLimiter.await(t, 5, 4)
	shut(t, s)
	wantRefusals(t, s, limitStrangers, 1)
	createTenant(t, s, "blue")
	f.send(t, hosting("blue"))
	f.next(t) // who is known has its connection
	for _, c := range silent {
		c.Close()
	}
	s.connLimiter.await(t, 1, 0)
	registered(t, s, testNode(2))
}

func TestConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	c := testConfig(t)
	c.Limits.Connections = 16 // two of strangers: to join, and to register
	s := start(t, c)
	for n := range 15 {
		registered(t, s, testNode(n+1))
		s.connLimiter.await(t, n+1, 0)
	}
	knock(t, s)
	s.connLimiter.await(t, 16, 1)
	shut(t, s)
	wantRefusals(t, s, limitConnections, 1)
}

func TestConnectionsOfOneNode(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	registered(t, s, testNode(1)).Close()
	s.connLimiter.await(t, 0, 0)
	register := func(tr *http.Transport) error {
		_, err := pilasterv1connect.NewNodeServiceClient(&http.Client{Transport: tr}, s.url()).
			Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
		return err
	}
	var all []*http.Transport
	for range maxNodeConnections {
		tr := transport(t, s, testNode(1))
		if err := register(tr); err != nil {
			t.Fatal(err)
		}
		all = append(all, tr)
	}
	s.connLimiter.await(t, maxNodeConnections, 0)
	err := register(transport(t, s, testNode(1)))
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "node n1 has 16 connections")
	wantRefusals(t, s, limitNodeConnections, 1)
	s.connLimiter.await(t, maxNodeConnections, 0) // the refused one was ended
	if err := register(all[0]); err != nil {
		t.Errorf("one of the sixteen: %v", err)
	}
	registered(t, s, testNode(2))
	all[0].CloseIdleConnections()
	for end := time.Now().Add(20 * time.Second); register(transport(t, s, testNode(1))) != nil; {
		if time.Now().After(end) {
			t.Fatal("there is room again, and it is not given")
		}
	}
}

// conn is a connection that only comes from somewhere.
type conn struct {
	net.Conn
	from net.Addr
}

func (c conn) RemoteAddr() net.Addr { return c.from }
func (c conn) Close() error         { return nil }

type addr string

func (addr) Network() string  { return "tcp" }
func (a addr) String() string { return string(a) }

// Each of 100,000 nodes has a connection, and another while it renews its certificate, also from one
// source; strangers leave them room.
func TestDefaultsSuit100000Nodes(t *testing.T) {
	refused := map[string]int{}
	d := newConnLimiter(
		Limits{}.orDefault(),
		func(limit string) { refused[limit]++ },
		slog.New(slog.NewTextHandler(io.Discard, nil)),
	)
	enter := func(from string) *limitedConn {
		c := conn{from: addr(from)}
		g, limit := d.admit(c)
		if limit != "" {
			d.refuse(c, limit)
		}
		return g
	}
	for i := range 30_000 {
		enter(fmt.Sprintf("[2001:db8:%x::1]:1", i))
	}
	if d.strangers != 25_000 || refused[limitStrangers] != 5_000 {
		t.Fatalf("%d strangers, refused %v", d.strangers, refused)
	}
	d = newConnLimiter(Limits{}.orDefault(), func(limit string) { refused[limit]++ }, slog.New(slog.DiscardHandler))
	clear(refused)
	var guests []*limitedConn
	for i := range 200_000 {
		g := enter("192.0.2.1:1")
		if g == nil {
			t.Fatalf("connection %d is refused: %v", i, refused)
		}
		if err := g.identify(testNode(i % 100_000)); err != nil {
			t.Fatal(err)
		}
		guests = append(guests, g)
	}
	if enter("192.0.2.2:1") != nil || refused[limitConnections] != 1 {
		t.Errorf("refused %v", refused)
	}
	for _, g := range guests {
		g.Close()
		g.Close()
	}
	if d.all != 0 || d.strangers != 0 || len(d.sources) != 0 || len(d.nodes) != 0 {
		t.Errorf(
			"left over: %d connections, %d strangers, %d sources, %d nodes",
			d.all,
			d.strangers,
			len(d.sources),
			len(d.nodes),
		)
	}
}

func TestConnectionsWithinFiles(t *testing.T) {
	few, err := Limits{Connections: math.MaxInt}.withinFiles()
	if err != nil || few.Connections == math.MaxInt || few.Connections < 100 {
		t.Errorf("%+v, %v", few, err)
	}
	if same, err := (Limits{Connections: 7, Joins: 8}).withinFiles(); err != nil ||
		same != (Limits{Connections: 7, Joins: 8}) {
		t.Errorf("%+v, %v", same, err)
	}
}
