package orchestrator

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// health records when the store last answered, so that a probe sends no request to the store. It compares monotonic
// times: setting the wall clock back must not make an unreachable store look ready.
type health struct{ answered atomic.Pointer[time.Time] } // nil: never

func (h *health) note(at time.Time) { h.answered.Store(&at) }

const (
	pingEvery  = 3 * time.Second
	staleAfter = 10 * time.Second
)

func (h *health) run(ctx context.Context, s *store.Store) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		once, cancel := context.WithTimeout(ctx, pingEvery)
		if s.Ping(once) == nil {
			h.note(time.Now())
		}
		cancel()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (h *health) serve(w http.ResponseWriter, _ *http.Request) {
	if last := h.answered.Load(); last == nil || time.Since(*last) > staleAfter {
		http.Error(w, "the store does not answer", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// serverCertificate creates the orchestrator's certificate and renews it in time.
type serverCertificate struct {
	authority *pki.Authority
	hosts     []string
	now       func() time.Time
	mu        sync.Mutex
	current   *tls.Certificate
}

func (c *serverCertificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	// If the clock was ahead when the certificate was made, the certificate is not valid yet.
	if c.current == nil || now.Before(c.current.Leaf.NotBefore) ||
		now.After(c.current.Leaf.NotAfter.Add(-pki.ServerLife/3)) {
		made, err := c.authority.Server(append([]string{join.ServerName}, c.hosts...), now)
		if err != nil {
			return nil, err
		}
		c.current = made
	}
	return c.current, nil
}
