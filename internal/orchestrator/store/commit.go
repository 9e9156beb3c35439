package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// Changes of one process wait for each other instead of undoing each other's transactions. Each transaction costs a
// round of the cluster and a write to its disks, so all changes that wait meanwhile are decided together, one after
// another, and are made by one: each sees what those before it wrote. What it would be by itself, it is: a refused one
// leaves nothing behind, and one that etcd does not take spoils no other.

// committer are those that wait.
type committer struct {
	mu         sync.Mutex
	queue      []*request
	maxWaiting int  // how many may
	maxBatch   int  // writes, and comparisons, that are made by one transaction
	running    bool // commitLoop runs
}

// request is a change that waits for its turn.
type request struct {
	ctx    context.Context
	decide func(*txn) error
	reads  []string // index first
	weight weight   // index first
	answer chan error

	taken bool // it is being decided and made; of the lock of changes
}

// change runs decide, perhaps several times, and commits what it wrote; when it fails, nothing is
// written. What decide finds may be kept even when it writes nothing: all its reads are of one
// revision. What is too large for a transaction is made in several, in the order it was written and
// each decided anew: the first was decided on the whole, and the later ones leave out what is there. So
// the order must be one that may end anywhere, to be gone on with when the change is asked for again.
// Decide may run in another goroutine, but not when change has returned.
func (s *Store) change(ctx context.Context, decide func(*txn) error) error {
	t, watched := newTxn(ctx, s.etcd), s.watched.Load()
	err := decide(t)
	s.noticeRewound(t.revision, watched)
	if !errors.Is(err, rpctypes.ErrCompacted) && (err != nil || len(t.writes) == 0) {
		return err // maxOps calls find everything as it should be, and need not wait for a turn
	}
	return s.submit(&request{ctx: ctx, decide: decide, reads: slices.Collect(maps.Keys(t.readings)), weight: t.weight()})
}

// noticeRewound has everything read anew where a revision was read that is older than what was heard of before: reads
// are linearised, so that it cannot be a member that lags.
func (s *Store) noticeRewound(read, watched int64) {
	if read == 0 || read >= watched {
		return
	}
	select {
	case s.rewound <- struct{}{}:
	default:
	}
}

// changeQueued is change without the first decision, where it is judged by few keys. It is for what many nodes ask at
// once and mostly has to be written, or is found as it should be: reading for all that wait costs less than for each,
// and who waits longest is served first. It takes what is written at most, and what is read.
func (s *Store) changeQueued(ctx context.Context, decide func(*txn) error, w weight, reads ...string) error {
	if len(reads) > maxOps {
		return s.change(ctx, decide)
	}
	return s.submit(&request{ctx: ctx, decide: decide, reads: reads, weight: w})
}

// submit has a change made in its turn.
func (s *Store) submit(r *request) error {
	r.answer = make(chan error, 1)
	s.enqueue(r)
	select {
	case err := <-r.answer:
		return err
	case <-r.ctx.Done():
		if s.committer.isWaiting(r) {
			return unavailable(r.ctx.Err()) // and when it is taken it is not decided
		}
		return <-r.answer
	}
}

// maxWaiting is how many changes may wait: more than can be made within the time that their callers have.
const maxWaiting = 1 << 15

func (s *Store) enqueue(r *request) {
	q := &s.committer
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) >= q.maxWaiting {
		r.answer <- refuse(Unavailable, "%d changes wait for the store already; nothing was changed: try again", len(q.queue))
		return
	}
	q.queue = append(q.queue, r)
	if !q.running {
		q.running = true
		go s.commitLoop() // whoever waits waits for it
	}
}

// Waiting is how many changes wait for the store.
func (s *Store) Waiting() int {
	s.committer.mu.Lock()
	defer s.committer.mu.Unlock()
	return len(s.committer.queue)
}

// isWaiting tells whether a change still waits.
func (q *committer) isWaiting(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !r.taken
}

// commitLoop makes changes until none waits.
func (s *Store) commitLoop() {
	for {
		some := s.committer.takeBatch()
		if some == nil {
			return
		}
		s.committer.requeueFront(s.commitBatch(some))
	}
}

// allocatePrefix takes as many as probably fit into one transaction.
func (q *committer) takeBatch() (some []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all weight
	for ; len(q.queue) > 0; q.queue = q.queue[1:] {
		r := q.queue[0]
		if all = all.and(r.weight); len(some) > 0 && !all.fits(q.maxBatch) || len(some) == q.maxBatch {
			break
		}
		r.taken = true
		some = append(some, r)
	}
	q.running = some != nil
	return some
}

// requeueFront has some be the next.
func (q *committer) requeueFront(some []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range some {
		r.taken = false
	}
	q.queue = slices.Insert(q.queue, 0, some...)
}

// requeueBack has a change of many parts go on when those that wait have had their turn.
func (q *committer) requeueBack(some []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range some {
		r.taken = false
	}
	q.queue = append(q.queue, some...)
}

// commitBatch decides changes and makes them, and returns those that have to be decided in another transaction.
func (s *Store) commitBatch(some []*request) (later []*request) {
	ctx, done := joinContexts(some)
	defer done()
	for len(some) > 0 {
		g := newTxn(ctx, s.etcd)
		d := s.decideBatch(g, some)
		later = slices.Concat(d.later, later)
		some = d.retry
		if len(g.writes) == 0 {
			continue
		}
		if len(d.decided) > 1 || g.indivisible {
			g.maxOps = s.committer.maxBatch
		}
		made, err := g.commit(ctx)
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound) && len(d.decided) > 1:
			// Nothing was changed, because of one of them.
			for _, one := range d.decided {
				s.commitBatch([]*request{one.request})
			}
		case err != nil:
			s.quarantineLease.Store(nil) // perhaps etcd knows it no more
			for _, one := range d.decided {
				one.answer <- unavailable(err)
			}
		case made == 0:
			s.conflicts.Add(1)
			some = d.requests()
		default:
			s.committed.Store(g.revision)
			if made < len(g.writes) { // then it was alone
				s.committer.requeueBack(d.requests())
				return later
			}
			for _, one := range d.decided {
				one.answer <- one.outcome
			}
		}
	}
	return later
}

// joinContexts ends with the last of their contexts.
func joinContexts(some []*request) (ctx context.Context, done func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var left atomic.Int64
	left.Store(int64(len(some)))
	var stops []func() bool
	for _, r := range some {
		stops = append(stops, context.AfterFunc(r.ctx, func() {
			if left.Add(-1) == 0 {
				cancel()
			}
		}))
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel()
	}
}

// decisions are what became of changes before the commit; who is in none of them was answered.
type decisions struct {
	decided []decided  // by the commit
	retry   []*request // to be decided again at once
	later   []*request // after the commit
}

// decided is a change whose writes are to be made, or that needs none, or was refused, because of what those before it
// wrote. All of it was read at the revision of the group, and the commit fails if any of that has changed since: so the
// answer is what it would be right after the commit.
type decided struct {
	*request
	outcome error
}

func (d decisions) requests() (all []*request) {
	for _, one := range d.decided {
		all = append(all, one.request)
	}
	return all
}

// decide runs a change's own function. A panic of it must not end the process, which goes on for all others; a server
// of HTTP does the same.
func (s *Store) decide(r *request, t *txn) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("deciding a change failed", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf(
				"the orchestrator failed in deciding this change; nothing more was changed, and its log says where: %v",
				p,
			)
		}
	}()
	return r.decide(t)
}

// dropExpired answers those whose time is over: nothing is read for them.
func dropExpired(some []*request) (still []*request) {
	for _, r := range some {
		if err := r.ctx.Err(); err != nil {
			r.answer <- unavailable(err)
			continue
		}
		still = append(still, r)
	}
	return still
}

func (s *Store) decideBatch(g *txn, some []*request) (d decisions) {
	some = dropExpired(some)
	var reads []string
	for _, r := range some {
		reads = append(reads, r.reads...)
	}
	watched := s.watched.Load()
	defer func() { s.noticeRewound(g.revision, watched) }()
	if err := g.fetch(reads...); errors.Is(err, rpctypes.ErrCompacted) {
		return decisions{retry: some}
	} else if err != nil {
		for _, r := range some {
			r.answer <- err
		}
		return d
	}
	for i, r := range some {
		if err := r.ctx.Err(); err != nil {
			r.answer <- unavailable(err)
			continue
		}
		t := g.next(r.ctx)
		err := s.decide(r, t)
		g.revision = t.revision
		if err != nil {
			t.writes = nil
		}
		commits := len(t.writes) > 0 || t.readsGroup
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			// It slept so long that the revision it reads is gone.
			*g = *newTxn(g.ctx, g.etcd)
			return decisions{retry: append(d.requests(), some[i:]...)}
		case errors.Is(err, errLater),
			commits && len(g.writes) > 0 && (t.deletesRange || !g.weight().and(t.weight()).fits(s.committer.maxBatch)):
			d.later = some[i:]
			return d
		case commits:
			g.join(t)
			d.decided = append(d.decided, decided{r, err})
			if t.deletesRange { // those after it would not see what that takes away
				d.later = some[i+1:]
				return d
			}
		default:
			r.answer <- err
		}
	}
	return d
}
