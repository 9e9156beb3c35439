package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// gatewaySide is one of the two devices by which the gateway of the second network, whose stack is in a namespace of
// its own, is joined to the node: the switch is behind the one, the fabric behind the other.
type gatewaySide struct {
	index   func(*pilasterNimitzNode) *uint32
	program func(*pilasterObjects) *ebpf.Program
	name    string
}

var (
	overlaySide = gatewaySide{
		func(v *pilasterNimitzNode) *uint32 { return &v.Gateway },
		func(o *pilasterObjects) *ebpf.Program { return o.PilGatewayIn }, pilasterProgPilGatewayIn,
	}
	underlaySide = gatewaySide{
		func(v *pilasterNimitzNode) *uint32 { return &v.Underlay },
		func(o *pilasterObjects) *ebpf.Program { return o.PilUnderlayIn }, pilasterProgPilUnderlayIn,
	}
)

// PlugUnderlay makes a device the one by which the gateway reaches the fabric, and the fabric the gateway.
func (d *Datapath) PlugUnderlay(device string) error {
	if _, err := d.plugGateway(underlaySide, device); err != nil {
		return fmt.Errorf("make %s the gateway's way to the fabric: %w", device, err)
	}
	return nil
}

// plugGateway has a program stand before anything is sent to the device. One that works already Restore moves, as all
// hookNames.
func (d *Datapath) plugGateway(s gatewaySide, device string) (index uint32, err error) {
	l, err := d.netlink.LinkByName(device)
	if err != nil {
		return 0, err
	}
	index = uint32(l.Attrs().Index)
	return index, d.withDeviceLock(func() error {
		if err := d.sysctls.set(device, hostSysctls()); err != nil {
			return err
		}
		there, err := d.programOn(l, netlink.HANDLE_MIN_INGRESS)
		if err == nil && there == 0 {
			err = d.attachGateway(s, l)
		}
		if err != nil {
			return err
		}
		return d.setNimitzNode(func(v *pilasterNimitzNode) { *s.index(v) = index })
	})
}

func (d *Datapath) attachGateway(s gatewaySide, l netlink.Link) error {
	return AttachFilter(
		d.netlink,
		l.Attrs().Index,
		l.Attrs().Name,
		netlink.HANDLE_MIN_INGRESS,
		s.program(&d.objects),
		s.name,
	)
}

// reattachGateway moves the hooks of the devices that are plugged to the programs of this build.
func (d *Datapath) reattachGateway() error {
	var node pilasterNimitzNode
	if err := d.objects.NimNodeV1.Lookup(uint32(0), &node); err != nil {
		return fmt.Errorf("read the second network's devices: %w", err)
	}
	for _, s := range []gatewaySide{overlaySide, underlaySide} {
		index := *s.index(&node)
		if index == 0 {
			continue
		}
		l, err := d.netlink.LinkByIndex(int(index))
		if err == nil {
			err = d.withDeviceLock(func() error { return ignoreGone(d.attachGateway(s, l)) })
		}
		var notFound netlink.LinkNotFoundError
		if err != nil && !errors.As(err, &notFound) {
			return err
		}
	}
	return nil
}

// gatewayProblems says what is missing of the gateway's devices, where there are any.
func (d *Datapath) gatewayProblems() ([]string, error) {
	var node pilasterNimitzNode
	if err := d.objects.NimNodeV1.Lookup(uint32(0), &node); err != nil {
		return nil, err
	}
	var problems []string
	for _, s := range []gatewaySide{overlaySide, underlaySide} {
		index := *s.index(&node)
		if index == 0 {
			continue
		}
		l, err := d.netlink.LinkByIndex(int(index))
		if err == nil {
			err = d.checkProgram(l, netlink.HANDLE_MIN_INGRESS, s.program(&d.objects), s.name)
		}
		if err != nil {
			problems = append(
				problems,
				fmt.Sprintf(
					"the gateway's device with program %s: %v; restart the agent to bring the gateway back",
					s.name,
					err,
				),
			)
		}
	}
	return problems, nil
}

// isGateway tells the gateway's devices on the node.
func isGateway(name string) bool {
	return name == pipeline.GatewayDevice || name == pipeline.UnderlayDevice
}

func staleGateway() (all []network.StaleState, err error) {
	for _, name := range []string{pipeline.GatewayDevice, pipeline.UnderlayDevice} {
		found, err := staleNamed("pair", name, isVeth)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}
