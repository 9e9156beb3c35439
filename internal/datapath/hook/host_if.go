package hook

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// hostIfHooks returns the hooks of an interface beside the uplink. The interface's index is part of the pin's name,
// because names of devices can change.
func (d *Hooks) hostIfHooks(l netlink.Link) []hook {
	pin := func(name string) string { return Numbered(name, l.Attrs().Index) }
	switch RoleOf(l, d.Uplinks, d.Netlink.LinkByIndex) {
	case RoleEdge:
		return []hook{
			{"edge_in", pin("edge_in"), l, ebpf.AttachTCXIngress, d.Objects.PilEdgeIn, nil},
			{"edge_out", pin("edge_out"), l, ebpf.AttachTCXEgress, d.Objects.PilEdgeOut, nil},
		}
	case RoleLoopback:
		return []hook{{"edge_in", pin("edge_in"), l, ebpf.AttachTCXIngress, d.Objects.PilEdgeIn, nil}}
	case RolePort:
		return []hook{{"port_in", pin("port_in"), l, ebpf.AttachTCXIngress, d.Objects.PilPortIn, nil}}
	}
	return nil
}

// Role is how the node's stack uses an interface beside the uplink.
type Role int

const (
	RoleNone Role = iota // the stack sends no packets through it, or our other programs do the work
	RoleEdge             // packets can reach the stack, or leave it
	// a member of a bridge or bond, which the stack uses instead of it, except for link-local frames
	RolePort
	RoleLoopback // the loopback device
)

// HostInterfaces returns the interfaces beside the uplinks through which packets can reach or leave the node's stack.
func HostInterfaces(h *netlink.Handle, uplinks ...netlink.Link) ([]netlink.Link, error) {
	links, err := netns.List(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	return slices.DeleteFunc(
		links,
		func(l netlink.Link) bool { return RoleOf(l, uplinks, h.LinkByIndex) != RoleEdge },
	), nil
}

// IsOurs reports whether a data path made a device.
func IsOurs(l netlink.Link) bool {
	_, container := host.DeviceID(l)
	ours := []string{NodeDevice, NodeFar, pipeline.NodeSide, pipeline.SwitchSide}
	return container || IsTunnel(l) || isGateway(l.Attrs().Name) || slices.Contains(ours, l.Attrs().Name)
}

func RoleOf(l netlink.Link, uplinks []netlink.Link, byIndex func(int) (netlink.Link, error)) Role {
	a := l.Attrs()
	switch {
	case IsOurs(l),
		slices.ContainsFunc(uplinks, func(u netlink.Link) bool {
			return a.Name == u.Attrs().Name || a.Index == u.Attrs().Index
		}):
		return RoleNone // other programs of ours are attached there
	case a.Flags&net.FlagLoopback != 0:
		return RoleLoopback
	case l.Type() == "ifb", a.EncapType == "can", a.EncapType == "netlink":
		return RoleNone // leads nowhere, or carries no IP
	case a.MasterIndex != 0:
		// A VRF receives packets after its members' hooks.
		if master, err := byIndex(a.MasterIndex); err == nil && master.Type() != "vrf" {
			return RolePort // of the uplink too: its containers' frames have other addresses
		}
	}
	if slices.ContainsFunc(uplinks, func(u netlink.Link) bool { return isUnderUplink(a.Index, u, byIndex) }) {
		return RoleNone
	}
	return RoleEdge
}

// encapsulatingKinds add a tag or a header to what they send through a lower device.
var encapsulatingKinds = []string{"vlan", "vxlan", "geneve", "gretap", "ip6gretap", "macsec"}

// isUnderUplink reports whether the uplink's frames leave through a lower device unchanged. There the packets of
// containers cannot be distinguished from others.
func isUnderUplink(index int, uplink netlink.Link, byIndex func(int) (netlink.Link, error)) bool {
	const deepest = 8 // MAX_NEST_DEV of the kernel
	for l, depth := uplink, 0; depth < deepest; depth++ {
		a := l.Attrs()
		elsewhere := a.NetNsID >= 0
		if a.ParentIndex == 0 || elsewhere || slices.Contains(encapsulatingKinds, l.Type()) {
			return false
		}
		if a.ParentIndex == index {
			return true
		}
		var err error
		if l, err = byIndex(a.ParentIndex); err != nil {
			return false
		}
	}
	return false
}

// GuardInterfaces attaches programs to the interfaces beside the uplink, or replaces those that are there. It detaches
// them from interfaces that have gone, moved to another namespace or joined a master. With nil it does so for all
// interfaces.
func (d *Hooks) GuardInterfaces(changed netlink.Link) error {
	if changed == nil {
		return d.guardAllInterfaces()
	}
	if _, container := host.DeviceID(changed); container {
		return nil // most updates on a busy node
	}
	// The update may be of a bridge port, or outdated.
	index := changed.Attrs().Index
	l, err := d.Netlink.LinkByIndex(index)
	var notFound netlink.LinkNotFoundError
	if err != nil && !errors.As(err, &notFound) {
		return fmt.Errorf("find %s: %w", changed.Attrs().Name, err)
	}
	var wanted []hook
	if err == nil {
		wanted = d.hostIfHooks(l)
	}
	var errs []error
	for _, name := range []string{"edge_in", "edge_out", "port_in"} {
		pin := Numbered(name, index)
		if slices.ContainsFunc(wanted, func(h hook) bool { return h.pin == pin }) {
			continue
		}
		if err := d.detachPin(pin); err != nil {
			errs = append(errs, fmt.Errorf("detach %s from %s: %w", name, changed.Attrs().Name, err))
		}
	}
	return errors.Join(append(errs, host.IgnoreGone(d.attachHooks(wanted)))...)
}

func (d *Hooks) guardAllInterfaces() error {
	links, err := netns.List(d.Netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	all := d.UplinkHooks()
	for _, l := range links {
		hooks := d.hostIfHooks(l)
		errs = append(errs, host.IgnoreGone(d.attachHooks(hooks)))
		all = append(all, hooks...)
	}
	return errors.Join(append(errs, d.sweepLinks(all))...)
}

// GuardedInterfaces returns the interfaces where packets are checked, without bridge ports, and the problems of others.
func (d *Hooks) GuardedInterfaces() (devices, problems []string, err error) {
	links, err := netns.List(d.Netlink.LinkList)
	if err != nil {
		return nil, nil, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		hooks := d.hostIfHooks(l)
		missing, notFirst, err := d.HookProblems(hooks)
		if err != nil {
			if host.IgnoreGone(err) == nil {
				continue
			}
			return nil, nil, err
		}
		if len(hooks) == 2 && len(missing) == 0 {
			devices = append(devices, l.Attrs().Name)
		}
		problems = append(append(problems, missing...), notFirst...)
	}
	return devices, problems, nil
}
