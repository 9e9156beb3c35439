package accelerate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/accelerate/overlay"
	"pilaster.io/pilaster/internal/netns"
)

// inspection is what a look at the devices and settings found. The kernel's lists of devices wait for changes that
// other processes make, such as the start of a container, so the loop lets a goroutine look.
type inspection struct {
	Options
	number   uint64       // of this inspection: the loop ignores results that an inspection of its own has overtaken
	changed  map[int]bool // devices whose programs to look at; nil: all
	programs map[int]string
	tracks   bool // the cache is in use and conntrack tracks

	links           []netlink.Link
	device          overlay.Device
	uplink, bridge  int
	ttl             time.Duration
	settings        []string // problems
	queues          []string // problems
	excluded        map[string]string
	overlayProblems []string
	err             error // the state is unknown
}

// newInspection prepares an inspection; all says that programs of all devices are looked at, which have no events.
func (d *daemon) newInspection(all bool) *inspection {
	d.inspections++
	i := &inspection{
		Options: d.Options, number: d.inspections, programs: maps.Clone(d.programs), tracks: d.cache != nil && d.tracks,
		excluded: map[string]string{},
	}
	if !all && i.programs != nil {
		i.changed = d.changed
	} else {
		i.programs = map[int]string{}
	}
	d.changed, d.changedAll = map[int]bool{}, false
	return i
}

func (i *inspection) run() *inspection {
	i.err = i.look()
	return i
}

func (i *inspection) look() (err error) {
	if i.links, err = netns.List(netlink.LinkList); err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	l, err := named(i.links, i.Overlay)
	if err == nil {
		i.device, err = overlay.Describe(l)
	}
	if err != nil {
		i.overlayProblems = []string{err.Error()}
		return err
	}
	if i.Containers.Bridge != "" {
		if l, err = named(i.links, i.Containers.Bridge); err != nil {
			return err
		}
		if l.Type() != "bridge" {
			return fmt.Errorf("%s is a device of type %s, not bridge", i.Containers.Bridge, l.Type())
		}
		i.bridge = l.Attrs().Index
	}
	if l, err = named(i.links, i.Uplink); err != nil {
		return err
	}
	i.uplink = l.Attrs().Index
	if i.ttl, err = validity(); err != nil {
		return err
	}
	return errors.Join(i.lookAtSettings(), i.lookAtQueues())
}

func named(links []netlink.Link, name string) (netlink.Link, error) {
	for _, l := range links {
		if l.Attrs().Name == name {
			return l, nil
		}
	}
	return nil, fmt.Errorf("%s: Link not found", name)
}

// lookAtSettings looks whether conntrack would call packets invalid after packets that it has not seen.
func (i *inspection) lookAtSettings() error {
	if !i.tracks {
		return nil
	}
	value, err := readSetting(liberal)
	if err == nil && value != "1" {
		i.settings = []string{
			fmt.Sprintf("%s is %s: another program has changed it; set it to 1", liberal, value),
		}
	}
	return err
}

// lookAtQueues looks for qdiscs, filters and programs that the cache would skip. One of a container excludes this
// container only.
func (i *inspection) lookAtQueues() error {
	qdiscs, err := overlay.Qdiscs()
	if err != nil {
		return err
	}
	programs := map[int]string{}
	for _, l := range i.links {
		index := l.Attrs().Index
		ours, skipsEgress := i.Containers.Has(l, i.bridge), index != i.uplink
		if index != i.device.Index && index != i.bridge && skipsEgress && !ours {
			continue
		}
		why, err := overlay.QueueProblem(l, qdiscs[index], skipsEgress)
		if err != nil {
			return err
		}
		known, ok := i.programs[index]
		if !ok || i.changed[index] {
			if known, err = overlay.ProgramProblem(l, skipsEgress); err != nil {
				return err
			}
		}
		programs[index] = known
		switch {
		case why == "" && known == "":
		case ours:
			i.excluded[l.Attrs().Name] = cmp.Or(why, known)
		default:
			i.queues = append(i.queues, cmp.Or(why, known))
		}
	}
	i.programs = programs
	slices.Sort(i.queues)
	return nil
}

// take makes an inspection's result the daemon's state. An error means that the state is unknown.
func (d *daemon) take(i *inspection) error {
	d.problem(problemOverlay, i.overlayProblems...)
	if i.err != nil {
		d.programs = nil
		return i.err
	}
	d.device, d.uplink, d.bridge, d.ttl = i.device, i.uplink, i.bridge, i.ttl
	d.programs, d.excluded = i.programs, i.excluded
	d.problem(problemSettings, i.settings...)
	d.problem(problemQueues, i.queues...)
	return nil
}

// apply makes the cache follow what an inspection found.
func (d *daemon) apply(i *inspection) {
	if err := d.take(i); err != nil {
		d.problem(problemCache, err.Error())
		d.changedAll, d.inspectionTime = true, retryInterval/2
		return
	}
	if d.cache == nil && i.changed != nil {
		return // the next look at all tries again
	}
	d.problem(problemCache)
	if d.cache == nil || d.config() != d.open || d.device != d.opened {
		d.reopen()
		return
	}
	for _, l := range i.links {
		d.follow(l)
	}
}

// recheck looks at all, now. It is for a cache that is closed, or whose state is unknown.
func (d *daemon) recheck() {
	d.rulesChanged = true
	d.apply(d.newInspection(true).run())
}

// passInterval bounds the time that passes take on a node whose containers and rules change all the time: passes over
// devices and readings of rules start that long after each other at the earliest, and later if they take long.
const passInterval = 20 * time.Millisecond

// retryInterval is the time between passes over devices that fail.
const retryInterval = time.Second

// startPasses has goroutines look at what has changed, so that the loop evicts what other changes concern meanwhile.
// It returns a channel that says when to call it again, nil if nothing waits.
func (d *daemon) startPasses(ctx context.Context) <-chan time.Time {
	var next time.Duration
	if (len(d.changed) > 0 || d.changedAll) && !d.inspecting {
		if wait := max(passInterval, 2*d.inspectionTime) - time.Since(d.lastInspection); wait > 0 {
			next = wait
		} else {
			d.inspecting, d.lastInspection = true, time.Now()
			i := d.newInspection(d.changedAll)
			d.passes.Go(func() { d.inspected <- i.run() })
		}
	}
	if d.rulesChanged && !d.reading {
		if wait := d.readingInterval - time.Since(d.lastReading); wait <= 0 {
			d.startReading(ctx)
		} else if next == 0 || wait < next {
			next = wait
		}
	}
	if next == 0 {
		return nil
	}
	return time.After(next)
}
