package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// uplinkHook is one of the two places where our programs stand on the uplink.
type uplinkHook struct {
	name    string
	attach  ebpf.AttachType
	program *ebpf.Program
}

func (d *Datapath) uplinkHooks() []uplinkHook {
	return []uplinkHook{
		{"uplink_in", ebpf.AttachTCXIngress, d.objects.PilUplinkIn},
		{"uplink_out", ebpf.AttachTCXEgress, d.objects.PilUplinkOut},
	}
}

// attachUplink puts our programs first on the uplink, or swaps them for those that are there.
// The links are pinned: they stay when the agent goes.
func (d *Datapath) attachUplink() error {
	if err := os.MkdirAll(d.linksDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for links: %w", err)
	}
	for _, h := range d.uplinkHooks() {
		if err := d.node.Do(func() error { return d.attachHook(h) }); err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.name, d.config.Uplink, err)
		}
	}
	return nil
}

// aloneOnUplink refuses an uplink that carries a packet path with pins elsewhere: its devices
// would look like nobody's, and be swept away with the network of their containers.
func (d *Datapath) aloneOnUplink() error {
	for _, h := range d.uplinkHooks() { // their programs are not loaded yet
		result, err := d.onUplink(h)
		if err != nil {
			return nil // a kernel without tcx: load says what is missing
		}
		for _, p := range result.Programs {
			if isUplinkProgram(p.ID) && !d.isOurLink(h, p) {
				return fmt.Errorf("%s carries the packet path of another agent, whose pins are not in %s; nothing was changed: "+
					"use the --bpffs and --state-dir that agent was started with, or take it apart with `pilaster node reset`",
					d.config.Uplink, d.config.BPFFS)
			}
		}
	}
	return nil
}

func isUplinkProgram(id ebpf.ProgramID) bool {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return false // detached meanwhile
	}
	defer p.Close()
	info, err := p.Info()
	return err == nil && (info.Name == pilasterProgPilUplinkIn || info.Name == pilasterProgPilUplinkOut)
}

// onUplink lists what stands at a hook, first to last.
func (d *Datapath) onUplink(h uplinkHook) (result *link.QueryResult, err error) {
	err = d.node.Do(func() (err error) {
		result, err = link.QueryPrograms(link.QueryOptions{Target: d.uplink.Attrs().Index, Attach: h.attach})
		return err
	})
	return result, err
}

func (d *Datapath) attachHook(h uplinkHook) error {
	pin := filepath.Join(d.linksDir(), h.name)
	if old, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer old.Close()
		if d.linkIsOnUplink(old) {
			return old.Update(h.program)
		}
		// The device the link belonged to is gone, and the link with it.
		if err := old.Unpin(); err != nil {
			return err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := link.AttachTCX(link.TCXOptions{
		Interface: d.uplink.Attrs().Index,
		Program:   h.program,
		Attach:    h.attach,
		Anchor:    link.Head(),
	})
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(pin)
}

func (d *Datapath) linkIsOnUplink(l link.Link) bool {
	info, err := l.Info()
	if err != nil || info.TCX() == nil {
		return false
	}
	return int(info.TCX().Ifindex) == d.uplink.Attrs().Index
}

// uplinkProblems says what is wrong with our place on the uplink: a program missing, or not first.
func (d *Datapath) uplinkProblems() (missing, notFirst []string, err error) {
	for _, h := range d.uplinkHooks() {
		result, err := d.onUplink(h)
		if err != nil {
			return nil, nil, fmt.Errorf("ask %s for its programs: %w", d.config.Uplink, err)
		}
		place := -1
		for i, p := range result.Programs {
			if d.isOurLink(h, p) {
				place = i
			}
		}
		switch {
		case place < 0:
			missing = append(missing, fmt.Sprintf("program %s is not on %s; restart the agent to attach it", h.name, d.config.Uplink))
		case place > 0:
			notFirst = append(notFirst, fmt.Sprintf("%d other programs stand before %s on %s; attach them after ours", place, h.name, d.config.Uplink))
		}
	}
	return missing, notFirst, nil
}

func (d *Datapath) isOurLink(h uplinkHook, p link.AttachedProgram) bool {
	l, err := link.LoadPinnedLink(filepath.Join(d.linksDir(), h.name), nil)
	if err != nil {
		return false
	}
	defer l.Close()
	info, err := l.Info()
	id, ok := p.LinkID()
	return err == nil && ok && id == info.ID
}

// guardPrefix gives the node its own address, prefix::1, and makes the rest of its /64 unreachable, and
// the private prefix: what no program takes, and what no container has, must not find the default route.
func (d *Datapath) guardPrefix() error {
	lo, err := d.netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	self := nodeAddress(d.config.NodePrefix)
	if err := netns.Retry(func() error { return d.netlink.AddrReplace(lo, self) }); err != nil {
		return fmt.Errorf("give lo the node address %v: %w", self.IPNet, err)
	}
	for _, p := range []netip.Prefix{d.config.NodePrefix, d.config.Plan.Private} {
		if err := netns.Retry(func() error { return d.netlink.RouteReplace(guardRoute(p)) }); err != nil {
			return fmt.Errorf("make the rest of %v unreachable: %w", p, err)
		}
	}
	return nil
}

func nodeAddress(prefix netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: hostNet(prefix.Addr().Next()), Flags: unix.IFA_F_NODAD}
}

func guardRoute(prefix netip.Prefix) *netlink.Route {
	return &netlink.Route{Dst: ipNet(prefix), Type: unix.RTN_UNREACHABLE, Protocol: unix.RTPROT_STATIC, Priority: 4096}
}
