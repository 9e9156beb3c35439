package hook

import (
	"errors"
	"fmt"
	"os"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
)

// ReconcileSettings sets our devices again after somebody has set all devices of the machine: without forwarding
// the FIB names no way for containers, with IPv6 a device without a program is a way into the node.
func (d *Hooks) ReconcileSettings() error {
	difference := d.Sysctls.Check(NodeFar, host.FarSysctls())
	if difference == nil {
		return nil
	}
	links, err := netns.List(d.Netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		name := l.Attrs().Name
		if _, ours := host.DeviceID(l); !ours && !IsTunnel(l) && !isGateway(name) {
			continue
		}
		err := d.WithDeviceLock(func() error { return d.Sysctls.Set(name, host.HostSysctls()) })
		if err != nil && !errors.Is(err, os.ErrNotExist) { // else it went meanwhile
			return err
		}
	}
	// Last, so that what failed is tried again.
	if err = d.WithDeviceLock(d.setNodeDevice); err == nil {
		d.Log.Warn("somebody set all devices of the machine; ours are as they were again", "difference", difference)
	}
	return err
}
