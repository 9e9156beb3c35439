package join

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ServerName is a DNS name in every orchestrator's certificate, which nodes verify instead of the address that they
// connect to.
const ServerName = "orchestrator.pilaster"

// AuthorityName is the common name in the certificate of every cluster's authority.
const AuthorityName = "Pilaster cluster"

// Token admits a node to a cluster: it has a secret, and the SHA-256 of the cluster's certificate authority (DER).
type Token struct {
	Secret [16]byte
	CA     [sha256.Size]byte
}

const tokenForm = "pilaster.<32 hexadecimal digits>.<64 hexadecimal digits>"

// ParseToken reads the output of Token.String. It ignores space around it.
func ParseToken(s string) (Token, error) {
	var t Token
	parts := strings.Split(strings.TrimSpace(s), ".")
	if len(parts) != 3 || parts[0] != "pilaster" ||
		!decodeHex(t.Secret[:], parts[1]) || !decodeHex(t.CA[:], parts[2]) {
		return Token{}, errors.New(
			"join token is not of the form " + tokenForm + "; copy all of it from the orchestrator's join-token file",
		)
	}
	return t, nil
}

func decodeHex(dst []byte, s string) bool {
	if len(s) != hex.EncodedLen(len(dst)) {
		return false
	}
	_, err := hex.Decode(dst, []byte(s))
	return err == nil
}

func (t Token) String() string {
	return fmt.Sprintf("pilaster.%x.%x", t.Secret, t.CA)
}

// OtherClusterError is the error of a join token of another cluster than the orchestrator's. A retry does not help.
type OtherClusterError struct {
	Token, Server [sha256.Size]byte // hashes of the clusters' authorities
}

func (e *OtherClusterError) Error() string {
	return fmt.Sprintf(
		"the join token is of another cluster (it ends in %x…, and those of this orchestrator's cluster in %x…); "+
			"nothing was changed: take the token from the join-token file in this orchestrator's data directory, or "+
			"set the right orchestrator",
		sha256Prefix(e.Token),
		sha256Prefix(e.Server),
	)
}

// authority returns the pinned authority from a server's chain.
func (t Token) authority(chain []*x509.Certificate) (*x509.Certificate, error) {
	for _, c := range chain {
		if c.IsCA && sha256.Sum256(c.Raw) == t.CA {
			return c, nil
		}
	}
	for _, c := range chain {
		if c.IsCA && c.Subject.CommonName == AuthorityName {
			return nil, &OtherClusterError{t.CA, sha256.Sum256(c.Raw)}
		}
	}
	return nil, errors.New(
		"the server is no orchestrator of a Pilaster cluster; nothing was changed: set the right orchestrator",
	)
}

// verify accepts a server whose chain leads to the pinned authority. It replaces the verification by crypto/tls, which
// needs roots. With a zero time it ignores validity periods.
func (t Token) verify(cs tls.ConnectionState, now time.Time) error {
	ca, err := t.authority(cs.PeerCertificates)
	if err != nil {
		return err
	}
	o := x509.VerifyOptions{
		Roots:       x509.NewCertPool(),
		CurrentTime: now,
		DNSName:     ServerName,
		KeyUsages:   []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if now.IsZero() {
		return VerifyButTime(cs.PeerCertificates[0], ca, o)
	}
	o.Roots.AddCert(ca)
	_, err = cs.PeerCertificates[0].Verify(o)
	return err
}

// tlsConfig trusts the pinned authority, and has no client certificate.
func (t Token) tlsConfig(now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		ServerName:         ServerName,
		InsecureSkipVerify: true, // VerifyConnection verifies the certificate
		VerifyConnection:   func(cs tls.ConnectionState) error { return t.verify(cs, now()) },
	}
}
