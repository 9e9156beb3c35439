package cni_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

func handle(t *testing.T, ns *netns.Namespace) *netlink.Handle {
	t.Helper()
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func links(t *testing.T, ns *netns.Namespace) []netlink.Link {
	t.Helper()
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	all, err := netns.List(h.LinkList)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// device is the kernel's view of a device, in the form of a CNI result.
type device struct {
	mac       string
	mtu       int
	addresses []string
	routes    []string // "prefix via gateway"
}

func read(t *testing.T, ns *netns.Namespace, name string) device {
	t.Helper()
	h := handle(t, ns)
	link, err := h.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	d := device{mac: link.Attrs().HardwareAddr.String(), mtu: link.Attrs().MTU}
	addresses, err := netns.List(func() ([]netlink.Addr, error) { return h.AddrList(link, unix.AF_INET6) })
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		d.addresses = append(d.addresses, a.IPNet.String())
	}
	routes, err := netns.List(func() ([]netlink.Route, error) { return h.RouteList(link, unix.AF_INET6) })
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		// The kernel adds a route to the device's own address and a multicast route.
		if r.Protocol != unix.RTPROT_KERNEL {
			d.routes = append(d.routes, fmt.Sprintf("%v via %v", r.Dst, r.Gw))
		}
	}
	slices.Sort(d.addresses)
	slices.Sort(d.routes)
	return d
}
