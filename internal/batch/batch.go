// Package batch combines concurrent requests: work that costs the same for one request and for many runs once for all
// callers that wait.
package batch

import "sync"

// Rounds runs work in rounds, one at a time. Callers that arrive during a round join the next one, because the running
// round may already have passed what they need.
type Rounds[T any] struct {
	one  sync.Locker // held by the running round
	work func(all []T) []error

	mu   sync.Mutex
	next *round[T]
}

type round[T any] struct {
	all  []T
	done chan struct{}
	errs []error
}

// New takes work that returns one error, or nil, for each request. Each round runs under the lock, which may also
// exclude other work. Callers that arrive before the round acquires the lock join that round.
func New[T any](one sync.Locker, work func(all []T) []error) *Rounds[T] {
	return &Rounds[T]{one: one, work: work}
}

// Do returns when a round has ended that includes this request and began after the call.
func (r *Rounds[T]) Do(this T) error {
	r.mu.Lock()
	mine, first := r.next, r.next == nil
	if first {
		mine = &round[T]{done: make(chan struct{})}
		r.next = mine
	}
	i := len(mine.all)
	mine.all = append(mine.all, this)
	r.mu.Unlock()
	if first {
		r.run(mine)
	}
	<-mine.done
	return mine.errs[i]
}

// Waiting returns how many requests the next round has.
func (r *Rounds[T]) Waiting() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next == nil {
		return 0
	}
	return len(r.next.all)
}

func (r *Rounds[T]) run(mine *round[T]) {
	r.one.Lock()
	defer r.one.Unlock()
	r.mu.Lock()
	r.next = nil
	r.mu.Unlock()
	defer close(mine.done) // even if work panics: the other callers must not wait for ever
	mine.errs = r.work(mine.all)
}
