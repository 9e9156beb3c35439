package evpn

import (
	"context"
	"sync"
	"sync/atomic"
)

// Stream sends the changes of a table to subscribers. A slow subscriber gets the last state of each record, and delays
// neither the table nor others.
type Stream struct {
	version     atomic.Uint64
	mu          sync.Mutex
	subscribers map[*Subscription]bool
}

// Subscription receives the changes after its snapshot.
type Subscription struct {
	stream  *Stream
	pending map[RecordKey]Change
	ready   chan struct{} // has room for one
}

// NewStream returns a stream without subscribers.
func NewStream() *Stream { return &Stream{subscribers: map[*Subscription]bool{}} }

// Subscribe begins a subscription. The caller reads the snapshot under the lock that it holds while it calls Publish.
func (s *Stream) Subscribe() *Subscription {
	sub := &Subscription{stream: s, pending: map[RecordKey]Change{}, ready: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subscribers[sub] = true
	return sub
}

// Publish sends the changes since the last call.
func (s *Stream) Publish(t *Table) {
	keys := t.Changes()
	if len(keys) == 0 {
		return
	}
	s.version.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	for sub := range s.subscribers {
		for _, key := range keys {
			record, exists := t.Record(key)
			record.RecordKey = key
			sub.pending[key] = Change{Record: record, Deleted: !exists}
		}
		select {
		case sub.ready <- struct{}{}:
		default:
		}
	}
}

// Version increases with each change.
func (s *Stream) Version() uint64 { return s.version.Load() }

// Next waits for changes and returns them in order.
func (s *Subscription) Next(ctx context.Context) ([]Change, error) {
	for {
		if changes := s.take(); len(changes) > 0 {
			return changes, nil
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *Subscription) take() []Change {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	changes := make([]Change, 0, len(s.pending))
	for _, c := range s.pending {
		changes = append(changes, c)
	}
	clear(s.pending)
	sortChanges(changes)
	return changes
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	delete(s.stream.subscribers, s)
}
