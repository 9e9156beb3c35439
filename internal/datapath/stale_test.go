package datapath

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
)

func kinds(all []network.StaleState) string {
	var names []string
	for _, l := range all {
		names = append(names, l.Kind)
	}
	return strings.Join(slices.Compact(names), " ")
}

// TestLeftoversWithoutState: our state in the kernel is found without files, and similar state of others stays.
func TestLeftoversWithoutState(t *testing.T) {
	n := newWire(t).nodes[0]
	n.add(t, blue, 1)
	dir := n.datapath.config.BPFFS
	must(t, n.datapath.Close())
	foreign := filepath.Join(dir, "foreign")
	must(t, os.Mkdir(foreign, 0o700))
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	must(t, err)
	guard, alone := netip.MustParsePrefix("2001:db8:1::/64"), netip.MustParsePrefix("2001:db8:2::/64")
	must(t, h.RouteAdd(hook.UnreachableRoute(guard)))
	must(t, h.AddrAdd(lo, hook.NodeAddress(alone)))
	egress := netip.MustParsePrefix("2001:db8:e:1::/64")
	must(t, h.RouteAdd(hook.UnreachableRoute(egress)))

	must(t, n.ns.Do(func() error {
		all, err := StaleState(netip.Prefix{}, egress, dir)
		must(t, err)
		if got := kinds(all); got != "device pair link map folder route address route" {
			t.Errorf("found %s", got)
		}
		for _, l := range all {
			must(t, l.Remove())
			must(t, orGone(l.Remove()))
		}
		if again, err := StaleState(n.prefix, egress, dir); err != nil || len(again) != 0 {
			t.Errorf("left: %v, %v", again, err)
		}
		return nil
	}))
	if _, err := os.Stat(foreign); err != nil {
		t.Error(err)
	}
	must(t, h.RouteDel(hook.UnreachableRoute(guard)))
	services, err := address.DefaultPlan().ServicePrefix()
	must(t, err)
	for _, p := range []netip.Prefix{egress, services} {
		if err := h.RouteDel(hook.UnreachableRoute(p)); err == nil {
			t.Errorf("the route of %v is left", p)
		}
	}
	must(t, h.AddrDel(lo, hook.NodeAddress(alone)))
	// Another program has removed a part: the node's own prefix is enough to find the rest.
	must(t, h.AddrAdd(lo, hook.NodeAddress(n.prefix)))
	must(t, n.ns.Do(func() error {
		if all, err := StaleState(n.prefix, egress, dir); err != nil || kinds(all) != "address" {
			t.Errorf("found %s, %v", kinds(all), err)
		}
		return nil
	}))
}

func orGone(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// TestBPFFSWhereNoneIsMounted: the default folder cannot be made in sysfs, so bpffs comes first.
func TestBPFFSWhereNoneIsMounted(t *testing.T) {
	const dir = "/sys/fs/bpf/pilaster"
	must(t, netns.OnThread(func() error {
		must(t, unix.Unshare(unix.CLONE_NEWNS))
		must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		for host.IsOn("/sys/fs/bpf", unix.BPF_FS_MAGIC) {
			must(t, unix.Unmount("/sys/fs/bpf", unix.MNT_DETACH))
		}
		if !host.IsOn("/sys/fs/bpf", unix.SYSFS_MAGIC) {
			t.Fatal("/sys/fs/bpf is not a folder of sysfs")
		}
		must(t, host.MountBPFFS(dir))
		must(t, host.MountBPFFS(dir))
		if !host.IsOn(dir, unix.BPF_FS_MAGIC) {
			t.Errorf("%s is not on a bpffs", dir)
		}
		// The pins of another program would be removed with the mount.
		must(t, os.Mkdir("/sys/fs/bpf/foreign", 0o700))
		if all, err := stalePins(dir); err != nil || kinds(all) != "folder" {
			t.Errorf("found %s, %v", kinds(all), err)
		}
		must(t, os.Remove("/sys/fs/bpf/foreign"))
		all, err := stalePins(dir)
		must(t, err)
		if kinds(all) != "folder mount" {
			t.Errorf("found %s", kinds(all))
		}
		for _, l := range all {
			must(t, l.Remove())
		}
		if !host.IsOn("/sys/fs/bpf", unix.SYSFS_MAGIC) {
			t.Error("the mount is left")
		}
		return nil
	}))
}

// TestLeftoversOnABPFFSOfOthers: a bpffs that the operator mounted is not unmounted.
func TestLeftoversOnABPFFSOfOthers(t *testing.T) {
	dir := t.TempDir()
	must(t, unix.Mount("bpf", dir, "bpf", 0, ""))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	must(t, os.Mkdir(filepath.Join(dir, bpfobj.MapsFolder), 0o700))
	all, err := stalePins(dir)
	if err != nil || kinds(all) != "folder" || all[0].Name != filepath.Join(dir, bpfobj.MapsFolder) {
		t.Errorf("left: %v, %v", all, err)
	}
	inside := filepath.Join(dir, "pilaster")
	must(t, os.Mkdir(inside, 0o700))
	if all, err := stalePins(inside); err != nil || kinds(all) != "folder" || all[0].Name != inside {
		t.Errorf("left of a folder in it: %v, %v", all, err)
	}
}
