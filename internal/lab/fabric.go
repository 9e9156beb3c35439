package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Uplink is the name of a node's device on the fabric.
const Uplink = "eth0"

// SecondUplink is the name of a node's device to the hosts outside, in labs where nodes have two uplinks.
const SecondUplink = "eth1"

// fabricMTU is the MTU of every link of the fabric.
const fabricMTU = 1500

// underlay returns the prefix of a link of the fabric. The orchestrators' links have the numbers from 0, and the nodes'
// links follow. In the prefix, the router is ::1 and the other side is ::2.
func underlay(link int) netip.Prefix {
	b := netip.MustParseAddr("2001:db8:70::").As16()
	b[6], b[7] = byte(link>>8), byte(link)
	return netip.PrefixFrom(netip.AddrFrom16(b), 64)
}

func routerSide(link int) netip.Addr { return underlay(link).Addr().Next() }

// routerOf returns the router's side of the link whose other side has an address.
func routerOf(far netip.Addr) netip.Addr { return far.Prev() }

func farSide(link int) netip.Addr { return routerSide(link).Next() }

// firstIndex is the lowest index of the router's devices. Their peers in the other namespaces have index 2. If a veth
// device and its peer had the same index, the kernel would assume that there is no peer and delay the first packets by
// up to a second.
const firstIndex = 100

// Priorities of the router's routing rules. The router drops a packet from a node's link unless its source is an
// address of that node. The rule for local delivery (for neighbour discovery) precedes these rules. If ruleOwnSource
// finds no route to the destination, the kernel continues with ruleNoRoute, which returns an ICMPv6 error to the
// sender.
const (
	ruleOwnSource   = 1000
	ruleNoRoute     = 1500
	ruleNoOther     = 2000
	routeMain       = unix.RT_TABLE_MAIN
	ruleBlackhole   = 6 // FR_ACT_BLACKHOLE
	ruleUnreachable = 7 // FR_ACT_UNREACHABLE
)

// fabric is the router's side of all links.
type fabric struct {
	router *netns.Namespace
	handle *netlink.Handle
}

func openFabric(f folder) (*fabric, error) {
	router, err := netns.Open(f.netns(Router))
	if err != nil {
		return nil, err
	}
	handle, err := router.Netlink()
	if err != nil {
		router.Close()
		return nil, err
	}
	return &fabric{router, handle}, nil
}

func (r *fabric) close() {
	r.handle.Close()
	r.router.Close()
}

// createRouter creates the router's namespace, the only one that forwards.
func createRouter(f folder) error {
	ns, err := netns.Create(f.netns(Router))
	if err != nil {
		return err
	}
	defer ns.Close()
	err = ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
	if err != nil {
		return fmt.Errorf("forward IPv4 in %s: %w", ns.Path(), err)
	}
	return setSysctls(
		ns,
		map[string]string{"all/forwarding": "1", "default/forwarding": "1", "default/accept_dad": "0"},
	)
}

// connect creates a namespace and a link from the router to it, with a number of its own and an address inside. The
// device has the name of the namespace in the router, and the name Uplink inside.
func (r *fabric) connect(f folder, name string, link int, far netip.Addr) error {
	ns, err := netns.Create(f.netns(name))
	if err != nil {
		return err
	}
	defer ns.Close()
	// No duplicate address detection, so that addresses work immediately. No router advertisements, because routes are
	// static.
	if err := setSysctls(ns, map[string]string{"default/accept_dad": "0", "default/accept_ra": "0"}); err != nil {
		return err
	}
	return r.link(ns, name, Uplink, link, far)
}

// link creates a link from the router to a namespace, with a number of its own and an address inside, which has the
// default route by it.
func (r *fabric) link(ns *netns.Namespace, outer, inner string, link int, far netip.Addr) error {
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: outer, MTU: fabricMTU, Index: firstIndex + link},
		PeerName:  inner, PeerNamespace: netlink.NsFd(ns.FD()), PeerMTU: fabricMTU,
	}
	if err := netns.Retry(func() error { return r.handle.LinkAdd(veth) }); err != nil {
		return fmt.Errorf("link %s from the router: %w", outer, err)
	}
	inside, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	if err := setUp(inside, inner, far); err != nil {
		return fmt.Errorf("%s of link %s: %w", inner, outer, err)
	}
	if err := setUp(r.handle, outer, routerOf(far)); err != nil {
		return fmt.Errorf("router's link %s: %w", outer, err)
	}
	err = netns.Retry(func() error {
		return inside.RouteReplace(&netlink.Route{Family: unix.AF_INET6, Gw: routerOf(far).AsSlice()})
	})
	if err != nil {
		return fmt.Errorf("default route by link %s: %w", outer, err)
	}
	return errors.Join(r.allowSource(outer, netip.PrefixFrom(far, 64).Masked()), r.refuseOtherSources(outer))
}

// secondLink returns the number of a node's second link, and its name in the router.
func (s Spec) secondLink(node string) (number int, name string) {
	nodes := s.AllNodes()
	number = len(s.regions()) + len(nodes) + len(s.Outside) + slices.Index(nodes, node)
	return number, fmt.Sprint("second.", number)
}

// Uplinks returns the names of the nodes' uplinks: the first leads to other nodes, the last to the hosts outside.
func (l *Lab) Uplinks() []string {
	if l.state.Spec.Uplinks < 2 {
		return []string{Uplink}
	}
	return []string{Uplink, SecondUplink}
}

// RouterLink returns the name of the router's device on the link of a node's last uplink.
func (l *Lab) RouterLink(node string) string {
	if l.state.Spec.Uplinks < 2 {
		return node
	}
	_, name := l.state.Spec.secondLink(node)
	return name
}

// connectSecond creates a node's second uplink. The node reaches other nodes by the first one, and all else by this
// one.
func (l *Lab) connectSecond(ctx context.Context, r *fabric, node string, firstLink int) error {
	ns, err := l.Namespace(node)
	if err != nil {
		return err
	}
	defer ns.Close()
	number, name := l.state.Spec.secondLink(node)
	if err := r.link(ns, name, SecondUplink, number, farSide(number)); err != nil {
		return err
	}
	inside, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	region, _ := l.state.Spec.RegionOf(node)
	base := l.state.Spec.plan(region).Base
	err = netns.Retry(func() error {
		return inside.RouteReplace(&netlink.Route{Dst: ipNet(base), Gw: routerSide(firstLink).AsSlice()})
	})
	if err != nil {
		return fmt.Errorf("route of node %s to %v: %w", node, base, err)
	}
	return errors.Join(ns.WaitUp(ctx, SecondUplink), r.router.WaitUp(ctx, name))
}

// route adds the route to a prefix of a node, and the rules for packets from the node whose source is in this prefix.
func (r *fabric) route(name string, prefix netip.Prefix, via netip.Addr) error {
	link, err := r.handle.LinkByName(name)
	if err != nil {
		return fmt.Errorf("route %v: %w", prefix, err)
	}
	err = netns.Retry(func() error {
		return r.handle.RouteReplace(
			&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(prefix), Gw: via.AsSlice()},
		)
	})
	if err != nil {
		return fmt.Errorf("route %v via %v: %w", prefix, via, err)
	}
	return errors.Join(r.allowSource(name, prefix), r.reportNoRoute(name, prefix))
}

// Route makes the fabric route an address to a node, which may then send with it. It replaces a route to another node.
func (l *Lab) Route(to netip.Addr, node string) error {
	prefix, err := l.Prefix(node)
	if err != nil {
		return err
	}
	r, err := openFabric(l.folder)
	if err != nil {
		return err
	}
	defer r.close()
	var via netip.Addr
	if number, _ := l.state.Spec.secondLink(node); l.state.Spec.Uplinks > 1 {
		via = farSide(number)
	} else {
		filter := &netlink.Route{Dst: ipNet(prefix)}
		routes, err := r.handle.RouteListFiltered(unix.AF_INET6, filter, netlink.RT_FILTER_DST)
		if err != nil {
			return fmt.Errorf("route of node %s: %w", node, err)
		}
		if len(routes) == 0 {
			return fmt.Errorf("the fabric has no route to node %s; it has been removed", node)
		}
		via, _ = netip.AddrFromSlice(routes[0].Gw)
	}
	return r.route(l.RouterLink(node), netip.PrefixFrom(to, to.BitLen()), via)
}

// AllowSource makes the fabric accept packets with a source prefix from all nodes, as it must from those that answer
// for external addresses of services.
func (l *Lab) AllowSource(prefix netip.Prefix) error {
	r, err := openFabric(l.folder)
	if err != nil {
		return err
	}
	defer r.close()
	for _, node := range l.state.Spec.Nodes {
		if err := r.allowSource(l.RouterLink(node), prefix); err != nil {
			return err
		}
	}
	return nil
}

// routedTo returns the node to which the fabric routes an address; empty if it routes it to none.
func (l *Lab) routedTo(to netip.Addr) (node string, err error) {
	r, err := openFabric(l.folder)
	if err != nil {
		return "", err
	}
	defer r.close()
	routes, err := r.handle.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		return "", nil // unreachable
	}
	link, err := r.handle.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", fmt.Errorf("device of the fabric's route to %v: %w", to, err)
	}
	for _, n := range l.NodeNames() {
		if name := link.Attrs().Name; name == n || name == l.RouterLink(n) {
			return n, nil
		}
	}
	return "", nil
}

// route4 adds the route to a node's IPv4 tunnel address, and the rules for packets from the node: other IPv4 sources
// are refused.
func (r *fabric) route4(name string, prefix netip.Prefix, via netip.Addr) error {
	if err := route4(r.handle, name, prefix, via); err != nil {
		return err
	}
	return errors.Join(
		r.rule4(name, func(rule *netlink.Rule) {
			rule.Priority, rule.Src, rule.Table = ruleOwnSource, ipNet(prefix), routeMain
		}),
		r.rule4(name, func(rule *netlink.Rule) { rule.Priority, rule.Type = ruleNoOther, ruleBlackhole }),
	)
}

// route4 adds an IPv4 route by an IPv6 next hop.
func route4(h *netlink.Handle, device string, to netip.Prefix, via netip.Addr) error {
	link, err := h.LinkByName(device)
	if err == nil {
		err = netns.Retry(func() error {
			return h.RouteReplace(&netlink.Route{
				LinkIndex: link.Attrs().Index, Dst: ipNet(to),
				Via: &netlink.Via{AddrFamily: unix.AF_INET6, Addr: via.AsSlice()},
			})
		})
	}
	if err != nil {
		return fmt.Errorf("route %v via %v: %w", to, via, err)
	}
	return nil
}

func (r *fabric) allowSource(device string, source netip.Prefix) error {
	return r.rule(device, func(rule *netlink.Rule) {
		rule.Priority, rule.Src, rule.Table = ruleOwnSource, ipNet(source), routeMain
	})
}

func (r *fabric) reportNoRoute(device string, source netip.Prefix) error {
	return r.rule(device, func(rule *netlink.Rule) {
		rule.Priority, rule.Src, rule.Type = ruleNoRoute, ipNet(source), ruleUnreachable
	})
}

func (r *fabric) refuseOtherSources(device string) error {
	return r.rule(device, func(rule *netlink.Rule) { rule.Priority, rule.Type = ruleNoOther, ruleBlackhole })
}

func (r *fabric) rule(device string, set func(*netlink.Rule)) error {
	return r.addRule(unix.AF_INET6, device, set)
}

func (r *fabric) rule4(device string, set func(*netlink.Rule)) error {
	return r.addRule(unix.AF_INET, device, set)
}

func (r *fabric) addRule(family int, device string, set func(*netlink.Rule)) error {
	rule := netlink.NewRule()
	rule.Family, rule.IifName = family, device
	set(rule)
	err := netns.Retry(func() error { return r.handle.RuleAdd(rule) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("source check on the router's link to %s: %w", device, err)
	}
	return nil
}

// setUp assigns an address to a device and sets the device up.
func setUp(h *netlink.Handle, device string, addr netip.Addr) error {
	link, err := h.LinkByName(device)
	if err != nil {
		return err
	}
	return netns.Retry(func() error {
		return errors.Join(
			h.AddrReplace(link, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(addr, 64)), Flags: unix.IFA_F_NODAD}),
			h.LinkSetUp(link),
		)
	})
}

// setSysctls writes sysctls below /proc/sys/net/ipv6/conf in a namespace.
func setSysctls(ns *netns.Namespace, values map[string]string) error {
	return ns.Do(func() error {
		for name, value := range values {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name, []byte(value), 0); err != nil {
				return fmt.Errorf("sysctl in %s: %w", ns.Path(), err)
			}
		}
		return nil
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
