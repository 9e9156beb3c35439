package dpapi

import (
	"context"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
)

// Devices creates, checks and removes the devices of containers, and attaches programs to them and to the node's own
// interfaces.
type Devices interface {
	// CreateDevice makes the container's device and what is on its side: address, routes, static neighbour. No packet
	// flows yet.
	CreateDevice(ctx context.Context, r endpoint.Record) (endpoint.Device, error)
	// Attach attaches the program to a recorded device. Packets flow once the endpoint's networks have entries for it.
	Attach(endpoint.Record) error
	// Readdress replaces the addresses, routes and neighbours of record was by those of record is: in the container of
	// an active endpoint, and the routes to it on the node. It does not touch what both have.
	Readdress(ctx context.Context, was, is endpoint.Record) error
	// CanReaddress returns the error that Readdress would return. It changes nothing.
	CanReaddress(was, is endpoint.Record) error
	// MTU returns the MTU, in bytes, that an endpoint without overhead should have now. An error says why there is no
	// usable one.
	MTU() (int, error)
	// SetMTU changes the MTU of an active endpoint's device, on both sides.
	SetMTU(r endpoint.Record, mtu int) error
	// RemoveDevice removes the device. The caller has removed the entries before. The namespace may be gone already.
	RemoveDevice(ctx context.Context, r endpoint.Record) error
	// Check compares the kernel's state with the record and names the first difference: link, address, route,
	// neighbour or program.
	Check(ctx context.Context, r endpoint.Record) error
	// Attached returns the endpoints whose devices take packets now, read from the kernel.
	Attached() ([]endpoint.ID, error)
	// Restore makes the packet path hold these endpoints and no others, and takes it over without packet loss from
	// whichever build left it. The agent calls it after it has put all tenants, and calls nothing else meanwhile.
	// Restore itself calls fill with the endpoints that it found, before it moves the first hook. It returns the
	// endpoints that cannot be restored, each with its error; ErrNoNamespace says that the container is gone too.
	Restore(ctx context.Context, keep []endpoint.Record,
		fill func(found []endpoint.Record) error) (lost map[endpoint.ID]error, err error)

	// MissingDevices returns the active endpoints whose devices are gone, with errors as Restore returns them. It
	// changes nothing.
	MissingDevices([]endpoint.Record) (map[endpoint.ID]error, error)
	// RemoveRoutes removes the routes to an endpoint whose device is gone. The caller has removed the entries before:
	// packets for it are then dropped with a reason, and do not wait for a device that does not exist.
	RemoveRoutes(endpoint.Record) error

	// ReconcileSettings sets the sysctls of the devices again where another program has overwritten them. The agent
	// calls it every few seconds.
	ReconcileSettings() error

	// GuardInterfaces attaches the programs that check packets on every interface of the node beside the uplink, and
	// detaches them from interfaces that no longer need them. changed is the interface from a netlink update; nil means
	// all interfaces.
	GuardInterfaces(changed netlink.Link) error
}
