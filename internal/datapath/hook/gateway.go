package hook

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// gatewaySide is one of the two devices that connect the gateway's namespace with the node: one leads to the switch,
// the other to the fabric.
type gatewaySide struct {
	index   func(*bpfobj.PilasterNimitzNode) *uint32
	program func(*bpfobj.PilasterObjects) *ebpf.Program
	name    string
}

var (
	OverlaySide = gatewaySide{
		func(v *bpfobj.PilasterNimitzNode) *uint32 { return &v.Gateway },
		func(o *bpfobj.PilasterObjects) *ebpf.Program { return o.PilGatewayIn }, bpfobj.PilasterProgPilGatewayIn,
	}
	underlaySide = gatewaySide{
		func(v *bpfobj.PilasterNimitzNode) *uint32 { return &v.Underlay },
		func(o *bpfobj.PilasterObjects) *ebpf.Program { return o.PilUnderlayIn }, bpfobj.PilasterProgPilUnderlayIn,
	}
)

// PlugUnderlay connects the gateway with the fabric through this device.
func (d *Hooks) PlugUnderlay(device string) error {
	if _, err := d.PlugGateway(underlaySide, device); err != nil {
		return fmt.Errorf("connect the gateway with the fabric through %s: %w", device, err)
	}
	return nil
}

// PlugGateway attaches the program before the device gets any packet. A program that is already there stays until
// Restore replaces it, as at all hooks.
func (d *Hooks) PlugGateway(s gatewaySide, device string) (index uint32, err error) {
	l, err := d.Netlink.LinkByName(device)
	if err != nil {
		return 0, err
	}
	index = uint32(l.Attrs().Index)
	return index, d.WithDeviceLock(func() error {
		if err := d.Sysctls.Set(device, host.HostSysctls()); err != nil {
			return err
		}
		there, err := d.ProgramOn(l, netlink.HANDLE_MIN_INGRESS)
		if err == nil && there == 0 {
			err = d.attachGateway(s, l)
		}
		if err != nil {
			return err
		}
		return d.SetTunnelNode(func(v *bpfobj.PilasterNimitzNode) { *s.index(v) = index })
	})
}

// attachGateway attaches the program for packets from the gateway and, on its underlay side, the one for packets to it.
func (d *Hooks) attachGateway(s gatewaySide, l netlink.Link) error {
	if s.name == underlaySide.name {
		if err := d.Objects.PilUplinksV1.Put(UplinkGateway, d.Objects.PilToGateway); err != nil {
			return fmt.Errorf("set the uplink's program of the gateway: %w", err)
		}
	}
	return host.AttachFilter(
		d.Netlink,
		l.Attrs().Index,
		l.Attrs().Name,
		netlink.HANDLE_MIN_INGRESS,
		s.program(&d.Objects),
		s.name,
	)
}

// ReattachGateway replaces the programs of the connected devices by those of this build.
func (d *Hooks) ReattachGateway() error {
	var node bpfobj.PilasterNimitzNode
	if err := d.Objects.NimNodeV1.Lookup(uint32(0), &node); err != nil {
		return fmt.Errorf("read the devices of network nimitz: %w", err)
	}
	for _, s := range []gatewaySide{OverlaySide, underlaySide} {
		index := *s.index(&node)
		if index == 0 {
			continue
		}
		l, err := d.Netlink.LinkByIndex(int(index))
		if err == nil {
			err = d.WithDeviceLock(func() error { return host.IgnoreGone(d.attachGateway(s, l)) })
		}
		var notFound netlink.LinkNotFoundError
		if err != nil && !errors.As(err, &notFound) {
			return err
		}
	}
	return nil
}

// GatewayProblems returns what is missing of the gateway's devices, if there are any.
func (d *Hooks) GatewayProblems() ([]string, error) {
	var node bpfobj.PilasterNimitzNode
	if err := d.Objects.NimNodeV1.Lookup(uint32(0), &node); err != nil {
		return nil, err
	}
	var problems []string
	for _, s := range []gatewaySide{OverlaySide, underlaySide} {
		index := *s.index(&node)
		if index == 0 {
			continue
		}
		l, err := d.Netlink.LinkByIndex(int(index))
		if err == nil {
			err = d.CheckProgram(l, netlink.HANDLE_MIN_INGRESS, s.program(&d.Objects), s.name)
		}
		if err != nil {
			problems = append(
				problems,
				fmt.Sprintf(
					"the gateway's device with program %s: %v; restart the agent to repair the gateway",
					s.name,
					err,
				),
			)
		}
	}
	return problems, nil
}

// isGateway reports whether this is a gateway's device on the node.
func isGateway(name string) bool {
	return name == pipeline.GatewayDevice || name == pipeline.UnderlayDevice
}
