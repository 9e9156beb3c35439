package join

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// Probe checks without joining that an orchestrator of the token's cluster answers and is ready. It does not send the
// token's secret, and ignores validity periods of certificates. ahead is how far the orchestrator's clock is ahead of
// this machine's, within about two seconds.
func Probe(ctx context.Context, baseURL string, token Token) (ahead time.Duration, err error) {
	if err := checkURL(baseURL); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	transport := Config{}.newTransport(token.tlsConfig(func() time.Time { return time.Time{} }))
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
		return 0, fmt.Errorf("the orchestrator at %s is not ready (%s)", baseURL, resp.Status)
	}
	clock, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		return 0, fmt.Errorf("the response of the orchestrator at %s has no valid Date: %w", baseURL, err)
	}
	return clock.Sub(asked.Add(answered.Sub(asked) / 2)), nil
}
