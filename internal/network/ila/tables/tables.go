package tables

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/network/ila"
)

// Config describes the node.
type Config struct {
	ILA       address.ILA
	Locator   netip.Prefix
	Endpoints int // maximum of containers
	Mappings  int // maximum of mappings
	// The source of a packet on the fabric is the address that containers see. Nodes then cannot compare the sender's
	// locator with its mapping.
	SourceStays bool
	Pull        bool // the programs report cache misses, and note which mappings packets use
}

// Tables implements ila.Tables with pinned maps, which outlive this process.
type Tables struct {
	config  Config
	path    *datapath.Datapath
	objects *ebpf.Collection
}

var (
	_ ila.Tables     = (*Tables)(nil)
	_ ila.PullTables = (*Tables)(nil)
)

// Open loads the programs, and makes them those of the network's containers and of its packets from the fabric.
func Open(path *datapath.Datapath, c Config) (*Tables, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read the programs of network %s: %w", ila.Name, err)
	}
	return open(path, spec, c)
}

func open(path *datapath.Datapath, spec *ebpf.CollectionSpec, c Config) (*Tables, error) {
	constants := map[string]any{
		"sir_prefix":      bpfobj.ToAddr(c.ILA.SIR.Addr()).Hi,
		"own_locator":     bpfobj.ToAddr(c.Locator.Addr()).Hi,
		"neutral_bit":     bpfobj.ToAddr(neutralBit).Lo,
		"source_stays":    c.SourceStays,
		"mappings_pulled": c.Pull,
	}
	if c.ILA.NoCBit {
		constants["neutral_bit"] = uint64(0)
	}
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	spec.Maps[localsMap].MaxEntries = uint32(c.Endpoints)
	spec.Maps[peersMap].MaxEntries = uint32(c.Mappings)
	objects, err := path.LoadNetwork(spec)
	if err != nil {
		return nil, err
	}
	path.SetEntry(ila.Name, device.EntryProgram{Program: objects.Programs[entry], Name: entry})
	path.UplinkPrograms[hook.UplinkILA] = objects.Programs[fromFabric]
	return &Tables{c, path, objects}, nil
}

// Symbols of the object file.
const (
	localsMap  = "ila_locals_v2"
	peersMap   = "ila_peers_v1"
	changesMap = "ila_changes_v1"
	missesMap  = "ila_misses_v1"
	entry      = "pil_ila"
	fromFabric = "pil_ila_in"
)

// neutralBit is the C bit of an identifier.
var neutralBit = netip.MustParseAddr("::1000:0:0:0")

// Close releases this process's handles; packets keep flowing.
func (t *Tables) Close() error {
	t.objects.Close()
	return nil
}

func (t *Tables) locals() *ebpf.Map { return t.objects.Maps[localsMap] }
func (t *Tables) peers() *ebpf.Map  { return t.objects.Maps[peersMap] }

// Programs returns the programs of containers and of packets from the fabric, for tests.
func (t *Tables) Programs() (container, uplink *ebpf.Program) {
	return t.objects.Programs[entry], t.objects.Programs[fromFabric]
}

func (t *Tables) changed() error { return t.path.BumpGeneration(t.objects.Maps[changesMap]) }

func identifier(a netip.Addr) uint64 { return bpfobj.ToAddr(a).Lo }

func (t *Tables) address(identifier uint64) netip.Addr {
	sir := bpfobj.ToAddr(t.config.ILA.SIR.Addr())
	sir.Lo = identifier
	return sir.Addr()
}

func half(p netip.Prefix) uint64 {
	if !p.IsValid() {
		return 0
	}
	return bpfobj.ToAddr(p.Addr()).Hi
}

func prefixOf(half uint64) netip.Prefix {
	if half == 0 {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(bpfobj.PilasterAddr{Hi: half}.Addr(), address.NodeBits)
}

// Locals reads the containers of this node.
func (t *Tables) Locals() (map[netip.Addr]ila.Local, error) {
	all := map[netip.Addr]ila.Local{}
	err := bpfobj.ForEachEntry(t.locals(), func(id uint64, v objectIlaLocal) {
		all[t.address(id)] = ila.Local{
			Device: v.Ifindex, Endpoint: v.Endpoint, App: address.AppID(v.App), Former: prefixOf(v.Former),
		}
	})
	return all, err
}

// Peers reads the mappings.
func (t *Tables) Peers() (map[netip.Addr]ila.Peer, error) {
	entries, all := map[uint64]objectIlaPeer{}, map[netip.Addr]ila.Peer{}
	if err := bpfobj.ReadEntries(t.peers(), entries); err != nil {
		return nil, err
	}
	for id, v := range entries {
		all[t.address(id)] = ila.Peer{
			Locator: prefixOf(v.Locator), Former: prefixOf(v.Former), App: address.AppID(v.App),
		}
	}
	return all, nil
}

// SetLocal writes or removes the entry of a container of this node.
func (t *Tables) SetLocal(a netip.Addr, to *ila.Local) error {
	if to == nil {
		err := t.locals().Delete(identifier(a))
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove the entry of %v: %w", a, err)
		}
		return t.changed()
	}
	value := objectIlaLocal{
		Ifindex: to.Device, Endpoint: to.Endpoint, App: uint32(to.App), Former: half(to.Former),
	}
	if to.Former.IsValid() {
		now, err := monotonic()
		if err != nil {
			return err
		}
		value.Until = now + uint64(ila.FormerTime)
	}
	if err := t.locals().Put(identifier(a), value); err != nil {
		return fmt.Errorf("write the entry of %v: %w", a, err)
	}
	return t.changed()
}

// SetPeers writes and removes mappings.
func (t *Tables) SetPeers(put map[netip.Addr]ila.Peer, remove []netip.Addr) error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	var gone, keys []uint64
	var values []objectIlaPeer
	for _, a := range remove {
		gone = append(gone, identifier(a))
	}
	for a, p := range put {
		v := objectIlaPeer{
			Locator: half(p.Locator), Former: half(p.Former), App: uint32(p.App), Used: usedUnits(now),
		}
		if p.Former.IsValid() {
			v.Until = now + uint64(ila.FormerTime)
		}
		keys, values = append(keys, identifier(a)), append(values, v)
	}
	// Removals first: a full table has room for what replaces them.
	if err := bpfobj.DeleteKeys(t.peers(), gone); err != nil {
		return errors.Join(fmt.Errorf("remove mappings: %w", err), t.changed())
	}
	if err := bpfobj.WriteEntries(t.peers(), keys, values); err != nil {
		return errors.Join(fmt.Errorf("write mappings: %w", err), t.changed())
	}
	return t.changed()
}

// Capacity returns the sizes of the maps.
func (t *Tables) Capacity() (locals, peers int) {
	return int(t.locals().MaxEntries()), int(t.peers().MaxEntries())
}

// monotonic returns the clock of the programs, in ns.
func monotonic() (uint64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint64(now.Nano()), nil
}
