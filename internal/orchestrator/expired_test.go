package orchestrator

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

const year = 365 * 24 * time.Hour

// outdated has times, as offsets from now. A certificate that was made at such a time is not valid now.
var outdated = map[string]time.Duration{
	"expired":       -pki.NodeLife - time.Hour,
	"not yet valid": year, // the orchestrator's clock was ahead
}

// stateWith returns a node's state directory with a certificate that was made at the given time.
func stateWith(t *testing.T, s *Server, n pki.Node, made time.Time) string {
	t.Helper()
	authority := s.store.Cluster().Authority
	pair := nodePair(t, authority, n, made)
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for _, b := range []pem.Block{
		{Type: "PRIVATE KEY", Bytes: key},
		{Type: "CERTIFICATE", Bytes: pair.Certificate[0]},
		{Type: "CERTIFICATE", Bytes: authority.Certificate()},
	} {
		text = append(text, pem.EncodeToMemory(&b)...)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, join.MemberFile), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// dialFrom connects as a node with the certificate in a state directory, or joins with the token.
func dialFrom(t *testing.T, s *Server, n pki.Node, dir, token string) *join.Client {
	t.Helper()
	c, err := join.Dial(
		t.Context(),
		join.Config{URL: s.url(), Token: token, StateDir: dir, NodeName: n.Name, NodeUUID: n.UUID, Log: s.config.Log},
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func ownCertificate(t *testing.T, dir string) join.Certificate {
	t.Helper()
	all, err := join.Describe(dir)
	if err != nil {
		t.Fatal(err)
	}
	return all[0]
}

func TestOutdatedCertificatePermitsOnlyRenewal(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	registered(t, s, testNode(1)).Close()
	for name, off := range outdated {
		t.Run(name, func(t *testing.T) {
			pair := nodePair(t, s.store.Cluster().Authority, testNode(1), time.Now().Add(off))
			client := raw(t, s, &http.Transport{TLSClientConfig: &tls.Config{
				RootCAs: s.store.Cluster().Authority.Pool(), ServerName: join.ServerName,
				Certificates: []tls.Certificate{pair},
			}})
			check := func(err error) {
				t.Helper()
				wantCode(t, err, connect.CodeUnauthenticated)
				leaf, _ := x509.ParseCertificate(pair.Certificate[0])
				for _, text := range []string{
					"n1",
					"the clock of this orchestrator says " + time.Now().UTC().Format("2006-01-02T"),
					leaf.NotBefore.UTC().Format(time.RFC3339),
					leaf.NotAfter.UTC().Format(time.RFC3339),
				} {
					if err == nil || !strings.Contains(err.Error(), text) {
						t.Errorf("got error %v, want one with %q", err, text)
					}
				}
			}
			_, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
			check(err)
			_, err = client.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
			check(err)
			stream := client.Follow(t.Context())
			stream.Send(&pilasterv1.FollowRequest{})
			_, err = stream.Receive()
			check(err)

			dir := stateWith(t, s, testNode(1), time.Now().Add(off))
			if err := register(t, dialFrom(t, s, testNode(1), dir, "")); err != nil {
				t.Fatalf("renewal without a token: %v", err)
			}
			if c := ownCertificate(t, dir); time.Now().Before(c.NotBefore) || time.Now().After(c.NotAfter) {
				t.Errorf("the certificate is valid from %v to %v, want now in between", c.NotBefore, c.NotAfter)
			}
		})
	}
}

func TestOutdatedCertificateIsNotRenewed(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	s.cache.Lag = time.Second
	long := time.Now().Add(-10 * pki.NodeLife)

	t.Run("never registered", func(t *testing.T) {
		dir := stateWith(t, s, testNode(1), long)
		err := register(t, dialFrom(t, s, testNode(1), dir, ""))
		wantCode(t, err, connect.CodeFailedPrecondition)
		if err == nil || !strings.Contains(err.Error(), "--token-file") {
			t.Error(err)
		}
		if err := register(t, dialFrom(t, s, testNode(1), dir, s.Token())); err != nil {
			t.Errorf("join with a token: %v", err)
		}
	})
	t.Run("connected", func(t *testing.T) {
		c := registered(t, s, testNode(2))
		stream := follow(t, c, hosting())
		stream.next(t)
		dir := stateWith(t, s, testNode(2), long)
		was := ownCertificate(t, dir)
		err := register(t, dialFrom(t, s, testNode(2), dir, ""))
		wantCode(t, err, connect.CodeAlreadyExists)
		if ownCertificate(t, dir).SHA256 != was.SHA256 {
			t.Error("the certificate was renewed, want it unchanged")
		}
	})
	t.Run("deleted", func(t *testing.T) {
		registered(t, s, testNode(3)).Close()
		dir := stateWith(t, s, testNode(3), long)
		request := connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n3"})
		if _, err := operator(s.config.RunDir).DeleteNode(t.Context(), request); err != nil {
			t.Fatal(err)
		}
		for _, token := range []string{"", s.Token()} {
			err := register(t, dialFrom(t, s, testNode(3), dir, token))
			wantCode(t, err, connect.CodeFailedPrecondition)
			if err == nil || !strings.Contains(err.Error(), "until it was deleted") {
				t.Error(err)
			}
		}
	})
	t.Run("another machine's UUID", func(t *testing.T) {
		registered(t, s, testNode(4)).Close()
		n := pki.Node{Name: "n4", UUID: testNode(5).UUID}
		wantCode(t, register(t, dialFrom(t, s, n, stateWith(t, s, n, long), "")), connect.CodeFailedPrecondition)
	})
	t.Run("signed by another cluster", func(t *testing.T) {
		foreign, err := pki.NewAuthority()
		if err != nil {
			t.Fatal(err)
		}
		pair := nodePair(t, foreign, testNode(4), long)
		client := raw(t, s, &http.Transport{TLSClientConfig: &tls.Config{
			RootCAs: s.store.Cluster().Authority.Pool(), ServerName: join.ServerName,
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil },
		}})
		_, err = client.Renew(t.Context(), connect.NewRequest(&pilasterv1.RenewRequest{}))
		wantCode(t, err, connect.CodeUnavailable)
	})
}

// clock is a clock that a test sets ahead or, with a negative value, back.
type clock struct{ ahead atomic.Int64 }

func (c *clock) set(ahead time.Duration) { c.ahead.Store(int64(ahead)) }
func (c *clock) now() time.Time          { return time.Now().Add(time.Duration(c.ahead.Load())) }

// Calls after a renewal use the new certificate, also while a stream from before the renewal continues.
func TestRenewedCertificateIsUsedDuringAStream(t *testing.T) {
	t.Parallel()
	var server clock
	config := testConfig(t)
	config.Now = server.now
	s := start(t, config)
	dir := t.TempDir()
	c := dialFrom(t, s, testNode(1), dir, s.Token())
	if err := register(t, c); err != nil {
		t.Fatal(err)
	}
	stream := follow(t, c, hosting())
	stream.next(t)
	server.set(pki.NodeLife - 24*time.Hour)
	if err := c.RenewCertificate(t.Context()); err != nil {
		t.Fatal(err)
	}
	renewed := ownCertificate(t, dir)
	server.set(pki.NodeLife + 24*time.Hour) // the first certificate has expired
	createTenant(t, s, "blue")
	resolve(t, c, "blue", "web")
	if ownCertificate(t, dir).SHA256 != renewed.SHA256 {
		t.Error("the calls renewed the certificate once more: they used the old one")
	}
	stream.send(t, hosting("blue"))
	if e := stream.next(t); len(e.GetSnapshot().GetTenants())+len(e.GetDelta().GetTenants()) == 0 {
		t.Errorf("got %v on the stream, want the tenant", e)
	}
}

func TestWrongClock(t *testing.T) {
	t.Parallel()
	var server, client clock
	config := testConfig(t)
	config.Now = server.now
	s := start(t, config)
	node := join.Config{
		URL:      s.url(),
		Token:    s.Token(),
		StateDir: t.TempDir(),
		NodeName: "n1",
		NodeUUID: testNode(1).UUID,
		Log:      s.config.Log,
		Now:      client.now,
	}
	wantBothClocks := func(err error) {
		t.Helper()
		wantCode(t, err, connect.CodeUnavailable) // the agent retries after this code
		for _, text := range []string{
			"the clock of this node says " + client.now().UTC().Format("2006-01-02T"),
			"the orchestrator at " + s.url() + " says " + time.Now().UTC().Format("2006-01-02T"),
		} {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("got error %v, want one with %q", err, text)
			}
		}
	}
	for _, off := range []time.Duration{-8 * year, 8 * year} {
		client.set(off)
		_, err := join.Dial(t.Context(), node)
		wantBothClocks(err)
	}
	client.set(0)
	c, err := join.Dial(t.Context(), node)
	if err != nil {
		t.Fatalf("with a correct clock: %v", err)
	}
	defer c.Close()
	if err := register(t, c); err != nil {
		t.Fatal(err)
	}

	for _, off := range []time.Duration{-8 * year, 8 * year} {
		client.set(off)
		again, err := join.Dial(t.Context(), node) // a restart
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		wantBothClocks(register(t, again))
		client.set(0)
		if err := register(t, again); err != nil {
			t.Errorf("with a correct clock: %v", err)
		}
	}

	token, err := join.ParseToken(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	for _, off := range []time.Duration{-8 * year, 8 * year} { // of the orchestrator's clock
		server.set(off)
		c.Close()
		other := node
		other.StateDir = t.TempDir()
		_, err := join.Dial(t.Context(), other)
		wantBothClocks(err)
		if _, err := join.Probe(t.Context(), s.url(), token); err != nil {
			t.Errorf("Probe, with which preflight reads the orchestrator's clock: %v", err)
		}
		client.set(off) // with both clocks wrong, certificates are made that are not valid now
		again, err := join.Dial(t.Context(), node)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		if err := again.RenewCertificate(t.Context()); off > 0 && err != nil {
			t.Errorf("renewal with both clocks ahead: %v", err)
		}
		server.set(0)
		client.set(0)
		if err := register(t, again); err != nil {
			t.Errorf("with both clocks correct again: %v", err)
		}
	}
}
