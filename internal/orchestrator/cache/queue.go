package cache

import (
	"sync"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// maxQueue is how many changes may wait for a node before its stream is ended.
const maxQueue = 256

// enqueue is what waits for one node. It has a lock of its own: of the thousands of streams that one change wakes, none
// waits for the model, nor the model for them.
type queue struct {
	mu      sync.Mutex
	waiting []*pilasterv1.FollowResponse // there are many nodes, and mostly nothing waits
	Filled  chan struct{}                // has something while anything waits
}

func newQueue() queue { return queue{Filled: make(chan struct{}, 1)} }

// put adds a message, which nobody writes to from now on, if there is room for one more.
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

// Next takes what waits longest, nil where nothing does.
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
