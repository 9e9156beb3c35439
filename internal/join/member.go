package join

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"pilaster.io/pilaster/internal/statefile"
)

// member is a node's key, its certificate and the cluster's authority. All are in one file on disk, so that a crash
// cannot leave a certificate with another key.
type member struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	ca   *x509.Certificate
}

// MemberFile is the name of the file with a node's key, its certificate and the authority.
const MemberFile = "member.pem"

// Joined reports whether a node's state directory has a certificate, valid or not.
func Joined(stateDir string) bool {
	_, err := os.Stat(filepath.Join(stateDir, MemberFile))
	return !errors.Is(err, fs.ErrNotExist)
}

// request makes a key and the signing request for it.
func request() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	// The request has no name and UUID, because the orchestrator uses the authenticated ones.
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	return key, csr, err
}

func newMember(key *ecdsa.PrivateKey, certDER, caDER []byte) (*member, error) {
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return nil, fmt.Errorf("certificate of this node: %w", err)
	}
	ca, err := x509.ParseCertificate(caDER)
	if err != nil {
		return nil, fmt.Errorf("certificate authority: %w", err)
	}
	if err := cert.CheckSignatureFrom(ca); err != nil {
		return nil, fmt.Errorf("certificate of this node is not signed by the cluster's authority: %w", err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, errors.New("certificate of this node is for another key")
	}
	return &member{key, cert, ca}, nil
}

func (m *member) tlsCertificate() *tls.Certificate {
	return &tls.Certificate{Certificate: [][]byte{m.cert.Raw}, PrivateKey: m.key, Leaf: m.cert}
}

func (m *member) caSum() [sha256.Size]byte { return sha256.Sum256(m.ca.Raw) }

// pin returns the authority's hash as a token without a secret.
func (m *member) pin() Token { return Token{CA: m.caSum()} }

// is reports whether the certificate is for this name and UUID.
func (m *member) is(name, uuid string) bool {
	return m.cert.Subject.CommonName == name && len(m.cert.URIs) == 1 && m.cert.URIs[0].String() == "urn:uuid:"+uuid
}

func (m *member) save(dir string) error {
	key, err := x509.MarshalPKCS8PrivateKey(m.key)
	if err != nil {
		return err
	}
	var text []byte
	for _, b := range []pem.Block{
		{Type: "PRIVATE KEY", Bytes: key},
		{Type: "CERTIFICATE", Bytes: m.cert.Raw},
		{Type: "CERTIFICATE", Bytes: m.ca.Raw},
	} {
		text = append(text, pem.EncodeToMemory(&b)...)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return statefile.WriteBytes(filepath.Join(dir, MemberFile), text, 0o600)
}

// load returns os.ErrNotExist if the node has not joined.
func load(dir string) (*member, error) {
	path := filepath.Join(dir, MemberFile)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var ders [][]byte
	var kinds []string
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		ders, kinds = append(ders, b.Bytes), append(kinds, b.Type)
	}
	if !slices.Equal(kinds, []string{"PRIVATE KEY", "CERTIFICATE", "CERTIFICATE"}) {
		return nil, unusable(path, fmt.Errorf("its PEM blocks are %q, want key, certificate and authority", kinds))
	}
	parsed, err := x509.ParsePKCS8PrivateKey(ders[0])
	if err != nil {
		return nil, unusable(path, err)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, unusable(path, fmt.Errorf("its key is a %T, not ECDSA", parsed))
	}
	m, err := newMember(key, ders[1], ders[2])
	if err != nil {
		return nil, unusable(path, err)
	}
	return m, nil
}

// unusable adds advice to the error of an unusable file. Without the file the node may join again under its name.
func unusable(path string, err error) error {
	return fmt.Errorf(
		"%s cannot be used: %w\n  nothing was changed; restore the file, or remove it and use --token-file to join "+
			"again under the same name",
		path,
		err,
	)
}
