package device

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// netkit runs the program where the container sends. A packet continues from there on the node's side without another
// queue. Without a program the device drops what the container sends; it delivers packets to the container like a veth.
type netkit struct{ *Devices }

func (d netkit) link(node, container netlink.LinkAttrs) netlink.Link {
	n := &netlink.Netkit{
		LinkAttrs: node, Mode: netlink.NETKIT_MODE_L2, Policy: netlink.NETKIT_POLICY_FORWARD,
		PeerPolicy: netlink.NETKIT_POLICY_BLACKHOLE,
		Scrub:      netlink.NETKIT_SCRUB_DEFAULT, PeerScrub: netlink.NETKIT_SCRUB_DEFAULT,
	}
	n.SetPeerAttrs(&container)
	return n
}

func (d netkit) checkKernel() error {
	if err := HasNetkit(); err != nil {
		others := slices.DeleteFunc(DeviceChoices(), func(kind string) bool { return kind == endpoint.Netkit })
		return fmt.Errorf("%w\n  nothing was changed; choose another --device: %s", err, strings.Join(others, ", "))
	}
	return nil
}

// HasNetkit returns why this kernel cannot make a netkit pair. It makes one in a temporary namespace.
func HasNetkit() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe"
	err := netns.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return netns.Retry(func() error { return h.LinkAdd(netkit{}.link(attrs, netlink.NewLinkAttrs())) })
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("this kernel has no netkit (CONFIG_NETKIT, Linux 6.7 or newer): %w", err)
	}
	if err != nil {
		return fmt.Errorf("a netkit pair cannot be made: %w", err)
	}
	return nil
}

// attachEntry does not use a link, which would have to be pinned: a program that is attached in this way is removed
// with the device. Programs of others stay.
func (d netkit) attachEntry(r endpoint.Record, entry EntryProgram) error {
	there, err := d.programAt(r.Device.HostIfindex)
	if err != nil {
		return err
	}
	o := link.RawAttachProgramOptions{
		Target: r.Device.HostIfindex, Program: entry.Program, Attach: ebpf.AttachNetkitPeer,
		Anchor: link.Head(),
	}
	if there != 0 {
		old, err := ebpf.NewProgramFromID(there)
		if err != nil {
			return fmt.Errorf("program on %s: %w", r.Device.HostName, err)
		}
		defer old.Close()
		o.Anchor = link.ReplaceProgram(old)
	}
	err = d.WithDeviceLock(func() error { return d.Node.Do(func() error { return link.RawAttachProgram(o) }) })
	if err != nil && !errors.Is(err, os.ErrExist) { // this program is already attached
		return fmt.Errorf("attach the program to %s: %w", r.Device.HostName, err)
	}
	return nil
}

func (d netkit) ProgramID(hostLink netlink.Link) (ebpf.ProgramID, error) {
	return d.programAt(hostLink.Attrs().Index)
}

// programAt returns our program among those that process the container's packets, whichever build attached it; 0 if
// there is none.
func (d netkit) programAt(ifindex int) (id ebpf.ProgramID, err error) {
	err = d.Node.Do(func() error {
		result, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: ebpf.AttachNetkitPeer})
		if err != nil {
			return err
		}
		for _, p := range result.Programs {
			if hook.ProgramHasName(p.ID, d.entryNames()...) {
				id = p.ID
				break
			}
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("program: query the programs of device %d: %w", ifindex, err)
	}
	return id, nil
}
