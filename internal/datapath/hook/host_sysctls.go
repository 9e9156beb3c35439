package hook

import (
	"errors"
	"fmt"
	"os"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
)

// ReconcileSettings restores the settings of our devices after another process has written net.*.conf.all: without
// forwarding the FIB lookup returns no route to containers, and with IPv6 a device without a program leads into the
// node.
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
		if err != nil && !errors.Is(err, os.ErrNotExist) { // else the device is gone
			return err
		}
	}
	// Last, so that a failed change is retried.
	if err = d.WithDeviceLock(d.setNodeDevice); err == nil {
		d.Log.Warn(
			"another process changed the settings of all devices; those of our devices were restored",
			"difference",
			difference,
		)
	}
	return err
}
