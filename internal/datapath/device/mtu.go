package device

import (
	"fmt"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// checkIPv6MTU returns an error for an MTU below 1280, with which a container would lose its IPv6 addresses.
func checkIPv6MTU(r endpoint.Record, mtu int) error {
	if mtu >= host.IPv6MinMTU {
		return nil
	}
	return fmt.Errorf(
		"an MTU of %d, what the uplink leaves beside the %d bytes that its network puts before packets, is under "+
			"IPv6's %d; raise the uplink's",
		mtu,
		r.Overhead(),
		host.IPv6MinMTU,
	)
}

// SetMTU changes the MTU of a container's device on both sides.
func (d *Devices) SetMTU(r endpoint.Record, mtu int) error {
	if err := checkIPv6MTU(r, mtu); err != nil {
		return err
	}
	in, err := OpenContainerNS(r.Netns)
	if err != nil {
		return err
	}
	defer in.Close()
	container, err := d.Driver(r).containerLink(r, in)
	if err != nil {
		return err
	}
	return d.WithDeviceLock(func() error {
		return d.Driver(r).setMTU(r, mtu, func() error {
			if err := netns.Retry(func() error { return in.LinkSetMTU(container, mtu) }); err != nil {
				return fmt.Errorf("link %s in the container: %w", r.Interface, err)
			}
			return nil
		})
	})
}
