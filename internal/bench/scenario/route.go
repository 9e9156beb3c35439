package scenario

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/netns"
)

// gateway is the next hop of containers in kernel scenarios.
var gateway = netip.MustParseAddr("fe80::1")

// addRouted adds a container to which the node routes, without any network plugin.
func (n *Node) addRouted() (*netns.Namespace, netip.Addr, error) {
	a := address.Plain{Node: n.Prefix, Tenant: 1, App: 1, Index: 1}.Addr()
	c, err := n.addRoutedAt(a)
	return c, a, err
}

// addRoutedAt adds a container with this address.
func (n *Node) addRoutedAt(a netip.Addr) (*netns.Namespace, error) {
	c, err := n.Wire.Namespace(n.name + "-container")
	if err != nil {
		return nil, err
	}
	if err := n.Wire.Link(n.NS, "container", c, "eth0"); err != nil {
		return nil, err
	}
	inNode := OnDevice(n.NS, "container", func(h *netlink.Handle, d netlink.Link) error {
		return errors.Join(
			addAddress(h, d, netip.PrefixFrom(gateway, 64)),
			h.LinkSetUp(d),
			h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Dst: IPNet(netip.PrefixFrom(a, 128))}),
			n.NS.Do(func() error { return sysctl("net/ipv6/conf/all/forwarding", "1") }),
		)
	})
	inContainer := OnDevice(c, "eth0", func(h *netlink.Handle, d netlink.Link) error {
		return errors.Join(
			addAddress(h, d, netip.PrefixFrom(a, 128)),
			h.LinkSetUp(d),
			h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Gw: gateway.AsSlice()}),
		)
	})
	return c, errors.Join(inNode, inContainer)
}

// vxlan is the set-up of Flannel's VXLAN backend on each node: containers on a bridge, kernel routing between the
// bridge and one VXLAN device without learning, and static route, neighbour and forwarding entry for the other node. It
// omits Flannel's masquerading rules, which would make it slower.
func vxlan(w *Wire) (Pair, error) { return w.overlay(netlink.Vxlan{}) }

// overlay builds vxlan, with VXLAN devices that have the settings of like.
func (w *Wire) overlay(like netlink.Vxlan) (Pair, error) {
	all, err := w.overlayPairs(1, like)
	if err != nil {
		return Pair{}, err
	}
	return all[0], nil
}

// OverlayPairs is vxlan with several pairs: clients on the first node, servers on the second.
func (w *Wire) OverlayPairs(pairs int) ([]Pair, error) { return w.overlayPairs(pairs, netlink.Vxlan{}) }

// OverlayDevice is the VXLAN device of a node.
const OverlayDevice = "vxlan"

func (w *Wire) overlayPairs(pairs int, like netlink.Vxlan) (all []Pair, err error) {
	a, b := w.Nodes[0], w.Nodes[1]
	if err := errors.Join(a.addBridge(), b.addBridge()); err != nil {
		return nil, err
	}
	for number := 1; number <= pairs; number++ {
		p, err := w.containers(func(n *Node) (*netns.Namespace, netip.Addr, error) { return n.addBridged(number) })
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, errors.Join(a.tunnel(b, like), b.tunnel(a, like))
}

// Flannel's values.
const (
	vxlanID       = 1
	vxlanPort     = 8472
	vxlanOverhead = 70 // Ethernet, IPv6, UDP and VXLAN headers
)

// addBridge adds a bridge to which the node routes its prefix.
func (n *Node) addBridge() error {
	if err := n.bridge("bridge"); err != nil {
		return err
	}
	return OnDevice(n.NS, "bridge", func(h *netlink.Handle, bridge netlink.Link) error {
		return errors.Join(
			addAddress(h, bridge, netip.PrefixFrom(gateway, 64)),
			h.RouteAdd(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: IPNet(n.Prefix)}),
			n.NS.Do(func() error { return sysctl("net/ipv6/conf/all/forwarding", "1") }))
	})
}

// addBridged adds a container to the node's bridge.
func (n *Node) addBridged(number int) (*netns.Namespace, netip.Addr, error) {
	a := address.Plain{Node: n.Prefix, Tenant: 1, App: 1, Index: address.Index(number)}.Addr()
	c, err := n.Wire.Namespace(fmt.Sprint(n.name, "-container", number))
	if err != nil {
		return nil, a, err
	}
	if err := n.Wire.Link(n.NS, paired(number), c, "eth0"); err != nil {
		return nil, a, err
	}
	return c, a, errors.Join(
		n.enslave(paired(number), "bridge"),
		OnDevice(c, "eth0", func(h *netlink.Handle, d netlink.Link) error {
			return errors.Join(
				h.LinkSetMTU(d, d.Attrs().MTU-vxlanOverhead),
				addAddress(h, d, netip.PrefixFrom(a, 128)),
				h.LinkSetUp(d),
				h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Gw: gateway.AsSlice()}))
		}))
}

func (n *Node) bridge(name string) error {
	h, err := n.NS.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := netns.Retry(func() error { return h.LinkAdd(bridge) }); err != nil {
		return fmt.Errorf("bridge in %s: %w", n.name, err)
	}
	return h.LinkSetUp(bridge)
}

// enslave makes a device of the node a port of its bridge.
func (n *Node) enslave(device, bridge string) error {
	return OnDevice(n.NS, bridge, func(h *netlink.Handle, bridge netlink.Link) error {
		port, err := h.LinkByName(device)
		if err != nil {
			return err
		}
		return errors.Join(h.LinkSetMaster(port, bridge), h.LinkSetUp(port))
	})
}

// hardware returns the MAC of a node's end of the tunnel.
func (n *Node) hardware() net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0, n.Prefix.Addr().As16()[7]}
}

// tunnel creates the VXLAN device and its static entries for the peer.
func (n *Node) tunnel(peer *Node, device netlink.Vxlan) error {
	return OnDevice(n.NS, "eth0", func(h *netlink.Handle, uplink netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = OverlayDevice, uplink.Attrs().MTU-vxlanOverhead, n.hardware()
		device.LinkAttrs, device.VxlanId, device.VtepDevIndex = attrs, vxlanID, uplink.Attrs().Index
		device.SrcAddr, device.Port = n.Underlay.AsSlice(), vxlanPort
		if err := netns.Retry(func() error { return h.LinkAdd(&device) }); err != nil {
			return fmt.Errorf("vxlan in %s: %w", n.name, err)
		}
		if err := h.LinkSetUp(&device); err != nil {
			return err
		}
		index, there := device.Attrs().Index, peer.Prefix.Addr()
		return errors.Join(
			h.NeighAppend(&netlink.Neigh{
				LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT,
				HardwareAddr: peer.hardware(), IP: peer.Underlay.AsSlice(),
			}),
			h.NeighSet(&netlink.Neigh{
				LinkIndex: index, Family: netlink.FAMILY_V6, State: netlink.NUD_PERMANENT,
				HardwareAddr: peer.hardware(), IP: there.AsSlice(),
			}),
			addAddress(h, &device, netip.PrefixFrom(n.Prefix.Addr(), 128)),
			h.RouteDel(&netlink.Route{Dst: IPNet(peer.Prefix)}), // of the fabric
			h.RouteAdd(&netlink.Route{
				LinkIndex: index, Dst: IPNet(peer.Prefix), Gw: there.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
			}))
	})
}
