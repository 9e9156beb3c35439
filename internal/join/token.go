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

// ServerName is in every orchestrator's certificate and checked by every node. It stands for
// "an orchestrator of this cluster", whatever address the node reached it by.
const ServerName = "orchestrator.pilaster"

// Token admits a node to a cluster: a secret the cluster knows, and the SHA-256 of its
// certificate authority (DER).
type Token struct {
	Secret [16]byte
	CA     [sha256.Size]byte
}

const tokenForm = "pilaster.<32 hexadecimal digits>.<64 hexadecimal digits>"

// ParseToken reads what Token.String writes; space around it is ignored.
func ParseToken(s string) (Token, error) {
	var t Token
	parts := strings.Split(strings.TrimSpace(s), ".")
	if len(parts) != 3 || parts[0] != "pilaster" ||
		!decodeHex(t.Secret[:], parts[1]) || !decodeHex(t.CA[:], parts[2]) {
		return Token{}, errors.New(
			"join token is not of the form " + tokenForm + "; copy it whole from the orchestrator's join-token file",
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

// authority is the pinned one, out of the chain of a server.
func (t Token) authority(chain []*x509.Certificate) (*x509.Certificate, error) {
	for _, c := range chain {
		if c.IsCA && sha256.Sum256(c.Raw) == t.CA {
			return c, nil
		}
	}
	return nil, errors.New(
		"the server does not belong to the cluster of this join token; take the token from the join-token file in " +
			"this orchestrator's data folder, or name the right orchestrator",
	)
}

// verify accepts a server whose chain leads to the pinned authority. It takes the place of the
// usual verification, which has no roots yet. No time means any.
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

// tlsConfig trusts the pinned authority, and shows no certificate: there is none yet.
func (t Token) tlsConfig(now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		ServerName:         ServerName,
		InsecureSkipVerify: true, // verify does it, against the pinned authority
		VerifyConnection:   func(cs tls.ConnectionState) error { return t.verify(cs, now()) },
	}
}
