package sim

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Progress is the progress of an event.
type Progress struct {
	Event    string // in words
	Done, Of int    // numbers of nodes
	Elapsed  time.Duration
	Left     time.Duration // an estimate; 0 if there is none yet
}

func (p Progress) String() string {
	text := fmt.Sprintf("%s: %.0f s", p.Event, p.Elapsed.Seconds())
	if p.Of > 0 {
		text = fmt.Sprintf("%s: %d of %d nodes in %.0f s", p.Event, p.Done, p.Of, p.Elapsed.Seconds())
	}
	if p.Left > 0 {
		text += fmt.Sprintf(", about %.0f s to go", p.Left.Seconds())
	}
	return text
}

// progress counts the nodes for which an event is done.
type progress struct {
	done  atomic.Int64
	mu    sync.Mutex
	event string
	of    int
	began time.Time
}

func (p *progress) begin(event string, nodes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.event, p.of, p.began = event, nodes, time.Now()
	p.done.Store(0)
}

func (p *progress) did() { p.done.Add(1) }

func (p *progress) now() Progress {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := Progress{Event: p.event, Done: int(p.done.Load()), Of: p.of, Elapsed: time.Since(p.began)}
	if now.Done > 0 && now.Done < now.Of {
		now.Left = time.Duration(float64(now.Elapsed) * float64(now.Of-now.Done) / float64(now.Done))
	}
	return now
}

// reportEvery calls report with the progress at an interval until ctx ends.
func (p *progress) reportEvery(ctx context.Context, every time.Duration, report func(Progress)) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if now := p.now(); now.Event != "" {
				report(now)
			}
		case <-ctx.Done():
			return
		}
	}
}

// noticeEvery is the polling interval for state without notification.
const noticeEvery = 10 * time.Millisecond

func pause(ctx context.Context, long time.Duration) error {
	timer := time.NewTimer(long)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// latencies collects durations of single operations.
type latencies struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *latencies) note(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, d)
}

// take returns count, median, 99th percentile and maximum in milliseconds, and resets the collection.
func (l *latencies) take() (q Quantiles) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.all)
	if q.N = len(l.all); q.N > 0 {
		q.Median, q.P99 = milliseconds(l.all[q.N/2]), milliseconds(l.all[q.N*99/100])
		q.Max = milliseconds(l.all[q.N-1])
	}
	l.all = nil
	return q
}

// distribution returns points of the distribution: milliseconds, and percent of the durations that took no longer.
func (l *latencies) distribution() (all [][2]float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.all)
	for percent := 0; percent <= 100 && len(l.all) > 0; percent++ {
		at := max((len(l.all)*percent+99)/100, 1)
		all = append(all, [2]float64{milliseconds(l.all[at-1]), float64(percent)})
	}
	return all
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
