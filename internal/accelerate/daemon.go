package accelerate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/accelerate/overlay"
	"pilaster.io/pilaster/internal/oncache"
	"pilaster.io/pilaster/internal/sdnotify"
)

// Causes of evictions beside those of package overlay.
const (
	causeNftables = "nftables"
	causeRule     = "rule"
	causeLost     = "lost-events"
	causeOperator = "operator"
	causeReopen   = "reopen"
)

// causes are all causes, for metrics that start at 0.
var causes = []string{
	overlay.CauseNeighbour, overlay.CauseForwarding, overlay.CauseRoute, overlay.CauseLink, causeNftables, causeRule,
	causeLost, causeOperator, causeReopen,
}

// container is a device that uses the cache.
type container struct {
	attachment
	state    string // what cached flows depend on
	attached bool   // the programs are attached
}

// daemon is the state of Run. Only the loop uses it, but for voider.
type daemon struct {
	Options
	calls  chan func()
	ended  chan struct{} // closed by reset
	voider voider

	cache      *oncache.Cache // nil while the overlay has no device
	open       oncache.Config
	opened     overlay.Device // that the cache was opened with
	device     overlay.Device
	uplink     int
	bridge     int
	states     map[int]string // of uplink, overlay and bridge, by index
	table      *overlay.Table
	containers map[int]container
	excluded   map[string]string // device → why its container does not use the cache

	attacher    *attacher       // nil while the cache is closed
	attachments uint64          // requests to the attacher
	detaching   map[uint64]bool // requests to detach from devices that must not use the cache, but exist

	passes         sync.WaitGroup // goroutines that look at devices or read rules
	inspected      chan *inspection
	inspecting     bool
	inspections    uint64
	lastInspection time.Time      // its start
	inspectionTime time.Duration  // how long it took
	changed        map[int]bool   // devices since then
	changedAll     bool           // all must be looked at
	programs       map[int]string // problem with programs of other processes, by device; nil: unknown

	rulesRead       chan ruleReport
	reading         bool
	rulesChanged    bool      // since they were read
	lastReading     time.Time // its start
	readingInterval time.Duration

	tracks   bool
	ttl      time.Duration
	paused   bool                // by an operator
	problems map[string][]string // by what was checked; they pause the cache
	inactive bool                // the cache does not learn
	void     bool                // nothing has been learnt since there is a problem
	renewed  time.Time
	evicted  map[string]uint64 // by cause
}

// Kinds of problems.
const (
	problemOverlay  = "overlay"
	problemRules    = "rules"
	problemQueues   = "queues"
	problemSettings = "settings"
	problemCache    = "cache"
)

// Run runs the daemon in the network namespace of this process until ctx ends, or until a reset. It returns an error
// and changes nothing if the cache must not be used.
func Run(ctx context.Context, o Options) (err error) {
	d := &daemon{
		Options: o, calls: make(chan func()), ended: make(chan struct{}), containers: map[int]container{},
		rulesRead: make(chan ruleReport, 1), inspected: make(chan *inspection, 1), excluded: map[string]string{},
		changed: map[int]bool{}, detaching: map[uint64]bool{}, problems: map[string][]string{},
		evicted: map[string]uint64{},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lock, err := claimOverlay(o.Overlay, o.Socket)
	if err != nil {
		return err
	}
	defer lock.Close()
	server, err := d.serve(ctx) // a socket has one daemon
	if err != nil {
		return err
	}
	defer func() { cancel(); err = errors.Join(err, server.close()) }()
	w, err := startWatch(ctx, d.voider.void)
	if err != nil {
		return err
	}
	defer func() { cancel(); w.done.Wait(); d.passes.Wait() }()
	if err := d.start(ctx); err != nil {
		return errors.Join(err, d.stop())
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	d.Log.Info("the cache is in use", "overlay", d.device.Name, "vni", d.device.VNI, "local", d.device.Local,
		"containers", len(d.containers))
	if err := sdnotify.Notify(sdnotify.Ready); err != nil {
		return err
	}
	defer sdnotify.Notify(sdnotify.Stopping)
	return d.loop(ctx, w)
}

// start checks everything before it changes anything.
func (d *daemon) start(ctx context.Context) error {
	if err := cmp.Or(d.take(d.newInspection(true).run()), d.applyRules(readRules(ctx, d.MarkMask))); err != nil {
		return fmt.Errorf("%w\n  nothing was changed", err)
	}
	if problems := d.allProblems(); len(problems) > 0 {
		return fmt.Errorf(
			"the overlay's verdicts are no function of a flow, so a cache would change them:\n  %s\n  nothing was "+
				"changed; docs/reference/accelerate.md says why each is refused", strings.Join(problems, "\n  "))
	}
	return d.openCache()
}

// stop detaches the cache and restores the settings.
func (d *daemon) stop() error {
	err := d.closeCache()
	undone, failed := restore(recordOf(d.Socket))
	for _, s := range undone {
		d.Log.Info("a setting is restored", "name", s.Name, "value", s.Before)
	}
	return errors.Join(err, failed)
}

func (d *daemon) loop(ctx context.Context, w *watch) error {
	renew, check := time.NewTicker(lease), time.NewTicker(MaxValidity)
	defer renew.Stop()
	defer check.Stop()
	for {
		again := d.startPasses(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-d.ended:
			return nil
		case err := <-w.failed:
			return err
		case b := <-w.routes:
			d.routeEvents(b)
		case err := <-w.rules:
			d.rulesEvent(err)
		case call := <-d.calls:
			call()
		case <-check.C: // what changes without an event
			d.rulesChanged, d.changedAll = true, true
		case i := <-d.inspected:
			d.inspecting, d.inspectionTime = false, time.Since(d.lastInspection)
			if i.number == d.inspections {
				d.apply(i)
			}
		case r := <-d.rulesRead:
			d.rulesAreRead(r)
		case r := <-d.attachedDevices():
			d.attachedDevice(r)
		case <-again:
		case <-renew.C:
		}
		d.settle()
	}
}

// settle makes the cache do what the state requires: learn or not, and be in use or not. It also renews the lease.
func (d *daemon) settle() {
	if d.cache == nil {
		return
	}
	if err := d.setLearning(); err != nil {
		d.Log.Error("cannot change the state of the cache; its lease ends", "err", err)
		return
	}
	if time.Since(d.renewed) < lease/2 {
		return
	}
	if err := d.cache.Renew(); err != nil {
		d.Log.Error("cannot renew the lease of the cache", "err", err)
		return
	}
	d.renewed = time.Now()
}

// setLearning pauses or resumes learning. With a problem, it voids what was learnt too; also while programs are still
// attached to a device that must not use the cache.
func (d *daemon) setLearning() error {
	found := d.allProblems()
	void := len(found) > 0 || len(d.detaching) > 0
	if want := d.paused || void; want != d.inactive {
		change := d.cache.Resume
		if want {
			change = d.cache.Pause
		}
		if err := change(); err != nil {
			return err
		}
		d.inactive = want
		d.Log.Info("the cache's state has changed", "learns", !want, "paused", d.paused,
			"problems", found)
	}
	if !void || d.void {
		d.void = void
		return nil
	}
	d.void = true
	return d.cache.Void()
}

// problem replaces what one check found.
func (d *daemon) problem(kind string, found ...string) {
	if !slices.Equal(d.problems[kind], found) && len(found) > 0 {
		d.Log.Warn("the overlay cannot be accelerated", "check", kind, "found", found)
	}
	d.problems[kind] = found
}

func (d *daemon) allProblems() (all []string) {
	for _, found := range d.problems {
		all = append(all, found...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
