package accelerate_test

import (
	"fmt"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/accelerate"
)

// judgement compares what arrives of both kinds of a flow's datagrams after a change.
type judgement struct {
	*model
	flow *dualFlow
	way  int
	done time.Duration // when the change was made
	what string
}

// window is how much longer than the limit a flow is observed of which nothing may arrive.
const window = 50 * time.Millisecond

// tolerated adds the time that the machine had no processor for the clients, and so perhaps not for the daemon.
func (j judgement) tolerated(limit time.Duration) time.Duration {
	return limit + 2*time.Duration(j.late.Load())
}

func (j judgement) fault(format string, args ...any) {
	j.faults = append(j.faults, "after "+j.what+": "+fmt.Sprintf(format, args...))
}

// await returns the first arrival after the change.
func (j judgement) await(kind int, most time.Duration) (a arrival, ok bool) {
	for deadline := j.now() + most; ; time.Sleep(interval) {
		if a, ok = j.flow.arrived[kind][j.way].first(j.done); ok || j.now() > deadline {
			return a, ok
		}
	}
}

// arrives judges a flow whose datagrams arrive. before says that they did before the change too.
func (j judgement) arrives(t *testing.T, before bool) {
	t.Helper()
	alone, ok := j.await(control, 30*time.Second)
	if !ok {
		t.Fatalf("after %s: the overlay delivers nothing: the model is wrong", j.what)
	}
	first, ok := j.await(cached, accelerate.MaxValidity+10*time.Second)
	switch lag := first.sent - alone.sent; {
	case !ok:
		j.fault("nothing arrives with the cache, and the overlay alone delivers")
		return
	case lag > j.tolerated(j.limit):
		j.fault("datagrams arrive with the cache %v later than over the overlay alone", lag)
		return
	}
	// The next change is to find the flow in the cache.
	for end := j.now() + time.Second; len(j.flow.arrived[cached][j.way].since(j.done)) < 10 && j.now() < end; {
		time.Sleep(interval)
	}
	if !before {
		return
	}
	record := &j.flow.arrived
	lost := longestLoss(record[cached][j.way].since(0))
	if alone := longestLoss(record[control][j.way].since(0)); lost > alone+j.tolerated(j.limit) {
		j.fault("datagrams are lost for %v with the cache, and for %v over the overlay alone", lost, alone)
	}
}

// limitOf returns when the first change is in effect that keeps datagrams from arriving, after the latest one.
func (j judgement) limitOf() time.Duration {
	limit := j.silent
	for _, c := range j.obstacles(j.flow, j.way) {
		if c.silent {
			limit = min(limit, c.since+j.silent-j.done)
		} else {
			limit = j.limit
		}
	}
	return max(limit, j.limit)
}

// nothingArrives judges a flow whose datagrams do not arrive.
func (j judgement) nothingArrives(t *testing.T) {
	t.Helper()
	limit := j.limitOf()
	for wait := window; wait > 0; wait = j.done + j.tolerated(limit) + window - j.now() {
		time.Sleep(wait)
	}
	for kind := range kinds {
		all := j.flow.arrived[kind][j.way].since(j.done + j.tolerated(limit))
		switch {
		case len(all) == 0:
		case kind == control:
			t.Fatalf("after %s: the overlay delivers: the model is wrong", j.what)
		default:
			j.fault("%d datagrams arrive with the cache, the last one sent %v after the change", len(all),
				all[len(all)-1].sent-j.done)
		}
	}
}
