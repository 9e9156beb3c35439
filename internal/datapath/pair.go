package datapath

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

const devicePrefix = "pil"

// deviceName is the host side's name: at most 3+5 of the 15 characters Linux allows.
func deviceName(id endpoint.ID) string { return devicePrefix + strconv.Itoa(int(id)) }

// deviceID is the endpoint whose host side a link is. Somebody else's pil007 is none of ours.
func deviceID(l netlink.Link) (endpoint.ID, bool) {
	name := l.Attrs().Name
	number, ours := strings.CutPrefix(name, devicePrefix)
	id, err := strconv.ParseUint(number, 10, 16)
	ours = ours && (l.Type() == Veth || l.Type() == Netkit)
	return endpoint.ID(id), ours && err == nil && name == deviceName(endpoint.ID(id))
}

// The pair is a wire for two, so the MACs need not differ between endpoints; constant ones tell a
// container nothing. bpf/common/packet.h has the same two.
var (
	gatewayMAC   = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
	containerMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
)

// pairDevice is two devices, one of them on the node, and our program between them.
type pairDevice struct {
	*Datapath
	pairDriver
}

// pairDriver is what pairs differ in.
type pairDriver interface {
	// checkKernel says why this kernel has no such pair.
	checkKernel() error
	// link is the pair for the kernel to make.
	link(node, container netlink.LinkAttrs) netlink.Link
	// attachProgram lets what the container sends meet our program, or swaps an older one for it in one step.
	attachProgram(r endpoint.Record) error
	// programID is the id of the program in the place of ours; 0 without one.
	programID(host netlink.Link) (ebpf.ProgramID, error)
}

func (d pairDevice) checkUplink(netlink.Link) error { return d.checkKernel() }

// create makes the pair, its container side born in the container's namespace: moving it there later
// would cost 30 times as much.
func (d pairDevice) create(r endpoint.Record, in *containerNS, mtu int) (_ endpoint.Device, err error) {
	name := deviceName(r.ID)
	node, container := netlink.NewLinkAttrs(), netlink.NewLinkAttrs()
	node.Name, node.MTU, node.HardwareAddr = name, mtu, gatewayMAC
	container.Name, container.MTU, container.HardwareAddr, container.Namespace = r.Interface, mtu, containerMAC, netlink.NsFd(in.netns.FD())
	pair := d.link(node, container)
	add := func() error {
		return d.withDeviceLock(func() error { return netns.Retry(func() error { return d.netlink.LinkAdd(pair) }) })
	}
	err = add()
	if errors.Is(err, os.ErrExist) {
		// A device of that name is what a crash left of an endpoint that has no record.
		if err = d.Datapath.removeHostDevice(name); err == nil {
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
			err = errors.Join(err, d.Datapath.removeHostDevice(name))
		}
	}()
	if pair.Attrs().Index == 0 { // LinkAdd looks it up, and does not say that it failed
		return endpoint.Device{}, fmt.Errorf("%s went while it was made", name)
	}
	r.Device = endpoint.Device{
		Kind: pair.Type(), HostName: name, HostIfindex: pair.Attrs().Index,
		HostMAC: gatewayMAC, ContainerMAC: containerMAC, MTU: mtu,
	}
	if err := d.withDeviceLock(func() error { return d.setUpHostSide(r, pair) }); err != nil {
		return endpoint.Device{}, fmt.Errorf("host side: %w", err)
	}
	return r.Device, nil
}

func hasDevice(r endpoint.Record, err error) error {
	return fmt.Errorf("the namespace has a device %s already; remove it or name another interface: %w", r.Interface, err)
}

func (d pairDevice) setUpHostSide(r endpoint.Record, host netlink.Link) error {
	if err := d.sysctls.set(r.Device.HostName, hostSysctls()); err != nil {
		return err
	}
	if err := setMTU(d.netlink, host, r.Device.MTU); err != nil {
		return err
	}
	if err := netns.Retry(func() error { return d.netlink.LinkSetARPOff(host) }); err != nil {
		return err
	}
	return netns.Retry(func() error { return d.netlink.LinkSetUp(host) })
}

// hostSide finds the endpoint's device. After a reboot its index may be any other device's, even the
// uplink's.
func (d pairDevice) hostSide(r endpoint.Record) (netlink.Link, error) {
	host, err := d.netlink.LinkByName(r.Device.HostName)
	if err != nil {
		return nil, fmt.Errorf("link %s: %w", r.Device.HostName, err)
	}
	if host.Attrs().Index != r.Device.HostIfindex {
		return nil, fmt.Errorf("link %s has index %d, not %d: it was made anew", r.Device.HostName, host.Attrs().Index, r.Device.HostIfindex)
	}
	return host, nil
}

func (d pairDevice) missing(records []endpoint.Record) map[endpoint.ID]error {
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

func (d pairDevice) netnsID(r endpoint.Record) (int, error) {
	host, err := d.hostSide(r)
	if err != nil {
		return 0, err
	}
	if host.Attrs().NetNsID < 0 {
		return 0, fmt.Errorf("the other end of %s is on the node", r.Device.HostName)
	}
	return host.Attrs().NetNsID, nil
}

func (d pairDevice) netnsIDOf(in *containerNS) (int, error) {
	return d.netlink.GetNetNsIdByFd(in.netns.FD())
}

func (d pairDevice) containerLink(r endpoint.Record, in *containerNS) (netlink.Link, error) {
	host, err := d.hostSide(r)
	if err != nil {
		return nil, err
	}
	container, err := in.LinkByName(r.Interface)
	if err != nil {
		return nil, fmt.Errorf("link %s in the container: %w", r.Interface, err)
	}
	if container.Attrs().ParentIndex != host.Attrs().Index || host.Attrs().ParentIndex != container.Attrs().Index {
		return nil, fmt.Errorf("link %s in %s is not the other end of %s", r.Interface, r.Netns, r.Device.HostName)
	}
	return container, nil
}

func (d pairDevice) check(r endpoint.Record) error {
	host, err := d.hostSide(r)
	if err != nil {
		return err
	}
	if host.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s is down", r.Device.HostName)
	}
	if host.Attrs().RawFlags&unix.IFF_NOARP == 0 {
		return fmt.Errorf("link %s does ARP", r.Device.HostName)
	}
	if mtu := host.Attrs().MTU; mtu != r.Device.MTU {
		return fmt.Errorf("link %s has MTU %d, not %d", r.Device.HostName, mtu, r.Device.MTU)
	}
	if err := d.sysctls.check(r.Device.HostName, hostSysctls()); err != nil {
		return err
	}
	there, err := d.programID(host)
	if err != nil {
		return err
	}
	return sameProgram(there, host, d.objects.PilContainer, pilasterProgPilContainer)
}

func (d pairDevice) repair(r endpoint.Record) error {
	host, err := d.hostSide(r)
	if err != nil {
		return err
	}
	return errors.Join(d.setUpHostSide(r, host), d.attachProgram(r))
}

// setMTU changes the side first that sends: the node's side takes no packet longer than its own MTU, and
// says nothing of it.
func (d pairDevice) setMTU(r endpoint.Record, mtu int, container func() error) error {
	host, err := d.hostSide(r)
	if err != nil {
		return err
	}
	set := func() error {
		if err := netns.Retry(func() error { return d.netlink.LinkSetMTU(host, mtu) }); err != nil {
			return fmt.Errorf("link %s: %w", r.Device.HostName, err)
		}
		return nil
	}
	first, second := container, set
	if mtu > host.Attrs().MTU {
		first, second = set, container
	}
	if err := first(); err != nil {
		return err
	}
	return second()
}

func (d pairDevice) effectiveMTU(mtu int) int { return mtu }

func (d pairDevice) remove(r endpoint.Record, routes ...*net.IPNet) error {
	return d.Datapath.removeHostDevice(deviceName(r.ID), routes...)
}

// attachedEndpoints finds the devices that have a program. One may go while it is asked for.
func (d pairDevice) attachedEndpoints() ([]endpoint.ID, error) {
	links, err := netns.List(d.netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var ids []endpoint.ID
	for _, l := range links {
		id, ours := deviceID(l)
		if !ours || l.Type() != d.link(netlink.LinkAttrs{}, netlink.LinkAttrs{}).Type() {
			continue
		}
		program, err := d.programID(l)
		if err := ignoreGone(err); err != nil {
			return nil, err
		}
		if program != 0 {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
