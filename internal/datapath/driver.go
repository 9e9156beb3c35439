package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
)

// driver is how containers are joined to the node. What is inside a container is the same with all of them.
type deviceDriver interface {
	// checkUplink refuses an uplink that the kind cannot work with.
	checkUplink(uplink netlink.Link) error
	// create makes the device, on both sides up to what is set inside the container.
	create(r endpoint.Record, in *containerNS, mtu int) (endpoint.Device, error)
	// attachProgram lets the container's packets meet our program; nothing but that may do so.
	attachProgram(r endpoint.Record) error
	// missing says why devices cannot be brought back, of those that cannot.
	missing([]endpoint.Record) map[endpoint.ID]error
	// netnsID is what tells a container's namespace from others, and netnsIDOf what any one has of that, if it is not
	// negative.
	netnsID(r endpoint.Record) (int, error)
	netnsIDOf(in *containerNS) (int, error)
	// containerNS finds the container's end of the device: the path of a namespace may meanwhile lead into another
	// one, which is none of ours.
	containerLink(r endpoint.Record, in *containerNS) (netlink.Link, error)
	// check names the first difference of what the node has of the device, and repair makes it right.
	check(r endpoint.Record) error
	repair(r endpoint.Record) error
	// setMTU changes the node's side to what the container's side is to be.
	setMTU(r endpoint.Record, mtu int, container func() error) error
	// effectiveMTU is what the kernel makes of the MTU while the uplink has its own.
	effectiveMTU(mtu int) int
	// removeHostDevice takes the device away, whatever is left of it, and the node's routes to it.
	remove(r endpoint.Record, routes ...*net.IPNet) error
	// attachedEndpoints finds the endpoints whose devices take packets, whichever build made them.
	attachedEndpoints() ([]endpoint.ID, error)
}

const (
	Veth    = "veth"
	Macvlan = "macvlan"
	Netkit  = "netkit"
)

// Auto is the best kind that a node's kernel has and that suits every container.
const Auto = "auto"

// DeviceChoices are what a node may be told: the names of the kinds of device, the default first, and Auto.
func DeviceChoices() []string { return append(DeviceKinds(), Auto) }

// ChooseDevice is the kind that a choice means here, and of Auto also why.
func ChooseDevice(choice string) (kind, why string) {
	if choice != Auto {
		return cmp.Or(choice, DeviceKinds()[0]), ""
	}
	if err := HasNetkit(); err != nil {
		return Veth, err.Error()
	}
	return Netkit, "this kernel has netkit"
}

// DeviceKinds are the names of the kinds of device, the default first.
func DeviceKinds() []string { return []string{Veth, Macvlan, Netkit} }

func (d *Datapath) drivers() map[string]deviceDriver {
	return map[string]deviceDriver{Veth: pairDevice{d, veth{d}}, Macvlan: macvlan{d}, Netkit: pairDevice{d, netkit{d}}}
}

// driver of an endpoint's device.
func (d *Datapath) driver(r endpoint.Record) deviceDriver {
	return d.drivers()[cmp.Or(r.Device.Kind, Veth)]
}

// CheckDeviceUplink refuses an uplink that a kind cannot work with.
func CheckDeviceUplink(kind string, uplink netlink.Link) error {
	if err := checkDeviceKind(kind); err != nil {
		return err
	}
	return new(Datapath).drivers()[kind].checkUplink(uplink)
}

// CreateDevice makes the device and the container's side of it.
func (d *Datapath) CreateDevice(ctx context.Context, r endpoint.Record) (_ endpoint.Device, err error) {
	mtu, err := d.MTU()
	if err != nil {
		return endpoint.Device{}, err
	}
	mtu -= r.Overhead()
	if err := checkIPv6MTU(r, mtu); err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	in, err := openContainerNS(r.Netns)
	if err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	defer in.Close()
	r.Device.Kind = d.config.Device
	if r.Device, err = d.driver(r).create(r, in, mtu); err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	if err := d.finish(ctx, r, in); err != nil {
		return endpoint.Device{}, errors.Join(fmt.Errorf("endpoint %d: %w", r.ID, err), d.driver(r).remove(r))
	}
	return r.Device, nil
}

func (d *Datapath) finish(ctx context.Context, r endpoint.Record, in *containerNS) error {
	if err := d.withDeviceLock(func() error { return d.setUpContainer(r, in) }); err != nil {
		return fmt.Errorf("container side: %w", err)
	}
	// Until the kernel has noticed the carrier it drops what the container sends.
	ctx, cancel := context.WithTimeout(ctx, carrierTimeout)
	defer cancel()
	return errors.Join(in.waitForCarrier(ctx, r), in.waitForAddresses(ctx, r))
}

// withDeviceLock keeps our own changes of devices from meeting at the kernel's one lock for them: a sysctl such
// as forwarding that finds it taken is tried again and again without a pause, for the 20 ms that the
// removal of another device may take.
func (d *Datapath) withDeviceLock(change func() error) error {
	d.deviceMu.Lock()
	defer d.deviceMu.Unlock()
	return change()
}

// Attached finds the endpoints whose devices take packets, whichever build made them.
func (d *Datapath) Attached() ([]endpoint.ID, error) {
	var all []endpoint.ID
	for _, k := range d.drivers() {
		ids, err := k.attachedEndpoints()
		if err != nil {
			return nil, err
		}
		all = append(all, ids...)
	}
	return all, nil
}
