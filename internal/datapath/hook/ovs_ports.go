package hook

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// networkOVS marks devices that Open vSwitch reads itself (bpf/common/tables.h).
const networkOVS = uint32(0xff)

// OVSPorts are devices whose packets Open vSwitch receives before our programs run. There the programs drop packets of
// networks other than their own without counting them. A program on the way out drops what Open vSwitch cannot check.
type OVSPorts struct {
	d *Hooks

	mu      sync.Mutex
	Devices map[pipeline.Port]uint32 // indexes
}

// OVSPorts returns an error for kinds of device whose packets our programs receive before Open vSwitch does.
func (d *Hooks) OVSPorts() (*OVSPorts, error) {
	if d.DeviceKind != endpoint.Veth {
		return nil, fmt.Errorf("--nimitz ovs needs devices of kind %s: with %s our programs receive packets first; "+
			"nothing was changed: start the agent with --device %s", endpoint.Veth, d.DeviceKind, endpoint.Veth)
	}
	if tunnel, err := d.findTunnel(); err != nil || tunnel != nil {
		return nil, errors.Join(
			err,
			fmt.Errorf(
				"%s exists: this node's tunnels are eBPF's; nothing was changed: "+
					"start the agent with --nimitz ebpf, or drain the node and run `pilaster node reset`",
				TunnelDevice,
			),
		)
	}
	t := NewOVSPorts(d)
	d.ActiveOVSPorts = t
	return t, bpfobj.ForEachEntry(
		d.Objects.PilPortsV1,
		func(device uint32, p bpfobj.PilasterDevEp) { t.Devices[pipeline.Port(p.Endpoint)] = device },
	)
}

func NewOVSPorts(d *Hooks) *OVSPorts { return &OVSPorts{d: d, Devices: map[pipeline.Port]uint32{}} }

// Mark returns the mark by which the programs on the uplink recognise the node's own tunnels.
func (t *OVSPorts) Mark() uint32 { return TunnelMark(t.d.AcceptMark) }

// Plug records that Open vSwitch reads a device. It may be repeated.
func (t *OVSPorts) Plug(_ context.Context, port pipeline.Port, is pipeline.Device) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, err := t.d.Netlink.LinkByName(is.Name)
	if err != nil {
		return fmt.Errorf("%v: device %s: %w", port, is.Name, err)
	}
	if port == pipeline.Gateway { // the node's stack must receive nothing from it
		err := t.d.WithDeviceLock(
			func() error { return errors.Join(t.d.Sysctls.Set(is.Name, host.HostSysctls()), t.attach(l)) },
		)
		t.Devices[port] = uint32(l.Attrs().Index)
		return err
	}
	if _, container := host.DeviceID(l); container && l.Type() != endpoint.Veth {
		return fmt.Errorf("%v: %s is a %s, whose packets our programs receive before the switch; nothing was "+
			"changed: remove the container and attach it again", port, is.Name, l.Type())
	}
	index := uint32(l.Attrs().Index)
	if old, there := t.Devices[port]; there && old != index {
		if err := t.unplug(port, old); err != nil {
			return err
		}
	}
	if err := t.d.WithDeviceLock(func() error { return t.attach(l) }); err != nil {
		return fmt.Errorf("%v: %w", port, err)
	}
	if err := t.d.Objects.PilPortsV1.Put(index, bpfobj.PilasterDevEp{Endpoint: uint32(port),
		Network: networkOVS}); err != nil {
		return fmt.Errorf("make %s %v: %w", is.Name, port, err)
	}
	t.Devices[port] = index
	return nil
}

func (t *OVSPorts) attach(l netlink.Link) error { return t.d.attachTapped(l) }

func (d *Hooks) attachTapped(l netlink.Link) error {
	return host.AttachFilter(
		d.Netlink,
		l.Attrs().Index,
		l.Attrs().Name,
		netlink.HANDLE_MIN_EGRESS,
		d.Objects.PilTapped,
		bpfobj.PilasterProgPilTapped,
	)
}

// AttachTapped attaches the program behind Open vSwitch to a device, if the device has one and still exists.
func (d *Hooks) AttachTapped(device int) error {
	l, err := d.Netlink.LinkByIndex(device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	there, err := d.ProgramOn(l, netlink.HANDLE_MIN_EGRESS)
	if err != nil || there == 0 {
		return host.IgnoreGone(err)
	}
	return d.WithDeviceLock(func() error { return host.IgnoreGone(d.attachTapped(l)) })
}

func (t *OVSPorts) Detach(device int) error {
	l, err := t.d.Netlink.LinkByIndex(device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	there, err := t.d.ProgramOn(l, netlink.HANDLE_MIN_EGRESS)
	if err != nil || there == 0 {
		return host.IgnoreGone(err)
	}
	return t.d.WithDeviceLock(func() error {
		return host.IgnoreGone(host.DetachFilter(t.d.Netlink, device, netlink.HANDLE_MIN_EGRESS))
	})
}

// Problems returns the existing devices that lack their program.
func (t *OVSPorts) Problems() ([]string, error) {
	if t == nil {
		return nil, nil
	}
	t.mu.Lock()
	devices := slices.Sorted(maps.Values(t.Devices))
	t.mu.Unlock()
	var without []string
	for _, index := range devices {
		l, err := t.d.Netlink.LinkByIndex(int(index))
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue // its endpoint is gone, or will be
		}
		if err == nil {
			err = t.d.CheckProgram(l, netlink.HANDLE_MIN_EGRESS, t.d.Objects.PilTapped, bpfobj.PilasterProgPilTapped)
		}
		if err != nil {
			without = append(without, err.Error())
		}
	}
	if len(without) == 0 {
		return nil, nil
	}
	return []string{fmt.Sprintf("%s (%s), so what the switch cannot check is not dropped there; restart the agent "+
		"to attach it again",
		without[0], humanize.Of(len(without), "device", "devices"))}, nil
}

// Check looks for the program.
func (t *OVSPorts) Check(_ context.Context, device pipeline.Device) error {
	l, err := t.d.Netlink.LinkByName(device.Name)
	if err != nil {
		return fmt.Errorf("device %s: %w", device.Name, err)
	}
	return t.d.CheckProgram(l, netlink.HANDLE_MIN_EGRESS, t.d.Objects.PilTapped, bpfobj.PilasterProgPilTapped)
}

// Unplug makes the programs count again the packets of the port that they drop.
func (t *OVSPorts) Unplug(_ context.Context, port pipeline.Port) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	index, there := t.Devices[port]
	if !there {
		return nil
	}
	return t.unplug(port, index)
}

// unplug makes the programs count again what they drop on the port.
func (t *OVSPorts) unplug(port pipeline.Port, index uint32) error {
	err := t.d.Objects.PilPortsV1.Delete(index)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil
	}
	if err == nil {
		err = t.Detach(int(index))
	}
	if err != nil {
		return fmt.Errorf("remove %v: %w", port, err)
	}
	delete(t.Devices, port)
	return nil
}
