package chaos_test

import (
	"slices"
	"time"
)

// call is one operation of a client on an object. It took effect at one time between asked and answered. If its outcome
// is unknown, it took effect at one time after asked, or never.
type call[S comparable] struct {
	asked, answered time.Duration
	unknown         bool
	kind            string            // unknown calls of one kind have the same step
	step            func(S) (S, bool) // the next state; false if the result contradicts the state
}

// linearizable reports whether a sequential order of the calls leads from the first state to a state that last accepts.
// It uses Wing and Gong's search with three reductions: it tries no state twice, it executes calls that do not change
// the state as soon as possible, and it executes unknown calls of one kind in the order of their start. For each order
// that a reduction skips, the search tries an equivalent one.
func linearizable[S comparable](calls []call[S], first S, last func(S) bool) bool {
	s := search[S]{calls: calls, done: make([]byte, (len(calls)+7)/8), tried: map[string]map[S]bool{}, last: last}
	slices.SortFunc(s.calls, func(a, b call[S]) int { return int(a.asked - b.asked) })
	for _, c := range calls {
		if !c.unknown {
			s.open++
		}
	}
	return s.from(first)
}

type search[S comparable] struct {
	calls []call[S]
	done  []byte // one bit per call
	open  int    // calls with a known outcome that are not executed yet
	tried map[string]map[S]bool
	last  func(S) bool
}

func (s *search[S]) from(state S) bool {
	if s.open == 0 && s.last(state) {
		return true
	}
	seen := s.tried[string(s.done)]
	if seen == nil {
		seen = map[S]bool{}
		s.tried[string(s.done)] = seen
	}
	if seen[state] {
		return false
	}
	seen[state] = true

	// A call cannot precede another call whose response came before it started.
	soonest := time.Duration(1<<63 - 1)
	for i, c := range s.calls {
		if !c.unknown && !s.has(i) {
			soonest = min(soonest, c.answered)
		}
	}
	var may []int
	waiting := map[string]bool{} // kinds of unknown calls
	for i, c := range s.calls {
		if c.asked > soonest {
			break
		}
		if s.has(i) || c.unknown && waiting[c.kind] {
			continue
		}
		if c.unknown {
			waiting[c.kind] = true
		}
		next, ok := c.step(state)
		switch {
		case ok && next != state:
			may = append(may, i)
		case ok && !c.unknown:
			return s.try(i, next)
		}
	}
	for _, i := range may {
		if next, _ := s.calls[i].step(state); s.try(i, next) {
			return true
		}
	}
	return false
}

func (s *search[S]) try(i int, next S) bool {
	s.flip(i)
	defer s.flip(i)
	return s.from(next)
}

func (s *search[S]) has(i int) bool { return s.done[i/8]&(1<<(i%8)) != 0 }

func (s *search[S]) flip(i int) {
	s.done[i/8] ^= 1 << (i % 8)
	switch {
	case s.calls[i].unknown:
	case s.has(i):
		s.open--
	default:
		s.open++
	}
}
