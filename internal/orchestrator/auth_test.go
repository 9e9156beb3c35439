package orchestrator

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// nodePair is a node's certificate from any authority.
func nodePair(t *testing.T, a *pki.Authority, n pki.Node, made time.Time) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := a.SignNode(csr, n, made)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestWhoMayCall(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	authority := s.store.Cluster().Authority
	foreign, err := pki.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	server, err := authority.Server([]string{join.ServerName}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		pair *tls.Certificate
		want connect.Code
	}{
		{"no certificate", nil, connect.CodeUnauthenticated},
		{"certificate of another cluster", ptr(nodePair(t, foreign, testNode(1), time.Now())), connect.CodeUnavailable},
		{"certificate of an orchestrator", server, connect.CodeUnavailable},
		{"certificate that is not bound", ptr(nodePair(t, authority, pki.Node{UUID: testNode(1).UUID}, time.Now())), connect.CodeUnauthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := raw(t, s, &http.Transport{TLSClientConfig: &tls.Config{
				RootCAs: authority.Pool(), ServerName: join.ServerName,
				GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					if c.pair == nil {
						return &tls.Certificate{}, nil
					}
					return c.pair, nil // whatever authorities the server asks for
				},
			}})
			_, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
			wantCode(t, err, c.want)
			_, err = client.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
			wantCode(t, err, c.want)
			_, err = client.Renew(t.Context(), connect.NewRequest(&pilasterv1.RenewRequest{}))
			wantCode(t, err, c.want)
			stream := client.Follow(t.Context())
			stream.Send(&pilasterv1.FollowRequest{})
			_, err = stream.Receive()
			wantCode(t, err, c.want)
		})
	}
	if nodes := s.cache.AllNodes(); len(nodes) != 0 {
		t.Errorf("one of them registered: %v", nodes)
	}

	t.Run("much from a stranger", func(t *testing.T) {
		client := raw(
			t,
			s,
			&http.Transport{TLSClientConfig: &tls.Config{RootCAs: authority.Pool(), ServerName: join.ServerName}},
		)
		_, err := client.Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{Csr: make([]byte, 65<<10)}))
		wantCode(t, err, connect.CodeResourceExhausted)
	})
	t.Run("old TLS", func(t *testing.T) {
		c, err := tls.Dial(
			"tcp",
			s.Addr().String(),
			&tls.Config{RootCAs: authority.Pool(), ServerName: join.ServerName, MaxVersion: tls.VersionTLS12},
		)
		if err == nil {
			c.Close()
			t.Error("TLS 1.2 was accepted")
		}
	})
	t.Run("without TLS", func(t *testing.T) {
		resp, err := http.Get("http://" + s.Addr().String() + "/healthz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				t.Error("plain HTTP was served")
			}
		}
	})
	t.Run("paths", func(t *testing.T) {
		client := &http.Client{
			Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: authority.Pool()}},
		} // by address, not by name
		for path, want := range map[string]int{
			"/healthz": 200, "/readyz": 200, "/metrics": 401, "/": 401,
			"/pilaster.v1.OperatorService/ListTenants": 401, "/healthz/": 401, "//healthz": 401,
		} {
			resp, err := client.Get(s.url() + path)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("%s: status %d, want %d", path, resp.StatusCode, want)
			}
		}
	})
	t.Run("a node is no operator", func(t *testing.T) {
		pair := nodePair(t, authority, testNode(1), time.Now())
		client := &http.Client{
			Transport: &http.Transport{
				TLSClientConfig: &tls.Config{RootCAs: authority.Pool(), Certificates: []tls.Certificate{pair}},
			},
		}
		resp, err := client.Post(
			s.url()+"/pilaster.v1.OperatorService/ListTenants",
			"application/json",
			strings.NewReader("{}"),
		)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("status %d, want 404", resp.StatusCode)
		}
	})
	t.Run("socket", func(t *testing.T) {
		fi, err := os.Stat(Socket(s.config.RunDir))
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v; want 0600", fi.Mode(), err)
		}
	})
}

func ptr[T any](v T) *T { return &v }

func TestJoinRefuses(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	good, err := join.ParseToken(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	wrongSecret, wrongPin := good, good
	wrongSecret.Secret[0] ^= 1
	wrongPin.CA[0] ^= 1
	try := func(token join.Token, n pki.Node) error {
		_, err := join.Dial(t.Context(), join.Config{
			URL: s.url(), Token: token.String(), StateDir: t.TempDir(), NodeName: n.Name, NodeUUID: n.UUID, Log: s.config.Log,
		})
		return err
	}
	wantCode(t, try(wrongSecret, testNode(1)), connect.CodeUnauthenticated)
	err = try(wrongPin, testNode(1))
	wantCode(t, err, connect.CodeUnavailable)
	if !strings.Contains(err.Error(), "does not belong to the cluster of this join token") {
		t.Errorf("wrong pin: %v", err)
	}
	wantCode(t, try(good, pki.Node{Name: "N1", UUID: testNode(1).UUID}), connect.CodeInvalidArgument)
	wantCode(t, try(good, pki.Node{Name: "n1", UUID: "1"}), connect.CodeInvalidArgument)
	registered(t, s, testNode(1))
	wantCode(t, try(good, pki.Node{Name: "n1", UUID: testNode(2).UUID}), connect.CodeFailedPrecondition)
	wantCode(t, try(good, pki.Node{Name: "n2", UUID: testNode(1).UUID}), connect.CodeFailedPrecondition)
	if err := try(good, testNode(1)); err != nil {
		t.Errorf("a node that lost its certificate, not its UUID: %v", err)
	}
}

// A server whose chain merely contains the pinned authority must not pass for an orchestrator.
func TestPinNeedsMoreThanTheAuthorityInTheChain(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	authority := s.store.Cluster().Authority
	impostor, err := pki.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	fake, err := impostor.Server([]string{join.ServerName}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	node := nodePair(t, authority, testNode(1), time.Now())
	for name, pair := range map[string]tls.Certificate{
		"impostor with the authority appended": {Certificate: [][]byte{fake.Certificate[0], authority.Certificate()}, PrivateKey: fake.PrivateKey},
		"a node as server":                     {Certificate: [][]byte{node.Certificate[0], authority.Certificate()}, PrivateKey: node.PrivateKey},
	} {
		l, err := tls.Listen(
			"tcp",
			"[::1]:0",
			&tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}},
		)
		if err != nil {
			t.Fatal(err)
		}
		heard := make(chan []byte, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				heard <- nil
				return
			}
			defer c.Close()
			b, _ := io.ReadAll(io.LimitReader(c, 1))
			heard <- b
		}()
		_, err = join.Dial(t.Context(), join.Config{
			URL: "https://" + l.Addr().(*net.TCPAddr).String(), Token: s.Token(), StateDir: t.TempDir(),
			NodeName: "n1", NodeUUID: testNode(1).UUID, Log: s.config.Log,
		})
		wantCode(t, err, connect.CodeUnavailable)
		if b := <-heard; len(b) != 0 {
			t.Errorf("%s: was told something", name)
		}
		l.Close()
	}
}

func TestRenewAndRemember(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	config := join.Config{
		URL:      s.url(),
		Token:    s.Token(),
		StateDir: t.TempDir(),
		NodeName: "n1",
		NodeUUID: testNode(1).UUID,
		Log:      s.config.Log,
	}
	c, err := join.Dial(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	before, _ := os.ReadDir(config.StateDir)
	if len(before) != 1 {
		t.Fatalf("state: %v", before)
	}
	first, _ := os.ReadFile(config.StateDir + "/" + before[0].Name())
	if err := c.RenewCertificate(t.Context()); err != nil {
		t.Fatal(err)
	}
	second, _ := os.ReadFile(config.StateDir + "/" + before[0].Name())
	if string(first) == string(second) {
		t.Error("nothing was renewed")
	}
	config.Token = "" // the certificate is enough from now on
	again, err := join.Dial(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	for _, client := range []*join.Client{c, again} {
		resp, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
		if err != nil || resp.Msg.Node.Name != "n1" {
			t.Errorf("with the new certificate: %v, %v", resp, err)
		}
	}
}
