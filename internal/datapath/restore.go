package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Restore takes the packet path over from whichever build left it. The order is what makes that safe
// inNetns any moment, also when it is cut off and begun again by either build: all tables are whole before
// the first hook is moved to programs that read them, each hook goes from a program to a program (but
// for guards where no macvlan is left, which are taken off), what one hook sends the next lets by, and
// the tables of other builds go after the last hook has left them. Until then those are not written,
// which is why nothing may be added or removed meanwhile.
func (d *Datapath) Restore(
	_ context.Context,
	keep []endpoint.Record,
	fill func(found []endpoint.Record) error,
) (lost map[endpoint.ID]error, err error) {
	if err := CheckDeviceKinds(d.config.Device, keep); err != nil {
		return nil, err
	}
	if err := d.sweepMacvlans(keep); err != nil {
		return nil, err
	}
	living := slices.DeleteFunc(
		slices.Clone(keep),
		func(r endpoint.Record) bool { return !r.Lives() },
	) // others' removal is tried again
	lost = d.missing(living)
	for _, err := range lost {
		if errors.Is(err, errOtherUplink) {
			return nil, fmt.Errorf(
				"%w; packets flow as before: start with the uplink it was made on until such containers have gone",
				err,
			)
		}
	}
	found := slices.DeleteFunc(living, func(r endpoint.Record) bool { return lost[r.ID] != nil })
	d.endpointByDevice.Clear()
	for _, r := range found {
		d.setEndpointOf(r)
	}
	if err := fill(found); err != nil {
		return nil, err
	}
	if err := d.sweepPorts(found); err != nil {
		return nil, err
	}
	for _, r := range found {
		if err := d.addNodeRoutes(r); err != nil {
			return nil, err
		}
	}
	for _, move := range d.attachSteps(found, lost) {
		if err := move(); err != nil {
			return nil, err
		}
	}
	if err := d.GuardInterfaces(nil); err != nil {
		d.log.Error("not every interface beside the uplink is guarded", "error", err) // as Status says
	}
	if err := errors.Join(d.sweepNodeRoutes(found), d.sweepDevices(keep), d.sweepMaps()); err != nil {
		return nil, err
	}
	d.repair(slices.DeleteFunc(found, func(r endpoint.Record) bool { return lost[r.ID] != nil }))
	return lost, nil
}

// attachSteps are of the hooks that packets of containers pass, in order; lost gets those that could not be moved. What a
// container's program sends beside macvlans, with the secret mark and by the node's own route, the uplink's let by on
// any node. What one sends where there are none, only the uplink's let by that know of none, and no guard does. So on
// the way to macvlans the containers' go first, and on the way back the guards, which have nothing left to stop, and
// the uplink's. Only what waits for a neighbour's MAC all the way to macvlans is lost.
func (d *Datapath) attachSteps(found []endpoint.Record, lost map[endpoint.ID]error) []func() error {
	containers := func() error {
		for _, r := range found {
			if err := d.driver(r).attachProgram(r); err != nil {
				lost[r.ID] = err
			}
		}
		return nil
	}
	if d.config.Device == Macvlan {
		return []func() error{d.attachNimitz, containers, d.attachNode, d.attachUplink}
	}
	return []func() error{d.attachNimitz, d.reattachGateway, d.detachBackstop, d.attachUplink, containers, d.attachNode}
}

// CheckDeviceKinds refuses devices that are not known here, and that a node of a kind leaves containers behind macvlans
// attachmentsNotIn the programs that judge them.
func CheckDeviceKinds(kind string, keep []endpoint.Record) error {
	for _, r := range keep {
		if new(Datapath).driver(r) == nil {
			return fmt.Errorf(
				"endpoint %d has a device of kind %q, which this build does not know; packets flow as before: start the build that made it",
				r.ID,
				r.Device.Kind,
			)
		}
	}
	others := slices.DeleteFunc(slices.Clone(keep), func(r endpoint.Record) bool { return r.Device.Kind != Macvlan })
	if len(others) > 0 && kind != Macvlan {
		return fmt.Errorf(
			"endpoints with a macvlan: %d, the first of them endpoint %d\n  packets flow as before; start with --device macvlan until the last has gone",
			len(others),
			others[0].ID,
		)
	}
	return nil
}

func (d *Datapath) byDriver(records []endpoint.Record) map[deviceDriver][]endpoint.Record {
	all := map[deviceDriver][]endpoint.Record{}
	for _, r := range records {
		all[d.driver(r)] = append(all[d.driver(r)], r)
	}
	return all
}

// missing says why endpoints cannot be brought back, of those that cannot.
func (d *Datapath) missing(records []endpoint.Record) map[endpoint.ID]error {
	lost := map[endpoint.ID]error{}
	for k, records := range d.byDriver(records) {
		for id, err := range k.missing(records) {
			lost[id] = fmt.Errorf("endpoint %d: %w", id, err)
		}
	}
	return lost
}

func devices(records []endpoint.Record) map[string]bool {
	names := map[string]bool{}
	for _, r := range records {
		names[deviceName(r.ID)] = true
	}
	return names
}

func (d *Datapath) sweepDevices(keep []endpoint.Record) error {
	links, err := netns.List(d.netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	known := devices(keep)
	var errs []error
	for _, l := range links {
		name := l.Attrs().Name
		if _, ours := deviceID(l); ours && !known[name] {
			d.log.Warn("device of no endpoint is removed", "device", name)
			errs = append(errs, d.removeHostDevice(name))
		}
	}
	return errors.Join(errs...)
}

// sweepMaps removes what other builds and settings pinned, except counters.
func (d *Datapath) sweepMaps() error {
	tables := map[string]bool{markMap: true}
	for _, t := range d.pinnedMaps() {
		tables[t.pinName()] = true
	}
	return d.sweepFolder(
		d.mapsDir(),
		os.Remove,
		func(name string) bool { return tables[name] || strings.HasPrefix(name, countersPrefix) },
	)
}

// sweepLinks takes away programs at other hooks than these: other builds', and on interfaces that are gone.
func (d *Datapath) sweepLinks(hooks []hook) error {
	pins := map[string]bool{}
	for _, h := range hooks {
		pins[h.pin] = true
	}
	return d.sweepFolder(d.linksDir(), detachLink, func(name string) bool { return pins[name] })
}

func (d *Datapath) sweepFolder(dir string, remove func(string) error, wanted func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	for _, e := range entries {
		if wanted(e.Name()) {
			continue
		}
		pin := filepath.Join(dir, e.Name())
		d.log.Info("pin of another build, size or interface is removed", "pin", pin)
		if err := remove(pin); err != nil {
			return fmt.Errorf("remove pin %s: %w", pin, err)
		}
	}
	return nil
}

// deleteOthers removes the entries of a map whose keys are not among those to keep.
func deleteOthers[K comparable](m *ebpf.Map, keep map[K]bool) error {
	keys, err := mapKeys[K](m)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if keep[k] {
			continue
		}
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("sweep %v: %w", m, err)
		}
	}
	return nil
}

// mapKeys lists a hash map's keys. A map that changes meanwhile is listed again.
func mapKeys[K comparable](m *ebpf.Map) ([]K, error) {
	for {
		var keys []K
		var key K
		var value []byte
		entries := m.Iterate()
		for entries.Next(&key, &value) {
			keys = append(keys, key)
		}
		if err := entries.Err(); !errors.Is(err, ebpf.ErrIterationAborted) {
			return keys, err
		}
	}
}
