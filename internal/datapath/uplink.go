package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/netns"
)

// hook is a place on an interface of the node where a program of ours stands first.
type hook struct {
	name    string
	pin     string // its file in linksDir
	device  netlink.Link
	attach  ebpf.AttachType
	program *ebpf.Program
	after   *ebpf.Program // stands first, and this one behind it
}

func (d *Datapath) uplinkHooks() []hook {
	if d.config.Device != Macvlan {
		return d.filterHooks()
	}
	return append(d.filterHooks(), d.backstopHooks()...)
}

// filterHooks stand first on the uplink.
func (d *Datapath) filterHooks() []hook {
	return []hook{
		{"uplink_in", "uplink_in", d.uplink, ebpf.AttachTCXIngress, d.objects.PilUplinkIn, nil},
		{"uplink_out", "uplink_out", d.uplink, ebpf.AttachTCXEgress, d.objects.PilUplinkOut, nil},
	}
}

// backstopHooks stand behind them, beside macvlans.
func (d *Datapath) backstopHooks() []hook {
	return []hook{
		{"guard_in", "guard_in", d.uplink, ebpf.AttachTCXIngress, d.objects.PilGuardIn, d.objects.PilUplinkIn},
		{"guard_out", "guard_out", d.uplink, ebpf.AttachTCXEgress, d.objects.PilGuardOut, d.objects.PilUplinkOut},
	}
}

func (d *Datapath) detachBackstop() error {
	for _, h := range d.backstopHooks() {
		if err := d.detachPin(h.pin); err != nil {
			return fmt.Errorf("take %s off %s: %w", h.name, h.device.Attrs().Name, err)
		}
	}
	return nil
}

// detachPin detaches the program that a pin holds, if there is one.
func (d *Datapath) detachPin(pin string) error {
	err := detachLink(filepath.Join(d.linksDir(), pin))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// attachUplink puts our programs first on the uplink, or swaps them for those that are there.
// The links are pinned: they stay when the agent goes.
func (d *Datapath) attachUplink() error {
	if err := os.MkdirAll(d.linksDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for links: %w", err)
	}
	return d.attachHooks(d.uplinkHooks())
}

func (d *Datapath) attachHooks(hooks []hook) error {
	for _, h := range hooks {
		if err := d.node.Do(func() error { return d.attachHook(h) }); err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.name, h.device.Attrs().Name, err)
		}
	}
	return nil
}

// checkUplinkFree refuses an uplink that carries a packet path with pins elsewhere: its devices
// would look like nobody's, and be swept away with the network of their containers.
func (d *Datapath) checkUplinkFree() error {
	for _, h := range d.filterHooks() { // their programs are not loaded yet
		var result *link.QueryResult
		if d.node.Do(func() (err error) { result, err = queryHook(h); return err }) != nil {
			return nil // a kernel without tcx: load says what is missing
		}
		for _, p := range result.Programs {
			if programHasName(p.ID, pilasterProgPilUplinkIn, pilasterProgPilUplinkOut) && !d.isOurLink(h, p) {
				return fmt.Errorf(
					"%s carries the packet path of another agent, whose pins are not in %s; nothing was changed: "+
						"use the --bpffs and --state-dir that agent was started with, or take it apart with `pilaster node reset`",
					d.config.Uplink,
					d.config.BPFFS,
				)
			}
		}
	}
	return nil
}

// programHasName tells programs by their names, whichever build loaded them.
func programHasName(id ebpf.ProgramID, names ...string) bool {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return false // detached meanwhile
	}
	defer p.Close()
	info, err := p.Info()
	return err == nil && slices.Contains(names, info.Name)
}

// queryHook lists what stands at a hook of the calling thread's namespace, first to last.
func queryHook(h hook) (*link.QueryResult, error) {
	return link.QueryPrograms(link.QueryOptions{Target: h.device.Attrs().Index, Attach: h.attach})
}

func (d *Datapath) attachHook(h hook) error {
	pin := filepath.Join(d.linksDir(), h.pin)
	if old, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer old.Close()
		place, err := d.position(h)
		if err != nil {
			return err
		}
		if place >= 0 {
			return old.Update(h.program)
		}
		// The device the link belonged to is gone, and the link with it, or it is in another namespace.
		if err := detachLink(pin); err != nil {
			return err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	anchor := link.Head()
	if h.after != nil {
		anchor = link.AfterProgram(h.after)
	}
	l, err := link.AttachTCX(
		link.TCXOptions{Interface: h.device.Attrs().Index, Program: h.program, Attach: h.attach, Anchor: anchor},
	)
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(pin)
}

// position is how many programs stand before ours at a hook of the calling thread's namespace; -1 where ours is not there.
func (d *Datapath) position(h hook) (int, error) {
	result, err := queryHook(h)
	if err != nil {
		return 0, fmt.Errorf("ask %s for its programs: %w", h.device.Attrs().Name, err)
	}
	for i, p := range result.Programs {
		if d.isOurLink(h, p) {
			return i, nil
		}
	}
	return -1, nil
}

// hookProblems says what is wrong with our place at hooks of the calling thread's namespace: a program missing, or not
// lookupFirst.
func (d *Datapath) hookProblems(hooks []hook) (missing, notFirst []string, err error) {
	for _, h := range hooks {
		place, err := d.position(h)
		device := h.device.Attrs().Name
		switch {
		case err != nil:
			return nil, nil, err
		case place < 0:
			missing = append(
				missing,
				fmt.Sprintf("program %s is not on %s; restart the agent to attach it", h.name, device),
			)
		case place == 0 && h.after != nil:
			missing = append(
				missing,
				fmt.Sprintf(
					"program %s stands first on %s, and drops all packets of containers behind macvlans; restart the agent",
					h.name,
					device,
				),
			)
		case place > 0 && h.after == nil:
			notFirst = append(
				notFirst,
				fmt.Sprintf(
					"%s before %s on %s; attach them after ours",
					humanize.Of(place, "other program stands", "other programs stand"),
					h.name,
					device,
				),
			)
		}
	}
	return missing, notFirst, nil
}

func (d *Datapath) isOurLink(h hook, p link.AttachedProgram) bool {
	l, err := link.LoadPinnedLink(filepath.Join(d.linksDir(), h.pin), nil)
	if err != nil {
		return false
	}
	defer l.Close()
	info, err := l.Info()
	id, ok := p.LinkID()
	return err == nil && ok && id == info.ID
}

// blockUnclaimedPrefixes gives the node its own address, prefix::1, and makes the rest of its /64 unreachable, and
// the private prefix: what no program takes, and what no container has, must not find the default route.
func (d *Datapath) blockUnclaimedPrefixes() error {
	lo, err := d.netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	self := nodeAddress(d.config.NodePrefix)
	if err := netns.Retry(func() error { return d.netlink.AddrReplace(lo, self) }); err != nil {
		return fmt.Errorf("give lo the node address %v: %w", self.IPNet, err)
	}
	for _, p := range []netip.Prefix{d.config.NodePrefix, d.config.Plan.Private} {
		if err := netns.PutRoute(d.netlink, unreachableRoute(p)); err != nil {
			return fmt.Errorf("make the rest of %v unreachable: %w", p, err)
		}
	}
	return nil
}

func nodeAddress(prefix netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: hostNet(prefix.Addr().Next()), Flags: unix.IFA_F_NODAD}
}

func unreachableRoute(prefix netip.Prefix) *netlink.Route {
	return &netlink.Route{Dst: ipNet(prefix), Type: unix.RTN_UNREACHABLE, Protocol: unix.RTPROT_STATIC, Priority: 4096}
}
