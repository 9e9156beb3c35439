package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// The node's stack and its containers meet on a device pair: routes to containers lead into its near
// end, where a program takes the packets away. What no program takes arrives at its far end, which
// listens to nothing. Containers' answers go the other way round.
const (
	nodeDevice = dpapi.NodeDevice
	nodeFar    = "pilaster1"

	// A device drops in silence what its peer's MTU does not take, so the pair takes whatever a container
	// sends; towards containers the routes say what every container takes.
	nodeMTU = 65535
)

// createNodeDevice makes the pair, or sets right the one that is there.
func (d *Datapath) createNodeDevice() error {
	near, far, err := d.nodePair()
	if err != nil {
		return err
	}
	if near == nil || far == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = nodeDevice, nodeMTU, containerMAC
		pair := netlink.NewVeth(attrs)
		pair.PeerName, pair.PeerHardwareAddr = nodeFar, gatewayMAC
		if err := netns.Retry(func() error { return d.netlink.LinkAdd(pair) }); err != nil {
			return fmt.Errorf("make the devices %s and %s: %w; take away what has their name", nodeDevice, nodeFar, err)
		}
		if near, far, err = d.nodePair(); err != nil || near == nil || far == nil {
			return fmt.Errorf("find the devices %s and %s: %w", nodeDevice, nodeFar, err)
		}
	}
	if err := d.setUpNodeDevice(near, far); err != nil {
		return fmt.Errorf("set up %s: %w", nodeDevice, err)
	}
	d.nodeNear, d.nodeFar = near.Attrs().Index, far.Attrs().Index
	ctx, cancel := context.WithTimeout(context.Background(), carrierTimeout)
	defer cancel()
	return d.node.WaitUp(ctx, nodeDevice)
}

// nodePair finds both ends, nil where there is none.
func (d *Datapath) nodePair() (near, far netlink.Link, err error) {
	for name, l := range map[string]*netlink.Link{nodeDevice: &near, nodeFar: &far} {
		found, err := d.netlink.LinkByName(name)
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

func (d *Datapath) setUpNodeDevice(near, far netlink.Link) error {
	if err := d.setNodeDevice(); err != nil {
		return err
	}
	for _, l := range []netlink.Link{near, far} {
		for _, step := range []func() error{
			func() error { return d.netlink.LinkSetMTU(l, nodeMTU) },
			func() error { return d.netlink.LinkSetARPOff(l) },
			func() error { return d.netlink.LinkSetUp(l) },
		} {
			if err := netns.Retry(step); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Datapath) setNodeDevice() error {
	return errors.Join(d.sysctls.set(nodeDevice, nodeSysctls()), d.sysctls.set(nodeFar, farSysctls()))
}

// attachNode puts the node's program where its packets to containers leave the stack.
func (d *Datapath) attachNode() error {
	return AttachFilter(
		d.netlink,
		d.nodeNear,
		nodeDevice,
		netlink.HANDLE_MIN_EGRESS,
		d.objects.PilNode,
		pilasterProgPilNode,
	)
}

// nodeProblems says what is missing between the node and its containers.
func (d *Datapath) nodeProblems() ([]string, error) {
	near, far, err := d.nodePair()
	if err != nil {
		return nil, err
	}
	if near == nil || far == nil || near.Attrs().Index != d.nodeNear || far.Attrs().Index != d.nodeFar {
		return []string{
			fmt.Sprintf(
				"devices %s and %s are gone or were made anew; restart the agent to let the node reach its containers",
				nodeDevice,
				nodeFar,
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
	if err := d.checkProgram(near, netlink.HANDLE_MIN_EGRESS, d.objects.PilNode, pilasterProgPilNode); err != nil {
		return []string{err.Error() + "; restart the agent to let the node reach its containers"}, nil
	}
	return nil, nil
}

// nodeRoute leads the node's stack to a container, as the container sees itself.
func (d *Datapath) nodeRoute(dst *net.IPNet) *netlink.Route {
	return &netlink.Route{
		LinkIndex: d.nodeNear, Dst: dst, Src: nodeAddress(d.config.NodePrefix).IP, Protocol: unix.RTPROT_STATIC, MTU: ipv6MinMTU,
	}
}

func (d *Datapath) addNodeRoutes(r endpoint.Record) error {
	for _, dst := range routesTo(r) {
		if err := netns.Retry(func() error { return d.netlink.RouteReplace(d.nodeRoute(dst)) }); err != nil {
			return fmt.Errorf("endpoint %d: route %v by %s: %w", r.ID, dst, nodeDevice, err)
		}
	}
	return nil
}

func (d *Datapath) deleteNodeRoute(dst *net.IPNet) error {
	err := netns.DeleteRoute(d.netlink, &netlink.Route{LinkIndex: d.nodeNear, Dst: dst})
	if ignoreGone(err) != nil {
		return fmt.Errorf("remove the route %v by %s: %w", dst, nodeDevice, err)
	}
	return nil
}

func (d *Datapath) nodeRoutes(dst *net.IPNet) ([]netlink.Route, error) {
	routes, err := netns.List(func() ([]netlink.Route, error) {
		filter, mask := &netlink.Route{LinkIndex: d.nodeNear}, netlink.RT_FILTER_OIF
		if dst != nil {
			filter.Dst, mask = dst, mask|netlink.RT_FILTER_DST
		}
		return d.netlink.RouteListFiltered(unix.AF_INET6, filter, mask)
	})
	if err != nil {
		return nil, fmt.Errorf("list the routes by %s: %w", nodeDevice, err)
	}
	// The kernel's own, for multicast, are no container's.
	return slices.DeleteFunc(routes, func(r netlink.Route) bool { return !prefixOf(r.Dst).IsSingleIP() }), nil
}

func (d *Datapath) sweepNodeRoutes(keep []endpoint.Record) error {
	routes, err := d.nodeRoutes(nil)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, r := range keep {
		for _, dst := range routesTo(r) {
			wanted[dst.String()] = true
		}
	}
	var errs []error
	for _, r := range routes {
		if !wanted[r.Dst.String()] {
			errs = append(errs, d.deleteNodeRoute(r.Dst))
		}
	}
	return errors.Join(errs...)
}

func (d *Datapath) checkNodeRoutes(r endpoint.Record) error {
	for _, dst := range routesTo(r) {
		routes, err := d.nodeRoutes(dst)
		if err != nil {
			return err
		}
		if len(routes) == 0 {
			return fmt.Errorf("the node has no route %v by %s", dst, nodeDevice)
		}
	}
	return nil
}
