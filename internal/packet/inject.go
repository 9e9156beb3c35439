package packet

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Injector sends frames unchanged through a device, past the routing and the firewall of its namespace.
type Injector struct {
	fd         int
	device     *net.Interface
	viaProgram bool // a send error means that a program dropped the frame, not that a queue is full
}

func NewInjector(ns *netns.Namespace, device string) (*Injector, error) {
	fd, dev, err := openSocket(ns, device, 0, 0, func(int) error { return nil })
	if err != nil {
		return nil, fmt.Errorf("inject: %w", err)
	}
	viaProgram, err := sendsToProgram(ns, dev)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("inject on %s: %w", device, err), unix.Close(fd))
	}
	return &Injector{fd, dev, viaProgram}, nil
}

// sendsToProgram reports whether an eBPF program runs within the send call. This is the case if the device is a
// macvlan, because of the programs on its uplink, or a netkit.
func sendsToProgram(ns *netns.Namespace, device *net.Interface) (bool, error) {
	h, err := ns.Netlink()
	if err != nil {
		return false, err
	}
	defer h.Close()
	link, err := h.LinkByIndex(device.Index)
	if err != nil {
		return false, err
	}
	netkit, ok := link.(*netlink.Netkit)
	return link.Type() == "macvlan" || ok && !netkit.IsPrimary(), nil
}

func (i *Injector) Close() error { return unix.Close(i.fd) }

// Mark sets the mark of sent packets, as any process with CAP_NET_RAW can.
func (i *Injector) Mark(mark uint32) error {
	return unix.SetsockoptInt(i.fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark))
}

// Call sets the protocol that the kernel assumes for sent frames, instead of their EtherType.
func (i *Injector) Call(protocol uint16) error {
	return unix.Bind(i.fd, &unix.SockaddrLinklayer{Protocol: protocol<<8 | protocol>>8, Ifindex: i.device.Index})
}

// MAC returns the device's MAC.
func (i *Injector) MAC() net.HardwareAddr { return i.device.HardwareAddr }

// Send sends one frame.
func (i *Injector) Send(frame []byte) error {
	for {
		_, err := unix.Write(i.fd, frame)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("inject on %s: %w", i.device.Name, err)
		}
	}
}

// backlogPause is the time for the peer device to empty its receive queue (1,000 packets by default).
const backlogPause = 200 * time.Microsecond

// Burst sends n frames as fast as the device accepts them; frame may return the same buffer each time. Burst repeats a
// frame that was rejected because the peer's queue is full, so after a nil error exactly n frames have passed the
// device. If a program runs within the send call, there is no such queue: then a rejected frame is one that the program
// dropped, and Burst does not repeat it.
func (i *Injector) Burst(n int, frame func(k int) []byte) error {
	for k := range n {
		f := frame(k)
		err := i.Send(f)
		if i.viaProgram && errors.Is(err, unix.ENOBUFS) {
			continue
		}
		for tries := 0; errors.Is(err, unix.ENOBUFS) && tries < 10_000; tries++ {
			time.Sleep(backlogPause)
			err = i.Send(f)
		}
		if err != nil {
			return fmt.Errorf("frame %d of %d: %w", k+1, n, err)
		}
	}
	return nil
}
