package datapath

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
)

// edgeHooks are where packets are checked on an interface beside the uplink. Its index is in the pin's name,
// because a device may have any name, and another tomorrow.
func (d *Datapath) edgeHooks(l netlink.Link) []hook {
	index := l.Attrs().Index
	return []hook{
		{"edge_in", fmt.Sprint("edge_in_", index), l, ebpf.AttachTCXIngress, d.objects.PilEdgeIn},
		{"edge_out", fmt.Sprint("edge_out_", index), l, ebpf.AttachTCXEgress, d.objects.PilEdgeOut},
	}
}

// Edge lists the interfaces beside the uplink by which packets can reach the node's stack or leave it.
func Edge(h *netlink.Handle, uplink netlink.Link) ([]netlink.Link, error) {
	links, err := netns.List(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var edge []netlink.Link
	for _, l := range links {
		if isEdge(l, uplink, h.LinkByIndex) {
			edge = append(edge, l)
		}
	}
	return edge, nil
}

func isEdge(l, uplink netlink.Link, byIndex func(int) (netlink.Link, error)) bool {
	a := l.Attrs()
	_, container := deviceID(l)
	switch {
	case container, a.Name == nodeDevice, a.Name == nodeFar, a.Name == uplink.Attrs().Name, a.Index == uplink.Attrs().Index:
		return false // there stand others of our programs
	case a.Flags&net.FlagLoopback != 0, l.Type() == "ifb", a.EncapType == "can", a.EncapType == "netlink":
		return false // leads nowhere, or carries no IP
	case a.MasterIndex != 0:
		// Of a bridge or a bond the stack sees the master. A VRF takes packets from its members' hooks.
		if master, err := byIndex(a.MasterIndex); err == nil && master.Type() != "vrf" {
			return false
		}
	}
	return !carries(a.Index, uplink, byIndex)
}

// wrap are the kinds of device that put a tag or a header of their own around what leaves by a lower one.
var wrap = []string{"vlan", "vxlan", "geneve", "gretap", "ip6gretap", "macsec"}

// carries reports whether the uplink's frames leave by a lower device as they are: there our packets look like
// anybody's.
func carries(index int, uplink netlink.Link, byIndex func(int) (netlink.Link, error)) bool {
	const deepest = 8 // MAX_NEST_DEV of the kernel
	for l, depth := uplink, 0; depth < deepest; depth++ {
		a := l.Attrs()
		elsewhere := a.NetNsID >= 0
		if a.ParentIndex == 0 || elsewhere || slices.Contains(wrap, l.Type()) {
			return false
		}
		if a.ParentIndex == index {
			return true
		}
		var err error
		if l, err = byIndex(a.ParentIndex); err != nil {
			return false
		}
	}
	return false
}

// GuardEdge puts programs on interfaces beside the uplink, or swaps those that are there, and takes them off
// where they do not belong any more: an interface that has gone, into another namespace too, or to a master.
func (d *Datapath) GuardEdge(changed netlink.Link) error {
	if changed == nil {
		return d.guardAll()
	}
	if _, container := deviceID(changed); container {
		return nil // most changes of a busy node
	}
	// A message may be of a bridge's port, or of what has changed again.
	l, err := d.netlink.LinkByIndex(changed.Attrs().Index)
	var notFound netlink.LinkNotFoundError
	if err != nil && !errors.As(err, &notFound) {
		return fmt.Errorf("find %s: %w", changed.Attrs().Name, err)
	}
	if err == nil && isEdge(l, d.uplink, d.netlink.LinkByIndex) {
		return d.guard(l)
	}
	var errs []error
	for _, h := range d.edgeHooks(changed) {
		if err := detach(filepath.Join(d.linksDir(), h.pin)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("take %s off %s: %w", h.name, changed.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

func (d *Datapath) guardAll() error {
	edge, err := Edge(d.netlink, d.uplink)
	if err != nil {
		return err
	}
	var errs []error
	hooks := d.uplinkHooks()
	for _, l := range edge {
		errs = append(errs, d.guard(l))
		hooks = append(hooks, d.edgeHooks(l)...)
	}
	return errors.Join(append(errs, d.sweepLinks(hooks))...)
}

func (d *Datapath) guard(l netlink.Link) error { return gone(d.attachHooks(d.edgeHooks(l))) }

// guarded lists the interfaces where packets are checked, and says what is wrong with others.
func (d *Datapath) guarded() (devices, problems []string, err error) {
	edge, err := Edge(d.netlink, d.uplink)
	if err != nil {
		return nil, nil, err
	}
	for _, l := range edge {
		missing, notFirst, err := d.problems(d.edgeHooks(l))
		if err != nil {
			if gone(err) == nil {
				continue
			}
			return nil, nil, err
		}
		if len(missing) == 0 {
			devices = append(devices, l.Attrs().Name)
		}
		problems = append(append(problems, missing...), notFirst...)
	}
	return devices, problems, nil
}
