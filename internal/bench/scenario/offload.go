package scenario

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// feature is an offload feature of a device, with the commands of linux/ethtool.h that read and write it.
type feature struct {
	name     string
	get, set uint32
}

// segmentation lists all features that merge packets or delay segmentation.
var segmentation = []feature{
	{"tso", unix.ETHTOOL_GTSO, unix.ETHTOOL_STSO},
	{"gso", unix.ETHTOOL_GGSO, unix.ETHTOOL_SGSO},
	{"gro", unix.ETHTOOL_GGRO, unix.ETHTOOL_SGRO},
}

// DisableOffloads disables segmentation offload on all devices of the wire. restore enables the features that were
// enabled before.
func (w *Wire) DisableOffloads() (restore func() error, err error) {
	var undo []func() error
	restore = func() error {
		var errs []error
		for _, f := range undo {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}
	for _, ns := range w.namespaces {
		was, err := cut(ns)
		undo = append(undo, was)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("disable segmentation offload in %s: %w", ns.Path(), err), restore())
		}
	}
	return restore, nil
}

// cut disables segmentation offload in one namespace. restore is never nil.
func cut(ns *netns.Namespace) (restore func() error, err error) {
	var undo []func(*netlink.Handle) error
	restore = func() error {
		return inside(ns, func(h *netlink.Handle) error {
			var errs []error
			for _, f := range undo {
				errs = append(errs, f(h))
			}
			return errors.Join(errs...)
		})
	}
	return restore, inside(ns, func(h *netlink.Handle) error {
		links, err := netns.List(h.LinkList)
		if err != nil {
			return err
		}
		for _, link := range links {
			name := link.Attrs().Name
			for _, f := range segmentation {
				on, err := f.off(name)
				if on && err == nil {
					undo = append(
						undo,
						func(*netlink.Handle) error { _, err := netns.Ethtool(name, f.set, 1); return err },
					)
				}
				if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
					return err
				}
			}
			// A macvlan always leaves segmentation to the device below. So limit TCP to single segments on the macvlan.
			// Do the same on all other devices: segmentation below TCP costs far less than single segments, and the
			// scenarios must differ only in their path.
			undo = append(
				undo,
				func(h *netlink.Handle) error { return h.LinkSetGSOMaxSegs(link, int(link.Attrs().GSOMaxSegs)) },
			)
			if err := h.LinkSetGSOMaxSegs(link, 1); err != nil {
				return fmt.Errorf("limit %s to one segment: %w", name, err)
			}
		}
		return nil
	})
}

// inside calls use in the namespace, with a netlink handle.
func inside(ns *netns.Namespace, use func(*netlink.Handle) error) error {
	h, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	return ns.Do(func() error { return use(h) })
}

// off disables the feature, and reports whether it was enabled.
func (f feature) off(device string) (was bool, err error) {
	value, err := netns.Ethtool(device, f.get, 0)
	if err != nil || value == 0 {
		return false, err
	}
	if _, err := netns.Ethtool(device, f.set, 0); err != nil {
		return true, err
	}
	if value, err = netns.Ethtool(device, f.get, 0); err == nil && value != 0 {
		err = fmt.Errorf("%s of %s stays enabled", f.name, device)
	}
	return true, err
}
