package cache

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// waiter is shared by all goroutines that wait for the same node; closing its channel wakes them.
type waiter struct {
	changed chan struct{} // closed at the next change
	count   int
}

// anything is the key of goroutines that wait for any change.
const anything = ""

// Await waits until the condition holds. The condition runs with the cache locked.
func (m *Cache) Await(ctx context.Context, condition func() bool) error {
	return m.AwaitNode(ctx, anything, condition)
}

// AwaitNode is Await for a condition that depends on one node only. The many changes of other nodes do not wake it.
func (m *Cache) AwaitNode(ctx context.Context, node string, condition func() bool) error {
	for {
		m.Mu.RLock()
		holds := condition()
		m.Mu.RUnlock()
		if holds {
			return nil
		}
		m.Mu.Lock()
		if condition() { // a change came between the two locks
			m.Mu.Unlock()
			return nil
		}
		w := m.waiters[node]
		if w == nil {
			w = &waiter{changed: make(chan struct{})}
			m.waiters[node] = w
		}
		w.count++
		m.Mu.Unlock()
		select {
		case <-w.changed:
		case <-ctx.Done():
			m.Mu.Lock()
			defer m.Mu.Unlock()
			if w.count--; w.count == 0 && m.waiters[node] == w {
				delete(m.waiters, node)
			}
			return ctx.Err()
		}
	}
}

// wake wakes the goroutines that wait for changes in a batch. nodes are the nodes whose record or transit tenants
// changed.
func (m *Cache) wake(b store.Batch, nodes map[string]bool) {
	if b.Whole {
		for node := range m.waiters {
			m.wakeNode(node)
		}
		return
	}
	m.wakeNode(anything)
	for node := range nodes {
		m.wakeNode(node)
	}
	for _, e := range b.Events {
		switch {
		case e.DeletedNode != "":
			m.wakeNode(e.DeletedNode)
		case e.Session != nil:
			m.wakeNode(e.Session.Node)
		case e.Hosting != nil:
			m.wakeNode(e.Hosting.Node)
		case e.EndedHosting != nil:
			m.wakeNode(e.EndedHosting.Node)
		}
	}
}

func (m *Cache) wakeNode(node string) {
	if w := m.waiters[node]; w != nil {
		close(w.changed)
		delete(m.waiters, node)
	}
}

// MaxLag is how long the end of a stream may take to reach all orchestrators. Before it has passed, an orchestrator
// does not refuse a node because of the node's previous stream.
const MaxLag = 5 * time.Second

func (m *Cache) Session(node string) store.Session {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Sessions[node]
}

// AwaitSession waits at most MaxLag until the session of a node meets a condition.
func (m *Cache) AwaitSession(ctx context.Context, node string, should func(store.Session) bool) error {
	ctx, cancel := context.WithTimeout(ctx, m.Lag)
	defer cancel()
	return m.AwaitNode(ctx, node, func() bool { return should(m.Sessions[node]) })
}
