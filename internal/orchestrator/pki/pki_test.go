package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

var node = Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}

func csr(t testing.TB, key any) []byte {
	t.Helper()
	// The authority must ignore the name.
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: []string{"n2"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func newKey(t testing.TB, c elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestNodeCertificate(t *testing.T) {
	now := time.Now()
	made, err := NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	cert, key, err := made.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	a, err := ParseAuthority(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := a.SignNode(csr(t, newKey(t, elliptic.P256())), node, now)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := NodeOf(leaf); err != nil || got != node {
		t.Errorf("got node %v, %v; want %v", got, err, node)
	}
	verify := func(usage x509.ExtKeyUsage, at time.Time) error {
		_, err := leaf.Verify(
			x509.VerifyOptions{Roots: a.Pool(), KeyUsages: []x509.ExtKeyUsage{usage}, CurrentTime: at},
		)
		return err
	}
	if err := verify(x509.ExtKeyUsageClientAuth, now); err != nil {
		t.Error(err)
	}
	if verify(x509.ExtKeyUsageServerAuth, now) == nil {
		t.Error("a node certificate was verified for a server, want an error")
	}
	if verify(x509.ExtKeyUsageClientAuth, now.Add(NodeLife+time.Minute)) == nil {
		t.Error("an expired certificate was verified, want an error")
	}

	other := newKey(t, elliptic.P384())
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	forged := csr(t, newKey(t, elliptic.P256()))
	forged[len(forged)-1] ^= 1
	for name, bad := range map[string][]byte{
		"P-384": csr(t, other), "RSA": csr(t, rsaKey), "bad signature": forged, "nothing": nil,
	} {
		if _, err := a.SignNode(bad, node, now); err == nil {
			t.Errorf("%s: the request was signed, want an error", name)
		}
	}
}

func TestServerCertificate(t *testing.T) {
	a, err := NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Server([]string{"orchestrator.pilaster", "2001:db8::1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"orchestrator.pilaster", "2001:db8::1"} {
		if err := c.Leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if c.Leaf.VerifyHostname("elsewhere") == nil {
		t.Error("the certificate is valid for any host, want an error")
	}
	if n, err := NodeOf(c.Leaf); err == nil {
		t.Errorf("got node %v in a server certificate, want an error", n)
	}
	if len(c.Certificate) != 2 || !slices.Equal(c.Certificate[1], a.Certificate()) {
		t.Error("the chain does not end with the authority, which a joining node needs")
	}
}

// The authority is valid at any time: the clock may have been wrong when it was made.
func TestAuthorityHasNoExpiry(t *testing.T) {
	a, err := NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, ca, a.Certificate())
	for _, at := range []time.Time{
		time.Unix(0, 0).Add(24 * time.Hour), time.Now(), time.Date(2200, 2, 29, 0, 0, 0, 0, time.UTC),
	} {
		server, err := a.Server([]string{"orchestrator.pilaster"}, at)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := server.Leaf.Verify(x509.VerifyOptions{Roots: a.Pool(), CurrentTime: at}); err != nil {
			t.Errorf("verify at %v: %v", at, err)
		}
		leaf := filepath.Join(t.TempDir(), "server.pem")
		writePEM(t, leaf, server.Certificate[0])
		verify := exec.Command("openssl", "verify", "-x509_strict",
			"-attime", strconv.FormatInt(at.Unix(), 10), "-CAfile", ca, leaf)
		if out, err := verify.CombinedOutput(); err != nil {
			t.Errorf("OpenSSL at %v: %v\n%s", at, err, out)
		}
	}
}

func writePEM(t *testing.T, path string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// OpenSSL verifies the chains independently.
func TestOpenSSLVerifies(t *testing.T) {
	now := time.Now()
	a, err := NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := a.SignNode(csr(t, newKey(t, elliptic.P256())), node, now)
	if err != nil {
		t.Fatal(err)
	}
	server, err := a.Server([]string{"orchestrator.pilaster"}, now)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, der []byte) string {
		path := filepath.Join(dir, name)
		writePEM(t, path, der)
		return path
	}
	ca, n, s := write("ca.pem", a.Certificate()), write("node.pem", leaf), write("server.pem", server.Certificate[0])
	verify := func(args ...string) error {
		return exec.Command("openssl", append([]string{"verify", "-x509_strict", "-CAfile", ca}, args...)...).Run()
	}
	if err := verify("-purpose", "sslclient", n); err != nil {
		t.Errorf("node as client: %v", err)
	}
	if err := verify("-purpose", "sslserver", "-verify_hostname", "orchestrator.pilaster", s); err != nil {
		t.Errorf("orchestrator as server: %v", err)
	}
	if verify("-purpose", "sslserver", n) == nil {
		t.Error("node as server: OpenSSL verified it, want an error")
	}
}
