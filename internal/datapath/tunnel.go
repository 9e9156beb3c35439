package datapath

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// tunnelDevice is the kernel's VXLAN device, which has no tunnel of its own: the programs say of each packet where it
// goes, and are told where it came from.
const tunnelDevice = "pilvxlan"

// createTunnel makes the device where there is none, sets its MTU and gives the node its tunnel address.
func (d *Datapath) createTunnel() error {
	tunnel, err := d.findTunnel()
	if err != nil {
		return err
	}
	if tunnel == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = tunnelDevice
		device := &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, GBP: true, Port: pipeline.UDPPort}
		if err := netns.Retry(func() error { return d.netlink.LinkAdd(device) }); err != nil {
			if l, _ := d.netlink.LinkByName(tunnelDevice); l != nil {
				return fmt.Errorf(
					"%s is a %s of somebody else: the second network's is VXLAN with external metadata, group policy and UDP port %d; nothing was changed: rename that one, or remove it",
					tunnelDevice,
					l.Type(),
					pipeline.UDPPort,
				)
			}
			return fmt.Errorf(
				"make the device %s: %w; nothing was changed: the kernel needs VXLAN (CONFIG_VXLAN), and no other may have UDP port %d of this node",
				tunnelDevice,
				err,
				pipeline.UDPPort,
			)
		}
		if tunnel, err = d.findTunnel(); err != nil || tunnel == nil {
			return fmt.Errorf("find the device %s: %w", tunnelDevice, err)
		}
	}
	mtu, err := d.MTU()
	if err == nil {
		err = d.setTunnelMTU(mtu)
	}
	if err != nil {
		return err
	}
	lo, err := d.netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	self := vtepAddress(d.config.NodePrefix)
	for _, step := range []func() error{
		func() error { return d.sysctls.set(tunnelDevice, hostSysctls()) },
		func() error { return d.netlink.LinkSetARPOff(tunnel) },
		func() error { return d.netlink.AddrReplace(lo, self) },
	} {
		if err := netns.Retry(step); err != nil {
			return fmt.Errorf("set up %s: %w", tunnelDevice, err)
		}
	}
	return nil
}

// setTunnelMTU has the device, where there is one, take what leaves by the uplink.
func (d *Datapath) setTunnelMTU(mtu int) error {
	tunnel, err := d.findTunnel()
	if err != nil || tunnel == nil {
		return err
	}
	if err := setMTU(d.netlink, tunnel, mtu-pipeline.Overhead); ignoreGone(err) != nil {
		return fmt.Errorf("MTU of %s: %w", tunnelDevice, err)
	}
	return nil
}

// vtepAddress is no source that the node's stack would choose by itself.
func vtepAddress(node netip.Prefix) *netlink.Addr {
	return &netlink.Addr{
		IPNet:       hostNet(pipeline.VTEP(node)),
		Flags:       unix.IFA_F_NODAD,
		ValidLft:    math.MaxUint32,
		PreferedLft: 0,
	}
}

// isTunnel tells the device from what else may have its name.
func isTunnel(l netlink.Link) bool {
	v, ok := l.(*netlink.Vxlan)
	return ok && v.Name == tunnelDevice && v.FlowBased && v.GBP && v.Port == pipeline.UDPPort
}

// findTunnel is nil where there is none.
func (d *Datapath) findTunnel() (netlink.Link, error) {
	l, err := d.netlink.LinkByName(tunnelDevice)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) || err == nil && !isTunnel(l) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", tunnelDevice, err)
	}
	return l, nil
}

// attachNimitz moves the second network's hooks to the programs of this build, where that network is in use. Its tables
// are whole by then: those of another size have been taken over.
func (d *Datapath) attachNimitz() error {
	tunnel, err := d.findTunnel()
	if err != nil || tunnel == nil {
		return err
	}
	index := tunnel.Attrs().Index
	steps := []func() error{
		func() error {
			return AttachFilter(
				d.netlink,
				index,
				tunnelDevice,
				netlink.HANDLE_MIN_INGRESS,
				d.objects.PilTunnelIn,
				pilasterProgPilTunnelIn,
			)
		},
		func() error { return d.setNimitzNode(func(v *pilasterNimitzNode) { v.Vxlan = uint32(index) }) },
		func() error { return d.objects.PilNetworksV1.Put(networkNimitz, d.objects.PilNimitz) },
		func() error { return netns.Retry(func() error { return d.netlink.LinkSetUp(tunnel) }) },
	}
	for _, step := range steps {
		if err := d.withDeviceLock(step); err != nil {
			return fmt.Errorf("attach the second network: %w", err)
		}
	}
	return nil
}

// sweepPorts has no device but of these endpoints be a port.
func (d *Datapath) sweepPorts(found []endpoint.Record) error {
	devices := map[uint32]bool{}
	for _, r := range found {
		devices[uint32(r.Device.HostIfindex)] = true
	}
	return deleteOthers(d.objects.PilPortsV1, devices)
}

func (d *Datapath) setNimitzNode(set func(*pilasterNimitzNode)) error {
	var v pilasterNimitzNode
	if err := d.objects.NimNodeV1.Lookup(uint32(0), &v); err != nil {
		return fmt.Errorf("read the second network's devices: %w", err)
	}
	set(&v)
	if err := d.objects.NimNodeV1.Update(uint32(0), v, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write the second network's devices: %w", err)
	}
	return nil
}

// tunnelProblems says what is missing of the second network, where it is in use.
func (d *Datapath) tunnelProblems() ([]string, error) {
	var node pilasterNimitzNode
	if err := d.objects.NimNodeV1.Lookup(uint32(0), &node); err != nil || node.Vxlan == 0 {
		return nil, err
	}
	const restart = "; restart the agent to bring the second network back"
	tunnel, err := d.findTunnel()
	switch {
	case err != nil:
		return nil, err
	case tunnel == nil || tunnel.Attrs().Index != int(node.Vxlan):
		return []string{"device " + tunnelDevice + " is gone or was made anew" + restart}, nil
	case tunnel.Attrs().Flags&net.FlagUp == 0:
		return []string{"device " + tunnelDevice + " is down" + restart}, nil
	}
	if err := d.checkProgram(tunnel, netlink.HANDLE_MIN_INGRESS, d.objects.PilTunnelIn, pilasterProgPilTunnelIn); err != nil {
		return []string{err.Error() + restart}, nil
	}
	return nil, nil
}
