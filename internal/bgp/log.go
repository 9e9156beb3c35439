package bgp

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// GoBGP logs each malformed message of a peer, which could fill a disk.
const (
	logBurst    = 20
	logInterval = 10 * time.Second // in which logBurst messages are logged
)

// limitedHandler limits the rate of warnings and errors, and logs nothing else.
type limitedHandler struct {
	slog.Handler
	rate  *logRate
	below func(slog.Record) // gets records of lower levels; nil: nothing does
}

type logRate struct {
	mu      sync.Mutex
	since   time.Time
	n       int
	dropped int
}

func newLimitedHandler(h slog.Handler, below func(slog.Record)) limitedHandler {
	return limitedHandler{h, &logRate{}, below}
}

// Enabled also admits the records that below gets.
func (h limitedHandler) Enabled(ctx context.Context, level slog.Level) bool {
	if level < slog.LevelWarn {
		return h.below != nil
	}
	return h.Handler.Enabled(ctx, level)
}

func (h limitedHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelWarn {
		h.below(r)
		return nil
	}
	ok, dropped := h.rate.allow(r.Time)
	if !ok {
		return nil
	}
	if dropped > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("suppressed", dropped))
	}
	return h.Handler.Handle(ctx, r)
}

func (h limitedHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return limitedHandler{h.Handler.WithAttrs(attrs), h.rate, h.below}
}

func (h limitedHandler) WithGroup(name string) slog.Handler {
	return limitedHandler{h.Handler.WithGroup(name), h.rate, h.below}
}

// allow reports whether a message is logged, and how many were not since the last one.
func (r *logRate) allow(at time.Time) (ok bool, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at.Sub(r.since) >= logInterval {
		r.since, r.n = at, 0
	}
	if r.n >= logBurst {
		r.dropped++
		return false, 0
	}
	r.n++
	dropped, r.dropped = r.dropped, 0
	return true, dropped
}
