package datapath

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

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// carrierTimeout is far above the second that the kernel's link watch takes at most.
const carrierTimeout = 10 * time.Second

// containerNS is a container's namespace while we work in it. What is done there goes by its handle, from any thread: to
// enter it is most of the cost.
type containerNS struct {
	*netlink.Handle
	netns  *netns.Namespace
	cookie uint64 // entriesOf the namespace, as long as the machine runs
}

func openContainerNS(path string) (_ *containerNS, err error) {
	in := &containerNS{}
	if in.netns, err = netns.Open(path); err != nil {
		return nil, err
	}
	err = in.netns.Do(func() (err error) {
		if in.Handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		in.cookie, err = netnsCookie()
		return err
	})
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// netnsCookie is that of the calling thread's network namespace.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

func (in *containerNS) Close() error {
	if in.Handle != nil {
		in.Handle.Close()
	}
	return in.netns.Close()
}

// withSysctls opens those of the container's devices for f.
func (in *containerNS) withSysctls(f func(sysctls) error) error {
	var s sysctls
	if err := in.netns.Do(func() (err error) { s, err = openSysctls("ipv6"); return err }); err != nil {
		return err
	}
	return errors.Join(f(s), s.Close())
}

// setUpContainer gives the container its address and the one way out. Nothing in it is
// resolved, solicited or advertised.
func (d *Datapath) setUpContainer(r endpoint.Record, in *containerNS) error {
	container, err := d.driver(r).containerLink(r, in)
	if err != nil {
		return err
	}
	if err := in.routesAreFree(r.Attachments, container); err != nil {
		return err
	}
	steps := []func() error{
		func() error { return setMTU(in.Handle, container, r.Device.MTU) },
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
func (in *containerNS) attach(attachments []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		steps = append(steps,
			func() error { return in.setAddress(container, a) },
			func() error { return in.NeighSet(gatewayNeighbour(container, a)) },
		)
		for _, route := range containerRoutes(container, a) {
			steps = append(steps, func() error { return in.RouteReplace(&route) })
		}
	}
	return steps
}

// detachLink is those that take it away, but for the next hop of others that stay.
func (in *containerNS) detach(attachments, stay []endpoint.Attachment, container netlink.Link) (steps []func() error) {
	for _, a := range attachments {
		for _, route := range containerRoutes(container, a) {
			steps = append(steps, func() error { return netns.DeleteRoute(in.Handle, &route) })
		}
		steps = append(steps, func() error { return in.AddrDel(container, containerAddress(a)) })
		if !slices.ContainsFunc(stay, func(o endpoint.Attachment) bool { return o.Gateway == a.Gateway }) {
			steps = append(steps, func() error { return in.NeighDel(gatewayNeighbour(container, a)) })
		}
	}
	return steps
}

// setAddress enables IPv6 where the runtime, or who lives there, has disabled it.
func (in *containerNS) setAddress(container netlink.Link, a endpoint.Attachment) error {
	set := func() error { return in.AddrReplace(container, containerAddress(a)) }
	err := set()
	if errors.Is(err, unix.EACCES) {
		enable := func(s sysctls) error { return s.set(container.Attrs().Name, containerSysctls()) }
		if err = in.withSysctls(enable); err == nil {
			err = set()
		}
	}
	return err
}

// routesAreFree refuses routes that another device of the container has: it would lose them to this one.
func (in *containerNS) routesAreFree(attachments []endpoint.Attachment, container netlink.Link) error {
	there, err := netns.List(func() ([]netlink.Route, error) { return in.RouteList(nil, unix.AF_UNSPEC) })
	if err != nil {
		return fmt.Errorf("list the container's routes: %w", err)
	}
	for _, a := range attachments {
		for _, wanted := range a.Routes {
			for _, other := range there {
				if other.LinkIndex != container.Attrs().Index && prefixOf(other.Dst) == wanted {
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
func (in *containerNS) waitForCarrier(ctx context.Context, r endpoint.Record) error {
	if l, err := in.LinkByName(r.Interface); err == nil && l.Attrs().OperState == netlink.OperUp {
		return nil
	}
	return in.netns.WaitUp(ctx, r.Interface)
}

// waitForAddresses waits until the container takes packets for its addresses: the kernel makes an
// address local in a work queue of its own, after it has answered that the address is there.
func (in *containerNS) waitForAddresses(ctx context.Context, r endpoint.Record) error {
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

func containerAddress(a endpoint.Attachment) *netlink.Addr {
	return &netlink.Addr{IPNet: hostNet(a.Address), Flags: unix.IFA_F_NODAD | unix.IFA_F_PERMANENT}
}

func familyOf(a endpoint.Attachment) int {
	if a.Gateway.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func gatewayNeighbour(container netlink.Link, a endpoint.Attachment) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: container.Attrs().Index, Family: familyOf(a), State: unix.NUD_PERMANENT,
		IP: a.Gateway.AsSlice(), HardwareAddr: gatewayMAC,
	}
}

func containerRoutes(container netlink.Link, a endpoint.Attachment) []netlink.Route {
	routes := make([]netlink.Route, len(a.Routes))
	for i, dst := range a.Routes {
		routes[i] = netlink.Route{
			LinkIndex: container.Attrs().Index, Dst: ipNet(dst), Gw: a.Gateway.AsSlice(),
			Flags: int(netlink.FLAG_ONLINK), Src: a.Address.AsSlice(), Protocol: unix.RTPROT_STATIC,
		}
	}
	return routes
}

func setMTU(h *netlink.Handle, l netlink.Link, mtu int) error {
	if l.Attrs().MTU == mtu {
		return nil
	}
	return netns.Retry(func() error { return h.LinkSetMTU(l, mtu) })
}

func setMAC(h *netlink.Handle, l netlink.Link, mac net.HardwareAddr) error {
	if slices.Equal(l.Attrs().HardwareAddr, mac) {
		return nil
	}
	return netns.Retry(func() error { return h.LinkSetHardwareAddr(l, mac) })
}
