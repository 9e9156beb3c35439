package ovs

import (
	"errors"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// NoOffload disables checksum and segmentation offload for a device in the thread's namespace: the userspace datapath
// of Open vSwitch takes packets as they are.
func NoOffload(device string) error { return offload(device, 0) }

func offload(device string, on uint32) error {
	_, err := netns.Ethtool(device, unix.ETHTOOL_STXCSUM, on) // segmentation offload depends on it and follows it
	return err
}

func selfReliant(is pipeline.Device) error {
	if is.Netns == "" {
		return nil
	}
	ns, err := netns.Open(is.Netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(func() error { return NoOffload(is.Inside) })
}

// relieve undoes selfReliant if the container still exists: its other networks use the kernel, which supports offload.
func (s *Switch) relieve(is pipeline.Device) error {
	ns, err := netns.Open(is.Netns)
	if err != nil {
		return nil // the container is gone
	}
	defer ns.Close()
	h, err := s.config.Netns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	inside, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	outer, err := h.LinkByName(is.Name)
	var inner netlink.Link
	if err == nil {
		inner, err = inside.LinkByName(is.Inside)
	}
	if errors.As(err, new(netlink.LinkNotFoundError)) ||
		err == nil && inner.Attrs().ParentIndex != outer.Attrs().Index {
		return nil // another container has its place
	}
	if err != nil {
		return err
	}
	return ns.Do(func() error { return offload(is.Inside, 1) })
}
