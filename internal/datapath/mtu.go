package datapath

import (
	"fmt"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

const ipv6MinMTU = 1280 // RFC 8200 §5

// MTU of a container is the uplink's less the reserve.
func (d *Datapath) MTU() (int, error) {
	uplink, err := d.netlink.LinkByIndex(d.uplink.Attrs().Index)
	if err != nil {
		return 0, fmt.Errorf("uplink %s: %w", d.config.Uplink, err)
	}
	mtu := uplink.Attrs().MTU - d.config.MTUReserve
	if mtu < ipv6MinMTU {
		return 0, fmt.Errorf(
			"uplink %s has an MTU of %d, less a reserve of %d that is under IPv6's %d; raise the one or lower the other",
			d.config.Uplink,
			uplink.Attrs().MTU,
			d.config.MTUReserve,
			ipv6MinMTU,
		)
	}
	return mtu, nil
}

// checkIPv6MTU refuses an MTU with which a container would lose its IPv6 addresses.
func checkIPv6MTU(r endpoint.Record, mtu int) error {
	if mtu >= ipv6MinMTU {
		return nil
	}
	return fmt.Errorf(
		"an MTU of %d, what the uplink leaves beside the %d bytes that its network puts before packets, is under IPv6's %d; raise the uplink's",
		mtu,
		r.Overhead(),
		ipv6MinMTU,
	)
}

// SetMTU changes that of a container's device.
func (d *Datapath) SetMTU(r endpoint.Record, mtu int) error {
	if err := checkIPv6MTU(r, mtu); err != nil {
		return err
	}
	in, err := openContainerNS(r.Netns)
	if err != nil {
		return err
	}
	defer in.Close()
	container, err := d.driver(r).containerLink(r, in)
	if err != nil {
		return err
	}
	return d.withDeviceLock(func() error {
		return d.driver(r).setMTU(r, mtu, func() error {
			if err := netns.Retry(func() error { return in.LinkSetMTU(container, mtu) }); err != nil {
				return fmt.Errorf("link %s in the container: %w", r.Interface, err)
			}
			return nil
		})
	})
}
