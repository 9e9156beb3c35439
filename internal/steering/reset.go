package steering

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
)

// Reset restores what was set before the first Apply, and returns the restored devices. Without devices it restores
// all. Devices that are gone have nothing to restore. After an error, the devices that were not restored stay in the
// record.
func (s Steering) Reset(devices ...Device) (restored []Device, err error) {
	err = s.update(func(r *record, _ func() error) error {
		var errs []error
		r.Devices = slices.DeleteFunc(r.Devices, func(e *entry) bool {
			if len(devices) > 0 && !slices.Contains(devices, e.Device) {
				return false
			}
			err := e.restore()
			if errors.Is(err, errGone) {
				return true
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%w\n  its former settings stay in %s; fix the cause and repeat", err,
					s.path()))
				return false
			}
			restored = append(restored, e.Device)
			return true
		})
		r.prune()
		return errors.Join(append(errs, s.settleTable(r, 0))...)
	})
	return restored, err
}

// restore writes what was set before. Queues that the device has no longer are left out.
func (e *entry) restore() error {
	t, err := e.open()
	if err != nil {
		return err
	}
	defer t.Close()
	now, err := t.settings(e.Name)
	if err != nil {
		return err
	}
	for _, file := range slices.Sorted(maps.Keys(e.Before)) {
		if _, has := now[file]; !has {
			continue
		}
		if err := t.write(e.Name, file, e.Before[file]); err != nil {
			return err
		}
	}
	return nil
}

// Status is the steering of a machine, as far as Apply has set it.
type Status struct {
	// Table is the number of entries of the machine's table of flows; nil if this process is not in the machine's first
	// network namespace.
	Table       *int           `json:"flowEntries,omitempty"`
	TableBefore *int           `json:"flowEntriesBefore,omitempty"` // nil if no steering needs it
	Devices     []DeviceStatus `json:"devices"`
}

// DeviceStatus is the steering of one device.
type DeviceStatus struct {
	Device
	Mode      string            `json:"mode"`
	Reason    string            `json:"reason,omitempty"` // of auto
	Queues    int               `json:"queues"`
	CPUs      string            `json:"cpus"`      // of its first queue
	FlowCount int               `json:"flowCount"` // of its first queue
	Before    map[string]string `json:"before"`
	Gone      bool              `json:"gone,omitempty"` // the device does not exist any more
	// Problem says that the present settings are not those that Apply wrote; empty if they are.
	Problem string `json:"problem,omitempty"`
}

// Status reads the present settings of the recorded devices.
func (s Steering) Status() (*Status, error) {
	r, err := s.read()
	if err != nil {
		return nil, err
	}
	all := &Status{Devices: []DeviceStatus{}}
	entries, here, err := tableSetting()
	if err != nil {
		return nil, err
	}
	if here {
		all.Table = &entries
	}
	t, recorded, err := readTable()
	if err != nil {
		return nil, err
	}
	if recorded {
		all.TableBefore = &t.Before
	}
	for _, e := range r.Devices {
		d, err := e.status()
		if err != nil {
			return nil, err
		}
		all.Devices = append(all.Devices, d)
	}
	return all, nil
}

func (e *entry) status() (d DeviceStatus, err error) {
	d = DeviceStatus{Device: e.Device, Mode: e.Mode, Reason: e.Reason, Queues: len(e.Set) / 2, Before: e.Before}
	t, err := e.open()
	if errors.Is(err, errGone) {
		d.Gone, d.CPUs = true, "none"
		return d, nil
	}
	if err != nil {
		return d, err
	}
	defer t.Close()
	now, err := t.settings(e.Name)
	if err != nil {
		return d, err
	}
	cpus, err := parseMask(now[filepath.Join("rx-0", cpusFile)])
	if err != nil {
		return d, err
	}
	d.CPUs, d.Queues = FormatCPUs(cpus), len(now)/2
	if d.FlowCount, err = strconv.Atoi(now[filepath.Join("rx-0", countFile)]); err != nil {
		return d, err
	}
	for _, file := range slices.Sorted(maps.Keys(now)) {
		if !sameSetting(file, now[file], e.Set[file]) {
			d.Problem = fmt.Sprintf("%s is %s; repeat steering apply", file, now[file])
			break
		}
	}
	return d, nil
}

// sameSetting compares two values of a file. The kernel writes masks with leading zeros.
func sameSetting(file, a, b string) bool {
	if filepath.Base(file) != cpusFile {
		return a == b
	}
	x, err := parseMask(a)
	y, wrong := parseMask(b)
	return err == nil && wrong == nil && slices.Equal(x, y)
}
