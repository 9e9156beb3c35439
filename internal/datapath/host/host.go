package host

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/netns"
)

// Host is what all parts of the data path share: the node's network namespace, its uplink, and the loaded programs and
// maps.
type Host struct {
	Node    *netns.Namespace
	Netlink *netlink.Handle // in node
	Sysctls Sysctls         // of node
	Uplinks []netlink.Link  // at least one
	Objects bpfobj.PilasterObjects
	Log     *slog.Logger

	DeviceKind string // of new containers: Veth, Macvlan or Netkit
	BPFFS      string // folder of the pins
	Cluster    string // UUID, which MACs are derived from
	NodePrefix netip.Prefix
	Plan       address.Plan
	MTUReserve int // bytes that a container's MTU stays below the uplink's
	// programs push and pull outer headers of tunnels, without the kernel's device
	DirectTunnel bool
	AcceptMark   uint32 // of packets that policy has accepted

	StandIns sync.Map // by ebpf.ProgramID: programs in the place of those in Objects during a trace

	DeviceMu     sync.Mutex // see WithDeviceLock
	generationMu sync.Mutex // guards the flow cache's generation, which is raised after the maps have changed
}

func (d *Host) MapsDir() string { return filepath.Join(d.BPFFS, bpfobj.MapsFolder) }

func (d *Host) LinksDir() string { return filepath.Join(d.BPFFS, bpfobj.LinksFolder) }

// InvalidateFlows makes the programs ignore every cached flow, as after every change of a map.
func (d *Host) InvalidateFlows() error {
	d.generationMu.Lock()
	defer d.generationMu.Unlock()
	return d.BumpGeneration(d.Objects.PilGenerationV1)
}

// BumpGeneration raises a counter by which the programs notice that other maps have changed.
func (d *Host) BumpGeneration(m *ebpf.Map) error {
	var count uint32
	if err := m.Lookup(uint32(0), &count); err != nil {
		return fmt.Errorf("read the generation: %w", err)
	}
	if err := m.Put(uint32(0), count+1); err != nil {
		return fmt.Errorf("count the generation: %w", err)
	}
	return nil
}

// WithDeviceLock runs a change of devices while this process makes no other such change. The kernel has one lock for
// devices. If it is taken, the kernel retries a write to a sysctl such as forwarding without a pause, for the 20 ms
// that the removal of another device may take.
func (d *Host) WithDeviceLock(change func() error) error {
	d.DeviceMu.Lock()
	defer d.DeviceMu.Unlock()
	return change()
}

const IPv6MinMTU = 1280 // RFC 8200 §5

// MTU returns the MTU of containers: the lowest of the uplinks' less the reserve.
func (d *Host) MTU() (int, error) {
	lowest := math.MaxInt
	for _, l := range d.Uplinks {
		uplink, err := d.Netlink.LinkByIndex(l.Attrs().Index)
		if err != nil {
			return 0, fmt.Errorf("uplink %s: %w", l.Attrs().Name, err)
		}
		mtu := uplink.Attrs().MTU - d.MTUReserve
		if mtu < IPv6MinMTU {
			return 0, fmt.Errorf(
				"uplink %s has an MTU of %d; less the reserve of %d, that is below IPv6's minimum of %d; increase "+
					"the MTU, or decrease --mtu-reserve",
				uplink.Attrs().Name,
				uplink.Attrs().MTU,
				d.MTUReserve,
				IPv6MinMTU,
			)
		}
		lowest = min(lowest, mtu)
	}
	return lowest, nil
}

// UplinkNames returns the uplinks' names for messages.
func (d *Host) UplinkNames() string {
	names := make([]string, len(d.Uplinks))
	for i, l := range d.Uplinks {
		names[i] = l.Attrs().Name
	}
	return strings.Join(names, ", ")
}

func (d *Host) SweepFolder(dir string, remove func(string) error, wanted func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	for _, e := range entries {
		if wanted(e.Name()) {
			continue
		}
		pin := filepath.Join(dir, e.Name())
		d.Log.Info("removing a pin of another build, size or interface", "pin", pin)
		if err := remove(pin); err != nil {
			return fmt.Errorf("remove pin %s: %w", pin, err)
		}
	}
	return nil
}

// CarrierTimeout is far above the one second that the kernel's link watch takes at most.
const CarrierTimeout = 10 * time.Second

// IgnoreGone returns nil for errors that say that the object is already gone.
func IgnoreGone(err error) error {
	for _, e := range []error{unix.ENODEV, unix.ESRCH, unix.EADDRNOTAVAIL, unix.ENOLINK} {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}

// Monotonic returns CLOCK_MONOTONIC in ns, as programs read it.
func Monotonic() (uint64, error) {
	var clock unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &clock); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint64(clock.Nano()), nil
}

// SetMTU writes the MTU of a link if it differs.
func SetMTU(h *netlink.Handle, l netlink.Link, mtu int) error {
	if l.Attrs().MTU == mtu {
		return nil
	}
	return netns.Retry(func() error { return h.LinkSetMTU(l, mtu) })
}
