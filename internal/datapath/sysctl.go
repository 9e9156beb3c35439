package datapath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// sysctl is a setting of one device.
type sysctl struct{ family, name, value string }

// hostSettings are of the host side. The stack takes nothing from it, so that a missing program drops.
// IPv4 cannot be disabled, but no source can be right on a device without routes, and ARP can.
func hostSettings() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv6", "forwarding", "1"}, // bpf_fib_lookup routes only for devices that forward
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

func containerSettings() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "0"},
		{"ipv6", "addr_gen_mode", "1"}, // no link-local address
		{"ipv6", "accept_ra", "0"},
		{"ipv6", "accept_dad", "0"},
		{"ipv6", "router_solicitations", "0"},
	}
}

// nodeSettings are of the near end of the node's device, and farSettings of its far end, where nobody listens.
func nodeSettings() []sysctl {
	return []sysctl{
		{"ipv6", "addr_gen_mode", "1"}, // no link-local address
		{"ipv6", "accept_ra", "0"},
		{"ipv6", "accept_dad", "0"},
		{"ipv6", "router_solicitations", "0"},
		{"ipv6", "forwarding", "0"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

func farSettings() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "1"},
		{"ipv4", "rp_filter", "1"},
		{"ipv4", "forwarding", "0"},
	}
}

func (s sysctl) path(device string) string {
	return filepath.Join("/proc/sys/net", s.family, "conf", device, s.name)
}

// set writes settings of a device in the namespace the calling thread is in.
func set(device string, settings []sysctl) error {
	for _, s := range settings {
		path := s.path(device)
		if err := os.WriteFile(path, []byte(s.value), 0); err != nil {
			return fmt.Errorf("set %s to %s: %w", path, s.value, err)
		}
	}
	return nil
}

// checkSettings names the first setting that is not as set.
func checkSettings(device string, settings []sysctl) error {
	for _, s := range settings {
		path := s.path(device)
		got, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("setting: %w", err)
		}
		if value := strings.TrimSpace(string(got)); value != s.value {
			return fmt.Errorf("%s is %s, not %s", path, value, s.value)
		}
	}
	return nil
}
