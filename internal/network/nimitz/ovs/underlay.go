package ovs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
)

// The path of tunnel packets between the VXLAN port and the node's stack. Open vSwitch sends encapsulated packets
// through the bridge whose device has the tunnel's address, and receives packets that this bridge sends to its device.
// The device itself stays down: the node routes packets for the VTEP to the bridge by a pair of devices, and forwards
// packets from it like any others.
const (
	underlayName = pipeline.Underlay // the bridge and its device
	hostSide     = pipeline.NodeSide
	bridgeSide   = pipeline.SwitchSide // the bridge's port
	portUnderlay = 1

	outerUDP = 4789
	// innerUDP is VXLAN's port between the two bridges. Open vSwitch 3.1 rejects a second VXLAN port with extensions on
	// the well-known number.
	innerUDP = 14789
	// hostPart is the last part of the address of the node's stack on the pair, by which the bridge reaches the stack.
	hostPart = 3
)

var (
	hostMAC   = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x03}
	bridgeMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x04}
	// bridgeLink is the bridge's address in the node's routes.
	bridgeLink = netip.MustParseAddr("fe80::2")
)

func (s *Switch) underlay(ctx context.Context, d *database) error {
	h, err := s.config.Netns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	if s.config.Datapath == Kernel {
		return s.own(h)
	}
	if err := s.pair(h); err != nil {
		return fmt.Errorf("%s: %w", hostSide, err)
	}
	err = d.ensureBridge(ctx, underlayName, Userspace, map[string]string{"hwaddr": bridgeMAC.String()},
		device{name: bridgeSide, of: underlayName, ofport: portUnderlay})
	if err != nil {
		return err
	}
	if err := s.address(ctx, h); err != nil {
		return fmt.Errorf("%s: %w", underlayName, err)
	}
	return s.withBridge(ctx, underlayName, func(c *openflow.Conn) error { return c.Apply(ctx, underlayFlows()) })
}

func (s *Switch) hostAddress() netip.Addr {
	b := s.config.Node.Masked().Addr().As16()
	b[15] = hostPart
	return netip.AddrFrom16(b)
}

// pair creates the two devices, and the node's route to the VTEP.
func (s *Switch) pair(h *netlink.Handle) error {
	host, err := h.LinkByName(hostSide)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr = hostSide, hostMAC
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: bridgeSide}); err != nil {
			return err
		}
		host, err = h.LinkByName(hostSide)
	}
	if err != nil {
		return err
	}
	bridge, err := h.LinkByName(bridgeSide)
	if err != nil {
		return err
	}
	if err := s.sysctls(); err != nil {
		return err
	}
	vtep := pipeline.VTEP(s.config.Node)
	return errors.Join(
		netns.Retry(func() error { return h.LinkSetUp(bridge) }),
		netns.Retry(func() error { return h.LinkSetUp(host) }),
		h.AddrReplace(host, &netlink.Addr{IPNet: single(s.hostAddress()), Flags: unix.IFA_F_NODAD}),
		h.NeighSet(
			&netlink.Neigh{
				LinkIndex:    host.Attrs().Index,
				Family:       unix.AF_INET6,
				State:        netlink.NUD_PERMANENT,
				IP:           bridgeLink.AsSlice(),
				HardwareAddr: bridgeMAC,
			},
		),
		netns.PutRoute(
			h,
			&netlink.Route{
				LinkIndex: host.Attrs().Index,
				Dst:       single(vtep),
				Gw:        bridgeLink.AsSlice(),
				Flags:     int(netlink.FLAG_ONLINK),
			},
		),
		s.config.Netns.Do(func() error { return NoOffload(hostSide) }),
		s.policy(h, host),
	)
}

// sysctls disables the node's stack on the bridge's port, and enables forwarding between the other device and the
// uplinks. From Linux 6.17 on it enables forwarding only for these, because a node that forwards on all devices
// loses a default route learnt from router advertisements.
func (s *Switch) sysctls() error {
	const conf = "/proc/sys/net/ipv6/conf/"
	return s.config.Netns.Do(func() error {
		settings := [][2]string{{bridgeSide + "/disable_ipv6", "1"}, {hostSide + "/accept_dad", "0"}}
		all, err := os.ReadFile(conf + "all/forwarding")
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(all)) == "0" {
			settings = append(
				settings,
				[2]string{hostSide + "/force_forwarding", "1"},
			)
			for _, name := range s.config.Uplinks {
				settings = append(settings, [2]string{name + "/force_forwarding", "1"})
			}
		}
		for _, set := range settings {
			if err := os.WriteFile(conf+set[0], []byte(set[1]), 0); err != nil {
				return fmt.Errorf(
					"%w; kernels before 6.17 need net.ipv6.conf.all.forwarding=1, which the agent does not set",
					err,
				)
			}
		}
		return nil
	})
}

func single(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// address assigns the VTEP's address to the bridge's device, where Open vSwitch reads it, and keeps the node's stack
// from using it as a local address.
func (s *Switch) address(ctx context.Context, h *netlink.Handle) error {
	tap, err := h.LinkByName(underlayName)
	if err != nil {
		return err
	}
	updates, done := make(chan netlink.RouteUpdate), make(chan struct{})
	err = s.config.Netns.Do(func() error {
		return netlink.RouteSubscribeWithOptions(updates, done, netlink.RouteSubscribeOptions{ListExisting: true})
	})
	if err != nil {
		return err
	}
	defer func() {
		close(done)
		for range updates { // closed when the subscription has ended
		}
	}()
	vtep := pipeline.VTEP(s.config.Node)
	list, err := netns.List(func() ([]netlink.Addr, error) { return h.AddrList(tap, unix.AF_INET6) })
	if err != nil {
		return err
	}
	for _, a := range list {
		if had, _ := netip.AddrFromSlice(a.IP); had == vtep {
			return nil // and its route was removed then
		}
	}
	// The prefix is the node's, so that Open vSwitch selects this address as the source for packets by hostAddress.
	own := &net.IPNet{IP: vtep.AsSlice(), Mask: net.CIDRMask(64, 128)}
	if err := h.AddrAdd(tap, &netlink.Addr{IPNet: own,
		Flags: unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE}); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case u, open := <-updates:
			if !open {
				return errors.New("the subscription to routes has ended")
			}
			if u.Type != unix.RTM_NEWROUTE || u.LinkIndex != tap.Attrs().Index || u.Route.Type != unix.RTN_LOCAL ||
				!u.Dst.IP.Equal(own.IP) {
				continue
			}
			return netns.DeleteRoute(h, &u.Route)
		}
	}
}

// underlayFlows forwards tunnel packets and neighbour discovery for the node's MAC, and nothing else.
func underlayFlows() []openflow.Change {
	udp := func(port uint32, to uint64) []openflow.Value {
		return []openflow.Value{
			inPort(port),
			ip6.is(),
			openflow.IPProto.Number(unix.IPPROTO_UDP),
			openflow.UDPDst.Number(to),
		}
	}
	neighbour := func(port uint32, kind uint64) []openflow.Value {
		return []openflow.Value{
			inPort(port),
			ip6.is(),
			openflow.IPProto.Number(unix.IPPROTO_ICMPV6),
			openflow.ICMPv6Type.Number(kind),
		}
	}
	var all []openflow.Change
	for _, f := range []openflow.Flow{
		{Match: udp(portUnderlay, outerUDP),
			Actions: []openflow.Action{set(openflow.UDPDst.Number(innerUDP)), openflow.Output(openflow.LocalPort)}},
		{Match: udp(openflow.LocalPort, innerUDP),
			Actions: []openflow.Action{set(openflow.UDPDst.Number(outerUDP)), openflow.Output(portUnderlay)}},
		{Match: neighbour(openflow.LocalPort, 135), Actions: []openflow.Action{openflow.Output(portUnderlay)}},
		{Match: neighbour(portUnderlay, 136), Actions: []openflow.Action{openflow.Output(openflow.LocalPort)}},
	} {
		f.Priority, f.Cookie = priorityEntry, cookieOurs
		all = append(all, openflow.Change{Command: openflow.Add, Flow: f})
	}
	return all
}

// routes adds Open vSwitch's routes to the region's nodes.
func (s *Switch) routes(ctx context.Context) error {
	if s.config.Datapath == Kernel {
		return nil // the stack has the routes
	}
	takes, err := s.takesTunnels(ctx)
	if err == nil && !takes { // a route of an earlier bridge refers to the index of a deleted device
		err = s.route(ctx, s.config.Region, false)
	}
	if err == nil {
		err = s.route(ctx, s.config.Region, true)
	}
	if err == nil {
		_, err = s.control(ctx, "tnl/neigh/set", underlayName, s.hostAddress().String(), hostMAC.String())
	}
	if err != nil || takes {
		return err
	}
	if takes, err = s.takesTunnels(ctx); err == nil && !takes {
		err = fmt.Errorf("ovs-vswitchd accepts no tunnels at %v (tnl/ports/show)", pipeline.VTEP(s.config.Node))
	}
	return err
}

func (s *Switch) takesTunnels(ctx context.Context) (bool, error) {
	ports, err := s.control(ctx, "tnl/ports/show", "-v")
	return strings.Contains(ports, fmt.Sprintf("ipv6(dst=%v,", pipeline.VTEP(s.config.Node))), err
}

// route adds or removes Open vSwitch's route to VTEPs in a prefix. Open vSwitch cannot derive it from the node's
// routes: those name the uplink, which is in no bridge. A correct route is left alone, because tunnels lose packets
// while it is missing.
func (s *Switch) route(ctx context.Context, to netip.Prefix, there bool) error {
	p := to.Masked().String()
	if !there {
		_, err := s.control(ctx, "ovs/route/del", p)
		if errors.As(err, new(refusal)) {
			return nil // it did not exist
		}
		return err
	}
	// ovs-vswitchd responds after it has processed all earlier route notifications of the kernel.
	all, err := s.control(ctx, "ovs/route/show")
	if err != nil ||
		strings.Contains(
			all,
			fmt.Sprintf(
				"User: %s dev %s GW %v SRC %v\n",
				p,
				underlayName,
				s.hostAddress(),
				pipeline.VTEP(s.config.Node),
			),
		) {
		return err
	}
	_, err = s.control(ctx, "ovs/route/add", p, underlayName, s.hostAddress().String())
	return err
}

// abroad adds or removes the routes to the Edge Switches of other regions among entries.
func (s *Switch) abroad(ctx context.Context, entries []pipeline.Entry, there bool) error {
	for _, e := range entries {
		if peer, ok := e.(pipeline.Peer); ok && s.config.Datapath != Kernel && !s.config.Region.Overlaps(peer.Nodes) {
			if err := s.route(ctx, peer.Nodes, there); err != nil {
				return fmt.Errorf("%v: %w", e, err)
			}
		}
	}
	return nil
}

func (s *Switch) removeUnderlay() error {
	h, err := s.config.Netns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	if s.config.Datapath == Kernel {
		return s.disown(h)
	}
	host, err := h.LinkByName(hostSide)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	return h.LinkDel(host)
}

// SetMTU adapts the pair of devices, and with it the bridge, to the MTU of the uplink.
func (s *Switch) SetMTU(mtu int) error {
	h, err := s.config.Netns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	if s.config.Datapath == Kernel {
		return nil // the encapsulated packets use the uplink itself
	}
	for _, name := range []string{hostSide, bridgeSide} {
		l, err := h.LinkByName(name)
		if err == nil && l.Attrs().MTU != mtu {
			err = netns.Retry(func() error { return h.LinkSetMTU(l, mtu) })
		}
		if err != nil {
			return fmt.Errorf("MTU of %s: %w", name, err)
		}
	}
	return nil
}
