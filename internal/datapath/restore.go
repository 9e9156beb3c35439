package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
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
	if err := device.CheckDeviceKinds(d.config.Device, keep); err != nil {
		return nil, err
	}
	if err := d.SweepMacvlans(keep); err != nil {
		return nil, err
	}
	living := slices.DeleteFunc(
		slices.Clone(keep),
		func(r endpoint.Record) bool { return !r.Lives() },
	) // others' removal is tried again
	lost = d.Missing(living)
	for _, err := range lost {
		if errors.Is(err, device.ErrOtherUplink) {
			return nil, fmt.Errorf(
				"%w; packets flow as before: start with the uplink it was made on until such containers have gone",
				err,
			)
		}
	}
	found := slices.DeleteFunc(living, func(r endpoint.Record) bool { return lost[r.ID] != nil })
	d.EndpointByDevice.Clear()
	for _, r := range found {
		d.SetEndpointOf(r)
	}
	if err := fill(found); err != nil {
		return nil, err
	}
	if err := d.SweepPorts(found); err != nil {
		return nil, err
	}
	for _, r := range found {
		if err := d.AddNodeRoutes(r); err != nil {
			return nil, err
		}
	}
	for _, move := range d.attachSteps(found, lost) {
		if err := move(); err != nil {
			return nil, err
		}
	}
	if err := d.GuardInterfaces(nil); err != nil {
		d.Log.Error("not every interface beside the uplink is guarded", "error", err) // as Status says
	}
	if err := errors.Join(d.SweepNodeRoutes(found), d.SweepDevices(keep), d.sweepMaps()); err != nil {
		return nil, err
	}
	d.Repair(slices.DeleteFunc(found, func(r endpoint.Record) bool { return lost[r.ID] != nil }))
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
			if err := d.Driver(r).AttachProgram(r); err != nil {
				lost[r.ID] = err
			}
		}
		return nil
	}
	if d.config.Device == endpoint.Macvlan {
		return []func() error{d.AttachNimitz, containers, d.AttachNode, d.AttachUplink}
	}
	return []func() error{d.AttachNimitz, d.ReattachGateway, d.DetachBackstop, d.AttachUplink, containers, d.AttachNode}
}

// sweepMaps removes what other builds and settings pinned, except counters.
func (d *Datapath) sweepMaps() error {
	tables := map[string]bool{markMap: true}
	for _, t := range d.pinnedMaps() {
		tables[t.pinName()] = true
	}
	return d.SweepFolder(
		d.MapsDir(),
		os.Remove,
		func(name string) bool { return tables[name] || strings.HasPrefix(name, countersPrefix) },
	)
}
