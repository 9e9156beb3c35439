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

// A bound measures the devices of a device kind without any decision about packets. The cost of our programs is the
// difference to the bound, not to native.

// boundVeth uses only the devices that netpila uses. On netpila a packet leaves its container by one veth pair, reaches
// the other node by a second one, and a redirect delivers it into the container without a third. So here each direction
// has its own veth pair, which ends in the receiving container. On the sending node, an unconditional tc action
// redirects the container's packets to this pair. Routing, as in `route`, or bridges would be a weaker bound, because
// they do more work per packet than netpila.
func boundVeth(w *Wire) (Pair, error) { return w.oneWayEach((*Node).joinVeth) }

// boundNetkit is boundVeth with netkit devices instead of the containers' veth pairs. A netkit device needs a program
// to forward packets. Here the program is a redirect of four instructions.
func boundNetkit(w *Wire) (Pair, error) { return w.oneWayEach((*Node).joinNetkit) }

// join adds eth0 to a container, and redirects its packets to the node's device "wire".
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

// oneWay connects a container of the node to one of the other node, in one direction.
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

// redirect redirects all ingress packets of one device of the node to another.
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
			h.FilterAdd(&netlink.U32{ // without a selector it matches every packet
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

// boundMacvlan attaches containers directly to the uplink.
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
		// Older kernels require a name that is also free in this namespace.
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
