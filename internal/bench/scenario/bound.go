package scenario

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/netns"
)

// A bound is what a kind of device costs when nothing is decided about a packet: what our programs add to
// is this, and not the bare wire.

// boundVeth has a packet pass the devices it passes on netpila, and no others. There it leaves its container
// by one veth pair, crosses to the other node by a second, and a redirect puts it into the container there
// without a third. So here each direction has a wire of its own that ends in the receiving container; on the
// sending node a traffic control action, which looks at nothing, joins the container's pair to it. Routing
// instead, as `route` does, or bridges would make a bound that is easily beaten: more is done there for a packet
// than on netpila.
func boundVeth(w *Wire) (Pair, error) { return w.oneWayEach((*Node).joinVeth) }

// boundNetkit is the same with netkits where boundVeth has the containers' veth pairs. A netkit hands nothing to
// another device without a program: here to one of four instructions, which redirects.
func boundNetkit(w *Wire) (Pair, error) { return w.oneWayEach((*Node).joinNetkit) }

// join gives a container its eth0, and has what it sends leave by the node's device "wire".
type join func(n *Node, container *netns.Namespace) error

func (w *Wire) oneWayEach(join join) (Pair, error) {
	var ends [2]*netns.Namespace
	var addresses [2]netip.Addr
	for i, n := range w.Nodes {
		c, err := w.Namespace(n.name + "-container")
		if err != nil {
			return Pair{}, err
		}
		ends[i], addresses[i] = c, address.Plain{Node: n.Prefix, Tenant: 1, App: 1, Index: 1}.Addr()
	}
	for i, n := range w.Nodes {
		if err := n.oneWay(join, ends[i], addresses[i], ends[1-i], addresses[1-i]); err != nil {
			return Pair{}, err
		}
	}
	return Pair{Client: ends[0], Server: ends[1], Target: addresses[1]}, nil
}

// oneWay leads from a container on the node to one elsewhere.
func (n *Node) oneWay(
	join join,
	from *netns.Namespace,
	source netip.Addr,
	to *netns.Namespace,
	target netip.Addr,
) error {
	if err := n.Wire.Link(n.NS, "wire", to, "in"); err != nil {
		return err
	}
	var mac net.HardwareAddr
	err := OnDevice(to, "in", func(h *netlink.Handle, d netlink.Link) error {
		mac = d.Attrs().HardwareAddr
		return h.LinkSetUp(d)
	})
	return errors.Join(err,
		join(n, from),
		OnDevice(from, "eth0", func(h *netlink.Handle, d netlink.Link) error {
			return errors.Join(
				addAddress(h, d, netip.PrefixFrom(source, 128)),
				h.LinkSetUp(d),
				h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Dst: IPNet(netip.PrefixFrom(target, 128))}),
				h.NeighSet(&netlink.Neigh{
					LinkIndex: d.Attrs().Index, Family: netlink.FAMILY_V6, State: netlink.NUD_PERMANENT,
					HardwareAddr: mac, IP: target.AsSlice(),
				}))
		}))
}

func (n *Node) joinVeth(container *netns.Namespace) error {
	return errors.Join(n.Wire.Link(n.NS, "container", container, "eth0"), n.redirect("container", "wire"))
}

func (n *Node) joinNetkit(container *netns.Namespace) error {
	return OnDevice(n.NS, "wire", func(h *netlink.Handle, to netlink.Link) error {
		node, peer := netlink.NewLinkAttrs(), netlink.NewLinkAttrs()
		node.Name, peer.Name, peer.Namespace = "container", "eth0", netlink.NsFd(container.FD())
		pair := &netlink.Netkit{
			LinkAttrs: node,
			Mode:      netlink.NETKIT_MODE_L2,
			Scrub:     netlink.NETKIT_SCRUB_DEFAULT,
			PeerScrub: netlink.NETKIT_SCRUB_DEFAULT,
		}
		pair.SetPeerAttrs(&peer)
		if err := netns.Retry(func() error { return h.LinkAdd(pair) }); err != nil {
			return fmt.Errorf("netkit: %w", err)
		}
		return errors.Join(
			h.LinkSetUp(pair),
			h.LinkSetUp(to),
			n.load(redirect(asm.FnRedirect, to.Attrs().Index), func(p *ebpf.Program) error {
				return n.NS.Do(func() error {
					return link.RawAttachProgram(
						link.RawAttachProgramOptions{Target: pair.Index, Program: p, Attach: ebpf.AttachNetkitPeer},
					)
				})
			}),
		)
	})
}

// redirect sends all that comes in by one device of the node out by another.
func (n *Node) redirect(in, out string) error {
	return OnDevice(n.NS, in, func(h *netlink.Handle, from netlink.Link) error {
		to, err := h.LinkByName(out)
		if err != nil {
			return err
		}
		ingress := netlink.QdiscAttrs{
			LinkIndex: from.Attrs().Index,
			Handle:    netlink.MakeHandle(0xffff, 0),
			Parent:    netlink.HANDLE_INGRESS,
		}
		return errors.Join(
			h.LinkSetUp(from),
			h.LinkSetUp(to),
			h.QdiscAdd(&netlink.Ingress{QdiscAttrs: ingress}),
			h.FilterAdd(&netlink.U32{ // without a selector it matches everything
				FilterAttrs: netlink.FilterAttrs{
					LinkIndex: ingress.LinkIndex,
					Parent:    ingress.Handle,
					Priority:  1,
					Protocol:  unix.ETH_P_ALL,
				},
				Actions: []netlink.Action{netlink.NewMirredAction(to.Attrs().Index)},
			}))
	})
}

// boundMacvlan has containers on the uplink's wire itself.
func boundMacvlan(w *Wire) (Pair, error) {
	return w.containers((*Node).addMacvlan)
}

func (n *Node) addMacvlan() (*netns.Namespace, netip.Addr, error) {
	a := address.Plain{Node: n.Prefix, Tenant: 1, App: 1, Index: 1}.Addr()
	c, err := n.Wire.Namespace(n.name + "-container")
	if err != nil {
		return nil, a, err
	}
	err = OnDevice(n.NS, "eth0", func(h *netlink.Handle, uplink netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		// Older kernels want a name that is free here too.
		attrs.Name, attrs.ParentIndex, attrs.Namespace = "macvlan", uplink.Attrs().Index, netlink.NsFd(c.FD())
		device := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}
		if err := netns.Retry(func() error { return h.LinkAdd(device) }); err != nil {
			return fmt.Errorf("macvlan: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, a, err
	}
	return c, a, OnDevice(c, "macvlan", func(h *netlink.Handle, d netlink.Link) error {
		return errors.Join(
			h.LinkSetName(d, "eth0"),
			addAddress(h, d, netip.PrefixFrom(a, 128)),
			h.LinkSetUp(d),
			h.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Dst: IPNet(address.DefaultPlan().Base)}))
	})
}
