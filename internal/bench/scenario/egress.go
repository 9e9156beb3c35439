package scenario

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// EgressScenarios have a client in a container and a server on a host outside of the cluster: on our datapath,
// and by routing and netfilter of the kernel on the same topology. They translate the client's address on its node, or
// on a second node.
func EgressScenarios() []Scenario {
	return []Scenario{
		{
			Name:  "egress",
			About: "containers on our datapath to a host outside, with an egress address each",
			Build: egress,
			Of:    "egress-nptv6",
		},
		{
			Name:  "egress-gateway",
			About: "the same by an egress gateway, which translates address and port",
			Build: egressGateway,
			Of:    "egress-masquerade",
		},
		{
			Name:  "egress-nptv6",
			About: "routed containers to a host outside, whose prefix the node translates (ip6tables SNPT, DNPT)",
			Build: egressNPTv6,
			Of:    "native",
			Lacks: lacksRule(nptOut(innerPrefix, address.DefaultPlan().Node(1))),
		},
		{
			Name:  "egress-masquerade",
			About: "the same by a second node, which translates address and port (ip6tables MASQUERADE)",
			Build: egressMasquerade((*Wire).routePlain),
			Of:    "native",
			Lacks: lacksRule(masquerade),
		},
		{
			Name:  "egress-masquerade-vxlan",
			About: "the same with kernel VXLAN between the two nodes, which a routed fabric needs",
			Build: egressMasquerade((*Wire).routeTunnelled),
			Of:    "egress-masquerade",
			Lacks: lacksRule(masquerade),
		},
	}
}

// egress has a container on the first node. The second node is the host outside.
func egress(w *Wire) (Pair, error) {
	t := blue()
	t.Egress = []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true}}
	return w.leaving(t, w.Nodes[:1], w.Nodes[1])
}

// egressGateway has a container on the first node, and the second node is its gateway.
func egressGateway(w *Wire) (Pair, error) {
	outside, err := w.addOutside()
	if err != nil {
		return Pair{}, err
	}
	gateway := w.Nodes[1].Prefix
	t := blue()
	t.Egress = []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true, Via: []tenant.EgressGateway{{
		Node: w.Nodes[1].name, Prefix: gateway, Address: tenant.EgressAddress(gateway, tenant.FirstGatewayIndex),
	}}}}
	return w.leaving(t, w.Nodes[:], outside)
}

// leaving starts the datapath on the nodes, adds a container to the first one, and pairs it with a host outside.
func (w *Wire) leaving(t tenant.Tenant, nodes []*Node, outside *Node) (Pair, error) {
	var paths []*datapath.Datapath
	for _, n := range nodes {
		d, err := n.startFor(t, Variant{})
		if err != nil {
			return Pair{}, err
		}
		paths = append(paths, d)
	}
	c, _, err := nodes[0].addContainer(paths[0], t, 1)
	if err != nil {
		return Pair{}, err
	}
	return Pair{Client: c, Server: outside.NS, Target: outside.Underlay}.on(paths), nil
}

// addOutside replaces the nodes' link by a switch, and connects a host outside to it. The host has a route to the
// second node's prefix.
func (w *Wire) addOutside() (*Node, error) {
	a, b := w.Nodes[0], w.Nodes[1]
	outside := &Node{
		Wire: w, name: "outside",
		Underlay:  netip.MustParseAddr("2001:db8:70::3"),
		Underlay4: netip.MustParseAddr("192.0.2.3"),
	}
	fabric := &Node{Wire: w, name: "fabric"}
	for _, n := range []*Node{outside, fabric} {
		var err error
		if n.NS, err = w.Namespace(n.name); err != nil {
			return nil, err
		}
	}
	if err := fabric.bridge("bridge"); err != nil {
		return nil, err
	}
	err := OnDevice(a.NS, "eth0", func(h *netlink.Handle, d netlink.Link) error { return h.LinkDel(d) })
	if err != nil {
		return nil, err
	}
	for i, n := range []*Node{a, b, outside} {
		if err := w.Link(fabric.NS, paired(i), n.NS, "eth0"); err != nil {
			return nil, err
		}
		if err := fabric.enslave(paired(i), "bridge"); err != nil {
			return nil, err
		}
	}
	return outside, errors.Join(a.configure(b), b.configure(a), outside.configure(b))
}

// innerPrefix is the prefix that NPTv6 (RFC 6296) translates to the node's.
var innerPrefix = netip.MustParsePrefix("fd10:0:0:1::/64")

// egressNPTv6 has a routed container on the first node. The second node is the host outside.
func egressNPTv6(w *Wire) (Pair, error) {
	n, outside := w.Nodes[0], w.Nodes[1]
	c, err := n.addRoutedAt(innerPrefix.Addr().Next())
	if err != nil {
		return Pair{}, err
	}
	return Pair{Client: c, Server: outside.NS, Target: outside.Underlay}, errors.Join(
		n.ip6tables(nptOut(innerPrefix, n.Prefix)), n.ip6tables(nptIn(innerPrefix, n.Prefix)),
	)
}

// nptOut returns the rule that translates sources.
func nptOut(inner, outer netip.Prefix) []string {
	return []string{
		"-t", "mangle", "-A", "POSTROUTING", "-o", "eth0", "-s", inner.String(),
		"-j", "SNPT", "--src-pfx", inner.String(), "--dst-pfx", outer.String(),
	}
}

// nptIn returns the rule that translates destinations back.
func nptIn(inner, outer netip.Prefix) []string {
	return []string{
		"-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-d", outer.String(),
		"-j", "DNPT", "--src-pfx", outer.String(), "--dst-pfx", inner.String(),
	}
}

// masquerade is the rule that translates address and port of all packets that leave by the uplink.
var masquerade = []string{"-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"}

// egressMasquerade has a routed container on the first node. This node sends packets to the host outside by the second
// one. route adds the route for that; the nodes have routes to each other's containers already.
func egressMasquerade(route func(w *Wire, outside netip.Prefix) error) func(*Wire) (Pair, error) {
	return func(w *Wire) (Pair, error) {
		outside, err := w.addOutside()
		if err != nil {
			return Pair{}, err
		}
		c, _, err := w.Nodes[0].addRouted()
		if err != nil {
			return Pair{}, err
		}
		gateway := w.Nodes[1]
		return Pair{Client: c, Server: outside.NS, Target: outside.Underlay}, errors.Join(
			route(w, netip.PrefixFrom(outside.Underlay, outside.Underlay.BitLen())),
			gateway.NS.Do(func() error { return sysctl("net/ipv6/conf/all/forwarding", "1") }),
			gateway.ip6tables(masquerade),
		)
	}
}

// routePlain adds a route without a tunnel, which is possible only if the nodes share a link.
func (w *Wire) routePlain(outside netip.Prefix) error { return w.Nodes[0].routeTo(outside, w.Nodes[1]) }

// routeTunnelled adds a route by the tunnel of scenario vxlan. The answers take the tunnel, too.
func (w *Wire) routeTunnelled(outside netip.Prefix) error {
	a, b := w.Nodes[0], w.Nodes[1]
	if err := errors.Join(a.tunnel(b, netlink.Vxlan{}), b.tunnel(a, netlink.Vxlan{})); err != nil {
		return err
	}
	return OnDevice(a.NS, OverlayDevice, func(h *netlink.Handle, d netlink.Link) error {
		return h.RouteAdd(&netlink.Route{
			LinkIndex: d.Attrs().Index, Dst: IPNet(outside), Gw: b.Prefix.Addr().AsSlice(),
			Flags: int(netlink.FLAG_ONLINK),
		})
	})
}

// ip6tables adds a rule on a node.
func (n *Node) ip6tables(rule []string) error {
	if err := n.NS.Do(func() error { return ip6tables(rule) }); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	return nil
}

// ip6tables adds a rule in the namespace of the calling thread.
func ip6tables(rule []string) error {
	const timeout = 30 * time.Second
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c := exec.CommandContext(ctx, "ip6tables", append([]string{"-w"}, rule...)...)
	if said, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", c.Args, err, bytes.TrimSpace(said))
	}
	return nil
}

// lacksRule returns the reason why this machine cannot add a rule; nil if it can. It adds the rule in a temporary
// namespace.
func lacksRule(rule []string) func() error {
	return func() error {
		if _, err := exec.LookPath("ip6tables"); err != nil {
			return fmt.Errorf("%w; install it (Debian: iptables)", err)
		}
		return netns.OnThread(func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("unshare: %w", err)
			}
			return ip6tables(rule)
		})
	}
}
