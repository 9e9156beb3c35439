package bench

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

// gateway is what containers of kernel scenarios route through.
var gateway = netip.MustParseAddr("fe80::1")

// addRouted puts a container behind the node as any Linux router would.
func (n *node) addRouted() (*netns.Namespace, netip.Addr, error) {
	a := address.Plain{Node: n.prefix, Tenant: 1, App: 1, Index: 1}.Addr()
	c, err := n.wire.namespace(n.name + "-container")
	if err != nil {
		return nil, a, err
	}
	if err := n.wire.link(n.ns, "container", c, "eth0"); err != nil {
		return nil, a, err
	}
	inNode := onDevice(n.ns, "container", func(h *netlink.Handle, d netlink.Link) error {
		return errors.Join(
			addAddress(h, d, netip.PrefixFrom(gateway, 64)),
			h.LinkSetUp(d),
			h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Dst: ipNet(netip.PrefixFrom(a, 128))}),
			n.ns.Do(func() error { return sysctl("net/ipv6/conf/all/forwarding", "1") }),
		)
	})
	inContainer := onDevice(c, "eth0", func(h *netlink.Handle, d netlink.Link) error {
		return errors.Join(
			addAddress(h, d, netip.PrefixFrom(a, 128)),
			h.LinkSetUp(d),
			h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Gw: gateway.AsSlice()}),
		)
	})
	return c, a, errors.Join(inNode, inContainer)
}

// vxlan is what Flannel's VXLAN backend sets up on each node: containers on a bridge, the kernel routing
// between it and one VXLAN device that learns nothing; for the other node a route, its neighbour and a
// forwarding entry, all static. Flannel's rules for masquerading are left out: they would slow it down.
func vxlan(w *wire) (Pair, error) { return w.overlay(netlink.Vxlan{}) }

// overlay is vxlan, with devices that differ from Flannel's in what is set in like.
func (w *wire) overlay(like netlink.Vxlan) (Pair, error) {
	p, err := w.containers((*node).addBridged)
	if err != nil {
		return p, err
	}
	a, b := w.nodes[0], w.nodes[1]
	return p, errors.Join(a.tunnel(b, like), b.tunnel(a, like))
}

// What Flannel uses.
const (
	vxlanID       = 1
	vxlanPort     = 8472
	vxlanOverhead = 70 // Ethernet, IPv6, UDP and VXLAN headers
)

// addBridged puts a container on the node's bridge.
func (n *node) addBridged() (*netns.Namespace, netip.Addr, error) {
	a := address.Plain{Node: n.prefix, Tenant: 1, App: 1, Index: 1}.Addr()
	if err := n.bridge("bridge"); err != nil {
		return nil, a, err
	}
	c, err := n.wire.namespace(n.name + "-container")
	if err != nil {
		return nil, a, err
	}
	if err := n.wire.link(n.ns, "container", c, "eth0"); err != nil {
		return nil, a, err
	}
	return c, a, errors.Join(
		n.enslave("container", "bridge"),
		onDevice(n.ns, "bridge", func(h *netlink.Handle, bridge netlink.Link) error {
			return errors.Join(
				addAddress(h, bridge, netip.PrefixFrom(gateway, 64)),
				h.RouteAdd(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: ipNet(n.prefix)}),
				n.ns.Do(func() error { return sysctl("net/ipv6/conf/all/forwarding", "1") }))
		}),
		onDevice(c, "eth0", func(h *netlink.Handle, d netlink.Link) error {
			return errors.Join(
				h.LinkSetMTU(d, d.Attrs().MTU-vxlanOverhead),
				addAddress(h, d, netip.PrefixFrom(a, 128)),
				h.LinkSetUp(d),
				h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Gw: gateway.AsSlice()}))
		}))
}

func (n *node) bridge(name string) error {
	h, err := n.ns.Netlink()
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
func (n *node) enslave(device, bridge string) error {
	return onDevice(n.ns, bridge, func(h *netlink.Handle, bridge netlink.Link) error {
		port, err := h.LinkByName(device)
		if err != nil {
			return err
		}
		return errors.Join(h.LinkSetMaster(port, bridge), h.LinkSetUp(port))
	})
}

// hardware is the MAC of a node's end of the tunnel.
func (n *node) hardware() net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0, n.prefix.Addr().As16()[7]}
}

// tunnel makes the VXLAN device, otherwise like another, and what it knows of the peer.
func (n *node) tunnel(peer *node, device netlink.Vxlan) error {
	return onDevice(n.ns, "eth0", func(h *netlink.Handle, uplink netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = "vxlan", uplink.Attrs().MTU-vxlanOverhead, n.hardware()
		device.LinkAttrs, device.VxlanId, device.VtepDevIndex = attrs, vxlanID, uplink.Attrs().Index
		device.SrcAddr, device.Port = n.underlay.AsSlice(), vxlanPort
		if err := netns.Retry(func() error { return h.LinkAdd(&device) }); err != nil {
			return fmt.Errorf("vxlan in %s: %w", n.name, err)
		}
		if err := h.LinkSetUp(&device); err != nil {
			return err
		}
		index, there := device.Attrs().Index, peer.prefix.Addr()
		return errors.Join(
			h.NeighAppend(&netlink.Neigh{
				LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT,
				HardwareAddr: peer.hardware(), IP: peer.underlay.AsSlice(),
			}),
			h.NeighSet(&netlink.Neigh{
				LinkIndex: index, Family: netlink.FAMILY_V6, State: netlink.NUD_PERMANENT,
				HardwareAddr: peer.hardware(), IP: there.AsSlice(),
			}),
			addAddress(h, &device, netip.PrefixFrom(n.prefix.Addr(), 128)),
			h.RouteDel(&netlink.Route{Dst: ipNet(peer.prefix)}), // the fabric's
			h.RouteAdd(&netlink.Route{
				LinkIndex: index, Dst: ipNet(peer.prefix), Gw: there.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
			}))
	})
}
