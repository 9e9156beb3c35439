package networks

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// KernelState is what a node's kernel has for other nodes on its VXLAN devices.
type KernelState struct {
	FDB        int `json:"fdb"`        // forwarding entries with a remote address
	Neighbours int `json:"neighbours"` // permanent ones
	Routes     int `json:"routes"`     // with a next hop behind the device
}

// All is the sum of all tables.
func (s KernelState) All() int { return s.FDB + s.Neighbours + s.Routes }

// readKernel reads the tables of all VXLAN devices of a node.
func readKernel(node *netns.Namespace) (s KernelState, err error) {
	h, err := node.Netlink()
	if err != nil {
		return s, err
	}
	defer h.Close()
	links, err := netns.List(h.LinkList)
	if err != nil {
		return s, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if l.Type() != "vxlan" {
			continue
		}
		if err := s.read(h, l); err != nil {
			return s, fmt.Errorf("tables of %s: %w", l.Attrs().Name, err)
		}
	}
	return s, nil
}

func (s *KernelState) read(h *netlink.Handle, l netlink.Link) error {
	neighbours := func(family int) ([]netlink.Neigh, error) {
		return netns.List(func() ([]netlink.Neigh, error) { return h.NeighList(l.Attrs().Index, family) })
	}
	entries, err := neighbours(unix.AF_BRIDGE)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IP != nil && !e.IP.IsUnspecified() {
			s.FDB++
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		entries, err := neighbours(family)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.State&netlink.NUD_PERMANENT != 0 {
				s.Neighbours++
			}
		}
		routes, err := netns.List(func() ([]netlink.Route, error) { return h.RouteList(l, family) })
		if err != nil {
			return err
		}
		for _, r := range routes {
			if r.Gw != nil {
				s.Routes++
			}
		}
	}
	return nil
}
