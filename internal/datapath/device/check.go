package device

import (
	"context"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Check compares the kernel with the record and returns the first difference.
func (d *Devices) Check(_ context.Context, r endpoint.Record) error {
	in, err := OpenContainerNS(r.Netns)
	if err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	defer in.Close()
	for _, check := range []func() error{
		func() error { return d.Driver(r).Check(r) },
		func() error { return d.checkMAC(r) },
		func() error { return d.checkContainer(r, in) },
		func() error { return d.CheckNodeRoutes(r) },
	} {
		if err := check(); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
	}
	return nil
}

func (d *Devices) checkContainer(r endpoint.Record, in *ContainerNS) error {
	container, err := d.Driver(r).containerLink(r, in)
	if err != nil {
		return err
	}
	// A link that is down, or whose MAC changed, has also lost addresses, routes or neighbours: report the cause.
	if container.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s in the container is down", r.Interface)
	}
	if mac := container.Attrs().HardwareAddr; !slices.Equal(mac, r.Device.ContainerMAC) {
		return fmt.Errorf("link %s in the container has MAC %v, not %v", r.Interface, mac, r.Device.ContainerMAC)
	}
	if mtu := container.Attrs().MTU; mtu != r.Device.MTU {
		return fmt.Errorf("link %s in the container has MTU %d, not %d", r.Interface, mtu, r.Device.MTU)
	}
	if err := in.withSysctls(func(s host.Sysctls) error {
		return s.Check(r.Interface,
			host.ContainerSysctls())
	}); err != nil {
		return fmt.Errorf("in the container: %w", err)
	}
	return checkContainerNetwork(r, in, container)
}

func checkContainerNetwork(r endpoint.Record, in *ContainerNS, container netlink.Link) error {
	addresses, err := netns.List(func() ([]netlink.Addr, error) { return in.AddrList(container, unix.AF_UNSPEC) })
	if err != nil {
		return fmt.Errorf("list the addresses of %s: %w", r.Interface, err)
	}
	routes, err := netns.List(func() ([]netlink.Route, error) { return in.RouteList(container, unix.AF_UNSPEC) })
	if err != nil {
		return fmt.Errorf("list the routes of %s: %w", r.Interface, err)
	}
	neighbours, err := netns.List(func() ([]netlink.Neigh, error) {
		return in.NeighList(container.Attrs().Index, unix.AF_UNSPEC)
	})
	if err != nil {
		return fmt.Errorf("list the neighbours of %s: %w", r.Interface, err)
	}
	for _, a := range r.Attachments {
		want := ContainerAddress(a)
		if !slices.ContainsFunc(
			addresses,
			func(got netlink.Addr) bool { return got.IPNet.String() == want.IPNet.String() },
		) {
			return fmt.Errorf("address %v is not on %s", want.IPNet, r.Interface)
		}
		neighbour := GatewayNeighbour(container, a)
		if !slices.ContainsFunc(neighbours, func(got netlink.Neigh) bool {
			return got.IP.Equal(neighbour.IP) && got.State == neighbour.State &&
				slices.Equal(got.HardwareAddr, neighbour.HardwareAddr)
		}) {
			return fmt.Errorf(
				"neighbour %v is not a permanent one with %v on %s",
				a.Gateway,
				host.GatewayMAC,
				r.Interface,
			)
		}
		for _, route := range ContainerRoutes(container, a) {
			if !slices.ContainsFunc(routes, func(got netlink.Route) bool {
				return got.Dst != nil && got.Dst.String() == route.Dst.String() && got.Gw.Equal(route.Gw)
			}) {
				return fmt.Errorf("route %v via %v is not in the container", route.Dst, a.Gateway)
			}
		}
	}
	return nil
}
