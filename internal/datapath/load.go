package datapath

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Folders of pins.
const (
	mapsFolder  = "maps"
	linksFolder = "links"
)

func (d *Datapath) mapsDir() string  { return filepath.Join(d.config.BPFFS, mapsFolder) }
func (d *Datapath) linksDir() string { return filepath.Join(d.config.BPFFS, linksFolder) }

// pinnedMap is a map that is pinned and so outlives this process. All but the counters are filled from
// the records at each start, so nothing is lost with a table of another layout.
type pinnedMap struct {
	symbol     string // entriesOf the map in the object
	name       string // entriesOf the pin, before its size
	maxEntries int    // entries, by the settings; 0: as many as the object says
}

// pinName is the file name of the pinned map. Two builds share the map if name and size agree: another layout has another
// name.
func (t pinnedMap) pinName() string {
	if t.maxEntries == 0 {
		return t.name
	}
	return fmt.Sprintf("%s_%d", t.name, t.maxEntries)
}

// Pin names. Other builds find the maps by these names, whatever the programs call them; they also begin the names that
// the kernel shows. A changed layout gets a new name with a higher version.
const (
	pinSources       = "pil_sources_v2"
	pinLocals        = "pil_locals_v1"
	pinTenants       = "pil_tenants_v2"
	pinKeys          = "pil_keys_v1"
	pinPorts         = "pil_ports_v1"
	pinNetworks      = "pil_networks_v1"
	pinNimNode       = "nim_node_v1"
	pinNimPeers      = "nim_peers_v1"
	pinNimSenders    = "nim_senders_v1"
	pinNimForeign    = "nim_foreign_v1"
	pinNimOutside    = "nim_outside_v1"
	pinNimDnat       = "nim_dnat_v1"
	pinNimSnat       = "nim_snat_v1"
	pinNimForward    = "nim_forward_v1"
	pinGeneration    = "pil_generation_v1"
	pinDrops         = "pil_drops_v1"
	pinEvents        = "pil_events_v2"
	pinPolSubjects   = "pol_subjects_v1"
	pinPolApps       = "pol_apps_v1"
	pinPolBlocks     = "pol_blocks_v1"
	pinPolPorts      = "pol_ports_v1"
	pinPolRanges     = "pol_ranges_v1"
	pinPolOverrides  = "pol_overrides_v1"
	pinPolHits       = "pol_hits_v1"
	pinPolGeneration = "pol_generation_v1"
	pinPolAdoptions  = "pol_adoptions_v1"
	pinSessions      = "pil_sessions_v1"
	pinSessionCounts = "pil_session_counts_v1"
	pinSessionUsers  = "pil_session_users_v1"
	pinFragments     = "pil_fragments_v1"
)

// pinnedMaps are the pinned maps; another one is a line here.
func (d *Datapath) pinnedMaps() []pinnedMap {
	return []pinnedMap{
		{pilasterMapPilSourcesV2, pinSources, d.config.MaxEndpoints},
		{pilasterMapPilLocalsV1, pinLocals, d.config.MaxEndpoints},
		{pilasterMapPilTenantsV2, pinTenants, d.config.MaxTenantIDs + 1}, // verifyCipher's, also on a full node
		{pilasterMapPilKeysV1, pinKeys, d.config.MaxTenantIDs + 1},
		{pilasterMapPilPortsV1, pinPorts, d.config.MaxEndpoints},
		{pilasterMapPilNetworksV1, pinNetworks, 0},
		{pilasterMapNimNodeV1, pinNimNode, 0},
		{pilasterMapNimPeersV1, pinNimPeers, maxPeers},
		{pilasterMapNimSendersV1, pinNimSenders, 2 * d.config.MaxEndpoints}, // an address of each family
		{pilasterMapNimForeignV1, pinNimForeign, d.config.MaxMappings},
		{pilasterMapNimOutsideV1, pinNimOutside, d.config.MaxMappings},
		{pilasterMapNimDnatV1, pinNimDnat, d.config.MaxMappings},
		{pilasterMapNimSnatV1, pinNimSnat, d.config.MaxMappings},
		{pilasterMapNimForwardV1, pinNimForward, d.config.MaxMappings},
		{pilasterMapPilGenerationV1, pinGeneration, 0},
		{pilasterMapPilDropsV1, pinDrops, 0},
		{pilasterMapPilEventsV2, pinEvents, 0},
		{
			pilasterMapPolSubjectsV1,
			pinPolSubjects,
			2 * d.config.MaxRules,
		}, // what is in force has its room until the next is
		{pilasterMapPolAppsV1, pinPolApps, 2 * d.config.MaxRules},
		{pilasterMapPolBlocksV1, pinPolBlocks, 2 * d.config.MaxRules},
		{pilasterMapPolPortsV1, pinPolPorts, 2 * d.config.MaxRules},
		{pilasterMapPolRangesV1, pinPolRanges, 2 * d.config.MaxRules},
		{pilasterMapPolOverridesV1, pinPolOverrides, 2 * d.config.MaxRules},
		{pilasterMapPolHitsV1, pinPolHits, 2 * d.config.MaxRules},
		{pilasterMapPolGenerationV1, pinPolGeneration, 0},
		{pilasterMapPolAdoptionsV1, pinPolAdoptions, d.config.MaxRules},
		{pilasterMapPilSessionsV1, pinSessions, d.sessionBuckets()},
		{pilasterMapPilSessionCountsV1, pinSessionCounts, 0},
		{pilasterMapPilSessionUsersV1, pinSessionUsers, d.quotaEntries()},
		{pilasterMapPilFragmentsV1, pinFragments, 0},
	}
}

// maxPeers is regions, and whatever a node takes tunnels from beside its own.
const maxPeers = 256

// load creates the maps or finds them pinned, and loads the programs over them. No packet meets them
// before Restore.
func (d *Datapath) load() error {
	if _, err := btf.LoadKernelSpec(); err != nil {
		return fmt.Errorf(
			"the kernel does not describe its types (BTF): %w; use Linux 6.12 or newer with CONFIG_DEBUG_INFO_BTF",
			err,
		)
	}
	spec, err := loadPilaster()
	if err != nil {
		return fmt.Errorf("read the programs built into this binary: %w", err)
	}
	for _, t := range d.pinnedMaps() {
		m := spec.Maps[t.symbol]
		m.Name, m.Pinning = t.pinName(), ebpf.PinByName
		if t.maxEntries > 0 {
			m.MaxEntries = uint32(t.maxEntries)
		}
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	spec.Maps[pilasterMapPilFlows].MaxEntries *= uint32(cpus)
	spec.Maps[pilasterMapPilVerdicts].MaxEntries *= uint32(cpus)
	if err := os.MkdirAll(d.mapsDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for maps: %w", err)
	}
	mark, err := d.loadAcceptMark()
	if err != nil {
		return fmt.Errorf("a mark for packets that were judged: %w", err)
	}
	d.acceptMark = mark
	var cookie uint64
	if err := d.node.Do(func() (err error) { cookie, err = netnsCookie(); return err }); err != nil {
		return fmt.Errorf("the cookie of this network namespace: %w", err)
	}
	if err := d.setConstants(spec, mark, cookie); err != nil {
		return err
	}
	known := d.hasSessionMap()
	err = spec.LoadAndAssign(&d.objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: d.mapsDir()}})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf(
			"a map pinned in %s has another layout under the same name: %w; packets flow as before; start the build that made it",
			d.mapsDir(),
			err,
		)
	}
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf(
			"the kernel refuses our programs: %w; use Linux 6.12 or newer (bpf_crypto kfuncs, tcx)\n%+v",
			err,
			verifier,
		)
	}
	if err != nil {
		return fmt.Errorf("load the packet path: %w; use Linux 6.12 or newer, as root", err)
	}
	if err := d.migrateMaps(); err != nil {
		return err
	}
	if err := d.migrateSessions(known); err != nil {
		return err
	}
	return d.openOldCounters()
}

// migrateMaps takes over what the second network's tables of other sizes hold, whose entries nobody records here: until
// Restore has moved all hooks those are what packets meet, and then they go.
func (d *Datapath) migrateMaps() error {
	own := map[string]*ebpf.Map{pinPorts: d.objects.PilPortsV1}
	for _, t := range pipelineMaps {
		own[t.pin] = t.mapOf(&d.objects)
	}
	for _, t := range d.pinnedMaps() {
		m := own[t.name]
		pins, err := filepath.Glob(filepath.Join(d.mapsDir(), t.name+"_*"))
		if m == nil || err != nil {
			continue
		}
		for _, pin := range pins {
			if filepath.Base(pin) == t.pinName() {
				continue
			}
			if err := readPinned(pin, func(old *ebpf.Map) error { return copyMap(m, old) }); err != nil {
				return fmt.Errorf(
					"%s has entries for which %s has no room: %w; packets flow as before: start with the limit there was",
					pin,
					t.pinName(),
					err,
				)
			}
		}
	}
	return nil
}

func copyMap(to, from *ebpf.Map) error {
	keys, values, err := rawEntries(from)
	for i := range keys {
		if err == nil {
			err = to.Put(keys[i], values[i])
		}
	}
	return err
}

// setConstants fills in what the programs are compiled around at load.
func (d *Datapath) setConstants(spec *ebpf.CollectionSpec, mark uint32, cookie uint64) error {
	base, baseMask := prefixWords(d.config.Plan.Base)
	private, privateMask := prefixWords(d.config.Plan.Private)
	own, _ := prefixWords(d.config.NodePrefix)
	sum := sha256.Sum256([]byte("pilaster packet mark " + d.config.NodePrefix.String()))
	for name, value := range map[string]any{
		pilasterVarBasePrefix: base, pilasterVarBaseMask: baseMask,
		pilasterVarPrivatePrefix: private, pilasterVarPrivateMask: privateMask,
		pilasterVarOwnNode:       own,
		pilasterVarUplinkIfindex: uint32(d.uplink.Attrs().Index),
		pilasterVarNodeIfindex:   uint32(d.nodeFar),
		pilasterVarNoFlowCache:   d.config.NoCache,
		// Programs of two loads run side by side during an upgrade, so they must agree on the mark.
		pilasterVarPacketMark:     uint32(sum[0])<<24 | uint32(sum[1])<<16 | uint32(sum[2])<<8 | 1,
		pilasterVarAcceptMark:     mark,
		pilasterVarTunnelMark:     tunnelMark(mark),
		pilasterVarTunnelBits:     uint32(pipeline.MarkBits),
		pilasterVarMacvlan:        d.config.Device == Macvlan,
		pilasterVarNodeCookie:     cookie,
		pilasterVarSessionBuckets: uint32(d.sessionBuckets()),
		pilasterVarSessionSeed:    mark,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

// markMap is pinned among the tables and holds what no program reads from it: a number that no container may know.
const markMap = "pil_mark_v1"

// loadAcceptMark is drawn when the packet path is made first.
func (d *Datapath) loadAcceptMark() (uint32, error) {
	m, err := ebpf.NewMapWithOptions(
		&ebpf.MapSpec{
			Name:       markMap,
			Type:       ebpf.Array,
			KeySize:    4,
			ValueSize:  4,
			MaxEntries: 1,
			Pinning:    ebpf.PinByName,
		},
		ebpf.MapOptions{PinPath: d.mapsDir()},
	)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	var mark uint32
	if err := m.Lookup(uint32(0), &mark); err != nil || mark != 0 {
		return mark, err
	}
	for mark == 0 {
		mark = rand.Uint32()
	}
	return mark, m.Put(uint32(0), mark)
}

// tunnelMark is never 0, which is what packets have that nobody marks.
func tunnelMark(secret uint32) uint32 { return secret&pipeline.MarkBits | 1 }

// prefixWords is a prefix of at most 64 bits, and its mask, as the programs compare them.
func prefixWords(p netip.Prefix) (prefix, mask uint64) {
	ones := netip.MustParseAddr("ffff:ffff:ffff:ffff::")
	m, _ := ones.Prefix(p.Bits())
	return toAddr(p.Masked().Addr()).Hi, toAddr(m.Addr()).Hi
}

// objectVersion names the programs built into this binary: the same on all nodes that run it.
func objectVersion() string {
	sum := sha256.Sum256(_PilasterBytes)
	return hex.EncodeToString(sum[:6])
}

// verifyCipher proves that the kernel's cipher is AES-128 as everyone else computes it.
func (d *Datapath) verifyCipher() error {
	const id = uint32(0) // the node's, which has no key: what tenants have is not touched
	key := address.Key{0: 0x70, 7: 0x69, 15: 0x6c}
	if err := d.setKey(id, key); err != nil {
		return err
	}
	defer d.objects.PilKeysV1.Delete(id)

	plain := address.Plain{Node: d.config.NodePrefix, Tenant: address.TenantID(id), App: 1, Index: 1}.Addr()
	frame := make([]byte, 14+40)
	frame[12], frame[13], frame[14] = 0x86, 0xdd, 0x60
	copy(frame[14+24:], plain.AsSlice())
	out := make([]byte, len(frame))
	result, err := d.objects.PilTryCipher.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
	if err != nil || result != 0 {
		return fmt.Errorf(
			"the kernel does not run its cipher in a packet program (result %d): %w",
			result,
			errors.Join(err, errors.ErrUnsupported),
		)
	}
	got, _ := netip.AddrFromSlice(out[14+8 : 14+24])
	if want := address.NewCipher(key).Encrypt(plain); got != want {
		return fmt.Errorf(
			"the kernel's ecb(aes) turns %v into %v, AES-128 is %v; this kernel cannot be used",
			plain,
			got,
			want,
		)
	}
	return nil
}
