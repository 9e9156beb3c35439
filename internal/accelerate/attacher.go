package accelerate

import (
	"context"
	"slices"
	"sync"
)

// attacher attaches the cache's programs to containers and detaches them, in a goroutine of its own: each time the
// kernel waits for a grace period, and evictions must not wait for that.
type attacher struct {
	cache   programs
	results chan attached
	wake    chan struct{} // has a value if there may be work
	cancel  context.CancelFunc
	done    sync.WaitGroup

	mu            sync.Mutex
	leaves, joins []attachment
}

// programs attaches and detaches, as oncache.Cache does.
type programs interface {
	Join(device string, index int) error
	Leave(device string, index int) error
}

// attachment is a device to attach programs to, or to detach them from.
type attachment struct {
	number uint64 // of this request: another device may get the index
	index  int
	name   string
}

type attached struct {
	attachment
	err error
}

func startAttacher(cache programs) *attacher {
	ctx, cancel := context.WithCancel(context.Background())
	a := &attacher{cache: cache, results: make(chan attached), wake: make(chan struct{}, 1), cancel: cancel}
	a.done.Go(func() { a.run(ctx) })
	return a
}

// stop waits for the attachment that is under way. The others are not done.
func (a *attacher) stop() {
	a.cancel()
	a.done.Wait()
}

func (a *attacher) join(device attachment) {
	a.mu.Lock()
	a.joins = append(a.joins, device)
	a.mu.Unlock()
	a.signal()
}

// leave is done before anything else: programs at a device that must not use the cache would learn.
func (a *attacher) leave(device attachment) {
	a.mu.Lock()
	a.joins = slices.DeleteFunc(a.joins, func(other attachment) bool { return other.index == device.index })
	a.leaves = append(a.leaves, device)
	a.mu.Unlock()
	a.signal()
}

func (a *attacher) signal() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

func (a *attacher) run(ctx context.Context) {
	for {
		device, do, ok := a.next()
		if !ok {
			select {
			case <-a.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
		select {
		case a.results <- attached{device, do(device.name, device.index)}:
		case <-ctx.Done():
			return
		}
	}
}

// next returns a device and what to do with it.
func (a *attacher) next() (device attachment, do func(name string, index int) error, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case len(a.leaves) > 0:
		device, a.leaves = a.leaves[0], a.leaves[1:]
		return device, a.cache.Leave, true
	case len(a.joins) > 0:
		device, a.joins = a.joins[0], a.joins[1:]
		return device, a.cache.Join, true
	}
	return device, nil, false
}
