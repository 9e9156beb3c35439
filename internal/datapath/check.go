package datapath

import (
	"context"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Check compares what exists with the record and names the first difference.
func (d *Datapath) Check(_ context.Context, r endpoint.Record) error {
	inside, err := netns.Open(r.Netns)
	if err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	defer inside.Close()
	for _, check := range []func() error{
		func() error { return d.checkHostSide(r) },
		func() error { return checkContainerSide(r, inside) },
		func() error { return d.checkEntries(r) },
	} {
		if err := check(); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
	}
	return nil
}

func (d *Datapath) checkHostSide(r endpoint.Record) error {
	host, err := d.netlink.LinkByName(r.Device.HostName)
	if err != nil {
		return fmt.Errorf("link %s: %w", r.Device.HostName, err)
	}
	if host.Attrs().Index != r.Device.HostIfindex {
		return fmt.Errorf("link %s has index %d, not %d: it was made anew", r.Device.HostName, host.Attrs().Index, r.Device.HostIfindex)
	}
	if host.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s is down", r.Device.HostName)
	}
	filters, err := netns.List(func() ([]netlink.Filter, error) {
		return d.netlink.FilterList(host, netlink.HANDLE_MIN_INGRESS)
	})
	if err != nil {
		return fmt.Errorf("program: list the filters of %s: %w", r.Device.HostName, err)
	}
	info, err := d.program.Info()
	if err != nil {
		return fmt.Errorf("program: %w", err)
	}
	id, _ := info.ID()
	ours := func(f netlink.Filter) bool {
		b, ok := f.(*netlink.BpfFilter)
		return ok && b.DirectAction && b.Id == int(id)
	}
	if !slices.ContainsFunc(filters, ours) {
		return fmt.Errorf("program %s is not on %s", pilasterProgPilContainer, r.Device.HostName)
	}
	return nil
}

func checkContainerSide(r endpoint.Record, inside *netns.Namespace) error {
	handle, err := inside.Netlink()
	if err != nil {
		return err
	}
	defer handle.Close()
	container, err := handle.LinkByName(r.Interface)
	if err != nil {
		return fmt.Errorf("link %s in the container: %w", r.Interface, err)
	}
	// A link that is down, or whose MAC changed, has lost addresses, routes or neighbours too: this is why.
	if container.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s in the container is down", r.Interface)
	}
	if mac := container.Attrs().HardwareAddr; !slices.Equal(mac, r.Device.ContainerMAC) {
		return fmt.Errorf("link %s in the container has MAC %v, not %v", r.Interface, mac, r.Device.ContainerMAC)
	}
	addresses, err := netns.List(func() ([]netlink.Addr, error) { return handle.AddrList(container, unix.AF_INET6) })
	if err != nil {
		return fmt.Errorf("list the addresses of %s: %w", r.Interface, err)
	}
	routes, err := netns.List(func() ([]netlink.Route, error) { return handle.RouteList(container, unix.AF_INET6) })
	if err != nil {
		return fmt.Errorf("list the routes of %s: %w", r.Interface, err)
	}
	neighbours, err := netns.List(func() ([]netlink.Neigh, error) {
		return handle.NeighList(container.Attrs().Index, unix.AF_INET6)
	})
	if err != nil {
		return fmt.Errorf("list the neighbours of %s: %w", r.Interface, err)
	}
	for _, a := range r.Attachments {
		want := containerAddress(a)
		if !slices.ContainsFunc(addresses, func(got netlink.Addr) bool { return got.IPNet.String() == want.IPNet.String() }) {
			return fmt.Errorf("address %v is not on %s", want.IPNet, r.Interface)
		}
		neighbour := gatewayNeighbour(container, a)
		if !slices.ContainsFunc(neighbours, func(got netlink.Neigh) bool {
			return got.IP.Equal(neighbour.IP) && got.State == neighbour.State && slices.Equal(got.HardwareAddr, neighbour.HardwareAddr)
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

func (d *Datapath) checkEntries(r endpoint.Record) error {
	for _, a := range r.Attachments {
		var local pilasterLocal
		if err := d.objects.PilLocalsV1.Lookup(words(a.Plaintext).Lo, &local); err != nil {
			return fmt.Errorf("map entry %s of %v: %w", pilasterMapPilLocalsV1, a.Plaintext, err)
		}
		if local.Address != words(a.Address) || int(local.Ifindex) != r.Device.HostIfindex {
			return fmt.Errorf("map entry %s of %v says %v on device %d", pilasterMapPilLocalsV1, a.Plaintext, local.Address.netip(), local.Ifindex)
		}
		var source pilasterSource
		if err := d.objects.PilSourcesV1.Lookup(sourceKey(r, a), &source); err != nil {
			return fmt.Errorf("map entry %s of %v: %w", pilasterMapPilSourcesV1, a.Address, err)
		}
		if source.Plain != words(a.Plaintext) || source.TenantId != uint32(r.TenantID) {
			return fmt.Errorf("map entry %s of %v says %v, tenant id %d", pilasterMapPilSourcesV1, a.Address, source.Plain.netip(), source.TenantId)
		}
	}
	var t pilasterTenant
	if err := d.objects.PilTenantsV2.Lookup(uint32(r.TenantID), &t); err != nil {
		return fmt.Errorf("map entry %s of tenant id %d: %w", pilasterMapPilTenantsV2, r.TenantID, err)
	}
	if t.Clear == 0 {
		if err := d.objects.PilKeysV1.Lookup(uint32(r.TenantID), new([8]byte)); err != nil {
			return fmt.Errorf("map entry %s of tenant id %d: %w", pilasterMapPilKeysV1, r.TenantID, err)
		}
	}
	return nil
}
