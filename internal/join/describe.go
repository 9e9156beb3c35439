package join

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Certificate is the public description of a certificate.
type Certificate struct {
	Subject   string    `json:"subject"`
	Issuer    string    `json:"issuer"`
	Serial    string    `json:"serial"`
	URIs      []string  `json:"uris,omitempty"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	SHA256    string    `json:"sha256"` // of the DER
}

// Describe returns the certificates in a node's state directory, the node's own first. It does not parse the key.
func Describe(stateDir string) ([]Certificate, error) {
	path := filepath.Join(stateDir, MemberFile)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var all []Certificate
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if b.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return all, fmt.Errorf("%s: %w", path, err)
		}
		d := Certificate{
			Subject: c.Subject.String(), Issuer: c.Issuer.String(), Serial: c.SerialNumber.Text(16),
			NotBefore: c.NotBefore, NotAfter: c.NotAfter, SHA256: fmt.Sprintf("%x", sha256.Sum256(c.Raw)),
		}
		for _, u := range c.URIs {
			d.URIs = append(d.URIs, u.String())
		}
		all = append(all, d)
	}
	if len(all) == 0 {
		return nil, errors.New(path + " has no certificate")
	}
	return all, nil
}
