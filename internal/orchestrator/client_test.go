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

// tlsOf is how a client of this cluster's calls, as a node where there is one.
func tlsOf(t *testing.T, s *Server, n pki.Node, protocols ...string) *tls.Config {
	authority := s.store.Cluster().Authority
	c := &tls.Config{RootCAs: authority.Pool(), ServerName: join.ServerName, NextProtos: protocols}
	if n != (pki.Node{}) {
		c.Certificates = []tls.Certificate{nodePair(t, authority, n, time.Now())}
	}
	return c
}

// ends fails when the other side has not ended the connection in time.
func ends(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	_, err := io.Copy(io.Discard, c)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Error("it is open still")
	}
}

// hang begins a call whose request does not come, until it or the server ends it: with the code of gRPC, or
// with an error where the server says nothing.
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
	go more.Write([]byte{0, 0, 0, 0, 200}) // bytes to come
	return ended
}

func transport(t *testing.T, s *Server, n pki.Node) *http.Transport {
	tr := &http.Transport{TLSClientConfig: tlsOf(t, s, n)}
	raw(t, s, tr) // HTTP/2
	return tr
}

// Who is slow is not waited for, whoever it is; a stream may be as slow as it likes between messages.
func TestSlowClients(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	c := testConfig(t)
	c.patience = 2 * time.Second
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
		t.Run("says nothing", func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", s.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			ends(t, conn)
		})
		t.Run("says nothing after the handshake", func(t *testing.T) {
			t.Parallel()
			ends(t, connected(t, "http/1.1"))
		})
		t.Run("opens HTTP/2 and no stream", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "h2")
			if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil { // the preface, and no settings
				t.Fatal(err)
			}
			ends(t, conn)
		})
		t.Run("drips its header", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "http/1.1")
			go func() {
				for _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nX: "); err == nil; time.Sleep(50 * time.Millisecond) {
					_, err = io.WriteString(conn, "x")
				}
			}()
			ends(t, conn)
		})
		t.Run("keeps what it does not use", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "http/1.1")
			if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			ends(t, conn)
		})
		for procedure, n := range map[string]pki.Node{
			pilasterv1connect.NodeServiceJoinProcedure: {}, pilasterv1connect.NodeServiceRegisterProcedure: n1, pilasterv1connect.NodeServiceFollowProcedure: n1,
		} {
			t.Run("does not send "+procedure, func(t *testing.T) {
				t.Parallel()
				select {
				case status := <-hang(t.Context(), t, transport(t, s, n), s.url()+procedure):
					if status != "4" { // deadline exceeded
						t.Errorf("ended with %s", status)
					}
				case <-time.After(20 * time.Second):
					t.Error("it is waited for still")
				}
			})
		}
		t.Run("does not take its answer", func(t *testing.T) {
			t.Parallel()
			conn := connected(t, "h2")
			// A window of 0 bytes for each stream, and a GET of /healthz in stream 1.
			if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00"+
				"\x00\x00\x0f\x01\x05\x00\x00\x00\x01\x82\x87\x41\x01x\x44\x08/healthz"); err != nil {
				t.Fatal(err)
			}
			for frame := make([]byte, 9); frame[3] != 3; { // RST_STREAM
				if _, err := io.ReadFull(conn, frame); err != nil {
					t.Fatalf("its stream was never ended: %v", err)
				}
				io.CopyN(io.Discard, conn, int64(frame[0])<<16|int64(frame[1])<<8|int64(frame[2]))
			}
		})
		t.Run("long header", func(t *testing.T) {
			t.Parallel()
			req, _ := http.NewRequest(http.MethodGet, s.url()+"/healthz", nil)
			req.Header.Set("X", strings.Repeat("x", 2*admission.MaxHeader))
			resp, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: tlsOf(t, s, pki.Node{}, "http/1.1")}}).Do(
				req,
			)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
				t.Errorf("status %d", resp.StatusCode)
			}
		})
	})
	// By now it lasts longer than anything may that is not a stream.
	createTenant(t, s, "blue")
	f.send(t, hosting("blue"))
	if d := f.next(t).GetDelta(); len(d.GetTenants()) != 1 {
		t.Errorf("the stream of a node says %v", d)
	}
}

// What one caller may do at once is not taken from others.
func TestCallsAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	member, other := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	going := func(n int) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			sum := s.limiter.Running()
			if sum == n {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d calls go on, want %d", sum, n)
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
	begin := func(n pki.Node, procedure string) {
		tr := transport(t, s, n)
		for range admission.Allowances[procedure].AtOnce {
			hang(ctx, t, tr, s.url()+procedure)
		}
	}
	going(0)
	begin(testNode(1), pilasterv1connect.NodeServiceRegisterProcedure)
	going(4)
	err := register(member)
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "node n1 has 4 calls")
	if err := register(other); err != nil {
		t.Errorf("another node: %v", err)
	}
	begin(testNode(1), pilasterv1connect.NodeServiceFollowProcedure)
	going(8)
	refused := member.Follow(t.Context())
	refused.Send(nil) // the header at least
	_, err = refused.Receive()
	wantCode(t, err, connect.CodeUnavailable)
	begin(pki.Node{}, pilasterv1connect.NodeServiceJoinProcedure)
	going(72)
	err = joinAs()
	wantCode(t, err, connect.CodeUnavailable)
	wantText(t, err, "::/64 has 64 calls")
	if err := register(other); err != nil {
		t.Errorf("a node beside strangers: %v", err)
	}
	if n := metric(t, s.config.RunDir, `pilaster_orchestrator_refused_total{limit="calls"}`); n != 3 {
		t.Errorf("%d refusals counted, want 3", n)
	}
	cancel()
	going(0)
	if err := register(member); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	wantCode(t, joinAs(), connect.CodeUnauthenticated)
}
