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
	Dir      string // an empty folder for the orchestrator's etcd and socket, which is removed
	Log      *slog.Logger
	Progress func(Progress)     // nil for none
	Every    time.Duration      // how often
	Before   func(string) error // called before each event, with its words; nil for none
	Settled  func() error       // called when all has happened and everything is still there; nil for none
	Patience time.Duration      // how long updates of agents may take to reach the orchestrator; 0 means 30 s

	Probe     Probe // nil for none; with one, invariants are not checked: they cover only simulated nodes
	Followers int   // nodes that follow the orchestrator; agents of the others end when they have their containers; 0 means all follow
}

// Run plays a scenario until its end or the first violated invariant. It returns the result also with an error of an
// event.
func Run(ctx context.Context, s Scenario, o Options) (r *Result, err error) {
	if s.Limits.Time > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, s.Limits.Time, errOverTime)
		defer cancel()
	}
	if s.Limits.Memory > 0 {
		// Use all allowed memory before garbage collection: its cost grows with the live heap. etcd's file needs
		// memory, too.
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
		telling, stop := context.WithCancel(ctx)
		defer stop()
		go w.progress.tell(telling, o.Every, o.Progress)
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
		r.judge(w)
		return r, nil
	}
	return r, r.ended(ctx, err)
}

// errOverTime is why a run ends whose scenario has a limit of its time.
var errOverTime = errors.New("the scenario's limit of its time is over")

// ended notes why a run ended before all of it had happened. Whatever a call says that was cut short, it is the limit,
// or who interrupted it. That a limit was exceeded is no error of the run.
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
		r.Error = fmt.Sprintf("the scenario's limit of %v was over %s", r.Scenario.Limits.Time, where)
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
		runtime.GC() // what is garbage now is not of this event
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
		if p := stage.Policies; p != nil {
			for _, e := range p.exceeded(s.Within, stage.Counts[deltas].Messages) {
				r.Exceeded = append(r.Exceeded, stage.Event+": "+e)
			}
		} else if limit := s.Within; limit > 0 && stage.Ready > limit.Seconds() {
			r.Exceeded = append(r.Exceeded, fmt.Sprintf("%s took %.1f s, and %v is its "+
				"limit", stage.Event, stage.Ready, limit))
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
					"%s cost %d snapshots, and it is about %d streams, each of which may begin with one",
					stage.Event,
					n,
					streams,
				),
			)
		}
		// A stream begins with a registration; one that does not come about costs another.
		if n := stage.Counts[registered].Messages; 2*n > 3*int64(streams) {
			r.Exceeded = append(
				r.Exceeded,
				fmt.Sprintf(
					"%s cost %d registrations for %d streams: more than one of three tries was in vain",
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
		for _, v := range append(stage.Policies.violated(), violated...) {
			r.Violations = append(r.Violations, "after "+stage.Event+": "+v)
		}
		if len(r.Violations) > 0 {
			return nil
		}
	}
	return nil
}

// judge checks the limits of the whole run.
func (r *Result) judge(w *world) {
	limits, total := w.scenario.Limits, int64(0)
	for _, s := range r.Stages {
		total += s.Total.Messages
	}
	if limits.Messages > 0 && total > limits.Messages {
		r.Exceeded = append(r.Exceeded, fmt.Sprintf("%d messages, and %d are the limit", total, limits.Messages))
	}
	if limits.Memory > 0 && r.PeakBytes > int64(limits.Memory) {
		r.Exceeded = append(
			r.Exceeded,
			fmt.Sprintf("%d MiB of memory, and %v are the limit", r.PeakBytes>>20, limits.Memory),
		)
	}
}

// stage measures while an event happens.
type stage struct {
	began  time.Time
	acts   time.Duration
	ready  time.Duration
	cpu    time.Duration // at its beginning, and when it is over what it took
	counts Counts
	syncs  int64
	files  int64

	changes *changes // of a policy; nil for none
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

// acted records that the event was done; nodes may not follow yet.
func (s *stage) acted() { s.acts = time.Since(s.began) }

// over records that all nodes follow.
func (s *stage) over() { s.ready, s.cpu = time.Since(s.began), cpuTime()-s.cpu }

// quietFor is the time without messages, except for heartbeats, after which an event is over.
const quietFor = 200 * time.Millisecond

// quiet waits until no more messages are sent, so that they count for their event.
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
	if s.changes != nil {
		now.Policies = s.changes.policies()
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

// status is a size that the kernel keeps of this process, in bytes.
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

// What is real in a run, and what is not, as every result says it.
var (
	isReal = []string{
		"the orchestrator: its handlers, limits, model and streams",
		"its etcd, which waits for the disk of --data-dir at every change, if it is one: a tmpfs has nothing to wait " +
			"for",
		"the encoding of every message, by protobuf and Connect's framing",
		"of each agent the core, the link to the orchestrator and the drawing of addresses",
	}
	isNotReal = []string{
		"TLS, HTTP/2 and TCP between agents and orchestrator: calls are passed within the process, and who calls is " +
			"said, not proven",
		"how many calls arrive at once: but for streams 64 are answered at a time, and the others wait before they " +
			"reach the orchestrator, as they would on wires",
		"joining: nodes have no certificates, so none is bought with a token; what begins a node is its registration",
		"packet paths: they know which endpoints and tenants they were given, and count them",
		"disks of agents: what they write is encoded as ever, and kept in memory or only counted",
		"time and processors of many machines: all agents and the orchestrator share one clock and the processors of " +
			"this machine",
	}
)

// collectEarly starts garbage collections before the memory limit is reached. The runtime itself would start late and
// then charge allocating goroutines with the collection: all simulated machines would stop for ten seconds, because
// they share one heap.
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

// inUse is what the heap has, with garbage, and goroutines' stacks, in bytes.
func inUse() uint64 {
	used := []metrics.Sample{{Name: heapObjects}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(used)
	return used[0].Value.Uint64() + used[1].Value.Uint64()
}
