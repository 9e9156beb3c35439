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

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/batch"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
)

// Devices makes, checks, repairs and removes the devices of containers.
type Devices struct {
	*hook.Hooks

	Removals         *batch.Rounds[removal]
	EndpointByDevice sync.Map // endpoint.ID by the number of its device in the maps, a uint32

	entries map[string]EntryProgram // by network
}

// EntryProgram is the program that packets of a container reach first.
type EntryProgram struct {
	Program *ebpf.Program
	Name    string
}

// SetEntry makes a program the entry program of containers that are on one network only. A network calls it when it
// opens, before Restore.
func (d *Devices) SetEntry(network string, p EntryProgram) { d.entries[network] = p }

// Entries returns the entry programs that networks have set, by network.
func (d *Devices) Entries() map[string]EntryProgram { return d.entries }

// EntryFor returns the entry program for an endpoint: that of the network by which it sends or, if these are several or
// the network has no program of its own, pil_container, which hands packets on to the other networks.
func (d *Devices) EntryFor(r endpoint.Record) EntryProgram {
	if on := r.SendsBy(); len(on) == 1 {
		if p, ok := d.entries[on[0]]; ok {
			return p
		}
	}
	return d.dispatcher()
}

func (d *Devices) dispatcher() EntryProgram {
	return EntryProgram{d.Objects.PilContainer, bpfobj.PilasterProgPilContainer}
}

// entryNames are the names of all entry programs.
func (d *Devices) entryNames() []string {
	names := []string{d.dispatcher().Name}
	for _, p := range d.entries {
		names = append(names, p.Name)
	}
	return names
}

// NewDevices makes the manager of containers' devices.
func NewDevices(hooks *hook.Hooks) *Devices {
	d := &Devices{Hooks: hooks, entries: map[string]EntryProgram{}}
	d.Removals = batch.New(&d.DeviceMu, d.removeBatch)
	return d
}

// deviceDriver makes one kind of device that joins a container to the node. The container's own settings do not depend
// on the kind.
type deviceDriver interface {
	// CheckUplink returns an error for an uplink that does not work with this kind.
	CheckUplink(uplink netlink.Link) error
	// create makes the device, except for the settings in the container.
	create(r endpoint.Record, in *ContainerNS, mtu int) (endpoint.Device, error)
	// AttachProgram makes the endpoint's entry program process the container's packets, or replaces another entry
	// program in one step. No other call may do so.
	AttachProgram(r endpoint.Record) error
	// Missing returns an error for each device that is gone and cannot be restored.
	Missing([]endpoint.Record) map[endpoint.ID]error
	// netnsID identifies a container's namespace. netnsIDOf returns the same of any namespace;
	// a negative number means none.
	netnsID(r endpoint.Record) (int, error)
	netnsIDOf(in *ContainerNS) (int, error)
	// containerLink finds the container's end of the device: the path may lead to another
	// namespace by now.
	containerLink(r endpoint.Record, in *ContainerNS) (netlink.Link, error)
	// Check returns the first difference on the node's side of the device; Repair removes it.
	Check(r endpoint.Record) error
	Repair(r endpoint.Record) error
	// setMTU changes the node's side to mtu and calls container, which changes the container's side, in the right
	// order.
	setMTU(r endpoint.Record, mtu int, container func() error) error
	// effectiveMTU is the MTU that the kernel allows while the uplink has its present one.
	effectiveMTU(mtu int) int
	// Remove removes what is left of the device, and the node's routes to it.
	Remove(r endpoint.Record, routes ...*net.IPNet) error
	// AttachedEndpoints returns the endpoints whose devices have a program, whichever build attached it.
	AttachedEndpoints() ([]endpoint.ID, error)
}

// Auto selects the best kind that the node's kernel supports and that suits every container.
const Auto = "auto"

// DeviceChoices returns the valid values of --device: the kinds of device, the default first, and Auto.
func DeviceChoices() []string { return append(DeviceKinds(), Auto) }

// ChooseDevice resolves a value of --device to a kind. For Auto it also returns the reason for the choice.
func ChooseDevice(choice string) (kind, why string) {
	if choice != Auto {
		return cmp.Or(choice, DeviceKinds()[0]), ""
	}
	if err := HasNetkit(); err != nil {
		return endpoint.Veth, err.Error()
	}
	return endpoint.Netkit, "this kernel has netkit"
}

// DeviceKinds returns the kinds of device, the default first.
func DeviceKinds() []string { return []string{endpoint.Veth, endpoint.Macvlan, endpoint.Netkit} }

func (d *Devices) Drivers() map[string]deviceDriver {
	return map[string]deviceDriver{
		endpoint.Veth:    PairDevice{d, veth{d}},
		endpoint.Macvlan: macvlan{d},
		endpoint.Netkit:  PairDevice{d, netkit{d}},
	}
}

// Driver returns the driver of an endpoint's device, nil if this build does not know the kind. Records without a kind
// are from builds that had only veth.
func (d *Devices) Driver(r endpoint.Record) deviceDriver {
	return d.Drivers()[cmp.Or(r.Device.Kind, endpoint.Veth)]
}

// CheckDeviceUplink returns an error if devices of this kind do not work on the uplink.
func CheckDeviceUplink(kind string, uplink netlink.Link) error {
	if err := CheckDeviceKind(kind); err != nil {
		return err
	}
	return new(Devices).Drivers()[kind].CheckUplink(uplink)
}

// CreateDevice makes the device and configures the container's side of it.
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
	// The kernel drops what the container sends until it has seen the carrier.
	ctx, cancel := context.WithTimeout(ctx, host.CarrierTimeout)
	defer cancel()
	return errors.Join(in.WaitForCarrier(ctx, r), in.WaitForAddresses(ctx, r))
}

// Attached returns the endpoints whose devices have a program, whichever build attached it.
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

// CheckDeviceKinds returns an error if this build does not know the device of an endpoint, or if the node would change
// to another kind while containers have macvlans: the programs that apply policy to macvlans would be removed.
func CheckDeviceKinds(kind string, keep []endpoint.Record) error {
	for _, r := range keep {
		if new(Devices).Driver(r) == nil {
			return fmt.Errorf(
				"endpoint %d has a device of kind %q, which this build does not know; packets flow as before: "+
					"start the build that made it",
				r.ID,
				r.Device.Kind,
			)
		}
	}
	others := slices.DeleteFunc(
		slices.Clone(keep),
		func(r endpoint.Record) bool { return r.Device.Kind != endpoint.Macvlan },
	)
	if len(others) > 0 && kind != endpoint.Macvlan {
		return fmt.Errorf(
			"endpoints with a macvlan: %d, the first of them endpoint %d\n  packets flow as before; start with "+
				"--device macvlan until the last has gone",
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

// Missing returns an error for each endpoint whose device is gone and cannot be restored.
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
		return fmt.Errorf(
			"--device %s is unknown; nothing was changed: choose %s",
			name,
			strings.Join(DeviceChoices(), ", "),
		)
	}
	return nil
}
