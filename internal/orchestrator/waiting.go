package orchestrator

import (
	"context"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// waiting is who waits for something to change: all that wait for the same are woken by one channel.
type waiting struct {
	changed chan struct{} // closed at the change
	many    int
}

// anything is what those wait for who do not wait for news of a node.
const anything = ""

// await waits until the condition, evaluated with the model locked, holds.
func (m *model) await(ctx context.Context, condition func() bool) error {
	return m.awaitNode(ctx, anything, condition)
}

// awaitNode is await for a condition that changes only with what is known of a node: many wait at once, each for its
// own.
func (m *model) awaitNode(ctx context.Context, node string, condition func() bool) error {
	for {
		m.mu.RLock()
		holds := condition()
		m.mu.RUnlock()
		if holds {
			return nil
		}
		m.mu.Lock()
		if condition() { // by now
			m.mu.Unlock()
			return nil
		}
		w := m.waiting[node]
		if w == nil {
			w = &waiting{changed: make(chan struct{})}
			m.waiting[node] = w
		}
		w.many++
		m.mu.Unlock()
		select {
		case <-w.changed:
		case <-ctx.Done():
			m.mu.Lock()
			defer m.mu.Unlock()
			if w.many--; w.many == 0 && m.waiting[node] == w {
				delete(m.waiting, node)
			}
			return ctx.Err()
		}
	}
}

// wake wakes who waits for any of these changes; nodes are those of which the record or what they carry is another.
func (m *model) wake(b store.Batch, nodes map[string]bool) {
	if b.Whole {
		for node := range m.waiting {
			m.wakeOne(node)
		}
		return
	}
	m.wakeOne(anything)
	for node := range nodes {
		m.wakeOne(node)
	}
	for _, e := range b.Events {
		switch {
		case e.DeletedNode != "":
			m.wakeOne(e.DeletedNode)
		case e.Session != nil:
			m.wakeOne(e.Session.Node)
		case e.Hosting != nil:
			m.wakeOne(e.Hosting.Node)
		case e.EndedHosting != nil:
			m.wakeOne(e.EndedHosting.Node)
		}
	}
}

func (m *model) wakeOne(node string) {
	if w := m.waiting[node]; w != nil {
		close(w.changed)
		delete(m.waiting, node)
	}
}
