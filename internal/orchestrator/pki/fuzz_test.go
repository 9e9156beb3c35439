package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"testing"
	"time"
)

// FuzzParseAuthority: what is accepted can sign, and its certificate verifies what it signed.
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
	f.Add(certs[0], keys[0])
	f.Add(certs[0], keys[1])
	f.Add(certs[0], keys[0][:60])
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, cert, key []byte) {
		a, err := ParseAuthority(cert, key)
		if err != nil {
			return
		}
		if _, err := a.Server([]string{"::1", "n1"}, now); err != nil {
			t.Fatalf("accepted, and cannot sign: %v", err)
		}
	})
}

// FuzzSignNode: whatever a machine asks for, it gets a certificate for its name and its own key, or none.
func FuzzSignNode(f *testing.F) {
	now := time.Now()
	a, err := NewAuthority()
	if err != nil {
		f.Fatal(err)
	}
	for _, curve := range []elliptic.Curve{elliptic.P256(), elliptic.P384()} {
		key, err := ecdsa.GenerateKey(curve, rand.Reader)
		if err != nil {
			f.Fatal(err)
		}
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: []string{"n2"}}, key)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(der)
		f.Add(der[:len(der)-1])
	}
	f.Fuzz(func(t *testing.T, csr []byte) {
		der, err := a.SignNode(csr, Node{"n1", "u1"}, now)
		if err != nil {
			return
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		asked, err := x509.ParseCertificateRequest(csr)
		if err != nil || !cert.PublicKey.(*ecdsa.PublicKey).Equal(asked.PublicKey) || asked.PublicKey.(*ecdsa.PublicKey).Curve != elliptic.P256() {
			t.Fatalf("a certificate for another key: %v", err)
		}
		if n, err := NodeOf(cert); err != nil || n != (Node{"n1", "u1"}) || cert.IsCA || len(cert.DNSNames) > 0 {
			t.Fatalf("a certificate for %+v, %v, names %v", n, err, cert.DNSNames)
		}
	})
}
