package orchestrator

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

func wantRefusals(t *testing.T, s *Server, limit string, want int) {
	t.Helper()
	if n := metric(t, s.config.RunDir, fmt.Sprintf("pilaster_orchestrator_refused_total{limit=%q}", limit)); n != want {
		t.Errorf("the metric counts %d refusals for limit %s, want %d", n, limit, want)
	}
}

func TestRequestSize(t *testing.T) {
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
	wantText(t, err, "maximum of 8388608 bytes")
	_, err = n1.Resolve(
		t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: strings.Repeat("x", 64<<10+100)}),
	)
	wantCode(t, err, connect.CodeResourceExhausted)
	wantRefusals(t, s, admission.LimitRequest, 2)

	// Each message of a stream may be as long as the first. The orchestrator ends the stream at a longer message.
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
		t.Errorf("after long messages: got %v, want the tenant", d)
	}
	f.Send(long(16 << 20))
	f.ended(t, connect.CodeResourceExhausted)
	wantRefusals(t, s, admission.LimitRequest, 3)
}

// Compressed requests are refused: a few bytes may expand to a thousand times as many.
func TestCompressedRequests(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	for name, protocol := range map[string]connect.ClientOption{
		"gRPC": connect.WithGRPC(), "gRPC-Web": connect.WithGRPCWeb(), "Connect": connect.WithClientOptions(),
	} {
		client := pilasterv1connect.NewNodeServiceClient(
			&http.Client{Transport: transport(t, s, pki.Node{})},
			s.url(),
			connect.WithSendGzip(),
			protocol,
		)
		_, err := client.Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{Csr: make([]byte, 63<<10)}))
		if connect.CodeOf(err) != connect.CodeUnimplemented || !strings.Contains(err.Error(), "send it uncompressed") {
			t.Errorf("%s: got error %v, want unimplemented", name, err)
		}
	}
	wantRefusals(t, s, admission.LimitCompressed, 3)
}

func TestMessageSize(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := registered(t, s, testNode(1))
	createTenant(t, s, "blue")
	f := follow(t, n1, hosting("blue"))
	f.next(t)
	s.cache.Mu.Lock()
	revision := s.cache.Revision
	s.cache.Mu.Unlock()
	s.cache.Apply(
		store.Batch{
			Revision: revision,
			Events: []store.Event{
				{
					App: &pilasterv1.App{
						Tenant: "blue",
						Id:     1,
						Labels: map[string]string{"app": strings.Repeat("x", admission.MaxAnswer)},
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
	wantRefusals(t, s, admission.LimitAnswer, 1)
}

func TestJoinRateOfOneSource(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Joins = 1
	s := start(t, c)
	n1 := registered(t, s, testNode(1))
	client := pilasterv1connect.NewNodeServiceClient(&http.Client{Transport: transport(t, s, pki.Node{})}, s.url())
	try := func() error {
		_, err := client.Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{}))
		return err
	}
	admitted := 0
	err := try()
	for ; connect.CodeOf(err) == connect.CodeUnauthenticated && admitted < 1000; admitted++ {
		err = try()
	}
	if connect.CodeOf(err) != connect.CodeUnavailable || admitted < 9 {
		t.Fatalf("after %d attempts: got error %v, want unavailable after at least 9", admitted, err)
	}
	wantText(t, err, "::/64 tries to join more than 1 times a second")
	wantRefusals(t, s, admission.LimitJoins, 1)
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{})); err != nil {
		t.Errorf("call of a node from the same source: %v", err)
	}
	for end := time.Now().Add(20 * time.Second); connect.CodeOf(try()) != connect.CodeUnauthenticated; {
		if time.Now().After(end) {
			t.Fatal("still refused after 20 s")
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Each node has a rate limit per procedure. Other nodes and procedures are not affected.
func TestCallRateOfOneNode(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	register := func(n *join.Client) error {
		_, err := n.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
		return err
	}
	rate, calls := admission.Allowances[pilasterv1connect.NodeServiceRegisterProcedure].Rate, 1
	began := time.Now()
	err := register(n1)
	for ; err == nil; err = register(n1) {
		if calls++; calls > 100*rate {
			t.Fatalf("%d calls were accepted, want a refusal", calls)
		}
	}
	if most := 10*rate + int(time.Since(began).Seconds()+1)*rate; calls < 10*rate || calls > most {
		t.Errorf("%d calls were accepted, want %d to %d", calls, 10*rate, most)
	}
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "node n1 calls /pilaster.v1.NodeService/Register more than 10 times a second")
	wantRefusals(t, s, admission.LimitRate, 1)
	if err := register(n2); err != nil {
		t.Errorf("call of another node: %v", err)
	}
	_, err = n1.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "none"}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("another procedure: got error %v, want not found", err)
	}
	for end := time.Now().Add(20 * time.Second); register(n1) != nil; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("still refused after 20 s")
		}
	}
}

// The orchestrator delays messages of a stream above the message rate, and drops none.
func TestMessageRateOfOneNode(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	s := start(t, testConfig(t))
	f := follow(t, registered(t, s, testNode(1)), hosting())
	f.next(t)
	createTenant(t, s, "blue")
	const excess = 3 * admission.MessageRate
	began := time.Now()
	for range 10*admission.MessageRate + excess {
		f.send(t, hosting())
	}
	f.send(t, hosting("blue"))
	if d := f.next(t).GetDelta(); len(d.GetTenants()) != 1 {
		t.Errorf("got %v after the last message, want the tenant", d)
	}
	if took := time.Since(began); took < excess/admission.MessageRate*time.Second-time.Second/2 {
		t.Errorf("%d messages were read in %v, want a delay", 10*admission.MessageRate+excess, took)
	}
}

// wantRefused opens a connection, which the orchestrator must close without a response.
func wantRefused(t *testing.T, s *Server) {
	t.Helper()
	c := connectTCP(t, s)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || isTimeout(err) {
		t.Errorf("read %d bytes, %v; want a closed connection", n, err)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// connectTCP opens a connection and starts no TLS handshake.
func connectTCP(t *testing.T, s *Server) net.Conn {
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func awaitConns(t *testing.T, s *Server, all, strangers int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		isAll, isStrangers, sources := s.connLimiter.Counts()
		if isAll == all && isStrangers == strangers && (sources == 0) == (strangers == 0) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf(
				"%d connections, %d without a certificate, of %d sources; want %d and %d",
				isAll,
				isStrangers,
				sources,
				all,
				strangers,
			)
		}
	}
}

// Idle connections up to the limit of one address affect no connected node, and a new node replaces the oldest.
func TestConnectionsWithoutCertificate(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Strangers = 16 // 4 of one address
	c.timeout = time.Minute // so that the orchestrator does not close them during the test
	s := start(t, c)
	f := follow(t, registered(t, s, testNode(1)), hosting())
	f.next(t)
	awaitConns(t, s, 1, 0)
	var silent []net.Conn
	for range 4 {
		silent = append(silent, connectTCP(t, s))
	}
	awaitConns(t, s, 5, 4)
	createTenant(t, s, "blue")
	f.send(t, hosting("blue"))
	f.next(t)
	n2 := testNode(2)
	config := join.Config{
		URL: s.url(), Token: s.Token(), StateDir: t.TempDir(), NodeName: n2.Name, NodeUUID: n2.UUID, Log: s.config.Log,
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		client, err := join.Dial(t.Context(), config)
		if err == nil {
			client.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatalf("idle connections keep a new node out: %v", err)
		}
	}
	closed := 0 // the oldest, or at random another one
	for _, c := range silent {
		c.SetReadDeadline(time.Now().Add(time.Second))
		_, err := io.Copy(io.Discard, c)
		if e, ok := err.(net.Error); !ok || !e.Timeout() {
			closed++
		}
		c.Close()
	}
	if closed == 0 {
		t.Error("the orchestrator closed no idle connection")
	}
	awaitConns(t, s, 1, 0)
}

// Connections that repeat a call without a certificate keep no new node out either.
func TestCallsWithoutCertificate(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Strangers = 16 // 4 of one address
	c.timeout = time.Minute // so that the orchestrator does not close them during the test
	s := start(t, c)
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	defer callers.Wait()
	defer stop()
	for range 4 {
		tr := transport(t, s, pki.Node{})
		callers.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) { // the transport connects again if it is closed
				req, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.url()+"/healthz", nil)
				if resp, err := tr.RoundTrip(req); err == nil {
					resp.Body.Close()
				}
			}
		})
	}
	awaitConns(t, s, 4, 4)
	n1 := testNode(1)
	config := join.Config{
		URL: s.url(), Token: s.Token(), StateDir: t.TempDir(), NodeName: n1.Name, NodeUUID: n1.UUID, Log: s.config.Log,
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		client, err := join.Dial(ctx, config)
		if err == nil {
			_, err = client.Register(ctx, connect.NewRequest(&pilasterv1.RegisterRequest{}))
			client.Close()
		}
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("connections with calls, but without certificate, keep a new node out: %v", err)
		}
	}
}

func TestConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	c := testConfig(t)
	c.Limits.Connections = 16 // at most two without a certificate: enough to join and to register
	s := start(t, c)
	for n := range 15 {
		registered(t, s, testNode(n+1))
		awaitConns(t, s, n+1, 0)
	}
	connectTCP(t, s)
	awaitConns(t, s, 16, 1)
	wantRefused(t, s)
	wantRefusals(t, s, admission.LimitConnections, 1)
}

func TestConnectionsOfOneNode(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	registered(t, s, testNode(1)).Close()
	awaitConns(t, s, 0, 0)
	register := func(tr *http.Transport) error {
		_, err := pilasterv1connect.NewNodeServiceClient(&http.Client{Transport: tr}, s.url()).
			Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
		return err
	}
	var all []*http.Transport
	for range admission.MaxNodeConnections {
		tr := transport(t, s, testNode(1))
		if err := register(tr); err != nil {
			t.Fatal(err)
		}
		all = append(all, tr)
	}
	awaitConns(t, s, admission.MaxNodeConnections, 0)
	err := register(transport(t, s, testNode(1)))
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "node n1 has 16 connections")
	wantRefusals(t, s, admission.LimitNodeConnections, 1)
	awaitConns(t, s, admission.MaxNodeConnections, 0) // the refused one was closed
	if err := register(all[0]); err != nil {
		t.Errorf("call on an earlier connection: %v", err)
	}
	registered(t, s, testNode(2))
	all[0].CloseIdleConnections()
	for end := time.Now().Add(20 * time.Second); register(transport(t, s, testNode(1))) != nil; {
		if time.Now().After(end) {
			t.Fatal("a new connection is refused 20 s after another was closed")
		}
	}
}
