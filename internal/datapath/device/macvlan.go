package device

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
)

// OnUplink marks the number of a container behind a macvlan, which is not an ifindex but derived from its namespace's
// cookie; bpf/common/device.h has the same value.
const OnUplink = 1 << 31

// macvlan is a device in the container's namespace on top of the uplink. It uses the uplink's programs. In private mode
// macvlans do not send to each other.
type macvlan struct{ *Devices }

// CheckUplink returns an error for an uplink that is itself a macvlan or similar: the kernel would put our devices
// beside it, past our programs.
func (d macvlan) CheckUplink(uplink netlink.Link) error {
	if kind := uplink.Type(); slices.Contains([]string{"macvlan", "macvtap", "ipvlan", "ipvtap"}, kind) {
		return fmt.Errorf("uplink %s is a %s: macvlans on it would bypass our programs\n  nothing was changed; use "+
			"--device veth", uplink.Attrs().Name, kind)
	}
	return nil
}

// MacvlanMAC is the MAC of a container by its number. It is unique on this node only.
func MacvlanMAC(number uint32) net.HardwareAddr {
	return binary.BigEndian.AppendUint32(net.HardwareAddr{0x06, 0x70}, number&^OnUplink)
}

// number identifies the container's packets. Cookies count the namespaces made since boot.
func (in *ContainerNS) number() (uint32, error) {
	if in.cookie >= OnUplink {
		return 0, fmt.Errorf("this machine has made %d namespaces since boot, more than there are numbers for; "+
			"reboot it, or use --device veth", in.cookie)
	}
	return OnUplink | uint32(in.cookie), nil
}

func (in *ContainerNS) hasNumber(number uint32) bool {
	n, err := in.number()
	return err == nil && n == number
}

func (d macvlan) create(r endpoint.Record, in *ContainerNS, mtu int) (endpoint.Device, error) {
	number, err := in.number()
	if err != nil {
		return endpoint.Device{}, err
	}
	mac := MacvlanMAC(number)
	add := func(name string) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = name, mtu, mac
		attrs.ParentIndex, attrs.Namespace = d.Uplinks[0].Attrs().Index, netlink.NsFd(in.Netns.FD())
		device := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}
		return netns.Retry(func() error { return d.Netlink.LinkAdd(device) })
	}
	err = d.WithDeviceLock(func() error {
		err := add(r.Interface)
		if !errors.Is(err, os.ErrExist) {
			return err
		}
		// Older kernels refuse a name that a device of the node has, so it gets another one first.
		other := fmt.Sprintf("%s%x", host.DevicePrefix, number)
		if err := add(other); err != nil {
			return err
		}
		return in.rename(other, r.Interface)
	})
	if err != nil {
		switch {
		case errors.Is(err, os.ErrExist):
			err = hasDevice(r, err)
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL):
			err = fmt.Errorf("%w; if the uplink is a member of a bridge, name the bridge with --uplink, or use "+
				"--device veth", err)
		}
		return endpoint.Device{}, fmt.Errorf("make a macvlan on %s: %w", d.UplinkNames(), err)
	}
	return endpoint.Device{
		Kind: endpoint.Macvlan, HostIfindex: int(number), HostMAC: host.GatewayMAC, ContainerMAC: mac, MTU: mtu,
	}, nil
}

// rename renames a device, or removes it if that fails.
func (in *ContainerNS) rename(from, to string) error {
	l, err := in.LinkByName(from)
	if err != nil {
		return err
	}
	if err := netns.Retry(func() error { return in.LinkSetName(l, to) }); err != nil {
		return errors.Join(err, netns.Retry(func() error { return in.LinkDel(l) }))
	}
	return nil
}

func (d macvlan) AttachProgram(endpoint.Record) error { return nil }

// Missing looks for all devices in one pass.
func (d macvlan) Missing(records []endpoint.Record) map[endpoint.ID]error {
	lost := d.forEachNetns(d, records, func(r endpoint.Record, in *ContainerNS) error {
		_, err := d.containerLink(r, in)
		return err
	})
	for id, err := range lost {
		if errors.Is(err, ErrNetnsNotFound) {
			lost[id] = fmt.Errorf("%w: %w", err, dpapi.ErrNoNamespace) // the namespace lives as long as the device
		}
	}
	return lost
}

func (d macvlan) netnsID(r endpoint.Record) (int, error) { return r.Device.HostIfindex, nil }

func (d macvlan) netnsIDOf(in *ContainerNS) (int, error) {
	number, err := in.number()
	return int(number), err
}

// errReplaced means that another container or device has taken the place of the endpoint's.
var errReplaced = errors.New("it does not belong to the endpoint")

// ErrOtherUplink means that a container's frames do not come through the uplink.
var ErrOtherUplink = errors.New("its macvlan is on another device than the uplink")

func (d macvlan) containerLink(r endpoint.Record, in *ContainerNS) (netlink.Link, error) {
	if !in.hasNumber(uint32(r.Device.HostIfindex)) {
		return nil, fmt.Errorf("namespace %s: %w", r.Netns, errReplaced)
	}
	l, err := d.find(r, in)
	if err == nil && l.Mode != netlink.MACVLAN_MODE_PRIVATE {
		err = fmt.Errorf("link %s in %s is no longer in private mode", r.Interface, r.Netns)
	}
	return l, err
}

// find accepts any mode: root in the container may have changed it.
func (d macvlan) find(r endpoint.Record, in *ContainerNS) (*netlink.Macvlan, error) {
	l, err := in.LinkByName(r.Interface)
	if err != nil {
		return nil, fmt.Errorf("link %s in the container: %w", r.Interface, err)
	}
	v, ok := l.(*netlink.Macvlan)
	if !ok {
		return nil, fmt.Errorf("link %s in %s is no macvlan: %w", r.Interface, r.Netns, errReplaced)
	}
	if v.ParentIndex != d.Uplinks[0].Attrs().Index {
		return nil, fmt.Errorf("link %s in %s: %w %s", r.Interface, r.Netns, ErrOtherUplink, d.UplinkNames())
	}
	return v, nil
}

func (d macvlan) Check(endpoint.Record) error  { return nil }
func (d macvlan) Repair(endpoint.Record) error { return nil }

func (d macvlan) setMTU(_ endpoint.Record, _ int, container func() error) error { return container() }

func (d macvlan) effectiveMTU(mtu int) int {
	if uplink, err := d.Netlink.LinkByIndex(d.Uplinks[0].Attrs().Index); err == nil {
		mtu = min(mtu, uplink.Attrs().MTU)
	}
	return mtu
}

// Remove leaves a device or container alone that has taken the place of the endpoint's.
func (d macvlan) Remove(r endpoint.Record, routes ...*net.IPNet) error {
	for _, dst := range routes {
		if err := d.DeleteNodeRoute(dst); err != nil {
			return err
		}
	}
	// Numbers start again after a reboot, and another endpoint may have this one by now.
	if id := d.EndpointOf(uint32(r.Device.HostIfindex)); id != 0 && id != r.ID {
		return nil
	}
	err := d.forEachNetns(d, []endpoint.Record{r}, d.removeInside)[r.ID]
	if errors.Is(err, ErrNetnsNotFound) {
		return nil // the device was removed with its namespace
	}
	return err
}

func (d macvlan) removeInside(r endpoint.Record, in *ContainerNS) error {
	l, err := d.find(r, in)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) || errors.Is(err, errReplaced) {
		return nil
	}
	if err != nil {
		return err
	}
	// Without the device lock: the kernel waits for RCU readers after it releases its own lock, for all callers at
	// once.
	if err := host.IgnoreGone(netns.Retry(func() error { return in.LinkDel(l) })); err != nil {
		return fmt.Errorf("remove device %s in %s: %w", r.Interface, r.Netns, err)
	}
	return nil
}

// AttachedEndpoints returns the endpoints with a map entry: the programs for macvlans are always attached.
func (d macvlan) AttachedEndpoints() ([]endpoint.ID, error) {
	var ids []endpoint.ID
	err := d.forEachEpDst(func(l bpfobj.PilasterEpDst) {
		if l.Ifindex&OnUplink != 0 {
			ids = append(ids, endpoint.ID(l.Endpoint))
		}
	})
	return ids, err
}

// SweepMacvlans removes macvlans of no endpoint, which an ADD leaves if the agent crashes. They have no map entries, so
// their packets are dropped, but only while the uplink's programs are attached.
func (d *Devices) SweepMacvlans(keep []endpoint.Record) error {
	if _, err := os.Stat(filepath.Join(d.LinksDir(), "guard_out")); err != nil && d.DeviceKind != endpoint.Macvlan {
		return nil // there never were any
	}
	known := map[uint32]bool{}
	for _, r := range keep {
		known[uint32(r.Device.HostIfindex)] = true
	}
	return d.Node.Do(func() error {
		left, err := findMacvlans()
		for _, m := range left {
			if !known[m.number] {
				d.Log.Warn("removing a device of no endpoint", "device", m.link.Attrs().Name, "namespace", m.path)
				err = errors.Join(err, m.Remove())
			}
		}
		return err
	})
}

// StaleMacvlans finds the macvlans of the calling thread's node.
func StaleMacvlans() ([]network.StaleState, error) {
	found, err := findMacvlans()
	var all []network.StaleState
	for _, m := range found {
		all = append(
			all,
			network.StaleState{
				Kind:   network.StateDevice,
				Name:   m.link.Attrs().Name + " in " + m.path,
				Remove: m.Remove,
			},
		)
	}
	return all, err
}

// staleMacvlan is a device of ours in a namespace that had this path.
type staleMacvlan struct {
	path   string
	number uint32
	link   netlink.Link
}

// findMacvlans searches all namespaces of the machine for macvlans on top of devices of the calling thread's namespace:
// no device of the node says in which namespaces they are.
func findMacvlans() (all []staleMacvlan, err error) {
	err = WalkNetns(func(path string, in *ContainerNS) (bool, error) {
		there, err := macvlansOf(path, in)
		all = append(all, there...)
		return false, err
	})
	return all, err
}

func macvlansOf(path string, in *ContainerNS) ([]staleMacvlan, error) {
	node, err := netns.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	defer node.Close()
	here, err := in.GetNetNsIdByFd(node.FD())
	if err != nil || here < 0 {
		return nil, err // no device in it is on top of a device of this node
	}
	number, err := in.number()
	if err != nil {
		return nil, nil // we made no device there
	}
	links, err := netns.List(in.LinkList)
	var all []staleMacvlan
	for _, l := range links {
		if l.Type() == endpoint.Macvlan && l.Attrs().NetNsID == here &&
			slices.Equal(l.Attrs().HardwareAddr, MacvlanMAC(number)) {
			all = append(all, staleMacvlan{path, number, l})
		}
	}
	return all, err
}

// Remove checks the device again before it removes it: the path may lead to another namespace by now.
func (m staleMacvlan) Remove() error {
	in, err := OpenContainerNS(m.path)
	if isNetnsGone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	again, err := macvlansOf(m.path, in)
	if err != nil ||
		!slices.ContainsFunc(
			again,
			func(o staleMacvlan) bool { return o.number == m.number && o.link.Attrs().Index == m.link.Attrs().Index },
		) {
		return err
	}
	return host.IgnoreGone(netns.Retry(func() error { return in.LinkDel(m.link) }))
}
