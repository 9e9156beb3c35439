package hook

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// A device pair connects the node's stack with its containers. Routes to containers lead into the near end, where a
// program redirects the packets. Without the program, packets arrive at the far end, where nothing accepts them.
// Containers' answers go the opposite way.
const (
	NodeDevice = dpapi.NodeDevice
	NodeFar    = "pilaster1"

	// A device drops packets that exceed its peer's MTU without an error, so the pair's MTU is above that of any packet
	// of a container. Towards containers, the routes have an MTU that every container accepts.
	nodeMTU = 65535
)

// CreateNodeDevice makes the pair, or repairs the one that is there.
func (d *Hooks) CreateNodeDevice() error {
	near, far, err := d.nodePair()
	if err != nil {
		return err
	}
	if near == nil || far == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = NodeDevice, nodeMTU, host.ContainerMAC
		pair := netlink.NewVeth(attrs)
		pair.PeerName, pair.PeerHardwareAddr = NodeFar, host.GatewayMAC
		if err := netns.Retry(func() error { return d.Netlink.LinkAdd(pair) }); err != nil {
			return fmt.Errorf("make the devices %s and %s: %w; remove devices of that name", NodeDevice, NodeFar, err)
		}
		if near, far, err = d.nodePair(); err != nil || near == nil || far == nil {
			return fmt.Errorf("find the devices %s and %s: %w", NodeDevice, NodeFar, err)
		}
	}
	if err := d.setUpNodeDevice(near, far); err != nil {
		return fmt.Errorf("set up %s: %w", NodeDevice, err)
	}
	d.NodeNear, d.NodeFar = near.Attrs().Index, far.Attrs().Index
	ctx, cancel := context.WithTimeout(context.Background(), host.CarrierTimeout)
	defer cancel()
	return d.Node.WaitUp(ctx, NodeDevice)
}

// nodePair finds both ends; an end is nil if it does not exist.
func (d *Hooks) nodePair() (near, far netlink.Link, err error) {
	for name, l := range map[string]*netlink.Link{NodeDevice: &near, NodeFar: &far} {
		found, err := d.Netlink.LinkByName(name)
		var notFound netlink.LinkNotFoundError
		if errors.As(err, &notFound) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("find %s: %w", name, err)
		}
		*l = found
	}
	return near, far, nil
}

func (d *Hooks) setUpNodeDevice(near, far netlink.Link) error {
	if err := d.setNodeDevice(); err != nil {
		return err
	}
	for _, l := range []netlink.Link{near, far} {
		for _, step := range []func() error{
			func() error { return d.Netlink.LinkSetMTU(l, nodeMTU) },
			func() error { return d.Netlink.LinkSetARPOff(l) },
			func() error { return d.Netlink.LinkSetUp(l) },
		} {
			if err := netns.Retry(step); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Hooks) setNodeDevice() error {
	return errors.Join(d.Sysctls.Set(NodeDevice, host.NodeSysctls()), d.Sysctls.Set(NodeFar, host.FarSysctls()))
}

// AttachNode attaches the node's program where packets to containers leave the node's stack.
func (d *Hooks) AttachNode() error {
	return host.AttachFilter(
		d.Netlink,
		d.NodeNear,
		NodeDevice,
		netlink.HANDLE_MIN_EGRESS,
		d.Objects.PilNode,
		bpfobj.PilasterProgPilNode,
	)
}

// NodeProblems returns what is missing between the node and its containers.
func (d *Hooks) NodeProblems() ([]string, error) {
	near, far, err := d.nodePair()
	if err != nil {
		return nil, err
	}
	if near == nil || far == nil || near.Attrs().Index != d.NodeNear || far.Attrs().Index != d.NodeFar {
		return []string{
			fmt.Sprintf(
				"devices %s and %s are gone or were replaced; restart the agent to let the node reach its containers",
				NodeDevice,
				NodeFar,
			),
		}, nil
	}
	for _, l := range []netlink.Link{near, far} {
		if l.Attrs().Flags&net.FlagUp == 0 {
			return []string{
				fmt.Sprintf("device %s is down; set it up to let the node reach its containers", l.Attrs().Name),
			}, nil
		}
	}
	if err := d.CheckProgram(near, netlink.HANDLE_MIN_EGRESS, d.Objects.PilNode,
		bpfobj.PilasterProgPilNode); err != nil {
		return []string{err.Error() + "; restart the agent to let the node reach its containers"}, nil
	}
	return nil, nil
}

// nodeRoute routes packets of the node's stack to a container's plaintext address.
func (d *Hooks) nodeRoute(dst *net.IPNet) *netlink.Route {
	return &netlink.Route{
		LinkIndex: d.NodeNear, Dst: dst, Src: NodeAddress(d.NodePrefix).IP, Protocol: unix.RTPROT_STATIC,
		MTU: host.IPv6MinMTU,
	}
}

func (d *Hooks) AddNodeRoutes(r endpoint.Record) error {
	for _, dst := range RoutesTo(r) {
		if err := netns.Retry(func() error { return d.Netlink.RouteReplace(d.nodeRoute(dst)) }); err != nil {
			return fmt.Errorf("endpoint %d: route %v by %s: %w", r.ID, dst, NodeDevice, err)
		}
	}
	return nil
}

func (d *Hooks) DeleteNodeRoute(dst *net.IPNet) error {
	err := netns.DeleteRoute(d.Netlink, &netlink.Route{LinkIndex: d.NodeNear, Dst: dst})
	if host.IgnoreGone(err) != nil {
		return fmt.Errorf("remove the route %v by %s: %w", dst, NodeDevice, err)
	}
	return nil
}

func (d *Hooks) NodeRoutes(dst *net.IPNet) ([]netlink.Route, error) {
	routes, err := netns.List(func() ([]netlink.Route, error) {
		filter, mask := &netlink.Route{LinkIndex: d.NodeNear}, netlink.RT_FILTER_OIF
		if dst != nil {
			filter.Dst, mask = dst, mask|netlink.RT_FILTER_DST
		}
		return d.Netlink.RouteListFiltered(unix.AF_INET6, filter, mask)
	})
	if err != nil {
		return nil, fmt.Errorf("list the routes by %s: %w", NodeDevice, err)
	}
	// The kernel's own, for multicast, are no container's.
	return slices.DeleteFunc(routes, func(r netlink.Route) bool { return !host.PrefixOf(r.Dst).IsSingleIP() }), nil
}

func (d *Hooks) SweepNodeRoutes(keep []endpoint.Record) error {
	routes, err := d.NodeRoutes(nil)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, r := range keep {
		for _, dst := range RoutesTo(r) {
			wanted[dst.String()] = true
		}
	}
	var errs []error
	for _, r := range routes {
		if !wanted[r.Dst.String()] {
			errs = append(errs, d.DeleteNodeRoute(r.Dst))
		}
	}
	return errors.Join(errs...)
}

func (d *Hooks) CheckNodeRoutes(r endpoint.Record) error {
	for _, dst := range RoutesTo(r) {
		routes, err := d.NodeRoutes(dst)
		if err != nil {
			return err
		}
		if len(routes) == 0 {
			return fmt.Errorf("the node has no route %v by %s", dst, NodeDevice)
		}
	}
	return nil
}

// RoutesTo returns the node's routes to an endpoint: to attachments with a plaintext address, which the node uses.
func RoutesTo(r endpoint.Record) []*net.IPNet {
	var routes []*net.IPNet
	for _, a := range r.Attachments {
		if a.Plaintext.IsValid() {
			routes = append(routes, host.HostNet(a.Address))
		}
	}
	return routes
}
