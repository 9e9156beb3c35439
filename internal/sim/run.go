package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options configure a run besides the scenario.
type Options struct {
	Dir      string // empty folder for the orchestrator's etcd and socket; Run removes it
	Log      *slog.Logger
	Progress func(Progress)     // nil for none
	Every    time.Duration      // interval of Progress
	Before   func(string) error // called with each event's title before the event; nil for none
	Settled  func() error       // called after the last event while the cluster still runs; nil for none
	Patience time.Duration      // maximum delay of agents' updates to the orchestrator; 0 means 30 s

	Probe     Probe // nil for none; with a probe, Run does not check the invariants: they cover only simulated nodes
	Followers int   // nodes that follow the orchestrator; the other agents end when their containers exist; 0: all
}

// Run plays a scenario until its end or the first violated invariant. The result is valid also if an event returns an
// error.
func Run(ctx context.Context, s Scenario, o Options) (r *Result, err error) {
	if s.Limits.Time > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, s.Limits.Time, errOverTime)
		defer cancel()
	}
	if s.Limits.Memory > 0 {
		// Collect garbage only when almost all allowed memory is in use, because the cost of a collection grows with
		// the live heap. Leave some memory for etcd's file.
		defer debug.SetMemoryLimit(debug.SetMemoryLimit(int64(s.Limits.Memory) / 32 * 31))
		defer debug.SetGCPercent(debug.SetGCPercent(1000))
		collecting, stop := context.WithCancel(ctx)
		defer stop()
		go collectEarly(collecting, uint64(s.Limits.Memory))
	}
	w := newWorld(s, o.Dir, o.Log)
	w.patience, w.followers = cmp.Or(o.Patience, settleTime), o.Followers
	defer func() {
		if closed := w.close(); err == nil && closed != nil {
			err, r.Error = closed, closed.Error()
		}
	}()
	if o.Progress != nil {
		reporting, stop := context.WithCancel(ctx)
		defer stop()
		go w.progress.reportEvery(reporting, o.Every, o.Progress)
	}
	r = &Result{
		Scenario:   s,
		CPUs:       runtime.GOMAXPROCS(0),
		InMemory:   inMemory(o.Dir),
		Stages:     []Stage{},
		Entries:    []Entries{},
		Violations: []string{},
		Exceeded:   []string{},
		Real:       isReal,
		NotReal:    isNotReal,
	}
	err = w.playAll(ctx, r, o)
	if err == nil && o.Probe == nil {
		r.Addresses = w.sum
		r.Entries, err = w.entries(ctx)
	}
	if o.Settled != nil {
		err = errors.Join(err, o.Settled())
	}
	r.Warnings, r.PeakBytes = w.warnings.m, status("VmHWM")
	if err == nil {
		r.checkLimits(w)
		return r, nil
	}
	return r, r.ended(ctx, err)
}

// errOverTime is the cause of a run's end after the scenario's time limit.
var errOverTime = errors.New("the scenario's time limit is exceeded")

// ended records why a run ended early. If the time limit or an interrupt has cancelled a call, it records the limit or
// the interrupt, and not the call's error. An exceeded limit is not an error of the run.
func (r *Result) ended(ctx context.Context, err error) error {
	where := "while the orchestrator started"
	if n := len(r.Stages); n > 0 {
		where = fmt.Sprintf("after %q", r.Stages[n-1].Event)
		if r.Stages[n-1].Unfinished {
			where = fmt.Sprintf("during %q", r.Stages[n-1].Event)
		}
	}
	switch {
	case context.Cause(ctx) == errOverTime:
		r.Error = fmt.Sprintf("the scenario's time limit of %v was exceeded %s", r.Scenario.Limits.Time, where)
		r.Exceeded = append(r.Exceeded, r.Error)
		return nil
	case ctx.Err() != nil:
		err = fmt.Errorf("interrupted %s", where)
	}
	r.Error = err.Error()
	return err
}

func (w *world) playAll(ctx context.Context, r *Result, o Options) error {
	if err := w.open(ctx); err != nil {
		return err
	}
	if o.Probe != nil {
		if err := o.Probe.Join(ctx, w.cluster()); err != nil {
			return err
		}
	}
	steps := w.scenario.plan()
	w.keeps = keeps(steps)
	setup := step{
		Event: Event{Do: Grow, By: Amount{N: w.scenario.Nodes}, ListFirst: w.scenario.asks()},
		nodes: make([]int, w.scenario.Nodes),
		setUp: true,
	}
	for i, s := range append([]step{setup}, steps...) {
		if i > 0 && o.Before != nil {
			if err := o.Before(s.String()); err != nil {
				return err
			}
		}
		runtime.GC() // do not count earlier garbage for this event
		w.stage = w.beginStage()
		sampled := w.sample(ctx)
		err := w.play(ctx, s)
		w.stage.over()
		samples := sampled()
		if err == nil {
			err = w.quiet(ctx)
		}
		stage, failed := w.stage.end(w)
		stage.Event, stage.About, stage.Samples = s.String(), len(s.nodes), samples
		if i == 0 {
			stage.Event = "set up"
		}
		stage.Unfinished = err != nil
		r.Stages = append(r.Stages, stage)
		if err != nil {
			return fmt.Errorf("%s: %w", stage.Event, err)
		}
		if failed != nil {
			return failed
		}
		if p := stage.changes(); p != nil {
			for _, e := range p.exceeded(s.Within, stage.Counts[deltas].Messages) {
				r.Exceeded = append(r.Exceeded, stage.Event+": "+e)
			}
		} else if limit := s.Within; limit > 0 && stage.Ready > limit.Seconds() {
			r.Exceeded = append(r.Exceeded, fmt.Sprintf("%s took %.1f s; its limit is %v",
				stage.Event, stage.Ready, limit))
		}
		if o.Probe != nil {
			if err := o.Probe.After(ctx, stage); err != nil {
				return err
			}
			continue
		}
		streams := s.streams(stage.Nodes)
		if n := stage.Counts[snapshots].Messages; n > int64(streams) {
			r.Exceeded = append(
				r.Exceeded,
				fmt.Sprintf(
					"%s cost %d snapshots for %d streams; each stream may begin with one",
					stage.Event,
					n,
					streams,
				),
			)
		}
		// A stream begins with a registration; a failed attempt costs another registration.
		if n := stage.Counts[registered].Messages; 2*n > 3*int64(streams) {
			r.Exceeded = append(
				r.Exceeded,
				fmt.Sprintf(
					"%s cost %d registrations for %d streams: more than one of three attempts failed",
					stage.Event,
					n,
					streams,
				),
			)
		}
		violated, err := w.check(ctx)
		if err != nil {
			return err
		}
		for _, v := range append(stage.changes().violated(), violated...) {
			r.Violations = append(r.Violations, "after "+stage.Event+": "+v)
		}
		if len(r.Violations) > 0 {
			return nil
		}
	}
	return nil
}

// checkLimits checks the limits of the whole run.
func (r *Result) checkLimits(w *world) {
	limits, total := w.scenario.Limits, int64(0)
	for _, s := range r.Stages {
		total += s.Total.Messages
	}
	if limits.Messages > 0 && total > limits.Messages {
		r.Exceeded = append(r.Exceeded, fmt.Sprintf("%d messages; the limit is %d", total, limits.Messages))
	}
	if limits.Memory > 0 && r.PeakBytes > int64(limits.Memory) {
		r.Exceeded = append(
			r.Exceeded,
			fmt.Sprintf("%d MiB of memory; the limit is %v", r.PeakBytes>>20, limits.Memory),
		)
	}
}

// stage measures while an event happens.
type stage struct {
	began  time.Time
	acts   time.Duration
	ready  time.Duration
	cpu    time.Duration // at first of the process until the stage began; after the stage, of the stage
	counts Counts
	syncs  int64
	files  int64

	changes *changes // of policies or endpoints; nil for none
}

const (
	etcdSyncs = "etcd_disk_wal_fsync_duration_seconds"
	etcdBytes = "etcd_mvcc_db_total_size_in_bytes"
)

func (w *world) beginStage() *stage {
	counts, _ := w.counts()
	return &stage{
		began:  time.Now(),
		cpu:    cpuTime(),
		counts: counts,
		syncs:  int64(valueOf(etcdSyncs)),
		files:  w.written.files.Load(),
	}
}

// acted records that the event was done; nodes may not follow the orchestrator yet.
func (s *stage) acted() { s.acts = time.Since(s.began) }

// over records that all nodes follow the orchestrator.
func (s *stage) over() { s.ready, s.cpu = time.Since(s.began), cpuTime()-s.cpu }

// quietFor is the time without messages, except heartbeats, after which an event is over.
const quietFor = 200 * time.Millisecond

// quiet waits until no more messages are sent, so that every message counts for its own event.
func (w *world) quiet(ctx context.Context) error {
	for last := (Count{-1, 0}); ; {
		counts, err := w.counts()
		if err != nil || counts.total() == last {
			return err
		}
		last = counts.total()
		if err := pause(ctx, quietFor); err != nil {
			return err
		}
	}
}

func (s *stage) end(w *world) (Stage, error) {
	counts, err := w.counts()
	now := Stage{
		Nodes: len(
			w.nodes,
		), Acted: seconds(s.acts), Ready: seconds(s.ready), CPU: seconds(s.cpu), Counts: counts.since(s.counts),
		Adds: w.adds.take(), Retried: w.retried.Swap(0),
		Goroutines: runtime.NumGoroutine(), Resident: status("VmRSS"), Store: int64(valueOf(etcdBytes)),
		Syncs: int64(valueOf(etcdSyncs)) - s.syncs, Written: w.written.files.Load() - s.files,
	}
	if c := s.changes; c != nil && c.of == policyChanges {
		now.Policies = c.propagation()
	} else if c != nil {
		now.Endpoints = c.propagation()
	}
	now.Total, now.Queries = now.Counts.total(), now.Counts.queries(now.Acted)
	delete(now.Counts, throttled)
	for _, n := range w.nodes {
		now.Containers += len(n.running)
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	now.Heap, now.Stacks = int64(memory.HeapAlloc), int64(memory.StackInuse)
	return now, err
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// inMemory reports whether a folder is on a tmpfs.
func inMemory(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && (fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC)
}

// status returns a size from /proc/self/status, in bytes.
func status(key string) int64 {
	text, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return n << 10
		}
	}
	return 0
}

// What is real in a run and what is not, as every result states.
var (
	isReal = []string{
		"the orchestrator: its handlers, limits, model and streams",
		"its etcd, which waits for the disk of --data-dir at every change, unless that is a tmpfs, which has no " +
			"disk to wait for",
		"the encoding of every message, by protobuf and Connect's framing",
		"of each agent the core, the link to the orchestrator, the allocation of addresses and, if the scenario has " +
			"services, their manager",
	}
	isNotReal = []string{
		"TLS, HTTP/2 and TCP between agents and orchestrator: calls are passed within the process, and the caller is " +
			"not authenticated",
		"how many calls arrive at once: except streams, the orchestrator handles 64 calls at a time, and the others " +
			"wait before they reach it",
		"joining: nodes have no certificates, so no token is exchanged for one; a node begins with its registration",
		"packet paths: they only record endpoints and tenants, and count their entries",
		"disks of agents: files are encoded as usual, but kept in memory or only counted",
		"time and processors of many machines: all agents and the orchestrator share one clock and the processors of " +
			"this machine",
	}
)

// collectEarly starts garbage collections before the memory limit is reached. The runtime itself would start them late,
// and then make allocating goroutines do the work. Because all simulated machines share one heap, all of them would
// pause for ten seconds.
func collectEarly(ctx context.Context, limit uint64) {
	for left := uint64(0); ; {
		if now := inUse(); now > limit/8*5 && now > left+limit/4 {
			runtime.GC()
			left = inUse()
		}
		if pause(ctx, 250*time.Millisecond) != nil {
			return
		}
	}
}

// inUse returns the size of the heap, with garbage, and of the goroutines' stacks, in bytes.
func inUse() uint64 {
	used := []metrics.Sample{{Name: heapObjects}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(used)
	return used[0].Value.Uint64() + used[1].Value.Uint64()
}
