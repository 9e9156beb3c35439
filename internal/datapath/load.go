package datapath

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
)

// pinnedMap is a map that is pinned and outlives this process. Most maps are filled from the records at each start, so
// a map of another layout loses nothing. Counters start again. A new layout of sessions, or of mappings to other nodes,
// needs a function that converts the entries of the former one.
type pinnedMap struct {
	symbol     string // of the map in the object
	name       string // of the pin, before its size
	maxEntries int    // entries, by the settings; 0: as many as the object says
}

// pinName returns the file name of the pin. Two builds share the map if name and size agree: another layout has another
// name.
func (t pinnedMap) pinName() string {
	if t.maxEntries == 0 {
		return t.name
	}
	return fmt.Sprintf("%s_%d", t.name, t.maxEntries)
}

// pinnedMaps returns the maps that are pinned: those of networks, and those of all. A new one needs a line here, or in
// the part of its network.
func (d *Datapath) pinnedMaps() (all []pinnedMap) {
	for _, n := range networkParts() {
		if n.maps != nil {
			all = append(all, n.maps(d.config)...)
		}
	}
	return append(all, []pinnedMap{
		{bpfobj.PilasterMapPilPortsV1, bpfobj.PinPorts, d.config.MaxEndpoints},
		{bpfobj.PilasterMapPilMacsV1, bpfobj.PinMacs, d.config.MaxEndpoints},
		{bpfobj.PilasterMapPilNetworksV1, bpfobj.PinNetworks, 0},
		{bpfobj.PilasterMapPilUplinksV1, bpfobj.PinUplinks, 0},
		{bpfobj.PilasterMapPilGenerationV1, bpfobj.PinGeneration, 0},
		{bpfobj.PilasterMapPilDropsV1, bpfobj.PinDrops, 0},
		{bpfobj.PilasterMapPilEventsV2, bpfobj.PinEvents, 0},
		{
			bpfobj.PilasterMapPolSubjectsV1,
			bpfobj.PinPolSubjects,
			2 * d.config.MaxRules,
		}, // what is in force has its room until the next is
		{bpfobj.PilasterMapPolAppsV1, bpfobj.PinPolApps, 2 * d.config.MaxRules},
		{bpfobj.PilasterMapPolBlocksV1, bpfobj.PinPolBlocks, 2 * d.config.MaxRules},
		{bpfobj.PilasterMapPolPortsV1, bpfobj.PinPolPorts, 2 * d.config.MaxRules},
		{bpfobj.PilasterMapPolRangesV1, bpfobj.PinPolRanges, 2 * d.config.MaxRules},
		{bpfobj.PilasterMapPolOverridesV1, bpfobj.PinPolOverrides, 2 * d.config.MaxRules},
		{bpfobj.PilasterMapPolHitsV1, bpfobj.PinPolHits, 2 * d.config.MaxRules},
		{bpfobj.PilasterMapPolGenerationV1, bpfobj.PinPolGeneration, 0},
		{bpfobj.PilasterMapPolAdoptionsV1, bpfobj.PinPolAdoptions, d.config.MaxRules},
		{bpfobj.PilasterMapPilSessionsV1, bpfobj.PinSessions, d.sessionBuckets()},
		{bpfobj.PilasterMapPilSessionCountsV1, bpfobj.PinSessionCounts, 0},
		{bpfobj.PilasterMapPilSessionUsersV1, bpfobj.PinSessionUsers, usageEntries},
		{bpfobj.PilasterMapPilSessionTenantsV1, bpfobj.PinSessionTenants, d.usageTenants()},
	}...)
}

// load creates the maps or opens the pinned ones, and loads the programs. No packet reaches the programs before Restore
// attaches them.
func (d *Datapath) load() error {
	if _, err := btf.LoadKernelSpec(); err != nil {
		return fmt.Errorf(
			"the kernel does not describe its types (BTF): %w; use Linux 6.12 or newer with CONFIG_DEBUG_INFO_BTF",
			err,
		)
	}
	spec, err := bpfobj.LoadSpec()
	if err != nil {
		return err
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
	spec.Maps[bpfobj.PilasterMapPilFlows].MaxEntries *= uint32(cpus)
	spec.Maps[bpfobj.PilasterMapPilVerdicts].MaxEntries *= uint32(cpus)
	spec.Maps[bpfobj.PilasterMapPilOflows].MaxEntries *= uint32(cpus)
	spec.Maps[bpfobj.PilasterMapPilOhops].MaxEntries *= uint32(cpus)
	spec.Maps[bpfobj.PilasterMapPilOverdicts].MaxEntries *= uint32(cpus)
	if err := os.MkdirAll(d.MapsDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for maps: %w", err)
	}
	mark, err := d.loadAcceptMark()
	if err != nil {
		return fmt.Errorf("read the mark of accepted packets: %w", err)
	}
	d.AcceptMark = mark
	if err := d.Node.Do(func() (err error) { d.cookie, err = device.NetnsCookie(); return err }); err != nil {
		return fmt.Errorf("the cookie of this network namespace: %w", err)
	}
	if err := d.setConstants(spec, mark, d.cookie); err != nil {
		return err
	}
	known := d.hasSessionMap()
	err = spec.LoadAndAssign(&d.Objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: d.MapsDir()}})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf(
			"a map pinned in %s has another layout under the same name: %w; packets flow as before; start the "+
				"build that made it",
			d.MapsDir(),
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

// migrateMaps copies entries from maps of another size, where no record on this node has them.
// Packets use the old maps until Restore has replaced all programs; then they are removed.
func (d *Datapath) migrateMaps() error {
	own := map[string]*ebpf.Map{bpfobj.PinPorts: d.Objects.PilPortsV1}
	for _, n := range networkParts() {
		for _, t := range n.kept {
			own[t.pin] = t.mapOf(&d.Objects)
		}
	}
	for _, t := range d.pinnedMaps() {
		if m := own[t.name]; m != nil {
			if err := d.copyOtherSizes(m, t.name, t.pinName()); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyOtherSizes copies into a map the entries of the other maps whose pins have its name, with another size.
func (d *Datapath) copyOtherSizes(m *ebpf.Map, name, pinName string) error {
	pins, err := filepath.Glob(filepath.Join(d.MapsDir(), name+"_*"))
	if err != nil {
		return err
	}
	for _, pin := range pins {
		if filepath.Base(pin) == pinName {
			continue
		}
		if err := bpfobj.ReadPinned(pin, func(old *ebpf.Map) error { return copyMap(m, old) }); err != nil {
			return fmt.Errorf(
				"%s has entries for which %s has no room: %w; packets flow as before: start the agent with the "+
					"previous limit",
				pin,
				pinName,
				err,
			)
		}
	}
	return nil
}

func copyMap(to, from *ebpf.Map) error {
	keys, values, err := bpfobj.RawEntries(from)
	for i := range keys {
		if err == nil {
			err = to.Put(keys[i], values[i])
		}
	}
	return err
}

// setConstants sets the constants of the programs before they are loaded.
func (d *Datapath) setConstants(spec *ebpf.CollectionSpec, mark uint32, cookie uint64) error {
	for name, value := range d.constants(mark, cookie) {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

// constants returns the constants of the programs, by name.
func (d *Datapath) constants(mark uint32, cookie uint64) map[string]any {
	base, baseMask := prefixWords(d.config.Plan.Base)
	private, privateMask := prefixWords(d.config.Plan.Private)
	own, _ := prefixWords(d.config.NodePrefix)
	vtep4, vtep4Mask := prefix4(d.config.VTEP4)
	sum := sha256.Sum256([]byte("pilaster packet mark " + d.config.NodePrefix.String()))
	all := map[string]any{
		bpfobj.PilasterVarBasePrefix: base, bpfobj.PilasterVarBaseMask: baseMask,
		bpfobj.PilasterVarPrivatePrefix: private, bpfobj.PilasterVarPrivateMask: privateMask,
		bpfobj.PilasterVarOwnNode:     own,
		bpfobj.PilasterVarUplinks:     d.uplinkIndexes(),
		bpfobj.PilasterVarNodeIfindex: uint32(d.NodeFar),
		bpfobj.PilasterVarNoFlowCache: d.config.NoCache,
		// Programs of two loads run side by side during an upgrade, so they must agree on the mark.
		bpfobj.PilasterVarPacketMark:     uint32(sum[0])<<24 | uint32(sum[1])<<16 | uint32(sum[2])<<8 | 1,
		bpfobj.PilasterVarAcceptMark:     mark,
		bpfobj.PilasterVarVtep4Prefix:    vtep4,
		bpfobj.PilasterVarVtep4Mask:      vtep4Mask,
		bpfobj.PilasterVarUplinkVtep4:    d.ownVTEP4Word(),
		bpfobj.PilasterVarMacvlan:        d.config.Device == endpoint.Macvlan,
		bpfobj.PilasterVarNodeCookie:     cookie,
		bpfobj.PilasterVarSessionBuckets: uint32(d.sessionBuckets()),
		bpfobj.PilasterVarSessionSeed:    mark,
	}
	for _, n := range networkParts() {
		if n.constants != nil {
			maps.Copy(all, n.constants(d))
		}
	}
	return all
}

// uplinkIndexes returns the uplinks as the programs compare devices with them.
func (d *Datapath) uplinkIndexes() (all [MaxUplinks]uint32) {
	for i, l := range d.Uplinks {
		all[i] = uint32(l.Attrs().Index)
	}
	return all
}

// prefixWords returns a prefix of at most 64 bits, and its mask, as the programs compare them.
func prefixWords(p netip.Prefix) (prefix, mask uint64) {
	ones := netip.MustParseAddr("ffff:ffff:ffff:ffff::")
	m, _ := ones.Prefix(p.Bits())
	return bpfobj.ToAddr(p.Masked().Addr()).Hi, bpfobj.ToAddr(m.Addr()).Hi
}

// ownVTEP4Word returns this node's IPv4 tunnel address as the programs compare it; 0 if it has none.
func (d *Datapath) ownVTEP4Word() uint32 {
	own, ok := d.OwnVTEP4()
	if !ok {
		return 0
	}
	return binary.NativeEndian.Uint32(own.AsSlice())
}

// prefix4 returns an IPv4 prefix and its mask as the programs compare them; zeros without a prefix.
func prefix4(p netip.Prefix) (prefix, mask uint32) {
	if !p.IsValid() {
		return 0, 0
	}
	ones, _ := netip.MustParseAddr("255.255.255.255").Prefix(p.Bits())
	return binary.NativeEndian.Uint32(p.Masked().Addr().AsSlice()), binary.NativeEndian.Uint32(ones.Addr().AsSlice())
}

// markMap is pinned among the maps but used by no program. It holds a random number that no container may know.
const markMap = "pil_mark_v1"

// loadAcceptMark chooses the mark at random when the packet path is first made.
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
		ebpf.MapOptions{PinPath: d.MapsDir()},
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

// verifyCipher proves that the kernel's cipher computes AES-128.
func (d *Datapath) verifyCipher() error {
	const id = uint32(0) // the node's id, which has no key: tenants' keys are not touched
	key := address.Key{0: 0x70, 7: 0x69, 15: 0x6c}
	if err := d.setKey(id, key); err != nil {
		return err
	}
	defer d.Objects.PilKeysV1.Delete(id)

	plain := address.Plain{Node: d.config.NodePrefix, Tenant: address.TenantID(id), App: 1, Index: 1}.Addr()
	frame := make([]byte, 14+40)
	frame[12], frame[13], frame[14] = 0x86, 0xdd, 0x60
	copy(frame[14+24:], plain.AsSlice())
	out := make([]byte, len(frame))
	result, err := d.Objects.PilTryCipher.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
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
