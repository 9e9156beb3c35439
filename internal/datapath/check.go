package datapath

import (
	"context"
	"fmt"
	"net"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Check compares what exists with the record and names the first difference.
func (d *Datapath) Check(_ context.Context, r endpoint.Record) error {
	in, err := openContainerNS(r.Netns)
	if err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	defer in.Close()
	for _, check := range []func() error{
		func() error { return d.driver(r).check(r) },
		func() error { return d.checkContainer(r, in) },
		func() error { return d.checkNodeRoutes(r) },
	} {
		if err := check(); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
	}
	return nil
}

func (d *Datapath) checkProgram(l netlink.Link, hook uint32, program *ebpf.Program, name string) error {
	there, err := d.programOn(l, hook)
	if err != nil {
		return err
	}
	return sameProgram(there, l, program, name)
}

func sameProgram(there ebpf.ProgramID, l netlink.Link, program *ebpf.Program, name string) error {
	info, err := program.Info()
	if err != nil {
		return fmt.Errorf("program: %w", err)
	}
	if id, _ := info.ID(); there != id {
		return fmt.Errorf("program %s is not on %s", name, l.Attrs().Name)
	}
	return nil
}

// programOn is the id of the program that stands on a device in the place of ours; 0 without one.
func (d *Datapath) programOn(l netlink.Link, hook uint32) (ebpf.ProgramID, error) {
	filters, err := netns.List(func() ([]netlink.Filter, error) { return d.netlink.FilterList(l, hook) })
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

func (d *Datapath) checkContainer(r endpoint.Record, in *containerNS) error {
	container, err := d.driver(r).containerLink(r, in)
	if err != nil {
		return err
	}
	// A link that is down, or whose MAC changed, has lost addresses, routes or neighbours too: this is why.
	if container.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s in the container is down", r.Interface)
	}
	if mac := container.Attrs().HardwareAddr; !slices.Equal(mac, r.Device.ContainerMAC) {
		return fmt.Errorf("link %s in the container has MAC %v, not %v", r.Interface, mac, r.Device.ContainerMAC)
	}
	if mtu := container.Attrs().MTU; mtu != r.Device.MTU {
		return fmt.Errorf("link %s in the container has MTU %d, not %d", r.Interface, mtu, r.Device.MTU)
	}
	if err := in.withSysctls(func(s sysctls) error { return s.check(r.Interface, containerSysctls()) }); err != nil {
		return fmt.Errorf("in the container: %w", err)
	}
	return checkContainerNetwork(r, in, container)
}

func checkContainerNetwork(r endpoint.Record, in *containerNS, container netlink.Link) error {
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
		want := containerAddress(a)
		if !slices.ContainsFunc(
			addresses,
			func(got netlink.Addr) bool { return got.IPNet.String() == want.IPNet.String() },
		) {
			return fmt.Errorf("address %v is not on %s", want.IPNet, r.Interface)
		}
		neighbour := gatewayNeighbour(container, a)
		if !slices.ContainsFunc(neighbours, func(got netlink.Neigh) bool {
			return got.IP.Equal(neighbour.IP) && got.State == neighbour.State &&
				slices.Equal(got.HardwareAddr, neighbour.HardwareAddr)
		}) {
			return fmt.Errorf("neighbour %v is not a permanent one with %v on %s", a.Gateway, gatewayMAC, r.Interface)
		}
		for _, route := range containerRoutes(container, a) {
			if !slices.ContainsFunc(routes, func(got netlink.Route) bool {
				return got.Dst != nil && got.Dst.String() == route.Dst.String() && got.Gw.Equal(route.Gw)
			}) {
				return fmt.Errorf("route %v via %v is not in the container", route.Dst, a.Gateway)
			}
		}
	}
	return nil
}
