package cache

import (
	"sync"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// maxQueue is how many messages may be pending for a node; one more ends its stream.
const maxQueue = 256

// queue has the pending messages of one node. It has its own lock: one change may wake thousands of streams, and these
// should wait neither for each other nor for the cache.
type queue struct {
	mu      sync.Mutex
	waiting []*pilasterv1.FollowResponse // nil when empty: most queues are empty, and there are many
	Filled  chan struct{}                // has a token while the queue is not empty
}

func newQueue() queue { return queue{Filled: make(chan struct{}, 1)} }

// put appends a message, which must not be modified afterwards. It returns false if the queue is full.
func (q *queue) put(r *pilasterv1.FollowResponse) (fits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == maxQueue {
		return false
	}
	q.waiting = append(q.waiting, r)
	q.signal()
	return true
}

// Next removes and returns the oldest message, nil if there is none.
func (q *queue) Next() (next *pilasterv1.FollowResponse) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return nil
	}
	if next, q.waiting = q.waiting[0], q.waiting[1:]; len(q.waiting) == 0 {
		q.waiting = nil
	} else {
		q.signal()
	}
	return next
}

func (q *queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

func (q *queue) signal() {
	select {
	case q.Filled <- struct{}{}:
	default:
	}
}
