package datapath

import (
	"errors"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// inside is a container's namespace while we work in it. What is done there goes by its handle and its
// settings, from any thread: to enter it once is most of the cost.
type inside struct {
	*netlink.Handle
	netns    *netns.Namespace
	settings settings
}

func openInside(path string) (_ *inside, err error) {
	in := &inside{}
	if in.netns, err = netns.Open(path); err != nil {
		return nil, err
	}
	err = in.netns.Do(func() (err error) {
		if in.settings, err = openSettings("ipv6"); err == nil {
			in.Handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

func (in *inside) Close() error {
	if in.Handle != nil {
		in.Handle.Close()
	}
	return errors.Join(in.settings.Close(), in.netns.Close())
}
