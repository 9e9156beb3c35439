package orchestrator

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// tlsOf returns the TLS configuration of a client of this cluster, with a node's certificate unless n is zero.
func tlsOf(t *testing.T, s *Server, n pki.Node, protocols ...string) *tls.Config {
	authority := s.store.Cluster().Authority
	c := &tls.Config{RootCAs: authority.Pool(), ServerName: join.ServerName, NextProtos: protocols}
	if n != (pki.Node{}) {
		c.Certificates = []tls.Certificate{nodePair(t, authority, n, time.Now())}
	}
	return c
}

// wantClosed fails if the peer has not closed the connection in time.
func wantClosed(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	_, err := io.Copy(io.Discard, c)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Error("the connection is still open after 20 s, want it closed")
	}
}

// hang starts a call and never sends its whole request. The channel receives the gRPC status, or the transport's error
// if the server sends no status.
func hang(ctx context.Context, t *testing.T, tr *http.Transport, url string) <-chan string {
	t.Helper()
	body, more := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/grpc+proto")
	ended := make(chan string, 1)
	go func() {
		resp, err := tr.RoundTrip(req)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		if err != nil {
			ended <- err.Error()
			return
		}
		ended <- resp.Header.Get("Grpc-Status") + resp.Trailer.Get("Grpc-Status")
	}()
	t.Cleanup(func() { more.Close() })
	go more.Write([]byte{0, 0, 0, 0, 200}) // the frame header of 200 bytes, which never follow
	return ended
}

func transport(t *testing.T, s *Server, n pki.Node) *http.Transport {
	tr := &http.Transport{TLSClientConfig: tlsOf(t, s, n)}
	raw(t, s, tr) // HTTP/2
	return tr
}

// The orchestrator closes connections and ends calls of slow clients, with or without a certificate. A stream may be
// idle between messages.
func TestSlowClients(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	c := testConfig(t)
	c.timeout = 2 * time.Second
	s := start(t, c)
	n1 := testNode(1)
	f := follow(t, registered(t, s, n1), hosting())
	f.next(t)
	connected := func(t *testing.T, protocol string) *tls.Conn {
		conn, err := tls.Dial("tcp", s.Addr().String(), tlsOf(t, s, pki.Node{}, protocol))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	t.Run("all", func(t *testing.T) {
		t.Run("sends nothing", func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", s.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			wantClosed(t, conn)
		})
		t.Run("sends nothing after the handshake", func(t *testing.T) {
			t.Parallel()
			wantClosed(t, connected(t, "http/1.1"))
		})
		t.Run("opens HTTP/2 and no stream", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "h2")
			// The preface, and an empty SETTINGS frame.
			const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
			if _, err := io.WriteString(conn, preface); err != nil {
				t.Fatal(err)
			}
			wantClosed(t, conn)
		})
		t.Run("sends its header byte by byte", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "http/1.1")
			go func() {
				for _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nX: "); err == nil; {
					_, err = io.WriteString(conn, "x")
					time.Sleep(50 * time.Millisecond)
				}
			}()
			wantClosed(t, conn)
		})
		t.Run("keeps an idle connection", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "http/1.1")
			if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			wantClosed(t, conn)
		})
		for procedure, n := range map[string]pki.Node{
			pilasterv1connect.NodeServiceJoinProcedure:     {},
			pilasterv1connect.NodeServiceRegisterProcedure: n1,
			pilasterv1connect.NodeServiceFollowProcedure:   n1,
		} {
			t.Run("does not send "+procedure, func(t *testing.T) {
				t.Parallel()
				select {
				case status := <-hang(t.Context(), t, transport(t, s, n), s.url()+procedure):
					if status != "4" {
						t.Errorf("got status %s, want 4 (deadline exceeded)", status)
					}
				case <-time.After(20 * time.Second):
					t.Error("the call is still in progress after 20 s")
				}
			})
		}
		t.Run("does not read its response", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "h2")
			// A window of 0 bytes for each stream, and a GET of /healthz in stream 1.
			if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00"+
				"\x00\x00\x0f\x01\x05\x00\x00\x00\x01\x82\x87\x41\x01x\x44\x08/healthz"); err != nil {
				t.Fatal(err)
			}
			for frame := make([]byte, 9); frame[3] != 3; { // RST_STREAM
				if _, err := io.ReadFull(conn, frame); err != nil {
					t.Fatalf("got no RST_STREAM: %v", err)
				}
				io.CopyN(io.Discard, conn, int64(frame[0])<<16|int64(frame[1])<<8|int64(frame[2]))
			}
		})
		t.Run("long header", func(t *testing.T) {
			t.Parallel()
			req, _ := http.NewRequest(http.MethodGet, s.url()+"/healthz", nil)
			req.Header.Set("X", strings.Repeat("x", 2*admission.MaxHeader))
			tr := &http.Transport{TLSClientConfig: tlsOf(t, s, pki.Node{}, "http/1.1")}
			resp, err := (&http.Client{Transport: tr}).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
				t.Errorf("got status %d, want 431", resp.StatusCode)
			}
		})
	})
	// The stream has lasted longer than any other call may last, and still works.
	createTenant(t, s, "blue")
	f.send(t, hosting("blue"))
	if d := f.next(t).GetDelta(); len(d.GetTenants()) != 1 {
		t.Errorf("got %v on the stream, want the tenant", d)
	}
}

// The limit of concurrent calls applies to each caller separately.
func TestConcurrentCalls(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.timeout = time.Minute // so that the orchestrator does not end them during the test
	s := start(t, c)
	member, other := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	awaitRunning := func(n int) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			sum := s.limiter.Running()
			if sum == n {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d calls are in progress, want %d", sum, n)
			}
		}
	}
	register := func(c *join.Client) error {
		_, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test"}))
		return err
	}
	joinAs := func() error {
		_, err := raw(
			t,
			s,
			&http.Transport{TLSClientConfig: tlsOf(t, s, pki.Node{})},
		).Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{}))
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	fill := func(n pki.Node, procedure string) {
		tr, before := transport(t, s, n), s.limiter.Running()
		for i := range admission.Allowances[procedure].AtOnce {
			if hang(ctx, t, tr, s.url()+procedure); i == 0 {
				awaitRunning(before + 1) // the others share its connection, so that no limit of connections is reached
			}
		}
	}
	awaitRunning(0)
	fill(testNode(1), pilasterv1connect.NodeServiceRegisterProcedure)
	awaitRunning(4)
	err := register(member)
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "node n1 has 4 calls")
	if err := register(other); err != nil {
		t.Errorf("call of another node: %v", err)
	}
	fill(testNode(1), pilasterv1connect.NodeServiceFollowProcedure)
	awaitRunning(8)
	refused := member.Follow(t.Context())
	refused.Send(nil) // sends the header
	_, err = refused.Receive()
	wantCode(t, err, connect.CodeUnavailable)
	fill(pki.Node{}, pilasterv1connect.NodeServiceJoinProcedure)
	awaitRunning(72)
	err = joinAs()
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "::/64 has 64 calls")
	if err := register(other); err != nil {
		t.Errorf("call of a node while calls without a certificate are at their limit: %v", err)
	}
	if n := metric(t, s.config.RunDir, `pilaster_orchestrator_refused_total{limit="calls"}`); n != 3 {
		t.Errorf("the metric counts %d refusals, want 3", n)
	}
	cancel()
	awaitRunning(0)
	if err := register(member); err != nil {
		t.Errorf("call after the others have ended: %v", err)
	}
	wantCode(t, joinAs(), connect.CodeUnauthenticated)
}
