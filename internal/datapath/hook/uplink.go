package hook

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/netns"
)

// Hooks attaches the programs of the uplink, of other host interfaces, and of the devices that belong to the node
// itself.
type Hooks struct {
	*host.Host

	NodeNear, NodeFar int       // ifindexes of the pair between the node and its containers
	ActiveOVSPorts    *OVSPorts // nil unless Open vSwitch reads the containers' devices

	UplinkPrograms map[uint32]*ebpf.Program // of networks with an object file of their own, by index in pil_uplinks_v1

	probing probing
}

// hook is a place on an interface of the node where our program runs first.
type hook struct {
	Name    string
	pin     string // its file in linksDir
	device  netlink.Link
	Attach  ebpf.AttachType
	program *ebpf.Program
	After   *ebpf.Program // must run before this program; nil if this one runs first
}

// Pin returns the name of the hook's pinned link.
func (h hook) Pin() string { return h.pin }

func (d *Hooks) UplinkHooks() []hook {
	if d.DeviceKind != endpoint.Macvlan {
		return d.filterHooks()
	}
	return append(d.filterHooks(), d.backstopHooks()...)
}

// filterHooks run first on the uplinks.
func (d *Hooks) filterHooks() (all []hook) {
	for i, l := range d.Uplinks {
		its := []hook{
			{"uplink_in", "uplink_in", l, ebpf.AttachTCXIngress, d.Objects.PilUplinkIn, nil},
			{"uplink_out", "uplink_out", l, ebpf.AttachTCXEgress, d.Objects.PilUplinkOut, nil},
		}
		for h := range its {
			if i > 0 { // builds that have a single uplink know the first by its name alone
				its[h].pin = Numbered(its[h].Name, l.Attrs().Index)
			}
		}
		all = append(all, its...)
	}
	return all
}

// Numbered returns the name of a pin of a device. Names of devices can change.
func Numbered(name string, index int) string { return fmt.Sprintf("%s_%d", name, index) }

// renameUplinkPins gives the pins of uplinks that an earlier process attached the names that they have now, if another
// uplink is the first. The programs stay where they are.
func (d *Hooks) renameUplinkPins() error {
	for _, h := range d.filterHooks()[:2] {
		if err := d.renameUplinkPin(h); err != nil {
			return fmt.Errorf("rename the pin of %s: %w", h.Name, err)
		}
	}
	return nil
}

func (d *Hooks) renameUplinkPin(first hook) error {
	index, err := pinnedDevice(filepath.Join(d.LinksDir(), first.pin))
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return err
	case index == first.device.Attrs().Index:
		return nil
	default:
		if err := d.renamePin(first.pin, Numbered(first.Name, index)); err != nil {
			return err
		}
	}
	err = d.renamePin(Numbered(first.Name, first.device.Attrs().Index), first.pin)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (d *Hooks) renamePin(from, to string) error {
	return os.Rename(filepath.Join(d.LinksDir(), from), filepath.Join(d.LinksDir(), to))
}

// pinnedDevice returns the index of the device of a pinned link; 0 if the device is gone.
func pinnedDevice(pin string) (int, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil || info.TCX() == nil {
		return 0, err
	}
	return int(info.TCX().Ifindex), nil
}

// backstopHooks run behind filterHooks if containers have macvlans.
func (d *Hooks) backstopHooks() []hook {
	l := d.Uplinks[0]
	return []hook{
		{"guard_in", "guard_in", l, ebpf.AttachTCXIngress, d.Objects.PilGuardIn, d.Objects.PilUplinkIn},
		{"guard_out", "guard_out", l, ebpf.AttachTCXEgress, d.Objects.PilGuardOut, d.Objects.PilUplinkOut},
	}
}

func (d *Hooks) DetachBackstop() error {
	for _, h := range d.backstopHooks() {
		if err := d.detachPin(h.pin); err != nil {
			return fmt.Errorf("detach %s from %s: %w", h.Name, h.device.Attrs().Name, err)
		}
	}
	return nil
}

// detachPin detaches the program that a pinned link holds, if there is one.
func (d *Hooks) detachPin(pin string) error {
	err := DetachLink(filepath.Join(d.LinksDir(), pin))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// AttachUplink puts our programs first on the uplinks, or replaces those of an earlier process. The links are pinned:
// they stay when the agent ends.
func (d *Hooks) AttachUplink() error {
	if err := os.MkdirAll(d.LinksDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for links: %w", err)
	}
	if err := d.renameUplinkPins(); err != nil {
		return err
	}
	return d.attachHooks(d.UplinkHooks())
}

// AttachUplinkPrograms replaces the programs that those of the uplink hand packets of other networks to, where the
// network has an object file of its own. Without the network its packets are dropped.
func (d *Hooks) AttachUplinkPrograms() error {
	if err := errors.Join(d.AttachEgressPrograms(), d.AttachServicePrograms()); err != nil {
		return err
	}
	for _, index := range []uint32{UplinkILA, UplinkTunnel4} {
		var err error
		if p := d.UplinkPrograms[index]; p != nil {
			err = d.Objects.PilUplinksV1.Put(index, p)
		} else {
			err = d.Objects.PilUplinksV1.Delete(index)
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("set program %d for packets from the uplink: %w", index, err)
		}
	}
	return nil
}

// AttachServicePrograms replaces the programs of packets to services.
func (d *Hooks) AttachServicePrograms() error {
	for index, p := range map[uint32]*ebpf.Program{
		programServiceOut: d.Objects.PilServiceOut, programServiceIn: d.Objects.PilServiceIn,
		programExposedIn: d.Objects.PilExposedIn, programExposedTunnel: d.Objects.PilExposedTun,
		programExposedOut: d.Objects.PilExposedOut,
	} {
		if err := d.Objects.PilServicesV1.Put(index, p); err != nil {
			return fmt.Errorf("set program %d of services: %w", index, err)
		}
	}
	return nil
}

// AttachEgressPrograms replaces the programs of packets between containers and hosts outside.
func (d *Hooks) AttachEgressPrograms() error {
	for index, p := range map[uint32]*ebpf.Program{
		ProgramEgressOut: d.Objects.PilEgressOut, ProgramEgressIn: d.Objects.PilEgressIn,
		ProgramEgressGateway: d.Objects.PilEgressGw,
	} {
		if err := d.Objects.PilUplinksV1.Put(index, p); err != nil {
			return fmt.Errorf("set program %d of egress: %w", index, err)
		}
	}
	return nil
}

func (d *Hooks) attachHooks(hooks []hook) error {
	for _, h := range hooks {
		if err := d.Node.Do(func() error { return d.attachHook(h) }); err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.Name, h.device.Attrs().Name, err)
		}
	}
	return nil
}

// UplinkProblems names the uplinks that carry no packets.
func (d *Hooks) UplinkProblems() (problems []string) {
	for _, l := range d.Uplinks {
		name := l.Attrs().Name
		switch is, err := d.Netlink.LinkByIndex(l.Attrs().Index); {
		case err != nil:
			problems = append(problems, fmt.Sprintf("uplink %s: %v; restart the agent when it is back", name, err))
		case is.Attrs().Flags&net.FlagUp == 0, is.Attrs().OperState == netlink.OperDown:
			problems = append(problems, fmt.Sprintf("uplink %s is down: no packets of containers leave by it; set it "+
				"up, or check its cable", name))
		}
	}
	return problems
}

// CheckUplinkFree returns an error if an uplink carries a packet path with pins elsewhere: this agent would take the
// devices of that path's containers for stale and remove them.
func (d *Hooks) CheckUplinkFree() error {
	for _, h := range d.filterHooks() { // their programs are not loaded yet
		var result *link.QueryResult
		if d.Node.Do(func() (err error) { result, err = QueryHook(h); return err }) != nil {
			return nil // a kernel without tcx: load returns the error
		}
		for _, p := range result.Programs {
			if ProgramHasName(p.ID, bpfobj.PilasterProgPilUplinkIn, bpfobj.PilasterProgPilUplinkOut) &&
				!d.isOurLink(h, p) {
				return fmt.Errorf(
					"%s carries the packet path of another agent, whose pins are not in %s; nothing was changed: "+
						"use the --bpffs and --state-dir of that agent, "+
						"or remove its packet path with `pilaster node reset`",
					h.device.Attrs().Name,
					d.BPFFS,
				)
			}
		}
	}
	return nil
}

// ProgramHasName reports whether a program has one of the names, whichever build loaded it.
func ProgramHasName(id ebpf.ProgramID, names ...string) bool {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return false // detached meanwhile
	}
	defer p.Close()
	info, err := p.Info()
	return err == nil && slices.Contains(names, info.Name)
}

// QueryHook returns the programs at a hook of the calling thread's namespace, first to last.
func QueryHook(h hook) (*link.QueryResult, error) {
	return link.QueryPrograms(link.QueryOptions{Target: h.device.Attrs().Index, Attach: h.Attach})
}

func (d *Hooks) attachHook(h hook) error {
	pin := filepath.Join(d.LinksDir(), h.pin)
	if old, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer old.Close()
		place, err := d.position(h)
		if err != nil {
			return err
		}
		if place >= 0 {
			return old.Update(h.program)
		}
		// The link's device is gone, or is in another namespace.
		if err := DetachLink(pin); err != nil {
			return err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	anchor := link.Head()
	if h.After != nil {
		anchor = link.AfterProgram(h.After)
	}
	l, err := link.AttachTCX(
		link.TCXOptions{Interface: h.device.Attrs().Index, Program: h.program, Attach: h.Attach, Anchor: anchor},
	)
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(pin)
}

// position returns how many programs run before ours at a hook of the calling thread's namespace; -1 if ours is not
// there.
func (d *Hooks) position(h hook) (int, error) {
	result, err := QueryHook(h)
	if err != nil {
		return 0, fmt.Errorf("query the programs of %s: %w", h.device.Attrs().Name, err)
	}
	for i, p := range result.Programs {
		if d.isOurLink(h, p) {
			return i, nil
		}
	}
	return -1, nil
}

// HookProblems returns what is wrong at hooks of the calling thread's namespace: our program is missing, or not first.
func (d *Hooks) HookProblems(hooks []hook) (missing, notFirst []string, err error) {
	for _, h := range hooks {
		place, err := d.position(h)
		device := h.device.Attrs().Name
		switch {
		case err != nil:
			return nil, nil, err
		case place < 0:
			missing = append(
				missing,
				fmt.Sprintf("program %s is not on %s; restart the agent to attach it", h.Name, device),
			)
		case place == 0 && h.After != nil:
			missing = append(
				missing,
				fmt.Sprintf(
					"program %s is first on %s and drops all packets of macvlans; restart the agent",
					h.Name,
					device,
				),
			)
		case place > 0 && h.After == nil:
			notFirst = append(
				notFirst,
				fmt.Sprintf(
					"%s before %s on %s; attach them after ours",
					humanize.Of(place, "other program runs", "other programs run"),
					h.Name,
					device,
				),
			)
		}
	}
	return missing, notFirst, nil
}

// isOurLink reports whether a program at a hook is ours. Before renameUplinkPins an uplink's pin may have either name.
func (d *Hooks) isOurLink(h hook, p link.AttachedProgram) bool {
	id, ok := p.LinkID()
	return ok && slices.ContainsFunc([]string{h.Name, Numbered(h.Name, h.device.Attrs().Index)}, func(pin string) bool {
		l, err := link.LoadPinnedLink(filepath.Join(d.LinksDir(), pin), nil)
		if err != nil {
			return false
		}
		defer l.Close()
		info, err := l.Info()
		return err == nil && id == info.ID
	})
}

// BlockUnclaimedPrefixes gives the node its own address, prefix::1, and makes the rest of its /64, its /64 of egress
// addresses, the private prefix, that of services, and, if they are reserved, its locator and the SIR prefix
// unreachable: a packet that no program takes must not follow the default route.
func (d *Hooks) BlockUnclaimedPrefixes() error {
	lo, err := d.Netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	self := NodeAddress(d.NodePrefix)
	if err := netns.Retry(func() error { return d.Netlink.AddrReplace(lo, self) }); err != nil {
		return fmt.Errorf("give lo the node address %v: %w", self.IPNet, err)
	}
	blocked := []netip.Prefix{d.NodePrefix, d.Plan.Private}
	if services, err := d.Plan.ServicePrefix(); err == nil { // else the cluster has none
		blocked = append(blocked, services)
	}
	if egress, ok := d.Plan.EgressNode(d.NodePrefix); ok && egress != d.NodePrefix {
		blocked = append(blocked, egress)
	}
	if ila, reserved := d.Plan.ReservedILA(); reserved {
		blocked = append(blocked, ila.SIR)
		if locator, err := ila.Locator(d.NodePrefix); err == nil {
			blocked = append(blocked, locator)
		}
	}
	for _, p := range blocked {
		if err := netns.PutRoute(d.Netlink, UnreachableRoute(p)); err != nil {
			return fmt.Errorf("make the rest of %v unreachable: %w", p, err)
		}
	}
	return nil
}

func NodeAddress(prefix netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: host.HostNet(prefix.Addr().Next()), Flags: unix.IFA_F_NODAD}
}

func UnreachableRoute(prefix netip.Prefix) *netlink.Route {
	return &netlink.Route{
		Dst:      host.IPNet(prefix),
		Type:     unix.RTN_UNREACHABLE,
		Protocol: unix.RTPROT_STATIC,
		Priority: 4096,
	}
}

// sweepLinks detaches programs at other hooks than these: those of other builds and of interfaces that are gone.
func (d *Hooks) sweepLinks(hooks []hook) error {
	pins := map[string]bool{}
	for _, h := range hooks {
		pins[h.pin] = true
	}
	for _, pin := range cgroupPins {
		pins[pin] = true
	}
	return d.SweepFolder(d.LinksDir(), DetachLink, func(name string) bool { return pins[name] })
}

// DetachLink ends a pinned link at once. If only the pin were removed, the kernel would detach the program some time
// later.
func DetachLink(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := host.IgnoreGone(l.Detach()); err != nil {
		return err
	}
	return l.Unpin()
}
