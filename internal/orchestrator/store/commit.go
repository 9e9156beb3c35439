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

// Group commit. A transaction costs a round trip in the etcd cluster and a write to disk. So while one transaction
// runs, the changes of this process wait in a queue. Then the committer decides them one after the other, and commits
// them in one transaction. Each change sees the writes of those before it. The changes stay independent: a refused
// change writes nothing, and a change that etcd rejects does not affect the others.

// committer is the queue of pending changes.
type committer struct {
	mu         sync.Mutex
	queue      []*request
	maxWaiting int  // maximum length of queue
	maxBatch   int  // limit of the writes of one transaction, and of its comparisons
	running    bool // commitLoop runs
}

// request is a pending change.
type request struct {
	ctx    context.Context
	decide func(*txn) error
	reads  []string // estimate
	weight weight   // estimate
	answer chan error

	taken bool // it is in a batch; protected by committer.mu
}

// change runs decide, perhaps several times, and commits its writes. If decide fails, change writes nothing. All reads
// of decide have one revision, so its results are consistent even if it writes nothing.
//
// A change that is too large for one transaction is committed in several, in the order of its writes. change runs
// decide before each of them, and decide must not repeat the writes that are done. The order of the writes must allow a
// crash after any transaction, and a repeated call must then complete the change.
//
// decide may run in another goroutine, but never after change has returned.
func (s *Store) change(ctx context.Context, decide func(*txn) error) error {
	t, watched := newTxn(ctx, s.etcd), s.watched.Load()
	err := decide(t)
	s.noticeRewound(t.revision, watched)
	if !errors.Is(err, rpctypes.ErrCompacted) && (err != nil || len(t.writes) == 0) {
		return err // most calls change nothing and need no commit
	}
	return s.submit(
		&request{ctx: ctx, decide: decide, reads: slices.Collect(maps.Keys(t.readings)), weight: t.weight()},
	)
}

// noticeRewound makes Watch read the whole store again if a read returned an older revision than the watch. Reads are
// linearizable, so a lagging member cannot be the cause: etcd was restored from a snapshot.
func (s *Store) noticeRewound(read, watched int64) {
	if read == 0 || read >= watched {
		return
	}
	select {
	case s.rewound <- struct{}{}:
	default:
	}
}

// changeQueued is change without the first run of decide before the queue. It is for calls that many nodes make often
// and that read few keys and usually write: one read per batch costs less than one per call, and the queue is fair. w
// estimates the writes; reads are the keys to fetch.
func (s *Store) changeQueued(ctx context.Context, decide func(*txn) error, w weight, reads ...string) error {
	if len(reads) > maxOps {
		return s.change(ctx, decide)
	}
	return s.submit(&request{ctx: ctx, decide: decide, reads: reads, weight: w})
}

// submit queues a change and waits for its result.
func (s *Store) submit(r *request) error {
	r.answer = make(chan error, 1)
	s.enqueue(r)
	select {
	case err := <-r.answer:
		return err
	case <-r.ctx.Done():
		if s.committer.isWaiting(r) {
			return unavailable(r.ctx.Err()) // not decided; dropExpired removes it from a later batch
		}
		return <-r.answer
	}
}

// maxWaiting limits the queue. More changes could not be committed within the callers' deadlines.
const maxWaiting = 1 << 15

func (s *Store) enqueue(r *request) {
	q := &s.committer
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) >= q.maxWaiting {
		r.answer <- refuse(Unavailable, "%d changes are already queued for the store; nothing was changed: try "+
			"again", len(q.queue))
		return
	}
	q.queue = append(q.queue, r)
	if !q.running {
		q.running = true
		go s.commitLoop() // ends when the queue is empty
	}
}

// Waiting returns the length of the queue.
func (s *Store) Waiting() int {
	s.committer.mu.Lock()
	defer s.committer.mu.Unlock()
	return len(s.committer.queue)
}

// isWaiting reports whether a change is still in the queue.
func (q *committer) isWaiting(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !r.taken
}

// commitLoop commits batches until the queue is empty.
func (s *Store) commitLoop() {
	for {
		some := s.committer.takeBatch()
		if some == nil {
			return
		}
		s.committer.requeueFront(s.commitBatch(some))
	}
}

// takeBatch removes as many changes from the queue as probably fit into one transaction, by their estimates.
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

// requeueFront puts changes at the front of the queue.
func (q *committer) requeueFront(some []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range some {
		r.taken = false
	}
	q.queue = slices.Insert(q.queue, 0, some...)
}

// requeueBack puts a change that needs more transactions at the back of the queue, behind the other changes.
func (q *committer) requeueBack(some []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range some {
		r.taken = false
	}
	q.queue = append(q.queue, some...)
}

// commitBatch decides and commits changes. It returns those that must wait for the next batch.
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
			// etcd rejected the transaction because of one change: commit each by itself.
			for _, one := range d.decided {
				s.commitBatch([]*request{one.request})
			}
		case err != nil:
			s.quarantineLease.Store(nil) // etcd may have lost the lease
			for _, one := range d.decided {
				one.answer <- unavailable(err)
			}
		case made == 0:
			s.conflicts.Add(1)
			some = d.requests()
		default:
			s.committed.Store(g.revision)
			if made < len(g.writes) { // a change of several transactions is alone in its batch
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

// joinContexts returns a context that ends when all contexts of the requests have ended.
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

// decisions are the results before the commit. Requests that are in none of the lists have their answer already.
type decisions struct {
	decided []decided  // answer after the commit
	retry   []*request // decide again immediately
	later   []*request // decide after the commit
}

// decided is a change that depends on the commit: it has writes, or its result depends on earlier writes of the batch.
// All reads have one revision, and the commit fails if one of their keys has changed since. So the result is valid at
// the time of the commit.
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

// decide runs the function of a change. It recovers from a panic, like net/http, so that the other changes of the batch
// continue.
func (s *Store) decide(r *request, t *txn) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("deciding a change failed", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf(
				"the orchestrator failed to decide this change; nothing more was changed, and its log has the stack: "+
					"%v",
				p,
			)
		}
	}()
	return r.decide(t)
}

// dropExpired answers the requests whose context has ended, and returns the others.
func dropExpired(some []*request) (valid []*request) {
	for _, r := range some {
		if err := r.ctx.Err(); err != nil {
			r.answer <- unavailable(err)
			continue
		}
		valid = append(valid, r)
	}
	return valid
}

// decideBatch decides changes one after the other in the group g, until one must wait for the commit.
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
			// etcd has compacted the revision of the batch: the process was suspended for a long time.
			*g = *newTxn(g.ctx, g.etcd)
			return decisions{retry: append(d.requests(), some[i:]...)}
		case errors.Is(err, errLater),
			commits && len(g.writes) > 0 && (t.deletesRange || !g.weight().and(t.weight()).fits(s.committer.maxBatch)):
			d.later = some[i:]
			return d
		case commits:
			g.join(t)
			d.decided = append(d.decided, decided{r, err})
			if t.deletesRange { // later changes would not see the deletions
				d.later = some[i+1:]
				return d
			}
		default:
			r.answer <- err
		}
	}
	return d
}
