package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/egressmap"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/datapath/policymap"
	"pilaster.io/pilaster/internal/datapath/servicemap"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Config describes a node's packet path. It must not change while endpoints exist.
type Config struct {
	Uplinks      []string // devices to the fabric and to hosts outside, 1 to MaxUplinks; macvlans need a single one
	Cluster      string   // UUID of the cluster, which containers' MACs are derived from
	NodePrefix   netip.Prefix
	Plan         address.Plan
	BPFFS        string // folder for pins; bpffs is mounted there when it is not on one
	MaxEndpoints int    // 1..65535
	MaxTenantIDs int    // of all tenants of the node; 1..65535, 0 means dpapi.DefaultMaxTenantIDs
	// entries of each table of a network with mappings, except its senders and peers; 0 means DefaultMaxMappings
	MaxMappings int
	MaxRules    int // entries of each table of policies; 0 means DefaultMaxRules
	MaxSessions int // of containers whose tenants have policies; 0 means DefaultMaxSessions
	MTUReserve  int // bytes that the containers' MTU stays below the uplink's
	// the prefix of the nodes' IPv4 tunnel addresses, for networks with an IPv4 underlay; without it there are none
	VTEP4     netip.Prefix
	ClearDSCP bool // of packets to the fabric that are in no tunnel
	// the programs push and pull the headers of the VXLAN tunnel, instead of the kernel's device
	DirectTunnel bool
	Device       string // kind of new containers' devices: one of device.DeviceChoices; "" means the first
	// CgroupRoot is the cgroup (version 2) whose sockets get a backend when they connect to a service; "": none, all
	// packets of containers to services are translated, and processes of the node reach none.
	CgroupRoot     string
	CgroupOptional bool // the node works also if the programs cannot be attached there
	NoCache        bool // for measurements only: disables the flow cache
	Log            *slog.Logger
}

// Datapath implements dpapi.Driver on Linux.
type Datapath struct {
	*device.Devices
	*policymap.Policies
	*servicemap.Tables
	Egress *egressmap.Tables

	config       Config
	deviceReason string      // why Auto chose this kind of device; empty if the kind was named
	oldCounters  []*ebpf.Map // drop counters of other layouts
	cookie       uint64      // of the node's network namespace
	networkPins  []string    // of maps that LoadNetwork pinned
	// what LoadNetwork loaded, by symbol, for the programs with tracing
	networkMaps      map[string]*ebpf.Map
	networkConstants map[string][]byte
	traced           []func() (*ebpf.CollectionSpec, error) // object files of networks, with tracing
	standInWork      standInWork

	sweptMu sync.Mutex
	swept   time.Time // when TenantSessions last freed expired sessions

	portUsers portUsers

	knownTenantIDs sync.Map // tenant ids that this process wrote; they stay without an endpoint
	clients        *servicemap.Clients
}

var (
	_ dpapi.Driver  = (*Datapath)(nil)
	_ dpapi.Sharing = (*Datapath)(nil)
)

// Open loads the packet path of the node whose namespace the calling thread is in. It proves the kernel's features by
// using them. Programs that an earlier process attached keep working until Restore replaces them.
func Open(c Config) (_ *Datapath, err error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	d, err := openNode(c)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if err := host.MountBPFFS(c.BPFFS); err != nil {
		return nil, err
	}
	// The programs know the node's device by its index.
	for _, step := range []func() error{d.CreateNodeDevice, d.load, d.LoadDeviceOwners, d.verifyCipher,
		d.BlockUnclaimedPrefixes} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// CheckUplink returns the error that Open would return for this uplink. It changes nothing, and needs no prefix, so
// that a node can check its uplink before it joins.
func CheckUplink(c Config) error {
	d, err := openNode(c)
	if err != nil {
		return err
	}
	return d.Close()
}

// UplinkKind is the only supported type of uplink: the programs expect an Ethernet header before the IP header.
const UplinkKind = "ether"

// openNode opens the calling thread's namespace and finds the uplink. It fails if the uplink carries the packet path of
// another agent.
func openNode(c Config) (_ *Datapath, err error) {
	if err := device.CheckDeviceKind(c.Device); err != nil {
		return nil, err
	}
	c.MaxTenantIDs = cmp.Or(c.MaxTenantIDs, dpapi.DefaultMaxTenantIDs)
	c.MaxMappings = cmp.Or(c.MaxMappings, DefaultMaxMappings)
	c.MaxRules = cmp.Or(c.MaxRules, DefaultMaxRules)
	c.MaxSessions = cmp.Or(c.MaxSessions, DefaultMaxSessions)
	d := newDatapath(c)
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.Node, err = netns.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, err
	}
	if d.Netlink, err = d.Node.Netlink(); err != nil {
		return nil, err
	}
	if err = d.Node.Do(func() (err error) {
		d.Sysctls, err = host.OpenSysctls("ipv6",
			"ipv4")
		return err
	}); err != nil {
		return nil, err
	}
	if err := d.findUplinks(c.Uplinks); err != nil {
		return nil, err
	}
	if _, err := d.MTU(); err != nil {
		return nil, fmt.Errorf("%w; nothing was changed", err)
	}
	return d, d.CheckUplinkFree()
}

// findUplinks opens the uplinks by their names and checks them.
func (d *Datapath) findUplinks(names []string) error {
	if err := CheckUplinkNames(names, d.config.Device); err != nil {
		return fmt.Errorf("%w; nothing was changed", err)
	}
	for _, name := range names {
		l, err := d.Netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("--uplink %s: %w; nothing was changed: name the device to the fabric", name, err)
		}
		if kind := l.Attrs().EncapType; kind != UplinkKind {
			return fmt.Errorf("uplink %s is no Ethernet device (%s); nothing was changed; name the device to the "+
				"fabric with --uplink", name, kind)
		}
		if hook.IsOurs(l) {
			return fmt.Errorf("uplink %s is a device of Pilaster; nothing was changed; name the device to the fabric "+
				"with --uplink", name)
		}
		if err := d.Drivers()[d.config.Device].CheckUplink(l); err != nil {
			return err
		}
		d.Uplinks = append(d.Uplinks, l)
	}
	return nil
}

// MaxUplinks is the number of uplinks that the programs know; MAX_UPLINKS in bpf/common/device.h.
const MaxUplinks = 8

// CheckUplinkNames returns an error for uplinks that a data path with a kind of devices cannot have.
func CheckUplinkNames(names []string, kind string) error {
	kind, _ = device.ChooseDevice(kind)
	switch distinct := slices.Compact(slices.Sorted(slices.Values(names))); {
	case len(names) == 0:
		return errors.New("there is no uplink: name the device to the fabric with --uplink")
	case len(distinct) < len(names):
		return fmt.Errorf("--uplink names a device twice: %s", strings.Join(names, ", "))
	case len(names) > MaxUplinks:
		return fmt.Errorf("%d uplinks: a node has at most %d", len(names), MaxUplinks)
	case len(names) > 1 && kind == endpoint.Macvlan:
		return fmt.Errorf("%d uplinks: a macvlan is on top of one device; use --device veth, or one --uplink",
			len(names))
	}
	return nil
}

// newDatapath puts the parts of a data path together. It opens nothing.
func newDatapath(c Config) *Datapath {
	var reason string
	c.Device, reason = device.ChooseDevice(c.Device)
	hostLink := &host.Host{
		Log: c.Log, DeviceKind: c.Device, BPFFS: c.BPFFS, Cluster: c.Cluster,
		NodePrefix: c.NodePrefix, Plan: c.Plan, MTUReserve: c.MTUReserve,
		DirectTunnel: c.DirectTunnel,
	}
	d := &Datapath{
		Devices: device.NewDevices(
			&hook.Hooks{Host: hostLink, UplinkPrograms: map[uint32]*ebpf.Program{}},
		), Policies: policymap.NewPolicies(hostLink, c.MaxRules), Egress: egressmap.New(hostLink), config: c,
		deviceReason: reason,
		networkMaps:  map[string]*ebpf.Map{}, networkConstants: map[string][]byte{},
	}
	d.Tables, d.clients = servicemap.New(hostLink, d.InvalidateFlows), servicemap.NewClients(hostLink)
	return d
}

func (c Config) validate() error {
	if err := c.Plan.Validate(); err != nil {
		return err
	}
	if !c.Plan.ContainsNode(c.NodePrefix) {
		return fmt.Errorf("node prefix %v is not a /64 of the base prefix %v", c.NodePrefix, c.Plan.Base)
	}
	if c.MaxEndpoints < 1 || c.MaxEndpoints > 65535 {
		return fmt.Errorf("max endpoints %d is out of range: choose 1 to 65535", c.MaxEndpoints)
	}
	if c.MaxTenantIDs < 0 || c.MaxTenantIDs > 65535 {
		return fmt.Errorf("max tenant ids %d is out of range: choose 1 to 65535", c.MaxTenantIDs)
	}
	if c.MaxMappings < 0 {
		return fmt.Errorf("max mappings %d is out of range: choose 1 or more", c.MaxMappings)
	}
	if c.MTUReserve < 0 {
		return fmt.Errorf("an MTU reserve of %d bytes is negative", c.MTUReserve)
	}
	return nil
}

// Close releases the handles of this process. The packet path keeps working.
func (d *Datapath) Close() error {
	if d.Netlink != nil {
		d.Netlink.Close()
	}
	var errs []error
	if d.Node != nil {
		errs = append(errs, d.Node.Close())
	}
	errs = append(errs, d.CloseProbes(), d.Sysctls.Close())
	for _, m := range d.oldCounters {
		errs = append(errs, m.Close())
	}
	return errors.Join(append(errs, d.Objects.Close())...)
}

// Limits of policies and sessions, unless the configuration says others.
const (
	DefaultMaxRules    = 1 << 18
	DefaultMaxSessions = slotsPerBucket << 15 // 16 MiB

	MaxMaxRules    = 1 << 22
	MaxMaxSessions = slotsPerBucket << 20
)
