package steering

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
)

// Device is a network device of one level.
type Device struct {
	Level string `json:"level"`
	Name  string `json:"device"`
	Netns string `json:"netns,omitempty"` // path of its network namespace; empty for this process's
}

func (d Device) String() string {
	if d.Netns == "" {
		return d.Name
	}
	return d.Name + " in " + d.Netns
}

// Selection names the devices of some levels.
type Selection struct {
	Levels     []string
	Netns      string   // of uplink and overlay devices; empty for this process's
	Uplinks    []string // needed for level host
	Overlays   []string // of level overlay; none: every VXLAN device of Netns
	Containers []string // of level container: paths of network namespaces
}

// containerDevice is the device of level container.
const containerDevice = "eth0"

// WhyNoContainer is the reason why level container is refused for endpoints of Pilaster.
const WhyNoContainer = "level container has no effect on endpoints of Pilaster: their packets are delivered with " +
	"bpf_redirect_peer, which does not pass the receive queue of the container's device; levels host and overlay " +
	"select the CPU that processes the packet up to the container's socket"

// Devices finds the devices of a selection.
func (s Selection) Devices() ([]Device, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	var all []Device
	if slices.Contains(s.Levels, Host) {
		for _, name := range s.Uplinks {
			all = append(all, Device{Host, name, s.Netns})
		}
	}
	if slices.Contains(s.Levels, Overlay) {
		overlays := s.Overlays
		if len(overlays) == 0 {
			var err error
			if overlays, err = vxlanDevices(s.Netns); err != nil {
				return nil, err
			}
		}
		for _, name := range overlays {
			all = append(all, Device{Overlay, name, s.Netns})
		}
	}
	if slices.Contains(s.Levels, Container) {
		for _, path := range s.Containers {
			if err := refusePilaster(s.Netns, path); err != nil {
				return nil, err
			}
			all = append(all, Device{Container, containerDevice, path})
		}
	}
	return all, nil
}

// Check refuses unknown levels and incomplete selections.
func (s Selection) Check() error {
	if err := CheckLevels(s.Levels); err != nil {
		return err
	}
	for _, c := range []struct {
		level, flag string
		given       bool
		required    bool
	}{
		{Host, "--uplink", len(s.Uplinks) > 0, true},
		{Overlay, "--overlay", len(s.Overlays) > 0, false},
		{Container, "--containers", len(s.Containers) > 0, true},
	} {
		switch has := slices.Contains(s.Levels, c.level); {
		case has && c.required && !c.given:
			return fmt.Errorf("level %s needs %s; nothing was changed", c.level, c.flag)
		case !has && c.given && c.level != Host: // uplinks are also given to agents that do not steer it
			return fmt.Errorf("%s needs level %s; nothing was changed: add it to the levels", c.flag, c.level)
		}
	}
	return nil
}

// CheckLevels refuses unknown levels and an empty list.
func CheckLevels(levels []string) error {
	for _, level := range levels {
		if !slices.Contains(Levels(), level) {
			return fmt.Errorf("level %q: use some of %s", level, strings.Join(Levels(), ","))
		}
	}
	if len(levels) == 0 {
		return fmt.Errorf("no level: use some of %s", strings.Join(Levels(), ","))
	}
	return nil
}

// open opens the namespace at a path; empty means this process's.
func open(path string) (*netns.Namespace, error) {
	if path == "" {
		return netns.Current()
	}
	return netns.Open(path)
}

// inNetns calls use with a netlink handle in a namespace.
func inNetns(path string, use func(*netlink.Handle) error) error {
	ns, err := open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	return use(h)
}

func vxlanDevices(path string) (names []string, err error) {
	err = inNetns(path, func(h *netlink.Handle) error {
		links, err := netns.List(h.LinkList)
		if err != nil {
			return fmt.Errorf("list devices: %w", err)
		}
		for _, l := range links {
			if isVXLAN(l) {
				names = append(names, l.Attrs().Name)
			}
		}
		return nil
	})
	if err == nil && len(names) == 0 {
		err = errors.New("level overlay: there is no VXLAN device; nothing was changed; omit the level, or name the " +
			"device with --overlay")
	}
	return names, err
}

func isVXLAN(l netlink.Link) bool { return l.Type() == "vxlan" }

// refusePilaster returns an error if a container's device is that of an endpoint of Pilaster, by the name of the node's
// end, or a macvlan.
func refusePilaster(node, container string) error {
	var pair, peer int
	err := inNetns(container, func(h *netlink.Handle) error {
		l, err := h.LinkByName(containerDevice)
		if err != nil {
			return fmt.Errorf("%s in %s: %w; nothing was changed", containerDevice, container, err)
		}
		if l.Type() == "macvlan" {
			return fmt.Errorf("%s in %s is a macvlan, which receives on the queue of its uplink; nothing was changed; "+
				"use level host", containerDevice, container)
		}
		pair, peer = l.Attrs().Index, l.Attrs().ParentIndex
		return nil
	})
	if err != nil || peer == 0 {
		return err
	}
	return inNetns(node, func(h *netlink.Handle) error {
		l, err := h.LinkByIndex(peer)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil // the pair's other end is elsewhere
		}
		if err != nil {
			return fmt.Errorf("the other end of %s in %s: %w", containerDevice, container, err)
		}
		if _, ours := host.DeviceID(l); ours && l.Attrs().ParentIndex == pair {
			return fmt.Errorf("%s is an endpoint of Pilaster (%s): %s; nothing was changed", container,
				l.Attrs().Name, WhyNoContainer)
		}
		return nil
	})
}
