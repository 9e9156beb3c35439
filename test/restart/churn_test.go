package restart_test

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// node is where the containers of the churn are.
const node = "n1"

const inFlight = 10

const maxMemory = 64 << 20

// pace is what calls of the plugin may take at a node with a thousand containers. A short run among other tests says
// nothing about times, so `make churn` alone judges these.
type pace struct {
	one          time.Duration // median of an ADD, one at a time
	ten, slowest time.Duration // median and P99 of one with ten in flight
	goneInAll    time.Duration // of a hundred DELs that begin together, until the last has ended
}

// paceOf a kind of device, on the machine of docs/results/scale.md in its slow hours: that says what was aimed at, 20
// and 60 ms for an ADD behind a macvlan and 100 for the DELs, and what the kernel and the processes alone take.
func paceOf(device string) pace {
	p := pace{one: 20 * time.Millisecond, ten: 60 * time.Millisecond, slowest: 90 * time.Millisecond,
		goneInAll: 300 * time.Millisecond}
	if device == endpoint.Macvlan {
		p.ten, p.slowest = 40*time.Millisecond, 80*time.Millisecond
	}
	return p
}

// exceeded names what took longer than it may.
func (p pace) exceeded(took pace) error {
	var errs []error
	for _, c := range []struct {
		what      string
		took, may time.Duration
	}{
		{"the median of an ADD, one at a time,", took.one, p.one},
		{"the median of an ADD with ten in flight", took.ten, p.ten},
		{"the P99 of an ADD with ten in flight", took.slowest, p.slowest},
		{"all DELs together", took.goneInAll, p.goneInAll},
	} {
		if c.took > c.may {
			errs = append(errs, fmt.Errorf("%s took %v, and may take %v", c.what, c.took, c.may))
		}
	}
	return errors.Join(errs...)
}

// TestChurn adds and removes PILASTER_RESTART_CONTAINERS containers PILASTER_RESTART_ROUNDS times,
// ten in flight. After the last has gone the node holds what it held before the first came.
func TestChurn(t *testing.T) {
	containers, rounds := setting(t, "PILASTER_RESTART_CONTAINERS", 60), setting(t, "PILASTER_RESTART_ROUNDS", 2)
	l := labtest.New(t, lab.Spec{Nodes: []string{node}, Tenants: []lab.Tenant{{Name: "blue"}}})
	ctx := t.Context()
	more := max(20, min(100, containers/10)) // are measured while the others are there
	p := newPlugin(t, l, containers+more)
	holds := func() holdings { return held(ctx, t, l, p, containers+more) }
	do := func(verb string, from, to, inFlight int) ([]time.Duration, time.Duration) {
		t.Helper()
		walls, cpu, err := p.each(ctx, verb, from, to, inFlight)
		if err != nil {
			t.Fatal(err)
		}
		return walls, cpu
	}

	// The first container makes the node host the tenant, and keep a file of the addresses it gave.
	do("ADD", 0, 1, 1)
	during := holds()
	do("DEL", 0, 1, 1)
	before := rest(ctx, t, holds)
	if len(during) == len(before) {
		t.Fatalf("a container changes nothing that is counted: %v", before)
	}

	for round := range rounds {
		start := time.Now()
		do("ADD", 0, containers, inFlight)
		added := time.Since(start)
		if round == rounds-1 {
			measure(ctx, t, l, containers, do, more)
		}
		start = time.Now()
		do("DEL", 0, containers, inFlight)
		t.Logf("round %d: %d containers added in %v, removed in %v", round+1, containers, added.Round(time.Millisecond),
			time.Since(start).Round(time.Millisecond))
	}
	before.same(ctx, t, holds)
}

// ownTime is the CPU time of this process, which starts the plugins as a runtime would.
func ownTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// measure adds more containers to those that are there and says what that takes.
func measure(ctx context.Context, t *testing.T, l *lab.Lab, containers int,
	do func(verb string, from, to, inFlight int) ([]time.Duration, time.Duration), more int) {
	t.Helper()
	agent := agentPID(ctx, t, l, node)
	used := func() time.Duration {
		d, err := cpuTime(agent)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	medians, slowest := map[int]time.Duration{}, map[int]time.Duration{}
	for _, n := range []int{1, inFlight} {
		before, beside := used(), ownTime()
		walls, plugins := do("ADD", containers, containers+more, n)
		agents, beside := used()-before, ownTime()-beside
		medians[n], slowest[n] = median(walls), percentile(walls, 99)
		t.Logf("ADD with %d containers there, %d in flight: median %v, P99 %v, slowest of %d %v; CPU an ADD: plugin "+
			"%v, agent %v, this test %v",
			containers, n, medians[n], slowest[n], more, walls[len(walls)-1],
			plugins/time.Duration(more), agents/time.Duration(more), beside/time.Duration(more))
		walls, _ = do("DEL", containers, containers+more, n)
		t.Logf("DEL with %d containers there, %d in flight: median %v, P99 %v", containers, n, median(walls),
			percentile(walls, 99))
	}
	do("ADD", containers, containers+more, inFlight)
	before, start := used(), time.Now()
	_, plugins := do("DEL", containers, containers+more, more)
	inAll := time.Since(start)
	t.Logf("DEL of %d together with %d containers there: %v in all; CPU a DEL: plugin %v, agent %v",
		more, containers, inAll, plugins/time.Duration(more), (used()-before)/time.Duration(more))
	peak, err := peakMemory(agent)
	if err != nil {
		t.Fatal(err)
	}
	maps, err := mapMemory(agent)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("agent: VmHWM %d KiB; kernel memory of its maps %d KiB", peak>>10, maps>>10)
	if peak > maxMemory {
		t.Errorf("the agent took %d KiB, the limit is %d", peak>>10, maxMemory>>10)
	}
	if err := paceOf(labtest.Device()).exceeded(pace{medians[1], medians[inFlight], slowest[inFlight],
		inAll}); judgesTimes() && err != nil {
		t.Error(err)
	}
}
