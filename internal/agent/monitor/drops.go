package monitor

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/dpapi"
)

// Drops of the last minute are computed from samples at this interval.
const (
	SampleEvery = 5 * time.Second
	samplesKept = int(time.Minute / SampleEvery)
)

// DropWindow keeps samples of the drop counters over the last minute.
type DropWindow struct {
	mu      sync.Mutex
	samples []map[string]uint64 // oldest first, at most samplesKept
}

// Run samples the counters at every tick until ctx ends. At each tick it also reconciles device settings and logs
// problems of the packet path that appeared or disappeared.
func (w *DropWindow) Run(
	ctx context.Context,
	keepSettings func() error,
	status func(context.Context) (dpapi.Status, error),
	tick <-chan time.Time,
	log *slog.Logger,
) {
	var known []string
	for {
		if err := keepSettings(); err != nil {
			log.Warn("reconciling device settings failed", "error", err)
		}
		if s, err := status(ctx); err != nil {
			log.Warn("reading the state of the packet path failed", "error", err)
		} else {
			w.Add(s.Drops)
			logProblems(known, s.Problems, log)
			known = s.Problems
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
	}
}

func (w *DropWindow) Add(drops []dpapi.Drops) {
	sample := make(map[string]uint64, len(drops))
	for _, d := range drops {
		sample[d.Reason] = d.Packets
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.samples); n > 0 && maps.Equal(sample, w.samples[n-1]) {
		sample = w.samples[n-1] // equal samples share memory
	}
	if len(w.samples) == samplesKept {
		w.samples = w.samples[1:]
	}
	w.samples = append(w.samples, sample)
}

// Since returns how much a counter has increased within the window. Drops before the first sample do not count.
func (w *DropWindow) Since(d dpapi.Drops) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.samples) == 0 {
		return 0
	}
	before, ok := w.samples[0][d.Reason]
	if !ok || before > d.Packets {
		return 0
	}
	return d.Packets - before
}

func logProblems(known, problems []string, log *slog.Logger) {
	for _, p := range problems {
		if !slices.Contains(known, p) {
			log.Error("the packet path has a problem", "problem", p)
		}
	}
	for _, p := range known {
		if !slices.Contains(problems, p) {
			log.Info("a problem of the packet path is resolved", "problem", p)
		}
	}
}
