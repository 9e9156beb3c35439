package device

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// ContainerNS is an open container namespace. Its netlink handle works from any thread, because entering the namespace
// is most of the cost of an operation.
type ContainerNS struct {
	*netlink.Handle
	Netns  *netns.Namespace
	cookie uint64 // of the namespace, as long as the machine runs
}

func OpenContainerNS(path string) (_ *ContainerNS, err error) {
	in := &ContainerNS{}
	if in.Netns, err = netns.Open(path); err != nil {
		return nil, err
	}
	err = in.Netns.Do(func() (err error) {
		if in.Handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		in.cookie, err = NetnsCookie()
		return err
	})
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// NetnsCookie returns the cookie of the calling thread's network namespace. It is unique until the machine reboots.
func NetnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// CookieOf returns the cookie of the network namespace at a path.
func CookieOf(path string) (cookie uint64, err error) {
	ns, err := netns.Open(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	err = ns.Do(func() (err error) { cookie, err = NetnsCookie(); return err })
	return cookie, err
}

func (in *ContainerNS) Close() error {
	if in.Handle != nil {
		in.Handle.Close()
	}
	return in.Netns.Close()
}

// withSysctls opens the sysctls of the container's devices for f.
func (in *ContainerNS) withSysctls(f func(host.Sysctls) error) error {
	var s host.Sysctls
	if err := in.Netns.Do(func() (err error) { s, err = host.OpenSysctls("ipv6"); return err }); err != nil {
		return err
	}
	return errors.Join(f(s), s.Close())
}

// setUpContainer gives the container its address and its only route. The kernel resolves, solicits and advertises
// nothing on the device.
func (d *Devices) setUpContainer(r endpoint.Record, in *ContainerNS) error {
	container, err := d.Driver(r).containerLink(r, in)
	if err != nil {
		return err
	}
	if err := in.routesAreFree(r.Attachments, container); err != nil {
		return err
	}
	steps := []func() error{
		func() error { return host.SetMTU(in.Handle, container, r.Device.MTU) },
		func() error { return setMAC(in.Handle, container, r.Device.ContainerMAC) },
		func() error { return in.LinkSetIP6AddrGenMode(container, nl.IN6_ADDR_GEN_MODE_NONE) },
		func() error { return in.LinkSetARPOff(container) },
		func() error { return in.LinkSetUp(container) },
	}
	for _, step := range append(steps, in.attach(r.Attachments, container)...) {
		if err := netns.Retry(step); err != nil {
			return err
		}
	}
	return nil
}

// attach returns the steps that configure attachments in the container.
func (in *ContainerNS) attach(attachments []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		steps = append(steps,
			func() error { return in.setAddress(container, a) },
			func() error { return in.NeighSet(GatewayNeighbour(container, a)) },
		)
	}
	return append(steps, in.addRoutes(attachments, container)...)
}

// addRoutes returns the steps that add the routes of attachments.
func (in *ContainerNS) addRoutes(attachments []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		for _, route := range ContainerRoutes(container, a) {
			steps = append(steps, func() error { return in.RouteReplace(&route) })
		}
	}
	return steps
}

// deleteRoutes returns the steps that delete the routes of attachments.
func (in *ContainerNS) deleteRoutes(attachments []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		for _, route := range ContainerRoutes(container, a) {
			steps = append(steps, func() error { return netns.DeleteRoute(in.Handle, &route) })
		}
	}
	return steps
}

// detach returns the steps that remove attachments, except the next hops that the remaining attachments use.
func (in *ContainerNS) detach(attachments, stay []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	steps = in.deleteRoutes(attachments, container)
	for _, a := range attachments {
		steps = append(steps, func() error { return in.AddrDel(container, ContainerAddress(a)) })
		if !slices.ContainsFunc(stay, func(o endpoint.Attachment) bool { return o.Gateway == a.Gateway }) {
			steps = append(steps, func() error { return in.NeighDel(GatewayNeighbour(container, a)) })
		}
	}
	return steps
}

// setAddress enables IPv6 on the device if the runtime or the container has disabled it.
func (in *ContainerNS) setAddress(container netlink.Link, a endpoint.Attachment) error {
	set := func() error { return in.AddrReplace(container, ContainerAddress(a)) }
	err := set()
	if errors.Is(err, unix.EACCES) {
		enable := func(s host.Sysctls) error { return s.Set(container.Attrs().Name, host.ContainerSysctls()) }
		if err = in.withSysctls(enable); err == nil {
			err = set()
		}
	}
	return err
}

// outsideMetric is the metric of the container's route to hosts outside of the cluster. It is higher than that of any
// other default route in practice (the kernel's default is 1024, NetworkManager's highest 20,700): another interface of
// the container that has one, or gets one later, keeps it.
const outsideMetric = 1 << 20

// routesAreFree returns an error if another device of the container has one of the routes: that device would lose it.
func (in *ContainerNS) routesAreFree(attachments []endpoint.Attachment, container netlink.Link) error {
	there, err := netns.List(func() ([]netlink.Route, error) { return in.RouteList(nil, unix.AF_UNSPEC) })
	if err != nil {
		return fmt.Errorf("list the container's routes: %w", err)
	}
	for _, a := range attachments {
		for _, wanted := range a.Routes {
			for _, other := range there {
				if a.LeadsOutside(wanted) && other.Priority != outsideMetric {
					continue
				}
				if other.LinkIndex != container.Attrs().Index && host.PrefixOf(other.Dst) == wanted {
					return fmt.Errorf(
						"the container already has a route %v through its device %d, which would stop working; "+
							"nothing was changed: "+
							"a container needs only one interface of Pilaster; or remove that route",
						wanted,
						other.LinkIndex,
					)
				}
			}
		}
	}
	return nil
}

// WaitForCarrier waits until the device is operational, which it mostly is at once: the kernel checks the carrier of a
// pair concurrently.
func (in *ContainerNS) WaitForCarrier(ctx context.Context, r endpoint.Record) error {
	if l, err := in.LinkByName(r.Interface); err == nil && l.Attrs().OperState == netlink.OperUp {
		return nil
	}
	return in.Netns.WaitUp(ctx, r.Interface)
}

// WaitForAddresses waits until the container accepts packets for its addresses: the kernel makes an address local in a
// work queue, after it has acknowledged the address.
func (in *ContainerNS) WaitForAddresses(ctx context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		for {
			routes, err := in.RouteGet(a.Address.AsSlice())
			if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf(
					"address %v is not local to the container: %w",
					a.Address,
					errors.Join(context.Cause(ctx), err),
				)
			case <-time.After(time.Millisecond):
			}
		}
	}
	return nil
}

func ContainerAddress(a endpoint.Attachment) *netlink.Addr {
	return &netlink.Addr{IPNet: host.HostNet(a.Address), Flags: unix.IFA_F_NODAD | unix.IFA_F_PERMANENT}
}

func FamilyOf(a endpoint.Attachment) int {
	if a.Gateway.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func GatewayNeighbour(container netlink.Link, a endpoint.Attachment) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: container.Attrs().Index, Family: FamilyOf(a), State: unix.NUD_PERMANENT,
		IP: a.Gateway.AsSlice(), HardwareAddr: host.GatewayMAC,
	}
}

func ContainerRoutes(container netlink.Link, a endpoint.Attachment) []netlink.Route {
	routes := make([]netlink.Route, len(a.Routes))
	for i, dst := range a.Routes {
		routes[i] = netlink.Route{
			LinkIndex: container.Attrs().Index, Dst: host.IPNet(dst), Gw: a.Gateway.AsSlice(),
			Flags: int(netlink.FLAG_ONLINK), Src: a.Address.AsSlice(), Protocol: unix.RTPROT_STATIC,
		}
		if a.LeadsOutside(dst) {
			routes[i].Priority = outsideMetric
		}
	}
	return routes
}

func setMAC(h *netlink.Handle, l netlink.Link, mac net.HardwareAddr) error {
	if slices.Equal(l.Attrs().HardwareAddr, mac) {
		return nil
	}
	return netns.Retry(func() error { return h.LinkSetHardwareAddr(l, mac) })
}
