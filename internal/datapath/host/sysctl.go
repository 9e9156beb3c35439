package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Sysctl is a setting of one device.
type Sysctl struct{ Family, Name, Value string }

// HostSysctls are the settings of the host side. The node's stack accepts nothing from it, so that packets are dropped
// if the program is missing. IPv4 cannot be disabled, but no source address is valid on a device without routes, and
// ARP is off.
func HostSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"}, // bpf_fib_lookup routes only for devices that forward
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// ContainerSysctls keep the container's device silent. Without a link-local address and without ARP, the kernel sends
// no solicitations and does no duplicate address detection. Router advertisements come from link-local addresses, which
// no program lets in.
func ContainerSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "disable_ipv6", "0"},
		{"ipv6", "addr_gen_mode", noLinkLocal},
	}
}

const noLinkLocal = "1"

// NodeSysctls are the settings of the near end of the node's device.
func NodeSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "addr_gen_mode", noLinkLocal},
		{"ipv6", "accept_ra", "0"},
		{"ipv6", "accept_dad", "0"},
		{"ipv6", "router_solicitations", "0"},
		{"ipv6", "forwarding", "0"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// FarSysctls are the settings of the far end of the node's device. They also show whether another process has written
// net.*.conf.all, which overwrites the settings of all our devices.
func FarSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// Sysctls are the open folders with the settings of devices of the calling thread's namespace, by family. The kernel
// finds the folder of one namespace by passing the folders of all others, so they are opened once, and for a container
// only if needed.
type Sysctls map[string]*os.Root

func OpenSysctls(families ...string) (Sysctls, error) {
	s := Sysctls{}
	for _, family := range families {
		root, err := os.OpenRoot(filepath.Join("/proc/sys/net", family, "conf"))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("settings of devices: %w", err), s.Close())
		}
		s[family] = root
	}
	return s, nil
}

func (s Sysctls) Close() error {
	var errs []error
	for _, root := range s {
		errs = append(errs, root.Close())
	}
	return errors.Join(errs...)
}

// Set writes settings of a device.
func (s Sysctls) Set(device string, values []Sysctl) error {
	for _, v := range values {
		root := s[v.Family]
		path := filepath.Join(device, v.Name)
		if err := root.WriteFile(path, []byte(v.Value), 0); err != nil {
			return fmt.Errorf("set %s to %s: %w", filepath.Join(root.Name(), path), v.Value, err)
		}
	}
	return nil
}

// Check returns an error for the first setting that differs.
func (s Sysctls) Check(device string, values []Sysctl) error {
	for _, v := range values {
		root := s[v.Family]
		path := filepath.Join(device, v.Name)
		got, err := root.ReadFile(path)
		if err != nil {
			return fmt.Errorf("setting below %s: %w", root.Name(), err)
		}
		if value := strings.TrimSpace(string(got)); value != v.Value {
			return fmt.Errorf("%s is %s, not %s", filepath.Join(root.Name(), path), value, v.Value)
		}
	}
	return nil
}
