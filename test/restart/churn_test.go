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

// node is the node of the churned containers.
const node = "n1"

const inFlight = 10

// maxMemory is the limit of the agent's memory, without pages of files. The kernel shares these and reclaims them, and
// how many are resident depends on how the page cache holds the executable: 37 to 44 MiB of the same build.
const maxMemory = 28 << 20

// pace limits the durations of CNI calls on a node with a thousand containers. Other tests that run at the same time
// change the durations, so only `make churn` checks these limits.
type pace struct {
	one          time.Duration // median of a single ADD
	ten, slowest time.Duration // median and P99 of an ADD with ten in flight
	goneInAll    time.Duration // of a hundred concurrent DELs, until the last DEL has ended
}

// paceOf returns the limits for a kind of device. They allow for the slow hours of the machine of
// docs/results/scale.md. That page has the goals (20 and 60 ms for an ADD with macvlans, 100 ms for the DELs), and how
// much of the time the kernel and the processes take.
func paceOf(device string) pace {
	p := pace{one: 20 * time.Millisecond, ten: 60 * time.Millisecond, slowest: 90 * time.Millisecond,
		goneInAll: 300 * time.Millisecond}
	if device == endpoint.Macvlan {
		p.ten, p.slowest = 40*time.Millisecond, 80*time.Millisecond
	}
	return p
}

// exceeded returns an error for each exceeded limit.
func (p pace) exceeded(took pace) error {
	var errs []error
	for _, c := range []struct {
		what      string
		took, may time.Duration
	}{
		{"the median of single ADDs", took.one, p.one},
		{"the median of an ADD with ten in flight", took.ten, p.ten},
		{"the P99 of an ADD with ten in flight", took.slowest, p.slowest},
		{"all concurrent DELs", took.goneInAll, p.goneInAll},
	} {
		if c.took > c.may {
			errs = append(errs, fmt.Errorf("%s took %v; the limit is %v", c.what, c.took, c.may))
		}
	}
	return errors.Join(errs...)
}

// TestChurn adds and removes PILASTER_RESTART_CONTAINERS containers PILASTER_RESTART_ROUNDS times, ten concurrently.
// After the last removal, the node has the same resources as before the first container.
func TestChurn(t *testing.T) {
	containers, rounds := setting(t, "PILASTER_RESTART_CONTAINERS", 60), setting(t, "PILASTER_RESTART_ROUNDS", 2)
	l := labtest.New(t, lab.Spec{Nodes: []string{node}, Tenants: []lab.Tenant{{Name: "blue"}}})
	ctx := t.Context()
	more := max(20, min(100, containers/10)) // measured while the other containers exist
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

	// With the first container, the node begins to host the tenant, and writes its file of allocated addresses.
	do("ADD", 0, 1, 1)
	during := holds()
	do("DEL", 0, 1, 1)
	before := rest(ctx, t, holds)
	if len(during) == len(before) {
		t.Fatalf("the counted resources do not change with a container: %v", before)
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

// ownTime is the CPU time of this process, which starts the plugins as a runtime does.
func ownTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// measure adds more containers to the existing ones, and logs and returns the durations.
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
		t.Logf("ADD with %d existing containers, %d in flight: median %v, P99 %v, slowest of %d %v; "+
			"CPU per ADD: plugin %v, agent %v, this test %v",
			containers, n, medians[n], slowest[n], more, walls[len(walls)-1],
			plugins/time.Duration(more), agents/time.Duration(more), beside/time.Duration(more))
		walls, _ = do("DEL", containers, containers+more, n)
		t.Logf("DEL with %d existing containers, %d in flight: median %v, P99 %v", containers, n, median(walls),
			percentile(walls, 99))
	}
	do("ADD", containers, containers+more, inFlight)
	before, start := used(), time.Now()
	_, plugins := do("DEL", containers, containers+more, more)
	inAll := time.Since(start)
	t.Logf("%d concurrent DELs with %d existing containers: %v in total; CPU a DEL: plugin %v, agent %v",
		more, containers, inAll, plugins/time.Duration(more), (used()-before)/time.Duration(more))
	peak, files, err := peakMemory(agent)
	if err != nil {
		t.Fatal(err)
	}
	maps, err := mapMemory(agent)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("agent: VmHWM %d KiB, of which %d KiB are pages of files; kernel memory of its maps %d KiB", peak>>10,
		files>>10, maps>>10)
	if own := peak - files; own > maxMemory {
		t.Errorf("the agent used %d KiB; the limit is %d KiB", own>>10, maxMemory>>10)
	}
	if err := paceOf(labtest.Device()).exceeded(pace{medians[1], medians[inFlight], slowest[inFlight],
		inAll}); judgesTimes() && err != nil {
		t.Error(err)
	}
}
