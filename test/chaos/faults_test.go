package chaos_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// fault is a kind of fault that occurs on one or all machines of a set, and then ends.
type fault struct {
	name  string
	to    []*process
	all   bool // all machines at once; otherwise a random one
	begin func(*process) (happened bool, err error)
	end   func(*process) error
}

func kill(p *process) (bool, error) { return p.kill() }
func revive(p *process) error       { p.revive(); return nil }
func stop(p *process) (bool, error) { return p.stop() }
func resume(p *process) error       { return p.resume() }
func heal(side string) func(*process) error {
	return func(p *process) error { return p.host.heal(side) }
}

func cut(side string) func(*process) (bool, error) {
	return func(p *process) (bool, error) {
		err := p.host.cut(side)
		return err == nil, err
	}
}

// storeFaults returns faults of etcd. Those of a single member leave a majority of etcd running.
func storeFaults(etcd []*process) []fault {
	return []fault{
		{"etcd member killed", etcd, false, kill, revive},
		{"etcd member stopped", etcd, false, stop, resume},
		{"etcd member cut off", etcd, false, cut(storeSide), heal(storeSide)},
		{"all of etcd killed", etcd, true, kill, revive},
		{"all of etcd cut apart", etcd, true, cut(storeSide), heal(storeSide)},
	}
}

func orchestratorFaults(all []*process) []fault {
	return []fault{
		{"orchestrator killed", all, false, kill, revive},
		{"orchestrator stopped", all, false, stop, resume},
		{"orchestrator cut off from etcd", all, false, cut(storeSide), heal(storeSide)},
		{"orchestrator cut off from nodes", all, false, cut(nodeSide), heal(nodeSide)},
		{"all orchestrators killed", all, true, kill, revive},
	}
}

// tally counts the faults.
type tally struct {
	mu    sync.Mutex
	count map[string]int
}

func (c *tally) add(name string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[name] += n
}

func (c *tally) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(c.count)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, c.count[name]))
	}
	return strings.Join(parts, ", ")
}

// Most faults are short. Long faults last longer than every timeout in an orchestrator, so that etcd executes pending
// writes, or loses them, long after all callers have given up.
const (
	shortest = 100 * time.Millisecond
	longest  = time.Second
	outlast  = 11 * time.Second
	rest     = time.Second // maximum pause between two faults; four times as long in a long run
)

// inject causes faults of all kinds repeatedly, in a random order, until ctx ends. After the first round through all
// kinds, it calls once, if that is not nil. If long is true, one fault in eight has length outlast.
func inject(ctx context.Context, t *testing.T, r *rand.Rand, kinds []fault, long bool, counts *tally, once func()) {
	for ctx.Err() == nil {
		for _, i := range r.Perm(len(kinds)) {
			f, one := kinds[i], r.IntN(len(kinds[i].to))
			length := shortest + upTo(r, longest-shortest)
			if outlasts := r.IntN(8) == 0; long && outlasts {
				length = outlast
			}
			pause := upTo(r, rest)
			if long {
				pause *= 4
			}
			if !sleep(ctx, pause) {
				return
			}
			victims := f.to
			if !f.all {
				victims = f.to[one : one+1]
			}
			if err := f.happen(ctx, victims, length, counts); err != nil {
				t.Errorf("%s: %v", f.name, err)
				return
			}
		}
		if once != nil {
			once()
			once = nil
		}
	}
}

func upTo(r *rand.Rand, below time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(below)))
}

func (f fault) happen(ctx context.Context, victims []*process, length time.Duration, counts *tally) (err error) {
	happened := false
	for _, p := range victims {
		did, failed := f.begin(p)
		happened = happened || did
		err = errors.Join(err, failed)
	}
	if happened {
		counts.add(f.name, 1)
	}
	sleep(ctx, length) // the fault lasts so long
	for _, p := range victims {
		err = errors.Join(err, f.end(p))
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
