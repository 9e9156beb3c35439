package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// StaleState finds what the packet path keeps in the kernel, in the order in which it can be removed without leaking a
// packet: devices before programs, programs before the routes behind them. It loads nothing. Call it, and the functions
// that it returns, in the node's namespace while no agent runs. The prefixes are the node's and that of its egress
// addresses; zero if unknown. Settings of the machine are not among them: only our devices have settings, which are
// removed with the devices.
func StaleState(prefix, egress netip.Prefix, bpffs string) ([]network.StaleState, error) {
	bpffs = filepath.Clean(bpffs)
	var all []network.StaleState
	for _, find := range []func() ([]network.StaleState, error){
		staleDevices, device.StaleMacvlans, staleNodeDevice, staleNetworks,
		func() ([]network.StaleState, error) { return stalePins(bpffs) },
		func() ([]network.StaleState, error) { return stalePrefixes(prefix, egress) },
		staleTunnelAddresses,
	} {
		found, err := find()
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

func staleDevices() ([]network.StaleState, error) {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var all []network.StaleState
	for _, l := range links {
		if _, ours := host.DeviceID(l); ours {
			all = append(all, network.StaleState{Kind: network.StateDevice, Name: l.Attrs().Name, Remove: func() error {
				return host.IgnoreGone(netns.Retry(func() error { return netlink.LinkDel(l) }))
			}})
		}
	}
	return all, nil
}

// staleNodeDevice finds the pair between the node and its containers. Its routes are removed with it.
func staleNodeDevice() ([]network.StaleState, error) {
	return staleNamed("pair", hook.NodeDevice, isVeth)
}

// staleNetworks finds the devices of networks.
func staleNetworks() (all []network.StaleState, err error) {
	for _, n := range networkParts() {
		if n.stale == nil {
			continue
		}
		found, err := n.stale()
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

func isVeth(l netlink.Link) bool { return l.Type() == "veth" }

func staleNamed(kind, name string, ours func(netlink.Link) bool) ([]network.StaleState, error) {
	l, err := netlink.LinkByName(name)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) || err == nil && !ours(l) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", name, err)
	}
	return []network.StaleState{{Kind: kind, Name: name, Remove: func() error {
		return host.IgnoreGone(netns.Retry(func() error { return netlink.LinkDel(l) }))
	}}}, nil
}

// stalePins finds pins, their folders, and the bpffs if we mounted it.
func stalePins(bpffs string) ([]network.StaleState, error) {
	var pins, folders []network.StaleState
	for _, sub := range []string{bpfobj.LinksFolder, bpfobj.MapsFolder} {
		err := filepath.WalkDir(filepath.Join(bpffs, sub), func(path string, entry fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, os.ErrNotExist):
				return nil
			case err != nil:
				return err
			case entry.IsDir():
				folders = append(folders, staleFile("folder", path))
			case sub == bpfobj.LinksFolder:
				pins = append(
					pins,
					network.StaleState{Kind: "link", Name: path, Remove: func() error { return hook.DetachLink(path) }},
				)
			default:
				pins = append(pins, staleFile(strings.TrimSuffix(sub, "s"), path))
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list pins: %w", err)
		}
	}
	slices.Reverse(folders) // the deepest first
	place, err := stalePinFolder(bpffs)
	return slices.Concat(pins, folders, place), err
}

// stalePinFolder finds the folder of pins, and the bpffs that we mounted for it. Neither is returned while another
// program keeps something there.
func stalePinFolder(bpffs string) ([]network.StaleState, error) {
	if _, err := os.Lstat(bpffs); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	mount, err := host.OurMount(bpffs)
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	unmount := network.StaleState{Kind: "mount", Name: mount, Remove: func() error { return unix.Unmount(mount, 0) }}
	alone, err := holdsOnly(bpffs, bpfobj.LinksFolder, bpfobj.MapsFolder)
	if err != nil || !alone {
		return nil, err
	}
	switch mount {
	case "":
		if isMountPoint(bpffs) {
			return nil, nil // another program mounted it and owns the folder
		}
		return []network.StaleState{staleFile("folder", bpffs)}, nil
	case bpffs:
		return []network.StaleState{unmount, staleFile("folder", bpffs)}, nil
	}
	if alone, err = holdsOnly(mount, filepath.Base(bpffs)); err != nil || !alone {
		return []network.StaleState{staleFile("folder", bpffs)}, err
	}
	return []network.StaleState{staleFile("folder", bpffs), unmount}, nil
}

func isMountPoint(dir string) bool {
	var here, above unix.Stat_t
	return unix.Stat(dir, &here) == nil && unix.Stat(filepath.Dir(dir), &above) == nil && here.Dev != above.Dev
}

// holdsOnly reports whether a folder holds nothing but these, and what the kernel puts into every bpffs.
func holdsOnly(dir string, names ...string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	names = append(names, "maps.debug", "progs.debug")
	return !slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return !slices.Contains(names, e.Name()) }), nil
}

// stalePrefixes finds node addresses and the unreachable routes behind them: the node's own, and those of a prefix that
// it had before. Only Pilaster makes such a pair. The route of the egress addresses has no address.
func stalePrefixes(own, egress netip.Prefix) ([]network.StaleState, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("lo: %w", err)
	}
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(lo, unix.AF_INET6) })
	if err != nil {
		return nil, fmt.Errorf("list the addresses of lo: %w", err)
	}
	routes, err := netns.List(func() ([]netlink.Route, error) { return netlink.RouteList(nil, unix.AF_INET6) })
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	hasAddress, hasTunnel, guarded := map[netip.Prefix]bool{}, map[netip.Prefix]bool{}, map[netip.Prefix]bool{}
	for _, a := range addrs {
		if p := host.PrefixOf(a.IPNet); p.IsValid() && p.IsSingleIP() {
			node, _ := p.Addr().Prefix(address.NodeBits)
			hasAddress[node] = hasAddress[node] || p.Addr() == node.Addr().Next()
			hasTunnel[node] = hasTunnel[node] || p.Addr() == tenant.TunnelAddress(node)
		}
	}
	services, _ := address.DefaultPlan().ServicePrefix() // the same in all plans
	var private []network.StaleState
	for _, r := range routes {
		switch p := host.PrefixOf(r.Dst); {
		case !p.IsValid() || !isUnreachableRoute(r):
		case p.Bits() == address.NodeBits:
			guarded[p] = true
		case p == services || p.Bits() >= address.MinPrivateBits && p.Bits() <= address.MaxPrivateBits:
			private = append(private, staleRoute(p))
		}
	}
	var all []network.StaleState
	for p := range guarded {
		if p != own && hasAddress[p] {
			all = append(all, staleAddress(lo, hook.NodeAddress(p)), staleRoute(p))
			if hasTunnel[p] {
				all = append(all, staleAddress(lo, hook.VtepAddress(p)))
			}
		}
	}
	if hasAddress[own] {
		all = append(all, staleAddress(lo, hook.NodeAddress(own)))
	}
	if hasTunnel[own] {
		all = append(all, staleAddress(lo, hook.VtepAddress(own)))
	}
	if guarded[own] {
		all = append(all, staleRoute(own))
	}
	for p := range guarded {
		// of a prefix that this node's programs alone use
		if p != own && !hasAddress[p] && (p == egress || isDerived(p, own, hasAddress)) {
			private = append(private, staleRoute(p))
		}
	}
	if len(all) == 0 {
		return nil, nil // without a node, the routes of the private prefix and of services are not ours
	}
	return append(private, all...), nil
}

// staleTunnelAddresses finds the IPv4 tunnel address that an agent has given the node.
func staleTunnelAddresses() (all []network.StaleState, err error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("lo: %w", err)
	}
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(lo, unix.AF_INET) })
	if err != nil {
		return nil, fmt.Errorf("list the IPv4 addresses of lo: %w", err)
	}
	for _, a := range addrs {
		if a.Label == hook.TunnelAddressLabel {
			all = append(all, staleAddress(lo, &a))
		}
	}
	return all, nil
}

// isDerived reports whether a prefix can be one of containers whose addresses on the fabric are not those that they
// see.
func isDerived(p, own netip.Prefix, nodes map[netip.Prefix]bool) bool {
	if own.IsValid() && address.IsDerivedFrom(p, own) {
		return true
	}
	for node, is := range nodes {
		if is && address.IsDerivedFrom(p, node) {
			return true
		}
	}
	return false
}

func isUnreachableRoute(r netlink.Route) bool {
	g := hook.UnreachableRoute(netip.Prefix{})
	return r.Type == g.Type && r.Protocol == g.Protocol && r.Priority == g.Priority
}

func staleAddress(lo netlink.Link, a *netlink.Addr) network.StaleState {
	return network.StaleState{Kind: "address", Name: fmt.Sprintf("%v on lo", a.IPNet), Remove: func() error {
		return host.IgnoreGone(netns.Retry(func() error { return netlink.AddrDel(lo, a) }))
	}}
}

func staleRoute(prefix netip.Prefix) network.StaleState {
	return network.StaleState{Kind: "route", Name: fmt.Sprintf("unreachable %v", prefix), Remove: func() error {
		return host.IgnoreGone(netns.DeleteRoute(&netlink.Handle{}, hook.UnreachableRoute(prefix)))
	}}
}

func staleFile(kind, path string) network.StaleState {
	return network.StaleState{Kind: kind, Name: path, Remove: func() error { return os.Remove(path) }}
}
