package bpftest

import (
	"net"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Namespace creates a network namespace for the time of the test.
func Namespace(t testing.TB, name string) *netns.Namespace {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), name))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	return ns
}

// Pair makes a device of a node, whose far end in the namespace beyond has the same name. Index 0 lets the kernel
// choose one.
func Pair(t testing.TB, node, beyond *netns.Namespace, name string, index int) netlink.Link {
	t.Helper()
	h, err := node.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index, attrs.MTU = name, index, 1500
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = name, netlink.NsFd(beyond.FD())
	must(t, h.LinkAdd(veth))
	l, err := h.LinkByName(name)
	must(t, err)
	must(t, h.LinkSetUp(l))
	must(t, beyond.Do(func() error {
		far, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(far)
	}))
	return l
}

// Route sends a family's packets of a node by a device to a router whose MAC is known.
func Route(t testing.TB, node *netns.Namespace, device netlink.Link, mac net.HardwareAddr, family int) {
	t.Helper()
	h, err := node.Netlink()
	must(t, err)
	defer h.Close()
	router := netip.MustParseAddr("fe80::9")
	must(t, h.NeighSet(&netlink.Neigh{
		LinkIndex: device.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT, IP: router.AsSlice(),
		HardwareAddr: mac,
	}))
	r := &netlink.Route{LinkIndex: device.Attrs().Index, Family: family}
	if family == unix.AF_INET {
		r.Dst = &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
		r.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: router.AsSlice()}
	} else {
		r.Gw = router.AsSlice()
	}
	must(t, netns.Retry(func() error { return h.RouteReplace(r) }))
}
