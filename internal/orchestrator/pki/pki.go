// Package pki is the cluster's certificate authority: it signs a certificate for each orchestrator, and one for each
// node with the node's name and UUID. It stores nothing: the authority's key is in the store, which all orchestrators
// of a cluster share.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/join"
)

// Validity of certificates, except the authority's own. A node renews when a third of the time is left.
const (
	ServerLife = 365 * 24 * time.Hour
	NodeLife   = 90 * 24 * time.Hour

	// clockSkew is how far a node's clock may lag behind the orchestrator's.
	clockSkew = time.Hour
)

// Authority signs certificates.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// NewAuthority makes a self-signed authority that is valid at any time. It cannot be replaced, because every join token
// contains its hash, and the clock may be wrong when NewAuthority runs.
func NewAuthority() (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{CommonName: join.AuthorityName},
		NotBefore:             time.Unix(0, 0),
		NotAfter:              time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // no end: RFC 5280, 4.1.2.5
		IsCA:                  true,
		MaxPathLenZero:        true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &Authority{cert, key}, err
}

// ParseAuthority reads the output of Marshal.
func ParseAuthority(certDER, keyDER []byte) (*Authority, error) {
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return nil, fmt.Errorf("certificate of the authority: %w", err)
	}
	if err := cert.CheckSignatureFrom(cert); err != nil { // this also checks that it may sign
		return nil, fmt.Errorf("certificate of the authority: %w", err)
	}
	key, err := x509.ParsePKCS8PrivateKey(keyDER)
	if err != nil {
		return nil, fmt.Errorf("key of the authority: %w", err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("key of the authority: a %T cannot sign", key)
	}
	if public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(cert.PublicKey) {
		return nil, errors.New("key of the authority: it is not the certificate's")
	}
	return &Authority{cert, signer}, nil
}

// Marshal returns the certificate and the PKCS#8 key, both DER.
func (a *Authority) Marshal() (certDER, keyDER []byte, err error) {
	keyDER, err = x509.MarshalPKCS8PrivateKey(a.key)
	return a.cert.Raw, keyDER, err
}

// Certificate is the authority's certificate, DER.
func (a *Authority) Certificate() []byte { return a.cert.Raw }

// Sum is the hash that a join token pins.
func (a *Authority) Sum() [sha256.Size]byte { return sha256.Sum256(a.cert.Raw) }

// Pool contains only the authority.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// Server makes an orchestrator's certificate for these host names and IP addresses. The chain includes the authority,
// because a joining node has only the authority's hash.
func (a *Authority) Server(hosts []string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "Pilaster orchestrator"},
		NotAfter:    now.Add(ServerLife),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	der, err := a.sign(t, key.Public(), now)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	return &tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: key, Leaf: leaf}, err
}

// Node is the identity in a node certificate.
type Node struct{ Name, UUID string }

const uuidURN = "urn:uuid:"

// SignNode signs a certificate for the key of a signing request (PKCS#10, DER). It takes only the key from the request;
// the caller determines the node.
func (a *Authority) SignNode(csrDER []byte, n Node, now time.Time) ([]byte, error) {
	csr, err := x509.ParseCertificateRequest(csrDER)
	if err != nil {
		return nil, fmt.Errorf("certificate signing request: %w", err)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, fmt.Errorf("certificate signing request: %w", err)
	}
	if k, ok := csr.PublicKey.(*ecdsa.PublicKey); !ok || k.Curve != elliptic.P256() {
		return nil, errors.New("certificate signing request: the key is not ECDSA on P-256")
	}
	return a.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: n.Name},
		URIs:        []*url.URL{{Scheme: "urn", Opaque: "uuid:" + n.UUID}},
		NotAfter:    now.Add(NodeLife),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, csr.PublicKey, now)
}

// VerifyNode accepts a certificate that this authority signed for a node, inside or outside its validity period.
func (a *Authority) VerifyNode(c *x509.Certificate) error {
	return join.VerifyButTime(c, a.cert, x509.VerifyOptions{KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
}

// NodeOf reads the identity in a verified node certificate.
func NodeOf(c *x509.Certificate) (Node, error) {
	if len(c.URIs) != 1 || c.Subject.CommonName == "" {
		return Node{}, errors.New("the certificate is not bound to a node")
	}
	uuid, ok := strings.CutPrefix(c.URIs[0].String(), uuidURN)
	if !ok {
		return Node{}, errors.New("the certificate is not bound to a node")
	}
	return Node{c.Subject.CommonName, uuid}, nil
}

func (a *Authority) sign(t *x509.Certificate, key crypto.PublicKey, now time.Time) ([]byte, error) {
	t.SerialNumber = serial()
	t.NotBefore = now.Add(-clockSkew)
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.BasicConstraintsValid = true
	return x509.CreateCertificate(rand.Reader, t, a.cert, key, a.key)
}

func serial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	b[0] &= 0x7f // positive, at most 16 octets
	return new(big.Int).SetBytes(b[:])
}
