package probe

import (
	"context"
	"time"
)

// Every is the time between two probes.
const Every = 100 * time.Millisecond

// Pulse is what is known of a node that is probed. The zero value is that of a node before its first probe.
type Pulse struct {
	Sent     time.Time // the last probe; zero before the first one
	Due      bool      // the last probe should be answered
	Answered time.Time // the last answer; zero before the first one
	Missed   int       // due probes in a row without an answer
}

// Count notes whether the last probe was answered: ago is the age of the last answer, if there is one. Probes count,
// and not the time, so that a pause of this process is no loss.
func (p *Pulse) Count(ago time.Duration, ok bool) {
	if at := time.Now().Add(-ago); ok && !p.Sent.IsZero() && !at.Before(p.Sent) {
		p.Answered, p.Missed = at, 0
	} else if p.Due {
		p.Missed++
	}
}

// Send notes that a probe is sent now, and whether it should be answered.
func (p *Pulse) Send(due bool) { p.Sent, p.Due = time.Now(), due }

// Rounds calls probe until ctx ends: after the time that it returned, and after each change. If it returned 0, there is
// nothing to probe until the next change.
func Rounds(ctx context.Context, changed <-chan struct{}, probe func() (next time.Duration)) {
	every := Every
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for {
		next := ticks.C
		switch wanted := probe(); wanted {
		case 0:
			next = nil
		case every:
		default:
			every = wanted
			ticks.Reset(every)
		}
		select {
		case <-next:
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
