package join

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// Visit calls at the orchestrator without joining: whoever answers belongs to the token's cluster.
// The token's secret is not shown, and certificates are taken whatever the time is: ahead is how far the
// orchestrator's clock is before this one's, to a second or two.
func Visit(ctx context.Context, baseURL string, token Token) (ahead time.Duration, err error) {
	if err := checkURL(baseURL); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	transport := newTransport(token.tlsConfig(func() time.Time { return time.Time{} }))
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, baseURL+"/readyz", nil)
	if err != nil {
		return 0, err
	}
	asked := time.Now()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	answered := time.Now()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("the orchestrator at %s answers, and is not ready (%s)", baseURL, resp.Status)
	}
	clock, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		return 0, fmt.Errorf("the orchestrator at %s does not say what time it is: %w", baseURL, err)
	}
	return clock.Sub(asked.Add(answered.Sub(asked) / 2)), nil
}
