package datapath

import (
	"fmt"

	"github.com/vishvananda/netlink"

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
		return 0, fmt.Errorf("uplink %s has an MTU of %d, less a reserve of %d that is under IPv6's %d; raise the one or lower the other",
			d.config.Uplink, uplink.Attrs().MTU, d.config.MTUReserve, ipv6MinMTU)
	}
	return mtu, nil
}

// SetMTU changes the side first that sends: the node's side takes no packet longer than its own MTU, and
// says nothing of it.
func (d *Datapath) SetMTU(r endpoint.Record, mtu int) error {
	host, err := d.hostSide(r)
	if err != nil {
		return err
	}
	in, err := openInside(r.Netns)
	if err != nil {
		return err
	}
	defer in.Close()
	container, err := d.containerSide(r, in)
	if err != nil {
		return err
	}
	set := func(h *netlink.Handle, l netlink.Link) error {
		return netns.Retry(func() error { return h.LinkSetMTU(l, mtu) })
	}
	return d.alone(func() error {
		if mtu > host.Attrs().MTU {
			if err := set(d.netlink, host); err != nil {
				return fmt.Errorf("link %s: %w", r.Device.HostName, err)
			}
		}
		if err := set(in.Handle, container); err != nil {
			return fmt.Errorf("link %s in the container: %w", r.Interface, err)
		}
		if err := set(d.netlink, host); err != nil {
			return fmt.Errorf("link %s: %w", r.Device.HostName, err)
		}
		return nil
	})
}
