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

// Restore takes the packet path over from whichever build left it. The order makes this safe at any moment, also if it
// is interrupted and started again by either build: all maps are complete before the first hook gets a program that
// reads them; each hook goes from one program to another (except the macvlan backstop, which is detached if no macvlan
// is left); what one hook sends, the next one accepts; and the maps of other builds are removed after the last hook has
// left them. Until then those maps are not written, so nothing may be added or removed meanwhile.
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
	) // the removal of the others is retried
	lost = d.Missing(living)
	for _, err := range lost {
		if errors.Is(err, device.ErrOtherUplink) {
			return nil, fmt.Errorf(
				"%w; packets flow as before: start with the uplink that it was made on until such containers are gone",
				err,
			)
		}
	}
	found := slices.DeleteFunc(living, func(r endpoint.Record) bool { return lost[r.ID] != nil })
	d.EndpointByDevice.Clear()
	for _, r := range found {
		d.SetEndpointOf(r)
	}
	if err := d.RestoreMACs(found); err != nil { // before fill, which invalidates cached flows
		return nil, err
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
		d.Log.Error("some interfaces beside the uplink have no guard programs", "error", err) // Status reports it too
	}
	// Programs of a build that does not count sessions have changed the table until now.
	if err := errors.Join(d.SweepNodeRoutes(found), d.SweepDevices(keep), d.sweepMaps(), d.recountUsage()); err != nil {
		return nil, err
	}
	d.Repair(slices.DeleteFunc(found, func(r endpoint.Record) bool { return lost[r.ID] != nil }))
	return lost, nil
}

// attachSteps returns the steps that replace the programs on the way of containers' packets, in order. It adds
// endpoints whose program could not be replaced to lost. If the node has macvlans, containers' programs mark packets
// with the secret mark or use the node's route, and all uplink programs accept both. If it has none, only uplink
// programs for nodes without macvlans accept their packets, and the backstop drops them. So a change to macvlans first
// replaces the containers' programs. A change back first detaches the backstop, which has nothing left to stop, and
// replaces the uplink's programs. Only packets that wait for a neighbour's MAC during the whole change to macvlans are
// lost.
func (d *Datapath) attachSteps(found []endpoint.Record, lost map[endpoint.ID]error) []func() error {
	containers := func() error {
		for _, r := range found {
			if err := d.Driver(r).AttachProgram(r); err != nil {
				lost[r.ID] = err
			}
		}
		return nil
	}
	sockets := func() error {
		err := d.AttachSockets(d.config.CgroupRoot)
		if err != nil && d.config.CgroupOptional {
			d.Log.Warn("sockets get no backend when they connect to a service; the node translates packets of "+
				"containers, and its own processes reach no services", "error", err)
			return nil
		}
		return err
	}
	if d.config.Device == endpoint.Macvlan {
		return []func() error{d.AttachTunnel, containers, d.AttachNode, d.AttachUplinkPrograms, d.AttachUplink,
			sockets}
	}
	return []func() error{
		d.AttachTunnel, d.ReattachGateway, d.DetachBackstop, d.AttachUplinkPrograms, d.AttachUplink, containers,
		d.AttachNode, sockets,
	}
}

// sweepMaps removes the pins of other builds and sizes, except counters.
func (d *Datapath) sweepMaps() error {
	tables := map[string]bool{markMap: true}
	for _, t := range d.pinnedMaps() {
		tables[t.pinName()] = true
	}
	for _, name := range d.networkPins {
		tables[name] = true
	}
	return d.SweepFolder(
		d.MapsDir(),
		os.Remove,
		func(name string) bool { return tables[name] || strings.HasPrefix(name, countersPrefix) },
	)
}
