package agent

import (
	"context"
	"log/slog"
	"maps"
	"pilaster.io/pilaster/internal/dpapi"
	"slices"
	"sync"
	"time"
)

// Drops of the last minute are told from samples taken this often.
const (
	sampleEvery = 5 * time.Second
	samplesKept = int(time.Minute / sampleEvery)
)

// dropWindow remembers the drop counters of the last minute.
type dropWindow struct {
	mu      sync.Mutex
	samples []map[string]uint64 // oldest first, at most samplesKept
}

// startFrees samples counters at every tick until ctx ends, and says when something begins or
// ceases to be wrong with the packet path, after it was set again.
func (w *dropWindow) run(
	ctx context.Context,
	keepSettings func() error,
	status func(context.Context) (dpapi.Status, error),
	tick <-chan time.Time,
	log *slog.Logger,
) {
	var known []string
	for {
		if err := keepSettings(); err != nil {
			log.Warn("devices are not set as they should be", "error", err)
		}
		if s, err := status(ctx); err != nil {
			log.Warn("the packet path cannot be read", "error", err)
		} else {
			w.add(s.Drops)
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

func (w *dropWindow) add(drops []dpapi.Drops) {
	sample := make(map[string]uint64, len(drops))
	for _, d := range drops {
		sample[d.Reason] = d.Packets
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.samples); n > 0 && maps.Equal(sample, w.samples[n-1]) {
		sample = w.samples[n-1] // a quiet minute takes no more memory than a moment
	}
	if len(w.samples) == samplesKept {
		w.samples = w.samples[1:]
	}
	w.samples = append(w.samples, sample)
}

// since is how far a counter has risen within the window. What was counted before the first
// sample was not dropped in the last minute as far as anyone knows.
func (w *dropWindow) since(d dpapi.Drops) uint64 {
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
			log.Error("the packet path is not as it should be", "problem", p)
		}
	}
	for _, p := range known {
		if !slices.Contains(problems, p) {
			log.Info("the packet path is right again", "problem", p)
		}
	}
}
