package join

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
)

// VerifyButTime verifies a certificate that ca itself has signed in every respect but when: o.CurrentTime and
// o.Roots are not looked at. Clocks may be wrong on either side, and then no moment may suit both certificates.
func VerifyButTime(cert, ca *x509.Certificate, o x509.VerifyOptions) error {
	o.Roots = x509.NewCertPool()
	o.Roots.AddCert(ca)
	o.CurrentTime = ca.NotBefore
	always := *cert
	always.NotBefore, always.NotAfter = ca.NotBefore, ca.NotAfter
	_, err := always.Verify(o)
	return err
}

// CheckTime says what is wrong when a certificate is not valid by the clock of whose.
func CheckTime(cert *x509.Certificate, now time.Time, whose string) error {
	if !now.Before(cert.NotBefore) && !now.After(cert.NotAfter) {
		return nil
	}
	return fmt.Errorf("the certificate of %s is valid from %s to %s, and the clock of %s says %s",
		cert.Subject.CommonName, stamp(cert.NotBefore), stamp(cert.NotAfter), whose, stamp(now))
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// clocks names the clocks where an orchestrator's certificate is not valid by this node's. Who serves
// it is asked for its own, which nothing but this message depends on.
func (c Config) clocks(ctx context.Context, ca Token, err error) error {
	var invalid x509.CertificateInvalidError
	if !errors.As(err, &invalid) || invalid.Reason != x509.Expired || invalid.Cert == nil {
		return err
	}
	here := c.Now()
	text := CheckTime(invalid.Cert, here, "this node")
	if text == nil { // set right meanwhile
		return err
	}
	there := "cannot be asked for its own"
	if ahead, asked := Visit(ctx, c.URL, ca); asked == nil {
		there = "says " + stamp(time.Now().Add(ahead))
	}
	return connect.NewError(
		connect.CodeOf(err),
		fmt.Errorf(
			"%w; the orchestrator at %s %s\n  set the wrong clock right; the node tries again by itself",
			text,
			c.URL,
			there,
		),
	)
}
