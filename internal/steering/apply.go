package steering

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
)

// Request is what Apply sets on devices.
type Request struct {
	Mode  string // off, rps, rfs or auto
	CPUs  []int  // none: all that are online
	Flows int    // expected number of active connections; 0 means DefaultFlows
	// HostEntries is the size of the table of flows that was set in the machine's first network namespace; needed for
	// RFS in another one, which cannot read it. 0 means that it was not set.
	HostEntries int
}

// ErrNoTable means that the machine's table of flows cannot be set from here.
var ErrNoTable = errors.New("only the machine's first network namespace has it")

// check completes a request and refuses invalid ones.
func (q *Request) check() error {
	if !slices.Contains(Modes(), q.Mode) {
		return fmt.Errorf("mode %q: use off, rps, rfs or auto", q.Mode)
	}
	online, err := onlineCPUs()
	if err != nil {
		return err
	}
	for _, cpu := range q.CPUs {
		if !slices.Contains(online, cpu) {
			return fmt.Errorf("CPU %d is not online; nothing was changed; use some of %s", cpu, FormatCPUs(online))
		}
	}
	if len(q.CPUs) == 0 {
		q.CPUs = online
	}
	if q.Flows == 0 {
		q.Flows = DefaultFlows
	}
	if q.Flows < 1 || q.Flows > MaxFlows {
		return fmt.Errorf("%d flows: use 1 to %d", q.Flows, MaxFlows)
	}
	return nil
}

// entries returns the size of the table of flows that the request needs. It is 0 if RFS is not possible, which is an
// error if the request needs RFS.
func (q *Request) entries() (int, error) {
	if q.Mode != RFS && q.Mode != Auto {
		return 0, nil
	}
	has, here, err := tableSetting()
	switch wanted := tableSize(q.Flows); {
	case err != nil:
		return 0, err
	case here:
		return max(has, wanted), nil
	case q.HostEntries > 0:
		return tableSize(q.HostEntries), nil
	case q.Mode == RFS:
		return 0, fmt.Errorf("rfs needs net.core.rps_sock_flow_entries: %w; nothing was changed; run there `sysctl -w "+
			"net.core.rps_sock_flow_entries=%d`, then repeat with --host-flow-entries %d", ErrNoTable, wanted, wanted)
	}
	return 0, nil
}

// Check returns the error that Apply would return for the request, whatever the devices.
func (q Request) Check() error {
	if err := q.check(); err != nil {
		return err
	}
	_, err := q.entries()
	return err
}

// target is a device with what Apply is about to write.
type target struct {
	*tree
	entry
	plan plan
}

// Apply sets the steering of devices. What was set before the first Apply of a device is recorded. If a device does not
// exist, or the request is invalid, nothing is changed.
func (s Steering) Apply(q Request, devices []Device) error {
	if err := q.check(); err != nil {
		return err
	}
	entries, err := q.entries()
	if err != nil {
		return err
	}
	return s.update(func(r *record, save func() error) error {
		targets, err := q.targets(devices, entries)
		defer func() {
			for _, t := range targets {
				t.Close()
			}
		}()
		if err != nil {
			return err
		}
		r.prune()
		for _, t := range targets {
			r.put(t.entry)
		}
		if err := save(); err != nil { // before the first write, so that Reset can restore
			return err
		}
		if err := s.settleTable(r, entries); err != nil {
			return err
		}
		if err := write(targets); err != nil {
			return fmt.Errorf("%w\n  the files before it were written; `pilaster steering reset` restores them", err)
		}
		return nil
	})
}

// targets reads the devices' settings and plans the new ones. The caller must close the targets, also after an error.
func (q *Request) targets(devices []Device, entries int) (all []target, err error) {
	for _, d := range devices {
		ns, err := open(d.Netns)
		if err != nil {
			return all, fmt.Errorf("device %v: %w; nothing was changed", d, err)
		}
		inode, err := ns.Inode()
		if err != nil {
			return all, errors.Join(err, ns.Close())
		}
		t := target{entry: entry{Device: d, Inode: inode}}
		t.tree, err = openTree(ns)
		if err := errors.Join(err, ns.Close()); err != nil {
			return all, err
		}
		all = append(all, t)
		if err := q.plan(&all[len(all)-1], entries); err != nil {
			return all, err
		}
	}
	return all, nil
}

func (q *Request) plan(t *target, entries int) (err error) {
	if t.Index, err = t.index(t.Name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = errors.New("there is no such device")
		}
		return fmt.Errorf("device %v: %w; nothing was changed", t.Device, err)
	}
	if t.Before, err = t.settings(t.Name); err != nil {
		return err
	}
	f, err := t.facts(t.Name, t.Before)
	if err != nil {
		return err
	}
	t.plan = planFor(q.Mode, f, q.CPUs, entries)
	t.Mode, t.Reason, t.Set = t.plan.mode, t.plan.reason, map[string]string{}
	for file := range t.Before {
		t.Set[file] = formatMask(t.plan.cpus)
		if filepath.Base(file) == countFile {
			t.Set[file] = strconv.Itoa(t.plan.flowCount)
		}
	}
	return nil
}

// put adds an entry. If the device has one already, what was set before stays.
func (r *record) put(e entry) {
	has := r.find(e.Device, e.Inode, e.Index)
	if has == nil {
		r.Devices = append(r.Devices, &e)
		return
	}
	before := maps.Clone(e.Before) // of queues that are new
	maps.Copy(before, has.Before)
	e.Before = before
	*has = e
}

func write(targets []target) error {
	for _, t := range targets {
		for _, file := range slices.Sorted(maps.Keys(t.Set)) {
			if err := t.write(t.Name, file, t.Set[file]); err != nil {
				return err
			}
		}
	}
	return nil
}

// prune removes the entries of devices that are gone: the kernel has removed their settings with them.
func (r *record) prune() {
	r.Devices = slices.DeleteFunc(r.Devices, func(e *entry) bool {
		t, err := e.open()
		if err == nil {
			t.Close()
		}
		return errors.Is(err, errGone)
	})
}

// settleTable makes the record a user of the machine's table of flows if a device has RFS, else no user. entries is the
// size that this change needs; 0 for none.
func (s Steering) settleTable(r *record, entries int) error {
	if !slices.ContainsFunc(r.Devices, func(e *entry) bool { return e.Mode == RFS }) {
		return settleTable(s.path(), 0)
	}
	return settleTable(s.path(), max(entries, 1))
}
