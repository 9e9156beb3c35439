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

// kind is how containers are joined to the node. What is inside a container is the same with all of them.
type kind interface {
	// suits refuses an uplink that the kind cannot work with.
	suits(uplink netlink.Link) error
	// make makes the device, on both sides up to what is set inside the container.
	make(r endpoint.Record, in *inside, mtu int) (endpoint.Device, error)
	// attach lets the container's packets meet our program; nothing but that may do so.
	attach(r endpoint.Record) error
	// lost says why devices cannot be brought back, of those that cannot.
	lost([]endpoint.Record) map[endpoint.ID]error
	// home is what tells a container's namespace from others, and homeOf what any one has of that, if it is not
	// negative.
	home(r endpoint.Record) (int, error)
	homeOf(in *inside) (int, error)
	// inside finds the container's end of the device: the path of a namespace may meanwhile lead into another
	// one, which is none of ours.
	inside(r endpoint.Record, in *inside) (netlink.Link, error)
	// check names the first difference of what the node has of the device, and repair makes it right.
	check(r endpoint.Record) error
	repair(r endpoint.Record) error
	// setMTU changes the node's side to what the container's side is to be.
	setMTU(r endpoint.Record, mtu int, container func() error) error
	// narrowed is what the kernel makes of the MTU while the uplink has its own.
	narrowed(mtu int) int
	// remove takes the device away, whatever is left of it, and the node's routes to it.
	remove(r endpoint.Record, routes ...*net.IPNet) error
	// carrying finds the endpoints whose devices take packets, whichever build made them.
	carrying() ([]endpoint.ID, error)
}

const (
	Veth    = "veth"
	Macvlan = "macvlan"
	Netkit  = "netkit"
)

// Auto is the best kind that a node's kernel has and that suits every container.
const Auto = "auto"

// Choices are what a node may be told: the names of the kinds of device, the default first, and Auto.
func Choices() []string { return append(Kinds(), Auto) }

// Choose is the kind that a choice means here, and of Auto also why.
func Choose(choice string) (kind, why string) {
	if choice != Auto {
		return cmp.Or(choice, Kinds()[0]), ""
	}
	if err := HasNetkit(); err != nil {
		return Veth, err.Error()
	}
	return Netkit, "this kernel has netkit"
}

// Kinds are the names of the kinds of device, the default first.
func Kinds() []string { return []string{Veth, Macvlan, Netkit} }

func (d *Datapath) kinds() map[string]kind {
	return map[string]kind{Veth: pair{d, veth{d}}, Macvlan: macvlan{d}, Netkit: pair{d, netkit{d}}}
}

// kind of an endpoint's device.
func (d *Datapath) kind(r endpoint.Record) kind { return d.kinds()[cmp.Or(r.Device.Kind, Veth)] }

// Suits refuses an uplink that a kind cannot work with.
func Suits(kind string, uplink netlink.Link) error {
	if err := checkKind(kind); err != nil {
		return err
	}
	return new(Datapath).kinds()[kind].suits(uplink)
}

// CreateDevice makes the device and the container's side of it.
func (d *Datapath) CreateDevice(ctx context.Context, r endpoint.Record) (_ endpoint.Device, err error) {
	mtu, err := d.MTU()
	if err != nil {
		return endpoint.Device{}, err
	}
	mtu -= r.Overhead()
	if err := leavesIPv6(r, mtu); err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	in, err := openInside(r.Netns)
	if err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	defer in.Close()
	r.Device.Kind = d.config.Device
	if r.Device, err = d.kind(r).make(r, in, mtu); err != nil {
		return endpoint.Device{}, fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	if err := d.finish(ctx, r, in); err != nil {
		return endpoint.Device{}, errors.Join(fmt.Errorf("endpoint %d: %w", r.ID, err), d.kind(r).remove(r))
	}
	return r.Device, nil
}

func (d *Datapath) finish(ctx context.Context, r endpoint.Record, in *inside) error {
	if err := d.alone(func() error { return d.setUpInside(r, in) }); err != nil {
		return fmt.Errorf("container side: %w", err)
	}
	// Until the kernel has noticed the carrier it drops what the container sends.
	ctx, cancel := context.WithTimeout(ctx, carrierTimeout)
	defer cancel()
	return errors.Join(in.waitForCarrier(ctx, r), in.waitForAddresses(ctx, r))
}

// alone keeps our own changes of devices from meeting at the kernel's one lock for them: a sysctl such
// as forwarding that finds it taken is tried again and again without a pause, for the 20 ms that the
// removal of another device may take.
func (d *Datapath) alone(change func() error) error {
	d.devices.Lock()
	defer d.devices.Unlock()
	return change()
}

// Attached finds the endpoints whose devices take packets, whichever build made them.
func (d *Datapath) Attached() ([]endpoint.ID, error) {
	var all []endpoint.ID
	for _, k := range d.kinds() {
		ids, err := k.carrying()
		if err != nil {
			return nil, err
		}
		all = append(all, ids...)
	}
	return all, nil
}
