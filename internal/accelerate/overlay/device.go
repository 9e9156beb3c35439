package overlay

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
)

// Device is a VXLAN device.
type Device struct {
	Name     string
	Index    int
	VNI      uint32
	Port     uint16
	Local    netip.Addr // address of the local VTEP
	Learning bool       // the device learns forwarding entries from packets
	Bridged  bool       // the device is a port of a bridge; otherwise the node routes
	MAC      string
}

// Describe returns what a device is. It returns an error if it is no VXLAN device, or if what it does to a packet is
// not a function of the flow.
func Describe(l netlink.Link) (Device, error) {
	name := l.Attrs().Name
	v, ok := l.(*netlink.Vxlan)
	if !ok {
		return Device{}, fmt.Errorf("%s is a device of type %s, not vxlan", name, l.Type())
	}
	if v.FlowBased {
		return Device{}, fmt.Errorf("%s is external: other programs choose VNI and VTEP of each packet", name)
	}
	local, ok := netip.AddrFromSlice(v.SrcAddr)
	if !ok {
		return Device{}, fmt.Errorf("%s has no local address: make it with \"local ADDRESS\"", name)
	}
	d := Device{
		Name: name, Index: v.Index, VNI: uint32(v.VxlanId), Port: uint16(v.Port), Local: local.Unmap(),
		Learning: v.Learning, Bridged: v.MasterIndex != 0, MAC: v.HardwareAddr.String(),
	}
	return d, usable(v, d)
}

// usable returns an error if the cache cannot do what the device does.
func usable(v *netlink.Vxlan, d Device) error {
	var errs []error
	refuse := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(v.Name+" "+format, args...))
	}
	if v.GBP {
		refuse("has a group policy (gbp): the group is not part of the flow")
	}
	if v.TOS != 0 {
		refuse("sets the type of service of outer headers (tos %d), which the cache does not", v.TOS)
	}
	if d.Local.Is6() && !(v.UDP6ZeroCSumTx && v.UDP6ZeroCSumRx) {
		refuse("has an IPv6 underlay and UDP checksums: make it with udp6zerocsumtx and udp6zerocsumrx on every node")
	}
	return errors.Join(errs...)
}

// Devices returns the names of the devices of a type in the network namespace of the calling thread; of all but lo for
// the type "".
func Devices(kind string) (names []string, err error) {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if name := l.Attrs().Name; l.Type() == kind || kind == "" && name != "lo" {
			names = append(names, name)
		}
	}
	return names, nil
}
