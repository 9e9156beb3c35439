package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"pilaster.io/pilaster/internal/netns"
)

// sysctl is a setting of one device.
type sysctl struct{ family, name, value string }

// hostSysctls are of the host side. The stack takes nothing from it, so that a missing program drops.
// IPv4 cannot be disabled, but no source can be right on a device without routes, and ARP can.
func hostSysctls() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"}, // bpf_fib_lookup routes only for devices that forward
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// containerSysctls are all it takes to be silent. Without a link-local address, and without ARP, the kernel solicits
// nobody and doubts no address; and a router speaks from a link-local address, which no program lets in.
func containerSysctls() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "0"},
		{"ipv6", "addr_gen_mode", noLinkLocal},
	}
}

const noLinkLocal = "1"

// nodeSysctls are of the near end of the node's device, and farSysctls of its far end, where nobody listens.
func nodeSysctls() []sysctl {
	return []sysctl{
		{"ipv6", "addr_gen_mode", noLinkLocal},
		{"ipv6", "accept_ra", "0"},
		{"ipv6", "accept_dad", "0"},
		{"ipv6", "router_solicitations", "0"},
		{"ipv6", "forwarding", "0"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// farSysctls tell of all our devices: who writes to net.*.conf.all overwrites theirs and these.
func farSysctls() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// sysctls are the folders of the calling thread's namespace with the settings of its devices, by family. The kernel
// finds the folder of one namespace by passing those of all others, so they are found once, and for a container only if
// need be.
type sysctls map[string]*os.Root

func openSysctls(families ...string) (sysctls, error) {
	s := sysctls{}
	for _, family := range families {
		root, err := os.OpenRoot(filepath.Join("/proc/sys/net", family, "conf"))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("settings of devices: %w", err), s.Close())
		}
		s[family] = root
	}
	return s, nil
}

func (s sysctls) Close() error {
	var errs []error
	for _, root := range s {
		errs = append(errs, root.Close())
	}
	return errors.Join(errs...)
}

// set writes settings of a device.
func (s sysctls) set(device string, values []sysctl) error {
	for _, v := range values {
		root := s[v.family]
		path := filepath.Join(device, v.name)
		if err := root.WriteFile(path, []byte(v.value), 0); err != nil {
			return fmt.Errorf("set %s to %s: %w", filepath.Join(root.Name(), path), v.value, err)
		}
	}
	return nil
}

// check names the first setting that is not as set.
func (s sysctls) check(device string, values []sysctl) error {
	for _, v := range values {
		root := s[v.family]
		path := filepath.Join(device, v.name)
		got, err := root.ReadFile(path)
		if err != nil {
			return fmt.Errorf("setting below %s: %w", root.Name(), err)
		}
		if value := strings.TrimSpace(string(got)); value != v.value {
			return fmt.Errorf("%s is %s, not %s", filepath.Join(root.Name(), path), value, v.value)
		}
	}
	return nil
}

// ReconcileSettings sets our devices again after somebody has set all devices of the machine: without forwarding
// the FIB names no way for containers, with IPv6 a device without a program is a way into the node.
func (d *Datapath) ReconcileSettings() error {
	difference := d.sysctls.check(nodeFar, farSysctls())
	if difference == nil {
		return nil
	}
	links, err := netns.List(d.netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		name := l.Attrs().Name
		if _, ours := deviceID(l); !ours && !isTunnel(l) && !isGateway(name) {
			continue
		}
		err := d.withDeviceLock(func() error { return d.sysctls.set(name, hostSysctls()) })
		if err != nil && !errors.Is(err, os.ErrNotExist) { // else it went meanwhile
			return err
		}
	}
	// Last, so that what failed is tried again.
	if err = d.withDeviceLock(d.setNodeDevice); err == nil {
		d.log.Warn("somebody set all devices of the machine; ours are as they were again", "difference", difference)
	}
	return err
}
