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

// tunnelDevice is the kernel's VXLAN device, which has no tunnel of its own: the programs say of each packet where it
// goes, and are told where it came from.
const TunnelDevice = "pilvxlan"

// createTunnel makes the device where there is none, sets its MTU and gives the node its tunnel address.
func (d *Hooks) CreateTunnel() error {
	tunnel, err := d.findTunnel()
	if err != nil {
		return err
	}
	if tunnel == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = TunnelDevice
		dev := &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, GBP: true, Port: pipeline.UDPPort}
		if err := netns.Retry(func() error { return d.Netlink.LinkAdd(dev) }); err != nil {
			if l, _ := d.Netlink.LinkByName(TunnelDevice); l != nil {
				return fmt.Errorf(
					"%s is a %s of somebody else: the second network's is VXLAN with external metadata, group policy and UDP port %d; nothing was changed: rename that one, or remove it",
					TunnelDevice,
					l.Type(),
					pipeline.UDPPort,
				)
			}
			return fmt.Errorf(
				"make the device %s: %w; nothing was changed: the kernel needs VXLAN (CONFIG_VXLAN), and no other may have UDP port %d of this node",
				TunnelDevice,
				err,
				pipeline.UDPPort,
			)
		}
		if tunnel, err = d.findTunnel(); err != nil || tunnel == nil {
			return fmt.Errorf("find the device %s: %w", TunnelDevice, err)
		}
	}
	mtu, err := d.MTU()
	if err == nil {
		err = d.SetTunnelMTU(mtu)
	}
	if err != nil {
		return err
	}
	lo, err := d.Netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	self := VtepAddress(d.NodePrefix)
	for _, step := range []func() error{
		func() error { return d.Sysctls.Set(TunnelDevice, host.HostSysctls()) },
		func() error { return d.Netlink.LinkSetARPOff(tunnel) },
		func() error { return d.Netlink.AddrReplace(lo, self) },
	} {
		if err := netns.Retry(step); err != nil {
			return fmt.Errorf("set up %s: %w", TunnelDevice, err)
		}
	}
	return nil
}

// setTunnelMTU has the device, where there is one, take what leaves by the uplink.
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

// vtepAddress is no source that the node's stack would choose by itself.
func VtepAddress(node netip.Prefix) *netlink.Addr {
	return &netlink.Addr{
		IPNet:       host.HostNet(pipeline.VTEP(node)),
		Flags:       unix.IFA_F_NODAD,
		ValidLft:    math.MaxUint32,
		PreferedLft: 0,
	}
}

// isTunnel tells the device from what else may have its name.
func IsTunnel(l netlink.Link) bool {
	v, ok := l.(*netlink.Vxlan)
	return ok && v.Name == TunnelDevice && v.FlowBased && v.GBP && v.Port == pipeline.UDPPort
}

// findTunnel is nil where there is none.
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

// attachNimitz moves the second network's hooks to the programs of this build, where that network is in use. Its tables
// are whole by then: those of another size have been taken over.
func (d *Hooks) AttachNimitz() error {
	tunnel, err := d.findTunnel()
	if err != nil || tunnel == nil {
		return err
	}
	index := tunnel.Attrs().Index
	steps := []func() error{
		func() error {
			return host.AttachFilter(
				d.Netlink,
				index,
				TunnelDevice,
				netlink.HANDLE_MIN_INGRESS,
				d.Objects.PilTunnelIn,
				bpfobj.PilasterProgPilTunnelIn,
			)
		},
		func() error { return d.SetNimitzNode(func(v *bpfobj.PilasterNimitzNode) { v.Vxlan = uint32(index) }) },
		func() error { return d.Objects.PilNetworksV1.Put(NetworkNimitz, d.Objects.PilNimitz) },
		func() error { return netns.Retry(func() error { return d.Netlink.LinkSetUp(tunnel) }) },
	}
	for _, step := range steps {
		if err := d.WithDeviceLock(step); err != nil {
			return fmt.Errorf("attach the second network: %w", err)
		}
	}
	return nil
}

// sweepPorts has no device but of these endpoints be a port.
func (d *Hooks) SweepPorts(found []endpoint.Record) error {
	devices := map[uint32]bool{}
	for _, r := range found {
		devices[uint32(r.Device.HostIfindex)] = true
	}
	return bpfobj.DeleteOthers(d.Objects.PilPortsV1, devices)
}

func (d *Hooks) SetNimitzNode(set func(*bpfobj.PilasterNimitzNode)) error {
	var v bpfobj.PilasterNimitzNode
	if err := d.Objects.NimNodeV1.Lookup(uint32(0), &v); err != nil {
		return fmt.Errorf("read the second network's devices: %w", err)
	}
	set(&v)
	if err := d.Objects.NimNodeV1.Update(uint32(0), v, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write the second network's devices: %w", err)
	}
	return nil
}

// tunnelProblems says what is missing of the second network, where it is in use.
func (d *Hooks) TunnelProblems() ([]string, error) {
	var node bpfobj.PilasterNimitzNode
	if err := d.Objects.NimNodeV1.Lookup(uint32(0), &node); err != nil || node.Vxlan == 0 {
		return nil, err
	}
	const restart = "; restart the agent to bring the second network back"
	tunnel, err := d.findTunnel()
	switch {
	case err != nil:
		return nil, err
	case tunnel == nil || tunnel.Attrs().Index != int(node.Vxlan):
		return []string{"device " + TunnelDevice + " is gone or was made anew" + restart}, nil
	case tunnel.Attrs().Flags&net.FlagUp == 0:
		return []string{"device " + TunnelDevice + " is down" + restart}, nil
	}
	if err := d.CheckProgram(tunnel, netlink.HANDLE_MIN_INGRESS, d.Objects.PilTunnelIn, bpfobj.PilasterProgPilTunnelIn); err != nil {
		return []string{err.Error() + restart}, nil
	}
	return nil, nil
}

// tunnelMark is never 0, which is what packets have that nobody marks.
func TunnelMark(secret uint32) uint32 { return secret&pipeline.MarkBits | 1 }

// networkNimitz is the second network's place in pil_networks (bpf/net/netpila/tables.h).
const NetworkNimitz = uint32(0)
