package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/batch"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
)

// Devices makes, checks, repairs and removes the devices of containers.
type Devices struct {
	*hook.Hooks

	Removals         *batch.Rounds[removal]
	EndpointByDevice sync.Map // endpoint.ID by the number of its device in the maps, a uint32
}

// NewDevices makes the manager of containers' devices.
func NewDevices(hooks *hook.Hooks) *Devices {
	d := &Devices{Hooks: hooks}
	d.Removals = batch.New(&d.DeviceMu, d.removeBatch)
	return d
}

// deviceDriver makes one kind of device that joins a container to the node. The container's own settings do not depend
// on the kind.
type deviceDriver interface {
	// checkUplink refuses an uplink that the kind cannot work with.
	CheckUplink(uplink netlink.Link) error
	// create makes the device, on both sides up to what is set inside the container.
	create(r endpoint.Record, in *ContainerNS, mtu int) (endpoint.Device, error)
	// attachProgram lets the container's packets meet our program; nothing but that may do so.
	AttachProgram(r endpoint.Record) error
	// missing says why devices cannot be brought back, of those that cannot.
	Missing([]endpoint.Record) map[endpoint.ID]error
	// netnsID is what tells a container's namespace from others, and netnsIDOf what any one has of that, if it is not
	// negative.
	netnsID(r endpoint.Record) (int, error)
	netnsIDOf(in *ContainerNS) (int, error)
	// containerLink finds the container's end of the device: the path of a namespace may meanwhile lead into another
	// one, which is none of ours.
	containerLink(r endpoint.Record, in *ContainerNS) (netlink.Link, error)
	// check names the first difference of what the node has of the device, and repair makes it right.
	Check(r endpoint.Record) error
	Repair(r endpoint.Record) error
	// setMTU changes the node's side to what the container's side is to be.
	setMTU(r endpoint.Record, mtu int, container func() error) error
	// effectiveMTU is what the kernel makes of the MTU while the uplink has its own.
	effectiveMTU(mtu int) int
	// remove takes the device away, whatever is left of it, and the node's routes to it.
	Remove(r endpoint.Record, routes ...*net.IPNet) error
	// attachedEndpoints finds the endpoints whose devices take packets, whichever build made them.
	AttachedEndpoints() ([]endpoint.ID, error)
}

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
		return endpoint.Veth, err.Error()
	}
	return endpoint.Netkit, "this kernel has netkit"
}

// DeviceKinds are the names of the kinds of device, the default first.
func DeviceKinds() []string { return []string{endpoint.Veth, endpoint.Macvlan, endpoint.Netkit} }

func (d *Devices) Drivers() map[string]deviceDriver {
	return map[string]deviceDriver{endpoint.Veth: PairDevice{d, veth{d}}, endpoint.Macvlan: macvlan{d}, endpoint.Netkit: PairDevice{d, netkit{d}}}
}

// driver of an endpoint's device.
func (d *Devices) Driver(r endpoint.Record) deviceDriver {
	return d.Drivers()[cmp.Or(r.Device.Kind, endpoint.Veth)]
}

// CheckDeviceUplink refuses an uplink that a kind cannot work with.
func CheckDeviceUplink(kind string, uplink netlink.Link) error {
	if err := CheckDeviceKind(kind); err != nil {
		return err
	}
	return new(Devices).Drivers()[kind].CheckUplink(uplink)
}

// CreateDevice makes the device and the container's side of it.
func (d *Devices) CreateDevice(ctx context.Context, r endpoint.Record) (_ endpoint.Device, err error) {
	mtu, err := d.MTU()
	if err != nil {
		return endpoint.Device{}, err
	}
	mtu -= r.Overhead()
	if err := checkIPv6MTU(r, mtu); err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	in, err := OpenContainerNS(r.Netns)
	if err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	defer in.Close()
	r.Device.Kind = d.DeviceKind
	if r.Device, err = d.Driver(r).create(r, in, mtu); err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	if err := d.finish(ctx, r, in); err != nil {
		return endpoint.Device{}, errors.Join(fmt.Errorf("endpoint %d: %w", r.ID, err), d.Driver(r).Remove(r))
	}
	return r.Device, nil
}

func (d *Devices) finish(ctx context.Context, r endpoint.Record, in *ContainerNS) error {
	if err := d.WithDeviceLock(func() error { return d.setUpContainer(r, in) }); err != nil {
		return fmt.Errorf("container side: %w", err)
	}
	// Until the kernel has noticed the carrier it drops what the container sends.
	ctx, cancel := context.WithTimeout(ctx, host.CarrierTimeout)
	defer cancel()
	return errors.Join(in.WaitForCarrier(ctx, r), in.WaitForAddresses(ctx, r))
}

// Attached finds the endpoints whose devices take packets, whichever build made them.
func (d *Devices) Attached() ([]endpoint.ID, error) {
	var all []endpoint.ID
	for _, k := range d.Drivers() {
		ids, err := k.AttachedEndpoints()
		if err != nil {
			return nil, err
		}
		all = append(all, ids...)
	}
	return all, nil
}

// CheckDeviceKinds refuses devices that are not known here, and that a node of a kind leaves containers behind macvlans
// attachmentsNotIn the programs that judge them.
func CheckDeviceKinds(kind string, keep []endpoint.Record) error {
	for _, r := range keep {
		if new(Devices).Driver(r) == nil {
			return fmt.Errorf(
				"endpoint %d has a device of kind %q, which this build does not know; packets flow as before: start the build that made it",
				r.ID,
				r.Device.Kind,
			)
		}
	}
	others := slices.DeleteFunc(slices.Clone(keep), func(r endpoint.Record) bool { return r.Device.Kind != endpoint.Macvlan })
	if len(others) > 0 && kind != endpoint.Macvlan {
		return fmt.Errorf(
			"endpoints with a macvlan: %d, the first of them endpoint %d\n  packets flow as before; start with --device macvlan until the last has gone",
			len(others),
			others[0].ID,
		)
	}
	return nil
}

func (d *Devices) byDriver(records []endpoint.Record) map[deviceDriver][]endpoint.Record {
	all := map[deviceDriver][]endpoint.Record{}
	for _, r := range records {
		all[d.Driver(r)] = append(all[d.Driver(r)], r)
	}
	return all
}

// missing says why endpoints cannot be brought back, of those that cannot.
func (d *Devices) Missing(records []endpoint.Record) map[endpoint.ID]error {
	lost := map[endpoint.ID]error{}
	for k, records := range d.byDriver(records) {
		for id, err := range k.Missing(records) {
			lost[id] = fmt.Errorf("endpoint %d: %w", id, err)
		}
	}
	return lost
}

func CheckDeviceKind(name string) error {
	if name != "" && !slices.Contains(DeviceChoices(), name) {
		return fmt.Errorf("--device %s is none; nothing was changed: choose %s", name, strings.Join(DeviceChoices(), ", "))
	}
	return nil
}
