package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"testing"
	"time"
)

// damaged changes one byte of a copy; a flip of 0 leaves all as it is.
func damaged(der []byte, at uint16, flip byte) []byte {
	der = bytes.Clone(der)
	if len(der) > 0 {
		der[int(at)%len(der)] ^= flip
	}
	return der
}

// FuzzParseAuthority: what is accepted can sign, its certificate verifies what it signed, and it stays the same.
func FuzzParseAuthority(f *testing.F) {
	now := time.Now()
	var certs, keys [2][]byte
	for i := range certs {
		a, err := NewAuthority()
		if err != nil {
			f.Fatal(err)
		}
		if certs[i], keys[i], err = a.Marshal(); err != nil {
			f.Fatal(err)
		}
	}
	asked := csr(f, newKey(f, elliptic.P256()))
	f.Add(certs[0], keys[0], byte(0), byte(0), uint16(0), byte(0))
	f.Add(certs[0], keys[0][:60], byte(0), byte(0), uint16(0), byte(0))
	f.Add([]byte{}, []byte{}, byte(1), byte(1), uint16(0), byte(0))
	f.Fuzz(func(t *testing.T, cert, key []byte, whoseCert, whoseKey byte, at uint16, flip byte) {
		if whoseCert > 0 {
			cert = certs[whoseCert%2]
		}
		if whoseKey > 0 {
			key = keys[whoseKey%2]
		}
		cert = damaged(cert, at, flip)
		a, err := ParseAuthority(cert, key)
		if err != nil {
			return
		}
		if _, err := a.Server([]string{"::1", "n1"}, now); err != nil {
			t.Fatalf("accepted, and cannot sign: %v", err)
		}
		der, err := a.SignNode(asked, Node{"n1", "u1"}, now)
		if err != nil {
			t.Fatalf("accepted, and cannot sign: %v", err)
		}
		leaf, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: a.Pool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			t.Fatalf("it signed what nobody can verify: %v", err)
		}
		if c, k, err := a.Marshal(); err != nil || !bytes.Equal(c, cert) || !sameKey(k, key) {
			t.Fatalf("it became another: %v", err)
		}
	})
}

func sameKey(a, b []byte) bool {
	one, err1 := x509.ParsePKCS8PrivateKey(a)
	other, err2 := x509.ParsePKCS8PrivateKey(b)
	return err1 == nil && err2 == nil && one.(interface{ Equal(crypto.PrivateKey) bool }).Equal(other)
}

// FuzzSignNode: whatever a machine asks for, it gets a certificate for its name and its own key, or none.
func FuzzSignNode(f *testing.F) {
	now := time.Now()
	a, err := NewAuthority()
	if err != nil {
		f.Fatal(err)
	}
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	long, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		f.Fatal(err)
	}
	// All but the first are of kinds that no agent makes.
	var requests [][]byte
	for _, key := range []crypto.Signer{newKey(f, elliptic.P256()), newKey(f, elliptic.P224()), newKey(f, elliptic.P384()), newKey(f, elliptic.P521()), edwards, long} {
		requests = append(requests, csr(f, key))
	}
	f.Add([]byte{}, byte(0), uint16(0), byte(0))
	f.Add(requests[0], byte(1), uint16(0), byte(0))
	f.Add(requests[0][:len(requests[0])-1], byte(1), uint16(0), byte(0))
	f.Fuzz(func(t *testing.T, der []byte, kind byte, at uint16, flip byte) {
		if kind != 1 {
			der = requests[int(kind)%len(requests)]
		}
		request := damaged(der, at, flip)
		der, err := a.SignNode(request, Node{"n1", "u1"}, now)
		if err != nil {
			return
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		asked, err := x509.ParseCertificateRequest(request)
		if err != nil || asked.CheckSignature() != nil {
			t.Fatalf("nobody has shown the key: %v", err)
		}
		key, ok := asked.PublicKey.(*ecdsa.PublicKey)
		if !ok || key.Curve != elliptic.P256() || !key.Equal(cert.PublicKey) {
			t.Fatalf("asked for a %T, got one for a %T", asked.PublicKey, cert.PublicKey)
		}
		if n, err := NodeOf(cert); err != nil || n != (Node{"n1", "u1"}) || cert.IsCA ||
			len(cert.DNSNames)+len(cert.IPAddresses) > 0 ||
			a.VerifyNode(cert) != nil {
			t.Fatalf("a certificate for %+v, %v, names %v", n, err, cert.DNSNames)
		}
	})
}
