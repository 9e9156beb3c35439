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

// flipByte returns a copy with one byte changed; a flip of 0 changes nothing.
func flipByte(der []byte, at uint16, flip byte) []byte {
	der = bytes.Clone(der)
	if len(der) > 0 {
		der[int(at)%len(der)] ^= flip
	}
	return der
}

// FuzzParseAuthority: an accepted authority can sign, its certificate verifies what it has signed, and Marshal returns
// the same certificate and key.
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
	request := csr(f, newKey(f, elliptic.P256()))
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
		cert = flipByte(cert, at, flip)
		a, err := ParseAuthority(cert, key)
		if err != nil {
			return
		}
		if _, err := a.Server([]string{"::1", "n1"}, now); err != nil {
			t.Fatalf("an accepted authority cannot sign a server: %v", err)
		}
		der, err := a.SignNode(request, Node{"n1", "u1"}, now)
		if err != nil {
			t.Fatalf("an accepted authority cannot sign a node: %v", err)
		}
		leaf, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		options := x509.VerifyOptions{
			Roots: a.Pool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		}
		if _, err := leaf.Verify(options); err != nil {
			t.Fatalf("the signed certificate cannot be verified: %v", err)
		}
		if c, k, err := a.Marshal(); err != nil || !bytes.Equal(c, cert) || !sameKey(k, key) {
			t.Fatalf("Marshal returned another certificate or key: %v", err)
		}
	})
}

func sameKey(a, b []byte) bool {
	one, err1 := x509.ParsePKCS8PrivateKey(a)
	other, err2 := x509.ParsePKCS8PrivateKey(b)
	return err1 == nil && err2 == nil && one.(interface{ Equal(crypto.PrivateKey) bool }).Equal(other)
}

// FuzzSignNode: SignNode returns a certificate for the node's name and the key of the request, or an error.
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
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		f.Fatal(err)
	}
	// Agents make requests of the first kind only.
	var requests [][]byte
	for _, key := range []crypto.Signer{
		newKey(f, elliptic.P256()), newKey(f, elliptic.P224()), newKey(f, elliptic.P384()), newKey(f, elliptic.P521()),
		edwards, rsaKey,
	} {
		requests = append(requests, csr(f, key))
	}
	f.Add([]byte{}, byte(0), uint16(0), byte(0))
	f.Add(requests[0], byte(1), uint16(0), byte(0))
	f.Add(requests[0][:len(requests[0])-1], byte(1), uint16(0), byte(0))
	f.Fuzz(func(t *testing.T, der []byte, kind byte, at uint16, flip byte) {
		if kind != 1 {
			der = requests[int(kind)%len(requests)]
		}
		request := flipByte(der, at, flip)
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
			t.Fatalf("signed a request without a valid signature: %v", err)
		}
		key, ok := asked.PublicKey.(*ecdsa.PublicKey)
		if !ok || key.Curve != elliptic.P256() || !key.Equal(cert.PublicKey) {
			t.Fatalf("requested a %T, got a certificate for a %T", asked.PublicKey, cert.PublicKey)
		}
		if n, err := NodeOf(cert); err != nil || n != (Node{"n1", "u1"}) || cert.IsCA ||
			len(cert.DNSNames)+len(cert.IPAddresses) > 0 ||
			a.VerifyNode(cert) != nil {
			t.Fatalf("got a certificate for %+v, %v, names %v; want n1 with UUID u1", n, err, cert.DNSNames)
		}
	})
}
