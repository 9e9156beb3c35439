// Package batch does work that costs the same for one and for many once for all who ask for it at the same time.
package batch

import "sync"

// Rounds run a work in rounds, one at a time. Callers that arrive during a round join the next one, because the running
// round may have passed what they need.
type Rounds[T any] struct {
	one  sync.Locker // held by the round that is on
	work func(all []T) []error

	mu   sync.Mutex
	next *round[T]
}

type round[T any] struct {
	all  []T
	done chan struct{}
	errs []error
}

// New is for a work that returns an error, or nil, for each. It is done under the lock, which may keep other work away
// as well: who comes while a round waits for it still belongs to that round.
func New[T any](one sync.Locker, work func(all []T) []error) *Rounds[T] {
	return &Rounds[T]{one: one, work: work}
}

// Do returns when a round with this one in it, begun after the call, has ended.
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

// Waiting is how many the next round has.
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
	defer close(mine.done) // also where work panics: the others must not wait for ever
	mine.errs = r.work(mine.all)
}
