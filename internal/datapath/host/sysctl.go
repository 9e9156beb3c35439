package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// sysctl is a setting of one device.
type Sysctl struct{ Family, Name, Value string }

// hostSysctls are of the host side. The stack takes nothing from it, so that a missing program drops.
// IPv4 cannot be disabled, but no source can be right on a device without routes, and ARP can.
func HostSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"}, // bpf_fib_lookup routes only for devices that forward
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// containerSysctls are all it takes to be silent. Without a link-local address, and without ARP, the kernel solicits
// nobody and doubts no address; and a router speaks from a link-local address, which no program lets in.
func ContainerSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "disable_ipv6", "0"},
		{"ipv6", "addr_gen_mode", noLinkLocal},
	}
}

const noLinkLocal = "1"

// nodeSysctls are of the near end of the node's device, and farSysctls of its far end, where nobody listens.
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

// farSysctls tell of all our devices: who writes to net.*.conf.all overwrites theirs and these.
func FarSysctls() []Sysctl {
	return []Sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

// sysctls are the folders of the calling thread's namespace with the settings of its devices, by family. The kernel
// finds the folder of one namespace by passing those of all others, so they are found once, and for a container only if
// need be.
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

// set writes settings of a device.
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

// check names the first setting that is not as set.
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
