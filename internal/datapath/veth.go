package datapath

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// veth has the program where packets come out of it.
type veth struct{ *Datapath }

func (d veth) checkKernel() error { return nil }

func (d veth) link(node, container netlink.LinkAttrs) netlink.Link {
	v := netlink.NewVeth(node)
	v.PeerName, v.PeerHardwareAddr, v.PeerNamespace = container.Name, container.HardwareAddr, container.Namespace
	return v
}

// attachProgram uses a cls_bpf filter, which takes 0.1 ms where a tcx link takes 11 ms, under the lock every other device
// operation waits for.
func (d veth) attachProgram(r endpoint.Record) error {
	return d.withDeviceLock(func() error {
		return AttachFilter(
			d.netlink,
			r.Device.HostIfindex,
			r.Device.HostName,
			netlink.HANDLE_MIN_INGRESS,
			d.objects.PilContainer,
			pilasterProgPilContainer,
		)
	})
}

func (d veth) programID(host netlink.Link) (ebpf.ProgramID, error) {
	return d.programOn(host, netlink.HANDLE_MIN_INGRESS)
}

// The place of our program on a device, the same in all builds: a filter put there takes the place of
// the one before in one step.
const (
	filterHandle   = 1
	filterPriority = 1
)

// AttachFilter puts a program on a hook of a device with clsact, in the place of ours.
func AttachFilter(
	h *netlink.Handle,
	ifindex int,
	device string,
	hook uint32,
	program *ebpf.Program,
	name string,
) error {
	clsact := &netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	err := netns.Retry(func() error { return h.QdiscAdd(clsact) })
	if err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make room for a program on %s: %w", device, err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: hook, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: program.FD(), Name: name, DirectAction: true,
	}
	if err := netns.Retry(func() error { return h.FilterReplace(filter) }); err != nil {
		return fmt.Errorf("put the program on %s: %w", device, err)
	}
	return nil
}

// detachFilter takes away what AttachFilter has put there.
func detachFilter(h *netlink.Handle, ifindex int, hook uint32) error {
	return netns.Retry(func() error {
		return h.FilterDel(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: hook, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		}})
	})
}
