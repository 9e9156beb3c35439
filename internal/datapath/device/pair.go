package device

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// PairDevice is two connected devices, one of them on the node, with a program between them.
type PairDevice struct {
	*Devices
	PairDriver
}

// PairDriver is what differs between kinds of pairs.
type PairDriver interface {
	// checkKernel returns an error if this kernel lacks this kind of pair.
	checkKernel() error
	// link returns the pair to create.
	link(node, container netlink.LinkAttrs) netlink.Link
	// attachEntry attaches a program to the packets that the container sends, or replaces an older one in one step.
	attachEntry(r endpoint.Record, entry EntryProgram) error
	// ProgramID returns the id of the program at our hook; 0 if there is none.
	ProgramID(hostLink netlink.Link) (ebpf.ProgramID, error)
}

func (d PairDevice) CheckUplink(netlink.Link) error { return d.checkKernel() }

func (d PairDevice) AttachProgram(r endpoint.Record) error { return d.attachEntry(r, d.EntryFor(r)) }

// SwapEntry replaces the program on an endpoint's device by the one with the same name among others, if isOld reports
// that it is one to replace. The endpoint may have changed its networks, and with them its entry program, since r.
func (d *Devices) SwapEntry(
	r endpoint.Record,
	isOld func(ebpf.ProgramID) bool,
	others map[string]*ebpf.Program,
) error {
	pair, ok := d.Driver(r).(PairDevice)
	if !ok {
		return nil
	}
	hostLink, err := pair.hostSide(r)
	if err != nil {
		return err
	}
	id, err := pair.ProgramID(hostLink)
	if err != nil || !isOld(id) {
		return err
	}
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return err
	}
	other := others[info.Name]
	if other == nil {
		return nil
	}
	return pair.attachEntry(r, EntryProgram{other, info.Name})
}

// create makes the pair with its container side in the container's namespace: moving it there later would take 30 times
// as long.
func (d PairDevice) create(r endpoint.Record, in *ContainerNS, mtu int) (_ endpoint.Device, err error) {
	name := host.DeviceName(r.ID)
	node, container := netlink.NewLinkAttrs(), netlink.NewLinkAttrs()
	node.Name, node.MTU, node.HardwareAddr = name, mtu, host.GatewayMAC
	mac := d.macFor(r)
	container.Name, container.MTU, container.HardwareAddr = r.Interface, mtu, mac
	container.Namespace = netlink.NsFd(in.Netns.FD())
	pair := d.link(node, container)
	add := func() error {
		return d.WithDeviceLock(func() error { return netns.Retry(func() error { return d.Netlink.LinkAdd(pair) }) })
	}
	err = add()
	if errors.Is(err, os.ErrExist) {
		// After a crash a device of that name may be left without a record.
		if err = d.Devices.removeHostDevice(name); err == nil {
			err = add()
		}
	}
	if err != nil {
		if errors.Is(err, os.ErrExist) {
			return endpoint.Device{}, hasDevice(r, err)
		}
		return endpoint.Device{}, fmt.Errorf("make the device pair: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Devices.removeHostDevice(name))
		}
	}()
	if pair.Attrs().Index == 0 { // LinkAdd looks it up without returning an error
		return endpoint.Device{}, fmt.Errorf("%s disappeared while it was made", name)
	}
	r.Device = endpoint.Device{
		Kind: pair.Type(), HostName: name, HostIfindex: pair.Attrs().Index,
		HostMAC: host.GatewayMAC, ContainerMAC: mac, MTU: mtu,
	}
	if err := d.WithDeviceLock(func() error { return d.setUpHostSide(r, pair) }); err != nil {
		return endpoint.Device{}, fmt.Errorf("host side: %w", err)
	}
	return r.Device, nil
}

// macFor returns the MAC of an endpoint's device. In a tenant with addresses of its own it follows from the address, so
// that it is the same on every node: other speakers see it, now (tenant.Announced) or after a move of the tenant.
func (d PairDevice) macFor(r endpoint.Record) net.HardwareAddr {
	if slices.ContainsFunc(r.Networks(), func(n string) bool { return tenant.NetworkHas(n, tenant.OwnCIDRs) }) {
		return r.SegmentMAC()
	}
	return address.MAC(d.Cluster, d.Plan.NodeNumber(d.NodePrefix), uint16(r.ID))
}

func hasDevice(r endpoint.Record, err error) error {
	return fmt.Errorf(
		"the namespace already has a device %s; remove it or name another interface: %w",
		r.Interface,
		err,
	)
}

func (d PairDevice) setUpHostSide(r endpoint.Record, hostLink netlink.Link) error {
	if err := d.Sysctls.Set(r.Device.HostName, host.HostSysctls()); err != nil {
		return err
	}
	if err := host.SetMTU(d.Netlink, hostLink, r.Device.MTU); err != nil {
		return err
	}
	if err := netns.Retry(func() error { return d.Netlink.LinkSetARPOff(hostLink) }); err != nil {
		return err
	}
	return netns.Retry(func() error { return d.Netlink.LinkSetUp(hostLink) })
}

// hostSide finds the endpoint's device by name and compares its index: after a reboot the index in the record may be
// that of any other device, even of the uplink.
func (d PairDevice) hostSide(r endpoint.Record) (netlink.Link, error) {
	hostLink, err := d.Netlink.LinkByName(r.Device.HostName)
	if err != nil {
		return nil, fmt.Errorf("link %s: %w", r.Device.HostName, err)
	}
	if hostLink.Attrs().Index != r.Device.HostIfindex {
		return nil, fmt.Errorf(
			"link %s has index %d, not %d: it was replaced",
			r.Device.HostName,
			hostLink.Attrs().Index,
			r.Device.HostIfindex,
		)
	}
	return hostLink, nil
}

func (d PairDevice) Missing(records []endpoint.Record) map[endpoint.ID]error {
	lost := map[endpoint.ID]error{}
	for _, r := range records {
		_, err := d.hostSide(r)
		if err == nil {
			continue
		}
		if _, gone := os.Stat(r.Netns); errors.Is(gone, os.ErrNotExist) {
			err = fmt.Errorf("%w, and %w", err, dpapi.ErrNoNamespace)
		}
		lost[r.ID] = err
	}
	return lost
}

func (d PairDevice) netnsID(r endpoint.Record) (int, error) {
	hostLink, err := d.hostSide(r)
	if err != nil {
		return 0, err
	}
	if hostLink.Attrs().NetNsID < 0 {
		return 0, fmt.Errorf("the other end of %s is on the node", r.Device.HostName)
	}
	return hostLink.Attrs().NetNsID, nil
}

func (d PairDevice) netnsIDOf(in *ContainerNS) (int, error) {
	return d.Netlink.GetNetNsIdByFd(in.Netns.FD())
}

func (d PairDevice) containerLink(r endpoint.Record, in *ContainerNS) (netlink.Link, error) {
	hostLink, err := d.hostSide(r)
	if err != nil {
		return nil, err
	}
	container, err := in.LinkByName(r.Interface)
	if err != nil {
		return nil, fmt.Errorf("link %s in the container: %w", r.Interface, err)
	}
	if container.Attrs().ParentIndex != hostLink.Attrs().Index ||
		hostLink.Attrs().ParentIndex != container.Attrs().Index {
		return nil, fmt.Errorf("link %s in %s is not the other end of %s", r.Interface, r.Netns, r.Device.HostName)
	}
	return container, nil
}

func (d PairDevice) Check(r endpoint.Record) error {
	hostLink, err := d.hostSide(r)
	if err != nil {
		return err
	}
	if hostLink.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s is down", r.Device.HostName)
	}
	if hostLink.Attrs().RawFlags&unix.IFF_NOARP == 0 {
		return fmt.Errorf("link %s does ARP", r.Device.HostName)
	}
	if mtu := hostLink.Attrs().MTU; mtu != r.Device.MTU {
		return fmt.Errorf("link %s has MTU %d, not %d", r.Device.HostName, mtu, r.Device.MTU)
	}
	if err := d.Sysctls.Check(r.Device.HostName, host.HostSysctls()); err != nil {
		return err
	}
	there, err := d.ProgramID(hostLink)
	if err != nil {
		return err
	}
	entry := d.EntryFor(r)
	return d.SameProgram(there, hostLink, entry.Program, entry.Name)
}

func (d PairDevice) Repair(r endpoint.Record) error {
	hostLink, err := d.hostSide(r)
	if err != nil {
		return err
	}
	return errors.Join(d.setUpHostSide(r, hostLink), d.AttachProgram(r))
}

// setMTU first changes the side that sends: the node's side drops packets longer than its own MTU without an error.
func (d PairDevice) setMTU(r endpoint.Record, mtu int, container func() error) error {
	hostLink, err := d.hostSide(r)
	if err != nil {
		return err
	}
	set := func() error {
		if err := netns.Retry(func() error { return d.Netlink.LinkSetMTU(hostLink, mtu) }); err != nil {
			return fmt.Errorf("link %s: %w", r.Device.HostName, err)
		}
		return nil
	}
	first, second := container, set
	if mtu > hostLink.Attrs().MTU {
		first, second = set, container
	}
	if err := first(); err != nil {
		return err
	}
	return second()
}

func (d PairDevice) effectiveMTU(mtu int) int { return mtu }

func (d PairDevice) Remove(r endpoint.Record, routes ...*net.IPNet) error {
	return d.Devices.removeHostDevice(host.DeviceName(r.ID), routes...)
}

// AttachedEndpoints returns the endpoints whose devices have a program. A device may disappear during the query.
func (d PairDevice) AttachedEndpoints() ([]endpoint.ID, error) {
	links, err := netns.List(d.Netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var ids []endpoint.ID
	for _, l := range links {
		id, ours := host.DeviceID(l)
		if !ours || l.Type() != d.link(netlink.LinkAttrs{}, netlink.LinkAttrs{}).Type() {
			continue
		}
		program, err := d.ProgramID(l)
		if err := host.IgnoreGone(err); err != nil {
			return nil, err
		}
		if program != 0 {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
