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

	"github.com/vishvananda/netlink"

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
	name  string
	state string // what cached flows depend on
}

// daemon is the state of Run. Only the loop uses it.
type daemon struct {
	Options
	calls chan func()
	ended chan struct{} // closed by reset

	cache      *oncache.Cache // nil while the overlay has no device
	open       oncache.Config
	device     overlay.Device
	uplink     int
	bridge     int
	states     map[int]string // of uplink, overlay and bridge, by index
	table      *overlay.Table
	containers map[int]container
	excluded   map[string]string // device → why its container does not use the cache

	rulesChanged bool      // since they were read
	reading      bool      // a goroutine reads them
	lastReading  time.Time // its start
	rulesRead    chan ruleReport
	reader       sync.WaitGroup

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
		rulesRead: make(chan ruleReport, 1), excluded: map[string]string{}, problems: map[string][]string{},
		evicted: map[string]uint64{},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server, err := d.serve(ctx) // a socket has one daemon
	if err != nil {
		return err
	}
	defer func() { cancel(); err = errors.Join(err, server.close()) }()
	claim, err := claimOverlay(o.Overlay)
	if err != nil {
		return err
	}
	defer claim.Close()
	w, err := startWatch(ctx)
	if err != nil {
		return err
	}
	defer func() { cancel(); w.done.Wait(); d.reader.Wait() }()
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
	if err := cmp.Or(d.inspect(), d.applyRules(readRules(ctx, d.MarkMask))); err != nil {
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
		select {
		case <-ctx.Done():
			return nil
		case <-d.ended:
			return nil
		case err := <-w.failed:
			return err
		case b := <-w.routes:
			d.routeEvents(b)
		case b := <-w.rules:
			d.ruleEvents(b)
		case call := <-d.calls:
			call()
		case <-check.C:
			d.recheck()
		case r := <-d.rulesRead:
			d.reading = false
			if err := d.applyRules(r); err != nil {
				d.Log.Warn("the rules are not known", "err", err)
			}
		case <-renew.C:
		}
		d.startReading(ctx)
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

// setLearning pauses or resumes learning. With a problem, it voids what was learnt too.
func (d *daemon) setLearning() error {
	found := d.allProblems()
	if want := d.paused || len(found) > 0; want != d.inactive {
		change := d.cache.Resume
		if want {
			change = d.cache.Pause
		}
		if err := change(); err != nil {
			return err
		}
		d.inactive = want
		d.Log.Info("the cache's state has changed", "learns", !want, "problems", found)
	}
	if len(found) == 0 || d.void {
		d.void = len(found) > 0
		return nil
	}
	d.void = true
	return d.cache.Void()
}

// recheck looks at all that changes without an event.
func (d *daemon) recheck() {
	d.rulesChanged = true
	if err := d.inspect(); err != nil {
		d.problem(problemCache, err.Error())
		return
	}
	d.problem(problemCache)
	if d.cache == nil || d.config() != d.open {
		d.reopen()
		return
	}
	if err := d.joinAll(); err != nil {
		d.problem(problemCache, err.Error())
	}
}

// inspect reads settings and looks at the devices. What it finds is in d.problems; an error means that the state is
// unknown.
func (d *daemon) inspect() (err error) {
	if d.device, err = overlay.Discover(d.Overlay); err != nil {
		d.problem(problemOverlay, err.Error())
		return err
	}
	d.problem(problemOverlay)
	if d.bridge, err = d.Containers.BridgeIndex(); err != nil {
		return err
	}
	up, err := netlink.LinkByName(d.Uplink)
	if err != nil {
		return fmt.Errorf("%s: %w", d.Uplink, err)
	}
	d.uplink = up.Attrs().Index
	if d.ttl, err = validity(); err != nil {
		return err
	}
	if err := d.inspectSettings(); err != nil {
		return err
	}
	return d.inspectDevices()
}

// inspectSettings looks whether conntrack would call packets invalid after packets that it has not seen.
func (d *daemon) inspectSettings() error {
	if d.cache == nil || !d.tracks {
		d.problem(problemSettings)
		return nil
	}
	value, err := readSetting(liberal)
	if err != nil {
		return err
	}
	if value == "1" {
		d.problem(problemSettings)
	} else {
		d.problem(problemSettings, fmt.Sprintf("%s is %s: another program has changed it; set it to 1", liberal, value))
	}
	return nil
}

// inspectDevices looks for qdiscs, filters and programs that the cache would skip. One of a container excludes this
// container only.
func (d *daemon) inspectDevices() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var problems []string
	clear(d.excluded)
	for _, l := range links {
		index := l.Attrs().Index
		ours := d.Containers.Has(l, d.bridge)
		if index != d.device.Index && index != d.bridge && index != d.uplink && !ours {
			continue
		}
		why, err := overlay.QueueProblem(l, index != d.uplink)
		switch {
		case err != nil:
			return err
		case why != "" && ours:
			d.excluded[l.Attrs().Name] = why
		case why != "":
			problems = append(problems, why)
		}
	}
	d.problem(problemQueues, problems...)
	return nil
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
