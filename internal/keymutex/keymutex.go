// Package keymutex provides a mutex for each key: work on one key is serialised, and work on different keys runs in
// parallel.
package keymutex

import (
	"context"
	"fmt"
	"sync"
)

// Locks has a lock for each key that a caller holds or waits for. The zero value is ready.
type Locks struct {
	mu    sync.Mutex
	locks map[string]*keyLock
}

type keyLock struct {
	held  chan struct{} // capacity 1
	users int           // holder and waiters
}

// Lock waits for the key or for ctx to end.
func (k *Locks) Lock(ctx context.Context, key string) (unlock func(), err error) {
	k.mu.Lock()
	if k.locks == nil {
		k.locks = map[string]*keyLock{}
	}
	l := k.locks[key]
	if l == nil {
		l = &keyLock{held: make(chan struct{}, 1)}
		k.locks[key] = l
	}
	l.users++
	k.mu.Unlock()

	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.locks, key)
		}
	}
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("another call about %s is still running: %w", key, ctx.Err())
	}
}
