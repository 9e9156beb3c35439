package orchestrator

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
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

// nodePair returns a node's certificate, signed by an authority, and its key.
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

func TestClientCertificates(t *testing.T) {
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
		{"certificate that names no node", ptr(nodePair(t, authority, pki.Node{UUID: testNode(1).UUID}, time.Now())),
			connect.CodeUnauthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := raw(t, s, &http.Transport{TLSClientConfig: &tls.Config{
				RootCAs: authority.Pool(), ServerName: join.ServerName,
				GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					if c.pair == nil {
						return &tls.Certificate{}, nil
					}
					return c.pair, nil // sent even if the server does not list its authority
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
		t.Errorf("registered nodes %v, want none", nodes)
	}

	t.Run("long request without a certificate", func(t *testing.T) {
		client := raw(
			t,
			s,
			&http.Transport{TLSClientConfig: &tls.Config{RootCAs: authority.Pool(), ServerName: join.ServerName}},
		)
		_, err := client.Join(t.Context(), connect.NewRequest(&pilasterv1.JoinRequest{Csr: make([]byte, 65<<10)}))
		wantCode(t, err, connect.CodeResourceExhausted)
	})
	t.Run("TLS 1.2", func(t *testing.T) {
		c, err := tls.Dial(
			"tcp",
			s.Addr().String(),
			&tls.Config{RootCAs: authority.Pool(), ServerName: join.ServerName, MaxVersion: tls.VersionTLS12},
		)
		if err == nil {
			c.Close()
			t.Error("a TLS 1.2 connection was accepted, want an error")
		}
	})
	t.Run("without TLS", func(t *testing.T) {
		resp, err := http.Get("http://" + s.Addr().String() + "/healthz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				t.Error("got status 200 over plain HTTP, want none")
			}
		}
	})
	t.Run("paths", func(t *testing.T) {
		client := &http.Client{
			Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: authority.Pool()}},
		} // verifies the server by its IP address, not by join.ServerName
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
	t.Run("operator call with a node certificate", func(t *testing.T) {
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
			t.Errorf("got mode %v, %v; want 0600", fi.Mode(), err)
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
			URL: s.url(), Token: token.String(), StateDir: t.TempDir(),
			NodeName: n.Name, NodeUUID: n.UUID, Log: s.config.Log,
		})
		return err
	}
	wantCode(t, try(wrongSecret, testNode(1)), connect.CodeUnauthenticated)
	err = try(wrongPin, testNode(1))
	var other *join.OtherClusterError
	if !errors.As(err, &other) || other.Token != wrongPin.CA || other.Server != good.CA ||
		errors.As(err, new(*connect.Error)) { // an agent would retry
		t.Errorf("wrong pin: got error %v, want one that names both clusters and permits no retry", err)
	}
	wantText(t, err, fmt.Sprintf("it ends in %x…, and those of this orchestrator's cluster in %x…",
		wrongPin.CA[:4], good.CA[:4]))
	wantCode(t, try(good, pki.Node{Name: "N1", UUID: testNode(1).UUID}), connect.CodeInvalidArgument)
	wantCode(t, try(good, pki.Node{Name: "n1", UUID: "1"}), connect.CodeInvalidArgument)
	registered(t, s, testNode(1))
	wantCode(t, try(good, pki.Node{Name: "n1", UUID: testNode(2).UUID}), connect.CodeFailedPrecondition)
	wantCode(t, try(good, pki.Node{Name: "n2", UUID: testNode(1).UUID}), connect.CodeFailedPrecondition)
	if err := try(good, testNode(1)); err != nil {
		t.Errorf("join again with the same name and UUID: %v", err)
	}
}

// A node refuses a server whose chain only contains the pinned authority: this authority must also have signed the
// server's certificate, for an orchestrator.
func TestPinVerifiesTheServerCertificate(t *testing.T) {
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
		"impostor with the authority appended": {
			Certificate: [][]byte{fake.Certificate[0], authority.Certificate()}, PrivateKey: fake.PrivateKey,
		},
		"a node as server": {
			Certificate: [][]byte{node.Certificate[0], authority.Certificate()}, PrivateKey: node.PrivateKey,
		},
	} {
		l, err := tls.Listen(
			"tcp",
			"[::1]:0",
			&tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}},
		)
		if err != nil {
			t.Fatal(err)
		}
		received := make(chan []byte, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				received <- nil
				return
			}
			defer c.Close()
			b, _ := io.ReadAll(io.LimitReader(c, 1))
			received <- b
		}()
		_, err = join.Dial(t.Context(), join.Config{
			URL: "https://" + l.Addr().(*net.TCPAddr).String(), Token: s.Token(), StateDir: t.TempDir(),
			NodeName: "n1", NodeUUID: testNode(1).UUID, Log: s.config.Log,
		})
		wantCode(t, err, connect.CodeUnavailable)
		if b := <-received; len(b) != 0 {
			t.Errorf("%s: the server received data, want none", name)
		}
		l.Close()
	}
}

func TestRenewedCertificateIsStored(t *testing.T) {
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
		t.Fatalf("got %v in the state directory, want one file", before)
	}
	first, _ := os.ReadFile(config.StateDir + "/" + before[0].Name())
	if err := c.RenewCertificate(t.Context()); err != nil {
		t.Fatal(err)
	}
	second, _ := os.ReadFile(config.StateDir + "/" + before[0].Name())
	if string(first) == string(second) {
		t.Error("the certificate file is unchanged after the renewal")
	}
	config.Token = "" // the certificate authenticates the node
	again, err := join.Dial(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	for _, client := range []*join.Client{c, again} {
		resp, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
		if err != nil || resp.Msg.Node.Name != "n1" {
			t.Errorf("register with the new certificate: got %v, %v; want node n1", resp, err)
		}
	}
}

// A node whose orchestrator was started with an empty data directory gets an error that names both clusters.
func TestAnotherCluster(t *testing.T) {
	var log bytes.Buffer
	c := testConfig(t)
	c.Log = slog.New(slog.NewTextHandler(&log, nil))
	other := start(t, c)
	if !strings.Contains(log.String(), "a new cluster was created") ||
		!strings.Contains(log.String(), other.store.Cluster().UUID) {
		t.Errorf("the log of a start with an empty data directory has no new cluster:\n%s", log.String())
	}
	own, n1, dir := start(t, testConfig(t)), testNode(1), t.TempDir()
	dialURL := func(url string) *join.Client {
		client, err := join.Dial(t.Context(), join.Config{
			URL: url, Token: own.Token(), StateDir: dir, NodeName: n1.Name, NodeUUID: n1.UUID, Log: own.config.Log,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Close)
		return client
	}
	dialURL(own.url())
	_, err := dialURL(other.url()).Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
	ca := other.store.Cluster().Authority.Sum()
	if err == nil || !strings.Contains(err.Error(), "belongs to another cluster than this node") ||
		!strings.Contains(err.Error(), fmt.Sprintf("%x", ca[:4])) || strings.Contains(err.Error(), "x509") {
		t.Errorf("got error %v; want one that names both clusters", err)
	}
}
