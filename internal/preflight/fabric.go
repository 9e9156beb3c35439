package preflight

import (
	"context"
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
)

// foreignSource is a source that no fabric routes to one of its nodes (RFC 6666).
var foreignSource = netip.MustParseAddr("100::1")

const (
	probeRounds  = 3
	probeTimeout = time.Second
)

// fabric tests the route and the source check of the fabric: it sends its router a packet for its own prefix, which
// comes back if the router has the route. Before that it sends one with a source that belongs to no node, which
// comes back as well unless the fabric checks sources.
func fabric(ctx context.Context, uplink netlink.Link, plan address.Plan, prefix netip.Prefix) (route, sources Result) {
	const urpf = "let every port of the fabric check sources (uRPF): docs/howto/fabric.md"
	unchecked := func(why string) (Result, Result) {
		return todo(
				"give the fabric this node's route as 'pilaster node list' says it, and ping the node's address "+
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
	if !prefix.IsValid() {
		return unchecked("this machine has no prefix yet")
	}
	source, found := globalAddress(uplink)
	if !found {
		return unchecked("the uplink has link-local addresses only")
	}
	router, err := routerMAC(ctx, uplink, plan)
	if err != nil {
		return unchecked(err.Error())
	}
	came, forged, err := probe(ctx, uplink.Attrs().Name, router, source, prefix.Addr().Next())
	switch {
	case err != nil:
		return unchecked(err.Error())
	case !came:
		_, sources = unchecked("nothing comes back from the fabric")
		return warn(fmt.Sprintf("give the fabric the route %v via %v: docs/howto/fabric.md", prefix, source),
			"a packet for %v, handed to the router, did not come back", prefix), sources
	}
	route = ok("a packet for %v, handed to the router, came back", prefix)
	if forged {
		return route, warn(
			urpf,
			"the fabric forwards what this machine sends as %v, which is not its own",
			foreignSource,
		)
	}
	return route, ok(
		"a packet sent as %v, which is not this machine's own, did not come back; a true one did",
		foreignSource,
	)
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

// routerMAC is the link-layer address of the next hop to other nodes. The kernel is made to find it
// out where it does not know it.
func routerMAC(ctx context.Context, uplink netlink.Link, plan address.Plan) (net.HardwareAddr, error) {
	routes, err := routesToNodes(plan)
	if err != nil || len(routes) == 0 || routes[0].LinkIndex != uplink.Attrs().Index || routes[0].Gw == nil {
		return nil, fmt.Errorf("no router leads to other nodes in %v", plan.Base)
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
			if n.IP.Equal(routes[0].Gw) && len(n.HardwareAddr) == 6 {
				return n.HardwareAddr, nil
			}
		}
		to := &net.UDPAddr{IP: routes[0].Gw, Zone: uplink.Attrs().Name, Port: 9}
		if c, err := net.DialUDP("udp6", nil, to); err == nil {
			_, _ = c.Write(nil)
			c.Close()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the router %v does not answer neighbour discovery", routes[0].Gw)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// probe sends a false and a true packet in turn until a true one is back, and reports whether a false one
// came before it. They have no upper layer: a host that receives one drops it.
func probe(
	ctx context.Context,
	uplink string,
	router net.HardwareAddr,
	source, target netip.Addr,
) (came, forged bool, err error) {
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
	label := rand.Uint32N(1 << 20) // routers keep it, and so it tells ours from others
	for range probeRounds {
		for _, from := range []netip.Addr{foreignSource, source} {
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
			forged = forged || p.Source == foreignSource
			if p.Source == source {
				cancel()
				return true, forged, nil
			}
		}
		cancel()
	}
	return false, forged, ctx.Err()
}

// withoutUpperLayer has a socket see only such packets, on an uplink that may be busy.
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
