package datapath

import (
	"context"
	"errors"
	"net"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// Attach gives the endpoint's device its program, and the node its routes.
func (d *Datapath) Attach(r endpoint.Record) error {
	if err := d.driver(r).attachProgram(r); err != nil {
		return err
	}
	d.setEndpointOf(r)
	return d.addNodeRoutes(r)
}

// setEndpointOf notes whose a device is, for events.
func (d *Datapath) setEndpointOf(r endpoint.Record) {
	d.endpointByDevice.Store(uint32(r.Device.HostIfindex), r.ID)
}

// MissingDevices looks for the devices of active endpoints, and says of those that are gone why they cannot be brought
// back.
func (d *Datapath) MissingDevices(records []endpoint.Record) (gone map[endpoint.ID]error, err error) {
	gone = map[endpoint.ID]error{}
	var errs []error
	for id, lost := range d.missing(records) {
		var notFound netlink.LinkNotFoundError
		if errors.As(lost, &notFound) || errors.Is(lost, dpapi.ErrNoNamespace) {
			gone[id] = lost
		} else {
			errs = append(errs, lost) // it is there, or could not be looked for
		}
	}
	return gone, errors.Join(errs...)
}

// RemoveRoutes takes the node's routes to an endpoint whose device is gone away.
func (d *Datapath) RemoveRoutes(r endpoint.Record) error {
	var errs []error
	for _, dst := range routesTo(r) {
		errs = append(errs, d.deleteNodeRoute(dst))
	}
	return errors.Join(errs...)
}

// routesTo are the node's: to attachments with a plaintext, which nodes see.
func routesTo(r endpoint.Record) []*net.IPNet {
	var routes []*net.IPNet
	for _, a := range r.Attachments {
		if a.Plaintext.IsValid() {
			routes = append(routes, hostNet(a.Address))
		}
	}
	return routes
}

// RemoveDevice takes away routes and device.
func (d *Datapath) RemoveDevice(_ context.Context, r endpoint.Record) error {
	if err := d.driver(r).remove(r, routesTo(r)...); err != nil {
		return err
	}
	d.endpointByDevice.CompareAndDelete(uint32(r.Device.HostIfindex), r.ID)
	return nil
}
