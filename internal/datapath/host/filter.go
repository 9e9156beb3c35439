package host

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Handle and priority of our filter on a device, the same in all builds: a new filter replaces the earlier one in one
// step.
const (
	filterHandle   = 1
	filterPriority = 1
)

// AttachFilter attaches a program to a clsact hook of a device. It replaces our program, if one is there, in one step.
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
		return fmt.Errorf("add clsact to %s: %w", device, err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: hook, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: program.FD(), Name: name, DirectAction: true,
	}
	if err := netns.Retry(func() error { return h.FilterReplace(filter) }); err != nil {
		return fmt.Errorf("attach the program to %s: %w", device, err)
	}
	return nil
}

// DetachFilter removes what AttachFilter attached.
func DetachFilter(h *netlink.Handle, ifindex int, hook uint32) error {
	return netns.Retry(func() error {
		return h.FilterDel(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: hook, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		}})
	})
}

func (d *Host) CheckProgram(l netlink.Link, hook uint32, program *ebpf.Program, name string) error {
	there, err := d.ProgramOn(l, hook)
	if err != nil {
		return err
	}
	return d.SameProgram(there, l, program, name)
}

// SameProgram returns an error if the program on a link is neither this one nor one in its place during a trace.
func (d *Host) SameProgram(there ebpf.ProgramID, l netlink.Link, program *ebpf.Program, name string) error {
	info, err := program.Info()
	if err != nil {
		return fmt.Errorf("program: %w", err)
	}
	_, standsIn := d.StandIns.Load(there)
	if id, _ := info.ID(); there != id && !standsIn {
		return fmt.Errorf("program %s is not on %s", name, l.Attrs().Name)
	}
	return nil
}

// ProgramOn returns the id of the program at our place on a device; 0 if there is none.
func (d *Host) ProgramOn(l netlink.Link, hook uint32) (ebpf.ProgramID, error) {
	filters, err := netns.List(func() ([]netlink.Filter, error) { return d.Netlink.FilterList(l, hook) })
	if err != nil {
		return 0, fmt.Errorf("program: list the filters of %s: %w", l.Attrs().Name, err)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && b.DirectAction && b.Handle == filterHandle &&
			b.Priority == filterPriority {
			return ebpf.ProgramID(b.Id), nil
		}
	}
	return 0, nil
}
