package packet

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// openSocket opens a packet socket on a device of a namespace. Protocol 0 receives nothing.
func openSocket(
	ns *netns.Namespace,
	device string,
	protocol uint16,
	flags int,
	options func(fd int) error,
) (int, *net.Interface, error) {
	var fd int
	var dev *net.Interface
	err := ns.Do(func() (err error) {
		if dev, err = net.InterfaceByName(device); err != nil {
			return err
		}
		// Open the socket with protocol 0: with another protocol, it would receive from all devices until bind. bind
		// sets the protocol.
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, 0); err != nil {
			return err
		}
		if err = options(fd); err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol<<8 | protocol>>8, Ifindex: dev.Index})
		}
		if err != nil {
			unix.Close(fd)
		}
		return err
	})
	if err != nil {
		return -1, nil, fmt.Errorf("packet socket on %s in %s: %w", device, ns.Path(), err)
	}
	return fd, dev, nil
}
