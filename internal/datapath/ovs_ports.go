package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// networkOVS is of devices that a switch reads itself (bpf/net/netpila/tables.h).
const networkOVS = uint32(0xff)

// OVSPorts are the devices whose packets a switch outside the packet path has already when they meet its programs, which let go without a word of what
// is no network's of their own. What the switch gives them meets a program on the way out, which drops what the switch cannot tell.
type OVSPorts struct {
	d *Datapath

	mu      sync.Mutex
	devices map[pipeline.Port]uint32 // indexes
}

// OVSPorts refuses kinds of device that a switch cannot read before the programs do.
func (d *Datapath) OVSPorts() (*OVSPorts, error) {
	if d.config.Device != Veth {
		return nil, fmt.Errorf("a switch of its own sees only what containers send by a %s, and behind a %s the programs come first; nothing was changed: start the agent with --device %s", Veth, d.config.Device, Veth)
	}
	if tunnel, err := d.findTunnel(); err != nil || tunnel != nil {
		return nil, errors.Join(err, fmt.Errorf("%s is here: this node's tunnels are eBPF's; nothing was changed: start the agent with --nimitz ebpf, or move the containers away and run `pilaster node reset`", tunnelDevice))
	}
	t := &OVSPorts{d: d, devices: map[pipeline.Port]uint32{}}
	d.ovsPorts = t
	return t, forEachEntry(d.objects.PilPortsV1, func(device uint32, p pilasterDevEp) { t.devices[pipeline.Port(p.Endpoint)] = device })
}

// Mark is what tells the programs on the uplink that a tunnel is the node's own.
func (t *OVSPorts) Mark() uint32 { return tunnelMark(t.d.acceptMark) }

// Plug notes that the switch reads a device. It may be repeated.
func (t *OVSPorts) Plug(_ context.Context, port pipeline.Port, is pipeline.Device) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, err := t.d.netlink.LinkByName(is.Name)
	if err != nil {
		return fmt.Errorf("%v: device %s: %w", port, is.Name, err)
	}
	if port == pipeline.Gateway { // the node's stack is to take nothing from it
		err := t.d.withDeviceLock(func() error { return errors.Join(t.d.sysctls.set(is.Name, hostSysctls()), t.attach(l)) })
		t.devices[port] = uint32(l.Attrs().Index)
		return err
	}
	if _, container := deviceID(l); container && l.Type() != Veth {
		return fmt.Errorf("%v: %s is a %s, whose packets the programs see before the switch; nothing was changed: let the container end, and attach it anew", port, is.Name, l.Type())
	}
	index := uint32(l.Attrs().Index)
	if old, there := t.devices[port]; there && old != index {
		if err := t.unplug(port, old); err != nil {
			return err
		}
	}
	if err := t.d.withDeviceLock(func() error { return t.attach(l) }); err != nil {
		return fmt.Errorf("%v: %w", port, err)
	}
	if err := t.d.objects.PilPortsV1.Put(index, pilasterDevEp{Endpoint: uint32(port), Network: networkOVS}); err != nil {
		return fmt.Errorf("make %s %v: %w", is.Name, port, err)
	}
	t.devices[port] = index
	return nil
}

func (t *OVSPorts) attach(l netlink.Link) error {
	return AttachFilter(t.d.netlink, l.Attrs().Index, l.Attrs().Name, netlink.HANDLE_MIN_EGRESS, t.d.objects.PilTapped, pilasterProgPilTapped)
}

func (t *OVSPorts) detach(device int) error {
	l, err := t.d.netlink.LinkByIndex(device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	there, err := t.d.programOn(l, netlink.HANDLE_MIN_EGRESS)
	if err != nil || there == 0 {
		return ignoreGone(err)
	}
	return t.d.withDeviceLock(func() error { return ignoreGone(detachFilter(t.d.netlink, device, netlink.HANDLE_MIN_EGRESS)) })
}

// hookProblems says which devices lack their program, and are there.
func (t *OVSPorts) problems() ([]string, error) {
	if t == nil {
		return nil, nil
	}
	t.mu.Lock()
	devices := slices.Sorted(maps.Values(t.devices))
	t.mu.Unlock()
	var without []string
	for _, index := range devices {
		l, err := t.d.netlink.LinkByIndex(int(index))
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue // its endpoint is lost, or is about to be
		}
		if err == nil {
			err = t.d.checkProgram(l, netlink.HANDLE_MIN_EGRESS, t.d.objects.PilTapped, pilasterProgPilTapped)
		}
		if err != nil {
			without = append(without, err.Error())
		}
	}
	if len(without) == 0 {
		return nil, nil
	}
	return []string{fmt.Sprintf("%s (%s), so what the switch cannot tell is not dropped there; restart the agent to bring it back",
		without[0], humanize.Of(len(without), "device", "devices"))}, nil
}

// Check looks for the program.
func (t *OVSPorts) Check(_ context.Context, device pipeline.Device) error {
	l, err := t.d.netlink.LinkByName(device.Name)
	if err != nil {
		return fmt.Errorf("device %s: %w", device.Name, err)
	}
	return t.d.checkProgram(l, netlink.HANDLE_MIN_EGRESS, t.d.objects.PilTapped, pilasterProgPilTapped)
}

// Unplug has the programs count again what they drop of the port's.
func (t *OVSPorts) Unplug(_ context.Context, port pipeline.Port) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	index, there := t.devices[port]
	if !there {
		return nil
	}
	return t.unplug(port, index)
}

func (t *OVSPorts) unplug(port pipeline.Port, index uint32) error {
	err := t.d.objects.PilPortsV1.Delete(index)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil
	}
	if err == nil {
		err = t.detach(int(index))
	}
	if err != nil {
		return fmt.Errorf("take %v off: %w", port, err)
	}
	delete(t.devices, port)
	return nil
}
