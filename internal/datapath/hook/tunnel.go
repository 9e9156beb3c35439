package hook

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// TunnelDevice is the kernel's VXLAN device. It has no remote address of its own: the programs set the destination of
// each packet and read its source.
const TunnelDevice = "pilvxlan"

// CreateTunnel makes the device if it does not exist, sets its MTU and gives the node its tunnel address. made is false
// if the device existed.
func (d *Hooks) CreateTunnel() (made bool, err error) {
	tunnel, err := d.findTunnel()
	if err != nil {
		return false, err
	}
	if made = tunnel == nil; made {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = TunnelDevice
		dev := &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, GBP: true, Port: pipeline.UDPPort}
		if err := netns.Retry(func() error { return d.Netlink.LinkAdd(dev) }); err != nil {
			if l, _ := d.Netlink.LinkByName(TunnelDevice); l != nil {
				return made, fmt.Errorf(
					"%s is a %s that another program made: network nimitz needs VXLAN with external metadata, "+
						"group policy and UDP port %d; nothing was changed: rename or remove that device",
					TunnelDevice,
					l.Type(),
					pipeline.UDPPort,
				)
			}
			return made, fmt.Errorf(
				"make the device %s: %w; nothing was changed: the kernel needs CONFIG_VXLAN, and UDP port %d must "+
					"be free",
				TunnelDevice,
				err,
				pipeline.UDPPort,
			)
		}
		if tunnel, err = d.findTunnel(); err != nil || tunnel == nil {
			return made, fmt.Errorf("find the device %s: %w", TunnelDevice, err)
		}
	}
	mtu, err := d.MTU()
	if err == nil {
		err = d.SetTunnelMTU(mtu)
	}
	if err != nil {
		return made, err
	}
	lo, err := d.Netlink.LinkByName("lo")
	if err != nil {
		return made, fmt.Errorf("lo: %w", err)
	}
	self := VtepAddress(d.NodePrefix)
	for _, step := range []func() error{
		func() error { return d.Sysctls.Set(TunnelDevice, host.HostSysctls()) },
		func() error { return d.Netlink.LinkSetARPOff(tunnel) },
		func() error { return d.Netlink.AddrReplace(lo, self) },
	} {
		if err := netns.Retry(step); err != nil {
			return made, fmt.Errorf("set up %s: %w", TunnelDevice, err)
		}
	}
	return made, nil
}

// SetTunnelMTU sets the MTU of the device, if it exists, to what the uplink can carry.
func (d *Hooks) SetTunnelMTU(mtu int) error {
	tunnel, err := d.findTunnel()
	if err != nil || tunnel == nil {
		return err
	}
	if err := host.SetMTU(d.Netlink, tunnel, mtu-pipeline.Overhead); host.IgnoreGone(err) != nil {
		return fmt.Errorf("MTU of %s: %w", TunnelDevice, err)
	}
	return nil
}

// VtepAddress returns the node's VTEP address as deprecated, so that the node's stack does not choose it as a source.
func VtepAddress(node netip.Prefix) *netlink.Addr {
	return &netlink.Addr{
		IPNet:       host.HostNet(pipeline.VTEP(node)),
		Flags:       unix.IFA_F_NODAD,
		ValidLft:    math.MaxUint32,
		PreferedLft: 0,
	}
}

// TunnelAddressLabel is the label of the IPv4 tunnel address that an agent has given the node. An address that the
// operator has configured keeps its own.
const TunnelAddressLabel = "lo:pilaster"

// AddTunnelAddress gives the node its IPv4 tunnel address.
func (d *Hooks) AddTunnelAddress(a netip.Addr) error {
	lo, err := d.Netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	own := &netlink.Addr{IPNet: host.HostNet(a), Scope: unix.RT_SCOPE_UNIVERSE, Label: TunnelAddressLabel}
	if err := netns.Retry(func() error { return d.Netlink.AddrReplace(lo, own) }); err != nil {
		return fmt.Errorf("give lo the tunnel address %v: %w", a, err)
	}
	return nil
}

// IsTunnel reports whether the link is our VXLAN device, not another device of that name.
func IsTunnel(l netlink.Link) bool {
	v, ok := l.(*netlink.Vxlan)
	return ok && v.Name == TunnelDevice && v.FlowBased && v.GBP && v.Port == pipeline.UDPPort
}

// findTunnel returns nil if there is no tunnel device.
func (d *Hooks) findTunnel() (netlink.Link, error) {
	l, err := d.Netlink.LinkByName(TunnelDevice)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) || err == nil && !IsTunnel(l) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", TunnelDevice, err)
	}
	return l, nil
}

// AttachTunnel replaces the programs of network nimitz by those of this build, if the network is in use. The maps are
// complete by then: the entries of maps of another size have been copied.
func (d *Hooks) AttachTunnel() error {
	tunnel, err := d.findTunnel()
	if err != nil || tunnel == nil {
		return err
	}
	index := uint32(tunnel.Attrs().Index)
	for _, step := range []func() error{
		func() error { return d.SetTunnelNode(func(v *bpfobj.PilasterNimitzNode) { v.Vxlan = index }) },
		d.AttachTunnelPrograms,
		func() error {
			return d.WithDeviceLock(func() error {
				return netns.Retry(func() error { return d.Netlink.LinkSetUp(tunnel) })
			})
		},
	} {
		if err := step(); err != nil {
			return fmt.Errorf("attach network nimitz: %w", err)
		}
	}
	return nil
}

// AttachTunnelPrograms replaces the programs of network nimitz and changes nothing else.
func (d *Hooks) AttachTunnelPrograms() error {
	tunnel, err := d.findTunnel()
	if err != nil || tunnel == nil {
		return err
	}
	return d.WithDeviceLock(func() error {
		err := host.AttachFilter(d.Netlink, tunnel.Attrs().Index, TunnelDevice, netlink.HANDLE_MIN_INGRESS,
			d.Objects.PilTunnelIn, bpfobj.PilasterProgPilTunnelIn)
		if err != nil {
			return err
		}
		if err := d.AttachOffloads(); err != nil {
			return err
		}
		return d.Objects.PilNetworksV1.Put(NetworkNimitz, d.Objects.PilNimitz)
	})
}

// OffloadMember reports whether this node is the backend or a frontend of an offload.
func (d *Hooks) OffloadMember() (bool, error) {
	roles, err := d.offloadRoles()
	return len(roles.of) > 0, err
}

// offloadRoles are the offloads of which this node is the backend or a frontend.
type offloadRoles struct {
	of      map[uint32]bool // by id
	backend bool            // of any
	probed  map[bpfobj.PilasterProbeKey]bool
}

func (d *Hooks) offloadRoles() (roles offloadRoles, err error) {
	own := bpfobj.ToAddr(d.NodePrefix.Addr()).Hi
	roles.of, roles.probed = map[uint32]bool{}, map[bpfobj.PilasterProbeKey]bool{}
	err = bpfobj.ForEachEntry(d.Objects.NimOffloadsV1, func(id uint32, o bpfobj.PilasterOffload) {
		if o.Backend == own || o.Fronts != 0 {
			roles.of[id] = true
		}
		if o.Backend == own {
			roles.backend = true
			for _, frontend := range o.From[:o.Accepted] {
				roles.probed[bpfobj.PilasterProbeKey{Frontend: frontend, Offload: id}] = true
			}
		}
	})
	if err != nil {
		return roles, fmt.Errorf("read the offloads: %w", err)
	}
	return roles, nil
}

// AttachOffloads gives tunnel packets of the uplink to the program that the offloads in the kernel's tables demand. A
// node that is a backend or a frontend accepts messages of the others, and leaves VXLAN to the kernel's device, because
// a program cannot put a packet into a tunnel that a program has taken out of one.
func (d *Hooks) AttachOffloads() error {
	roles, err := d.offloadRoles()
	if err == nil {
		err = errors.Join(d.countMessages(roles.of), d.awaitAnswers(roles.probed))
	}
	if err != nil {
		return err
	}
	if err := d.Objects.PilUplinksV1.Put(UplinkOffloadOut, d.Objects.PilOffloadOut); err != nil {
		return err
	}
	err = d.SetTunnelNode(func(v *bpfobj.PilasterNimitzNode) { v.Backends = bpfobj.BoolToUint32(roles.backend) })
	switch {
	case err != nil:
	case len(roles.of) > 0:
		// Messages pass no tunnel device, which would cut UDP segments that came in one piece from a virtual uplink.
		for _, l := range d.Uplinks {
			if l.Type() != "veth" {
				continue
			}
			name := l.Attrs().Name
			err := d.Node.Do(func() error { return netns.SetFeature(name, "tx-udp-segmentation", false) })
			if err != nil {
				return err
			}
		}
		err = d.Objects.PilUplinksV1.Put(UplinkTunnel, d.Objects.PilOffloadIn)
	case d.DirectTunnel:
		err = d.Objects.PilUplinksV1.Put(UplinkTunnel, d.Objects.PilTunnelDirect)
	default:
		err = d.Objects.PilUplinksV1.Delete(UplinkTunnel)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = nil
		}
	}
	return err
}

// SweepPorts removes ports whose devices belong to none of these endpoints.
func (d *Hooks) SweepPorts(found []endpoint.Record) error {
	devices := map[uint32]bool{}
	for _, r := range found {
		devices[uint32(r.Device.HostIfindex)] = true
	}
	return bpfobj.DeleteOthers(d.Objects.PilPortsV1, devices)
}

func (d *Hooks) SetTunnelNode(set func(*bpfobj.PilasterNimitzNode)) error {
	var v bpfobj.PilasterNimitzNode
	if err := d.Objects.NimNodeV1.Lookup(uint32(0), &v); err != nil {
		return fmt.Errorf("read the devices of network nimitz: %w", err)
	}
	set(&v)
	if err := d.Objects.NimNodeV1.Update(uint32(0), v, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write the devices of network nimitz: %w", err)
	}
	return nil
}

// TunnelProblems returns what is missing of network nimitz, if the network is in use.
func (d *Hooks) TunnelProblems() ([]string, error) {
	var node bpfobj.PilasterNimitzNode
	if err := d.Objects.NimNodeV1.Lookup(uint32(0), &node); err != nil || node.Vxlan == 0 {
		return nil, err
	}
	const restart = "; restart the agent to repair network nimitz"
	tunnel, err := d.findTunnel()
	switch {
	case err != nil:
		return nil, err
	case tunnel == nil || tunnel.Attrs().Index != int(node.Vxlan):
		return []string{"device " + TunnelDevice + " is gone or was replaced" + restart}, nil
	case tunnel.Attrs().Flags&net.FlagUp == 0:
		return []string{"device " + TunnelDevice + " is down" + restart}, nil
	}
	if err := d.CheckProgram(tunnel, netlink.HANDLE_MIN_INGRESS, d.Objects.PilTunnelIn,
		bpfobj.PilasterProgPilTunnelIn); err != nil {
		return []string{err.Error() + restart}, nil
	}
	return nil, nil
}

// TunnelMark is never 0, the mark of packets that nothing has marked.
func TunnelMark(secret uint32) uint32 { return secret&pipeline.MarkBits | 1 }

// Indexes of the programs of networks beside netpila: in pil_networks_v1 (bpf/net/netpila/tables.h) and in
// pil_uplinks_v1 (bpf/hooks/uplink_class.h).
const (
	NetworkNimitz = uint32(0)
	UplinkGateway = uint32(0)
	UplinkTunnel  = uint32(1)
	UplinkILA     = uint32(2)

	ProgramEgressOut     = uint32(5)
	ProgramEgressIn      = uint32(6)
	ProgramEgressGateway = uint32(7)
	UplinkTunnel4        = uint32(3)

	UplinkOffloadOut = uint32(4)
)

// Programs of services, with the values of enum service_program.
const (
	programServiceOut    = uint32(0)
	programServiceIn     = uint32(1)
	programExposedIn     = uint32(2)
	programExposedTunnel = uint32(3)
	programExposedOut    = uint32(4)
)
