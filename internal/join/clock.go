package join

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
)

// VerifyButTime verifies that ca has signed a certificate, but not the validity periods: if a clock was wrong, there
// may be no time at which both certificates are valid. It ignores o.CurrentTime and o.Roots.
func VerifyButTime(cert, ca *x509.Certificate, o x509.VerifyOptions) error {
	o.Roots = x509.NewCertPool()
	o.Roots.AddCert(ca)
	o.CurrentTime = ca.NotBefore
	always := *cert
	always.NotBefore, always.NotAfter = ca.NotBefore, ca.NotAfter
	_, err := always.Verify(o)
	return err
}

// CheckTime returns an error if a certificate is not valid now. The error names whose, the machine whose clock shows
// now.
func CheckTime(cert *x509.Certificate, now time.Time, whose string) error {
	if !now.Before(cert.NotBefore) && !now.After(cert.NotAfter) {
		return nil
	}
	return fmt.Errorf("the certificate of %s is valid from %s to %s, and the clock of %s says %s",
		cert.Subject.CommonName, stamp(cert.NotBefore), stamp(cert.NotAfter), whose, stamp(now))
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// explainClocks replaces an error by one with the times of both clocks if the orchestrator's certificate is not valid
// by this node's clock. It queries the orchestrator's time without a check of that validity, because it uses the time
// only in the error message.
func (c Config) explainClocks(ctx context.Context, ca Token, err error) error {
	var invalid x509.CertificateInvalidError
	if !errors.As(err, &invalid) || invalid.Reason != x509.Expired || invalid.Cert == nil {
		return err
	}
	here := c.Now()
	text := CheckTime(invalid.Cert, here, "this node")
	if text == nil { // the clock was corrected meanwhile
		return err
	}
	there := "does not return its time"
	if ahead, err := Probe(ctx, c.URL, ca); err == nil {
		there = "says " + stamp(time.Now().Add(ahead))
	}
	return connect.NewError(
		connect.CodeOf(err),
		fmt.Errorf(
			"%w; the orchestrator at %s %s\n  correct the clock that is wrong; the node retries automatically",
			text,
			c.URL,
			there,
		),
	)
}
