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

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/netns"
)

// A floor is a bound with programs on the same hooks as ours. These programs only pass packets on, so a floor measures
// the cost of calling any program there. The difference to netpila is the cost of our decisions.

// floorMacvlan has an empty program on both hooks of the uplink.
func floorMacvlan(w *Wire) (Pair, error) {
	pair, err := boundMacvlan(w)
	for _, n := range w.Nodes {
		err = errors.Join(err,
			n.hook("eth0", ebpf.AttachTCXIngress, asm.Mov.Imm(asm.R0, tcxNext)),
			n.hook("eth0", ebpf.AttachTCXEgress, asm.Mov.Imm(asm.R0, tcxNext)))
	}
	return pair, err
}

const tcxNext = -1

// floorVeth redirects packets of the container to the uplink, and packets of the uplink into the container.
func floorVeth(w *Wire) (Pair, error) {
	var macs [2]net.HardwareAddr
	for i, n := range w.Nodes {
		err := OnDevice(n.NS, "eth0", func(_ *netlink.Handle, d netlink.Link) error {
			macs[i] = d.Attrs().HardwareAddr
			return nil
		})
		if err != nil {
			return Pair{}, err
		}
	}
	// The container sends to the MAC of the other node's uplink, so that the other node accepts the redirected packets.
	return w.containers(func(n *Node) (*netns.Namespace, netip.Addr, error) {
		gateway := macs[0]
		if n == w.Nodes[0] {
			gateway = macs[1]
		}
		return n.addRedirected(gateway)
	})
}

func (n *Node) addRedirected(gateway net.HardwareAddr) (*netns.Namespace, netip.Addr, error) {
	c, a, ours, err := n.addPaired(1, gateway)
	if err != nil {
		return nil, a, err
	}
	var uplink int
	err = OnDevice(n.NS, "eth0", func(_ *netlink.Handle, d netlink.Link) error {
		uplink = d.Attrs().Index
		return nil
	})
	return c, a, errors.Join(err,
		n.filter(paired(1), redirect(asm.FnRedirect, uplink)...),
		n.hook("eth0", ebpf.AttachTCXEgress, asm.Mov.Imm(asm.R0, tcxNext)),
		n.hook("eth0", ebpf.AttachTCXIngress, redirect(asm.FnRedirectPeer, ours)...))
}

// floorLocal redirects between two containers of one node.
func floorLocal(w *Wire) (Pair, error) {
	n := w.Nodes[0]
	var ends [2]*netns.Namespace
	var devices [2]int
	var target netip.Addr
	var err error
	for i := range ends {
		if ends[i], target, devices[i], err = n.addPaired(i+1, nil); err != nil {
			return Pair{}, err
		}
	}
	return Pair{Client: ends[0], Server: ends[1], Target: target}, errors.Join(
		n.filter(paired(1), redirect(asm.FnRedirectPeer, devices[1])...),
		n.filter(paired(2), redirect(asm.FnRedirectPeer, devices[0])...))
}

// addPaired adds a container behind a new veth pair, and returns the index of the node's end. The container sends to
// the MAC gateway, or to the MAC of the node's end if gateway is nil.
func (n *Node) addPaired(number int, gateway net.HardwareAddr) (c *netns.Namespace, a netip.Addr, ours int, err error) {
	a = address.Plain{Node: n.Prefix, Tenant: 1, App: 1, Index: address.Index(number)}.Addr()
	if c, err = n.Wire.Namespace(fmt.Sprint(n.name, "-container", number)); err != nil {
		return nil, a, 0, err
	}
	if err := n.Wire.Link(n.NS, paired(number), c, "eth0"); err != nil {
		return nil, a, 0, err
	}
	err = errors.Join(
		OnDevice(n.NS, paired(number), func(h *netlink.Handle, d netlink.Link) error {
			ours = d.Attrs().Index
			if gateway == nil {
				gateway = d.Attrs().HardwareAddr
			}
			return h.LinkSetUp(d)
		}),
		OnDevice(c, "eth0", func(h *netlink.Handle, d netlink.Link) error {
			next := netip.MustParseAddr("fe80::1")
			return errors.Join(
				addAddress(h, d, netip.PrefixFrom(a, 128)),
				h.LinkSetUp(d),
				h.NeighSet(&netlink.Neigh{
					LinkIndex: d.Attrs().Index, Family: netlink.FAMILY_V6, State: netlink.NUD_PERMANENT,
					HardwareAddr: gateway, IP: next.AsSlice(),
				}),
				h.RouteAdd(
					&netlink.Route{
						LinkIndex: d.Attrs().Index,
						Dst:       IPNet(address.DefaultPlan().Base),
						Gw:        next.AsSlice(),
					},
				),
			)
		}))
	return c, a, ours, err
}

// paired returns the name of the node's end.
func paired(number int) string { return fmt.Sprint("container", number) }

// redirect returns a program that redirects every packet to a device with one of the kernel's redirect helpers.
func redirect(by asm.BuiltinFunc, ifindex int) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Imm(asm.R1, int32(ifindex)), asm.Mov.Imm(asm.R2, 0), by.Call()}
}

// hook attaches a program to a device of the node until the run ends, in the same way as our programs on the uplink.
func (n *Node) hook(device string, at ebpf.AttachType, body ...asm.Instruction) error {
	return n.load(body, func(p *ebpf.Program) error {
		return OnDevice(n.NS, device, func(_ *netlink.Handle, d netlink.Link) error {
			return n.NS.Do(func() error {
				l, err := link.AttachTCX(link.TCXOptions{Interface: d.Attrs().Index, Program: p, Attach: at})
				if err == nil {
					n.Wire.OnClose(l.Close)
				}
				return err
			})
		})
	})
}

// filter attaches a program in the same way as our programs on a container's veth.
func (n *Node) filter(device string, body ...asm.Instruction) error {
	return n.load(body, func(p *ebpf.Program) error {
		return OnDevice(n.NS, device, func(h *netlink.Handle, d netlink.Link) error {
			return host.AttachFilter(h, d.Attrs().Index, device, netlink.HANDLE_MIN_INGRESS, p, "floor")
		})
	})
}

func (n *Node) load(body []asm.Instruction, use func(*ebpf.Program) error) error {
	p, err := ebpf.NewProgram(
		&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: append(body, asm.Return())},
	)
	if err != nil {
		return err
	}
	defer p.Close() // the device keeps a reference
	return use(p)
}
