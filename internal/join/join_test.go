package join

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io/fs"
	"log/slog"
	"math/big"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const goodToken = "pilaster.000102030405060708090a0b0c0d0e0f." +
	"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"

func TestToken(t *testing.T) {
	token, err := ParseToken("  " + goodToken + "\n")
	if err != nil {
		t.Fatal(err)
	}
	if token.Secret[15] != 15 || token.CA[31] != 31 || token.String() != goodToken {
		t.Errorf("got token %v, want %s", token, goodToken)
	}
	for _, bad := range []string{
		"", "pilaster", "pilaster..", strings.ToUpper(goodToken), goodToken[1:], goodToken + "00",
		goodToken[:len(goodToken)-2],
		strings.Replace(goodToken, "0f.", "0g.", 1), goodToken + ".00", strings.Replace(goodToken, ".", " ", 1),
	} {
		if _, err := ParseToken(bad); err == nil {
			t.Errorf("%q was accepted, want an error", bad)
		}
	}
}

func FuzzToken(f *testing.F) {
	f.Add(goodToken)
	f.Add("pilaster..")
	f.Fuzz(func(t *testing.T, s string) {
		token, err := ParseToken(s)
		if err != nil {
			return
		}
		if !strings.EqualFold(token.String(), strings.TrimSpace(s)) {
			t.Errorf("%q was read as %s", s, token)
		}
	})
}

// newTestMember returns a certificate from a new authority.
func newTestMember(t testing.TB, name, uuid string, until time.Time) *member {
	t.Helper()
	sign := func(c, parent *x509.Certificate, pub, key any) []byte {
		der, err := x509.CreateCertificate(rand.Reader, c, parent, pub, key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	caKey, _, err := request()
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := request()
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
		NotAfter:              until,
	}
	caDER := sign(ca, ca, &caKey.PublicKey, caKey)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: until.Add(-time.Hour), NotAfter: until,
		Subject: pkix.Name{CommonName: name}, URIs: []*url.URL{{Scheme: "urn", Opaque: "uuid:" + uuid}},
	}
	m, err := newMember(key, sign(leaf, ca, &key.PublicKey, caKey), caDER)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestCalling: the address of a connection is known before it is made.
func TestCalling(t *testing.T) {
	var called []netip.Addr
	c := Config{Calling: func(a netip.Addr) { called = append(called, a) }}
	if conn, err := c.newTransport(nil).DialContext(t.Context(), "tcp", "[::1]:1"); err == nil {
		conn.Close()
		t.Fatal("port 1 answers")
	}
	if len(called) != 1 || called[0] != netip.IPv6Loopback() {
		t.Errorf("called %v", called)
	}
}

func TestMemberFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if _, err := load(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("load without a file: got error %v", err)
	}
	m := newTestMember(t, "n1", "u1", time.Now().Add(time.Hour))
	if err := m.save(dir); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(filepath.Join(dir, MemberFile)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("got mode %v, %v; want 0600", fi.Mode(), err)
	}
	if files, _ := os.ReadDir(dir); len(files) != 1 {
		t.Errorf("got files %v, want %s only", files, MemberFile)
	}
	token := Token{CA: m.caSum()}
	good := Config{
		URL:      "https://[::1]:1",
		StateDir: dir,
		NodeName: "n1",
		NodeUUID: "u1",
		Log:      slog.New(slog.DiscardHandler),
	}
	if c, err := Dial(t.Context(), good); err != nil || !c.current.Load().key.Equal(m.key) {
		t.Errorf("dial with a certificate, without a token or an orchestrator: %v", err)
	}
	good.Token = token.String()
	if _, err := Dial(t.Context(), good); err != nil {
		t.Errorf("dial with a certificate and a token of the same cluster: %v", err)
	}

	for _, c := range []struct {
		name, text string
		change     func(*Config)
	}{
		{"another name", "has joined as n1", func(c *Config) { c.NodeName = "n2" }},
		{"another UUID", "has joined as n1", func(c *Config) { c.NodeUUID = "u2" }},
		{"another cluster", "another cluster", func(c *Config) { c.Token = goodToken }},
		{"invalid token", "not of the form", func(c *Config) { c.Token = "x" }},
		{"no TLS", "https://", func(c *Config) { c.URL = "http://[::1]:1" }},
		{"never joined", "no join token", func(c *Config) { c.StateDir, c.Token = t.TempDir(), "" }},
	} {
		config := good
		c.change(&config)
		if _, err := Dial(t.Context(), config); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got error %v, want one with %q", c.name, err, c.text)
		}
	}

	expired := newTestMember(t, "n1", "u1", time.Now().Add(-time.Minute))
	if err := expired.save(dir); err != nil {
		t.Fatal(err)
	}
	good.Token = ""
	if c, err := Dial(t.Context(), good); err != nil || !c.current.Load().key.Equal(expired.key) {
		t.Errorf("dial with an expired certificate, without a token: %v", err)
	}
	for _, damage := range []string{"", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
		if err := os.WriteFile(filepath.Join(dir, MemberFile), []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := load(dir); err == nil || !strings.Contains(err.Error(), MemberFile) {
			t.Errorf("damaged file %q: got error %v, want one with the file's name", damage, err)
		}
	}
}
