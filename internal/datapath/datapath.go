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

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/batch"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
)

// Config is what a node's packet path is made from. It never changes while endpoints exist.
type Config struct {
	Uplink       string // device to the fabric
	NodePrefix   netip.Prefix
	Plan         address.Plan
	BPFFS        string // folder for pins; bpffs is mounted there when it is not on one
	MaxEndpoints int    // 1..65535
	MaxTenantIDs int    // entriesOf all tenants of the node; 1..65535, 0 means agent.DefaultMaxTenantIDs
	MaxMappings  int    // entriesOf the second network: forwarding entries, and each of its tables of translations; 0 means nimitz.DefaultMaxMappings
	MaxRules     int    // entries of each table of policies; 0 means DefaultMaxRules
	MaxSessions  int    // entriesOf containers whose tenants have policies; 0 means DefaultMaxSessions
	MTUReserve   int    // bytes the containers' MTU stays below the uplink's
	Device       string // how new containers are joined to the node: one of Choices; "" means the first
	NoCache      bool   // for measuring only: every packet is a first one
	Log          *slog.Logger
}

// Datapath implements agent.Driver on Linux.
type Datapath struct {
	config       Config
	deviceReason string // this kind of device was chosen; empty where somebody named it
	log          *slog.Logger
	node         *netns.Namespace
	netlink      *netlink.Handle
	sysctls      sysctls // entriesOf the node
	uplink       netlink.Link
	objects      pilasterObjects
	oldCounters  []*ebpf.Map // drops counted by programs of other layouts

	// generationMu orders changes: tables first, then the count that voids the caches.
	generationMu sync.Mutex

	policyMu         sync.Mutex
	tenantPolicies   map[string]*dpapi.TenantPolicies // what tenants' containers are policed by, by name: nobody changes it meanwhile
	pendingTenants   map[string]*dpapi.TenantPolicies // tenants whose containers are policed by what an earlier process has left, without it
	policyMapsSynced bool                             // the kernel's tables hold what policed says, and nothing else

	deviceMu sync.Mutex // pending by alone
	removals *batch.Rounds[removal]

	endpointByDevice sync.Map // endpoint.ID by the number of its device in the tables, a uint32
	knownTenantIDs   sync.Map // tenant ids that this process has put, which need no endpoint to stay

	acceptMark        uint32    // entriesOf packets that were judged
	nodeNear, nodeFar int       // ifindexes of the pair between the node and its containers
	ovsPorts          *OVSPorts // nil where no switch reads devices itself
}

var _ dpapi.Driver = (*Datapath)(nil)

// Open loads the packet path of the node whose namespace the calling thread is in. It proves the
// kernel's features by using them. What already works goes on as it did: Restore takes it over.
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
	if err := mountBPFFS(c.BPFFS); err != nil {
		return nil, err
	}
	// The programs know the node's device by its index.
	for _, step := range []func() error{d.createNodeDevice, d.load, d.loadDeviceOwners, d.verifyCipher, d.blockUnclaimedPrefixes} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// CheckUplink refuses the uplink that Open would refuse, and changes nothing. It needs no prefix, so
// that a node can ask before it joins.
func CheckUplink(c Config) error {
	d, err := openNode(c)
	if err != nil {
		return err
	}
	return d.Close()
}

// UplinkKind is what an uplink has to be: the programs look for addresses behind an Ethernet header.
const UplinkKind = "ether"

// openNode finds the uplink in the namespace of the calling thread, where nobody else's packet path may be.
func openNode(c Config) (_ *Datapath, err error) {
	if err := checkDeviceKind(c.Device); err != nil {
		return nil, err
	}
	c.MaxTenantIDs = cmp.Or(c.MaxTenantIDs, dpapi.DefaultMaxTenantIDs)
	c.MaxMappings = cmp.Or(c.MaxMappings, nimitz.DefaultMaxMappings)
	c.MaxRules = cmp.Or(c.MaxRules, DefaultMaxRules)
	c.MaxSessions = cmp.Or(c.MaxSessions, DefaultMaxSessions)
	d := &Datapath{log: c.Log}
	c.Device, d.deviceReason = ChooseDevice(c.Device)
	d.config = c
	d.removals = batch.New(&d.deviceMu, d.removeBatch)
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.node, err = netns.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, err
	}
	if d.netlink, err = d.node.Netlink(); err != nil {
		return nil, err
	}
	if err = d.node.Do(func() (err error) { d.sysctls, err = openSysctls("ipv6", "ipv4"); return err }); err != nil {
		return nil, err
	}
	if d.uplink, err = d.netlink.LinkByName(c.Uplink); err != nil {
		return nil, fmt.Errorf("--uplink %s: %w; nothing was changed: name the device to the fabric", c.Uplink, err)
	}
	if kind := d.uplink.Attrs().EncapType; kind != UplinkKind {
		return nil, fmt.Errorf(
			"uplink %s is no Ethernet device (%s); nothing was changed; name the device to the fabric with --uplink",
			c.Uplink,
			kind,
		)
	}
	if err := d.drivers()[c.Device].checkUplink(d.uplink); err != nil {
		return nil, err
	}
	if _, err := d.MTU(); err != nil {
		return nil, fmt.Errorf("%w; nothing was changed", err)
	}
	return d, d.checkUplinkFree()
}

func (c Config) validate() error {
	if err := c.Plan.Validate(); err != nil {
		return err
	}
	if !c.Plan.ContainsNode(c.NodePrefix) {
		return fmt.Errorf("node prefix %v is not a /64 of the base prefix %v", c.NodePrefix, c.Plan.Base)
	}
	if c.MaxEndpoints < 1 || c.MaxEndpoints > 65535 {
		return fmt.Errorf("at most %d endpoints: choose 1 to 65535", c.MaxEndpoints)
	}
	if c.MaxTenantIDs < 0 || c.MaxTenantIDs > 65535 {
		return fmt.Errorf("at most %d tenant ids: choose 1 to 65535", c.MaxTenantIDs)
	}
	if c.MaxMappings < 0 {
		return fmt.Errorf("at most %d mappings: choose 1 or more", c.MaxMappings)
	}
	if c.MTUReserve < 0 {
		return fmt.Errorf("an MTU reserve of %d bytes is negative", c.MTUReserve)
	}
	return nil
}

func checkDeviceKind(name string) error {
	if name != "" && !slices.Contains(DeviceChoices(), name) {
		return fmt.Errorf("--device %s is none; nothing was changed: choose %s", name, strings.Join(DeviceChoices(), ", "))
	}
	return nil
}

// Close lets go of the packet path and leaves it working.
func (d *Datapath) Close() error {
	if d.netlink != nil {
		d.netlink.Close()
	}
	var errs []error
	if d.node != nil {
		errs = append(errs, d.node.Close())
	}
	errs = append(errs, d.sysctls.Close())
	for _, m := range d.oldCounters {
		errs = append(errs, m.Close())
	}
	return errors.Join(append(errs, d.objects.Close())...)
}

// InvalidateFlows has the programs take nothing that they have cached for true any more, as after every change of a
// pinnedMap.
func (d *Datapath) InvalidateFlows() error {
	d.generationMu.Lock()
	defer d.generationMu.Unlock()
	return d.bumpGeneration(d.objects.PilGenerationV1)
}

// bumpGeneration is for a map that holds how often others have changed.
func (d *Datapath) bumpGeneration(m *ebpf.Map) error {
	var count uint32
	if err := m.Lookup(uint32(0), &count); err != nil {
		return fmt.Errorf("read the generation: %w", err)
	}
	if err := m.Put(uint32(0), count+1); err != nil {
		return fmt.Errorf("count the generation: %w", err)
	}
	return nil
}
