package preflight

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// forgedSource is the address of another node, which probably exists: a source that strict uRPF refuses. The loose mode
// and filters for unused addresses do not.
func forgedSource(plan address.Plan, own netip.Prefix) netip.Addr {
	n := uint64(1)
	if plan.ContainsNode(own) && plan.NodeNumber(own) == n {
		n++
	}
	return tenant.NodeAddress(plan.Node(n))
}

const (
	probeRounds  = 3
	probeTimeout = time.Second
)

// fabric tests the route and the source check of the fabric. It sends the router a packet for this node's prefix. If
// the router has the route, the packet returns. First it sends such a packet with the source of another node.
// That packet returns too, unless the fabric checks sources.
func fabric(ctx context.Context, uplink netlink.Link, plan address.Plan, prefix netip.Prefix) (route, sources Result) {
	unchecked := func(why string) (Result, Result) {
		return todo(
				"add this node's route, as in 'pilaster node list', to the fabric, and ping the node's address "+
					"ending in ::1 from another node",
				"not checked: %s",
				why,
			),
			todo(
				urpf,
				"not checked: %s",
				why,
			)
	}
	source, router, err := probePath(ctx, uplink, prefix, lastNode(plan))
	if err != nil {
		return unchecked(err.Error())
	}
	forged := forgedSource(plan, prefix)
	came, passed, err := probe(ctx, uplink.Attrs().Name, router, source, prefix.Addr().Next(), forged)
	switch {
	case err != nil:
		return unchecked(err.Error())
	case !came:
		_, sources = unchecked("no packet came back from the fabric")
		return warn(fmt.Sprintf("add the route %v via %v to the fabric: docs/howto/fabric.md", prefix, source),
			"a packet for %v, sent to the router of %s, did not come back", prefix, uplink.Attrs().Name), sources
	}
	route = ok("a packet for %v, sent to the router of %s, came back", prefix, uplink.Attrs().Name)
	return route, sourceCheck(passed, forged, uplink)
}

const urpf = "enable source checks (uRPF) on all ports of the fabric: docs/howto/fabric.md"

// sourceCheck says whether the fabric checks sources, from a probe by an uplink: the packet with the true source came
// back, and passed says whether the one with the forged source did.
func sourceCheck(passed bool, forged netip.Addr, uplink netlink.Link) Result {
	if passed {
		return warn(urpf, "the fabric forwards packets of this machine with the false source %v, sent by %s", forged,
			uplink.Attrs().Name)
	}
	return ok("a packet with the false source %v, sent by %s, did not come back; one with the true source did", forged,
		uplink.Attrs().Name)
}

// probePath returns the source address and the router for packets to a prefix of this node: the router is the one to a
// destination.
func probePath(
	ctx context.Context,
	uplink netlink.Link,
	prefix netip.Prefix,
	destination netip.Addr,
) (source netip.Addr, router net.HardwareAddr, err error) {
	if !prefix.IsValid() {
		return source, nil, errors.New("this machine has no prefix yet")
	}
	source, found := globalAddress(uplink)
	if !found {
		return source, nil, errors.New("the uplink has only link-local addresses")
	}
	router, err = routerMAC(ctx, uplink, destination)
	return source, router, err
}

// egressRoute tests the route to this node's egress addresses as fabric does that to its prefix, with the router to
// hosts outside.
func egressRoute(ctx context.Context, uplinks []netlink.Link, plan address.Plan, node netip.Prefix) Result {
	_, uplink := way(uplinks, hostOutside)
	if uplink == nil {
		return todo("add a default route by an uplink, or the routes to the hosts outside",
			"not checked: there is no default route by %s", namesOf(uplinks))
	}
	source, router, err := probePath(ctx, uplink, node, hostOutside)
	if err != nil {
		return todo("add the route of this node's egress addresses, as in 'pilaster node list', to the fabric",
			"not checked: %v", err)
	}
	egress, has := plan.EgressNode(node)
	if !has {
		return warn("set up the cluster with a longer --base-prefix, or with a shorter --egress-prefix",
			"the egress prefix %v has no /64 for the node %v: its containers have no egress addresses", plan.Egress,
			node)
	}
	came, _, err := probe(ctx, uplink.Attrs().Name, router, source, egress.Addr().Next(), forgedSource(plan, node))
	switch {
	case err != nil:
		return todo("add the route of this node's egress addresses, as in 'pilaster node list', to the fabric",
			"not checked: %v", err)
	case !came:
		return warn(fmt.Sprintf("add the route %v via %v to the fabric, and accept sources of %[1]v from this node: "+
			"docs/howto/fabric.md", egress, source),
			"a packet for %v, sent to the router of %s, did not come back", egress, uplink.Attrs().Name)
	}
	return ok("a packet for %v, sent to the router of %s, came back", egress, uplink.Attrs().Name)
}

// sourcesOutside tests the source check where packets to hosts outside leave, if that is another uplink than the one to
// the nodes.
func sourcesOutside(
	ctx context.Context, uplinks []netlink.Link, toNodes netlink.Link, plan address.Plan, node netip.Prefix,
) (result Result, other bool) {
	_, uplink := way(uplinks, hostOutside)
	if uplink == nil || toNodes == nil || uplink.Attrs().Index == toNodes.Attrs().Index {
		return result, false
	}
	source, router, err := probePath(ctx, uplink, node, hostOutside)
	if err != nil {
		return todo(urpf, "not checked: %v", err), true
	}
	target, has := plan.EgressNode(node)
	if !has {
		target = node
	}
	forged := forgedSource(plan, node)
	came, passed, err := probe(ctx, uplink.Attrs().Name, router, source, target.Addr().Next(), forged)
	switch {
	case err != nil:
		return todo(urpf, "not checked: %v", err), true
	case !came:
		return todo(urpf, "not checked: a packet for %v, sent to the router of %s, did not come back", target,
			uplink.Attrs().Name), true
	}
	return sourceCheck(passed, forged, uplink), true
}

func globalAddress(uplink netlink.Link) (netip.Addr, bool) {
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(uplink, unix.AF_INET6) })
	if err != nil {
		return netip.Addr{}, false
	}
	for _, a := range addrs {
		if ip, _ := netip.AddrFromSlice(a.IP); ip.IsGlobalUnicast() {
			return ip, true
		}
	}
	return netip.Addr{}, false
}

// routerMAC is the link-layer address of the next hop to a destination. If the kernel has no neighbour entry, an empty
// datagram makes it resolve the address.
func routerMAC(ctx context.Context, uplink netlink.Link, to netip.Addr) (net.HardwareAddr, error) {
	route, by := way([]netlink.Link{uplink}, to)
	if by == nil || route.Gw == nil {
		return nil, fmt.Errorf("%s has no router on the way to %v", uplink.Attrs().Name, to)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*probeTimeout)
	defer cancel()
	for {
		neighbours, err := netns.List(func() ([]netlink.Neigh, error) {
			return netlink.NeighList(uplink.Attrs().Index, unix.AF_INET6)
		})
		if err != nil {
			return nil, err
		}
		for _, n := range neighbours {
			if n.IP.Equal(route.Gw) && len(n.HardwareAddr) == 6 {
				return n.HardwareAddr, nil
			}
		}
		to := &net.UDPAddr{IP: route.Gw, Zone: uplink.Attrs().Name, Port: 9}
		if c, err := net.DialUDP("udp6", nil, to); err == nil {
			_, _ = c.Write(nil)
			c.Close()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the router %v does not answer neighbour discovery", route.Gw)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// probe alternately sends packets with a forged and with the true source, until a packet with the true source returns.
// passed reports whether a packet with the forged source returned before it. The packets have no upper layer, so a host
// that receives one drops it.
func probe(
	ctx context.Context,
	uplink string,
	router net.HardwareAddr,
	source, target, forged netip.Addr,
) (came, passed bool, err error) {
	here, err := netns.Open("/proc/thread-self/ns/net")
	if err != nil {
		return false, false, err
	}
	defer here.Close()
	capture, err := packet.NewCapture(here, uplink, packet.IncomingOnly, withoutUpperLayer)
	if err != nil {
		return false, false, err
	}
	defer capture.Close()
	out, err := packet.NewInjector(here, uplink)
	if err != nil {
		return false, false, err
	}
	defer out.Close()
	label := rand.Uint32N(1 << 20) // routers do not change it, so it identifies these packets
	for range probeRounds {
		for _, from := range []netip.Addr{forged, source} {
			if err := out.Send(packet.Packet{Source: from, Destination: target, FlowLabel: label}.Frame(router,
				out.MAC())); err != nil {
				return false, false, err
			}
		}
		wait, cancel := context.WithTimeout(ctx, probeTimeout)
		for {
			got, err := capture.Next(wait)
			if err != nil {
				break // nothing more in this round
			}
			p, err := got.Packet()
			if err != nil || p.FlowLabel != label || p.Destination != target {
				continue
			}
			passed = passed || p.Source == forged
			if p.Source == source {
				cancel()
				return true, passed, nil
			}
		}
		cancel()
	}
	return false, passed, ctx.Err()
}

// withoutUpperLayer sets a filter, so that the socket receives only packets without an upper layer. Other packets of a
// busy uplink then do not fill its buffer.
func withoutUpperLayer(fd int) error {
	const nextHeader = 14 + 6
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: nextHeader},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_NONE, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	return unix.SetsockoptSockFprog(
		fd,
		unix.SOL_SOCKET,
		unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]},
	)
}
