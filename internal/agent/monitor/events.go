package monitor

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"pilaster.io/pilaster/internal/dpapi"
)

const (
	eventsAhead = 256 // events queued for one watcher before it loses some
	eventsKept  = 512 // recent events kept; at least half as many
)

// Hub distributes events of the packet path to all watchers. The packet path has one reader; a slow watcher loses
// only its own events and receives their number.
type Hub struct {
	mu           sync.Mutex
	watchers     map[*watcher]bool
	recentEvents []dpapi.Event // oldest first
}

type watcher struct {
	events chan dpapi.Event
	lost   uint64
}

// Run reads the driver's events until ctx ends.
func (h *Hub) Run(ctx context.Context, d dpapi.Events, log *slog.Logger) error {
	events, err := d.Events(ctx)
	if err != nil {
		return fmt.Errorf("reading events of the packet path: %w", err)
	}
	for e := range events {
		h.publish(e)
	}
	if ctx.Err() == nil {
		log.Error("events of the packet path ended; counters still work")
	}
	return nil
}

func (h *Hub) publish(e dpapi.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.recentEvents) == eventsKept {
		h.recentEvents = append(h.recentEvents[:0], h.recentEvents[eventsKept/2:]...)
	}
	h.recentEvents = append(h.recentEvents, e)
	for w := range h.watchers {
		mine := e
		mine.Lost += w.lost
		select {
		case w.events <- mine:
			w.lost = 0
		default:
			w.lost = mine.Lost + 1
		}
	}
}

// Recent returns the last events, oldest first.
func (h *Hub) Recent() []dpapi.Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.recentEvents)
}

// Watch returns a channel of events that is fed until stop is called.
func (h *Hub) Watch() (events <-chan dpapi.Event, stop func()) {
	w := &watcher{events: make(chan dpapi.Event, eventsAhead)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers == nil {
		h.watchers = map[*watcher]bool{}
	}
	h.watchers[w] = true
	return w.events, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watchers, w)
	}
}
