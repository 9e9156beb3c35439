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

// containerNS is a container's namespace while we work in it. What is done there goes by its handle, from any thread: to
// enter it is most of the cost.
type ContainerNS struct {
	*netlink.Handle
	Netns  *netns.Namespace
	cookie uint64 // entriesOf the namespace, as long as the machine runs
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

// netnsCookie is that of the calling thread's network namespace.
func NetnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

func (in *ContainerNS) Close() error {
	if in.Handle != nil {
		in.Handle.Close()
	}
	return in.Netns.Close()
}

// withSysctls opens those of the container's devices for f.
func (in *ContainerNS) withSysctls(f func(host.Sysctls) error) error {
	var s host.Sysctls
	if err := in.Netns.Do(func() (err error) { s, err = host.OpenSysctls("ipv6"); return err }); err != nil {
		return err
	}
	return errors.Join(f(s), s.Close())
}

// setUpContainer gives the container its address and the one way out. Nothing in it is
// resolved, solicited or advertised.
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

// attachProgram is the steps that give the container what belongs to attachments.
func (in *ContainerNS) attach(attachments []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		steps = append(steps,
			func() error { return in.setAddress(container, a) },
			func() error { return in.NeighSet(GatewayNeighbour(container, a)) },
		)
		for _, route := range ContainerRoutes(container, a) {
			steps = append(steps, func() error { return in.RouteReplace(&route) })
		}
	}
	return steps
}

// detachLink is those that take it away, but for the next hop of others that stay.
func (in *ContainerNS) detach(attachments, stay []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		for _, route := range ContainerRoutes(container, a) {
			steps = append(steps, func() error { return netns.DeleteRoute(in.Handle, &route) })
		}
		steps = append(steps, func() error { return in.AddrDel(container, ContainerAddress(a)) })
		if !slices.ContainsFunc(stay, func(o endpoint.Attachment) bool { return o.Gateway == a.Gateway }) {
			steps = append(steps, func() error { return in.NeighDel(GatewayNeighbour(container, a)) })
		}
	}
	return steps
}

// setAddress enables IPv6 where the runtime, or who lives there, has disabled it.
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

// routesAreFree refuses routes that another device of the container has: it would lose them to this one.
func (in *ContainerNS) routesAreFree(attachments []endpoint.Attachment, container netlink.Link) error {
	there, err := netns.List(func() ([]netlink.Route, error) { return in.RouteList(nil, unix.AF_UNSPEC) })
	if err != nil {
		return fmt.Errorf("list the container's routes: %w", err)
	}
	for _, a := range attachments {
		for _, wanted := range a.Routes {
			for _, other := range there {
				if other.LinkIndex != container.Attrs().Index && host.PrefixOf(other.Dst) == wanted {
					return fmt.Errorf(
						"the container has a route %v by its device %d already, which would be cut off; nothing was changed: "+
							"one interface of Pilaster is enough for a container; or take that route away",
						wanted,
						other.LinkIndex,
					)
				}
			}
		}
	}
	return nil
}

// waitForCarrier is mostly over at once: the kernel looks at the carrier of a pair while we go on.
func (in *ContainerNS) WaitForCarrier(ctx context.Context, r endpoint.Record) error {
	if l, err := in.LinkByName(r.Interface); err == nil && l.Attrs().OperState == netlink.OperUp {
		return nil
	}
	return in.Netns.WaitUp(ctx, r.Interface)
}

// waitForAddresses waits until the container takes packets for its addresses: the kernel makes an
// address local in a work queue of its own, after it has answered that the address is there.
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
	}
	return routes
}

func setMAC(h *netlink.Handle, l netlink.Link, mac net.HardwareAddr) error {
	if slices.Equal(l.Attrs().HardwareAddr, mac) {
		return nil
	}
	return netns.Retry(func() error { return h.LinkSetHardwareAddr(l, mac) })
}
