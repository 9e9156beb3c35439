package device

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// Attach attaches the program to the endpoint's device and adds the node's routes to the endpoint.
func (d *Devices) Attach(r endpoint.Record) error {
	d.SetEndpointOf(r)
	if err := d.PutMAC(r); err != nil {
		return err
	}
	if err := d.Driver(r).AttachProgram(r); err != nil {
		return err
	}
	return d.AddNodeRoutes(r)
}

// SetEndpointOf records which endpoint a device belongs to. Events need it.
func (d *Devices) SetEndpointOf(r endpoint.Record) {
	d.EndpointByDevice.Store(uint32(r.Device.HostIfindex), r.ID)
}

// MissingDevices looks for the devices of active endpoints. It returns an error for each endpoint whose device is gone
// and cannot be restored.
func (d *Devices) MissingDevices(records []endpoint.Record) (gone map[endpoint.ID]error, err error) {
	gone = map[endpoint.ID]error{}
	var errs []error
	for id, lost := range d.Missing(records) {
		var notFound netlink.LinkNotFoundError
		if errors.As(lost, &notFound) || errors.Is(lost, dpapi.ErrNoNamespace) {
			gone[id] = lost
		} else {
			errs = append(errs, lost) // it exists, or the lookup failed
		}
	}
	return gone, errors.Join(errs...)
}

// RemoveRoutes removes the node's routes to an endpoint whose device is gone.
func (d *Devices) RemoveRoutes(r endpoint.Record) error {
	var errs []error
	for _, dst := range hook.RoutesTo(r) {
		errs = append(errs, d.DeleteNodeRoute(dst))
	}
	return errors.Join(errs...)
}

// RemoveDevice removes the endpoint's device and the node's routes to it.
func (d *Devices) RemoveDevice(_ context.Context, r endpoint.Record) error {
	if err := d.Driver(r).Remove(r, hook.RoutesTo(r)...); err != nil {
		return err
	}
	// After a reboot another endpoint may have this index.
	if d.EndpointByDevice.CompareAndDelete(uint32(r.Device.HostIfindex), r.ID) {
		return d.deleteMAC(r)
	}
	return nil
}

// EndpointOf returns the endpoint of the device that a packet came from, whatever source address it claims. It is 0 for
// the uplink and for a device that is gone by now.
func (d *Devices) EndpointOf(device uint32) endpoint.ID {
	id, _ := d.EndpointByDevice.Load(device)
	owner, _ := id.(endpoint.ID)
	return owner
}

// LoadDeviceOwners fills the table of devices from the maps that an earlier process filled.
func (d *Devices) LoadDeviceOwners() error {
	return d.forEachEpDst(func(l bpfobj.PilasterEpDst) { d.EndpointByDevice.Store(l.Ifindex, endpoint.ID(l.Endpoint)) })
}

// forEachEpDst calls f with the map entry of each local address.
func (d *Devices) forEachEpDst(f func(bpfobj.PilasterEpDst)) error {
	var key uint64
	var local bpfobj.PilasterEpDst
	entries := d.Objects.PilLocalsV1.Iterate()
	for entries.Next(&key, &local) {
		f(local)
	}
	if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("list the containers' entries: %w", err)
	}
	return nil
}
