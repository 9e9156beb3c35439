package datapath

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"pilaster.io/pilaster/internal/address"
)

// Folders of pins.
const (
	mapsFolder     = "maps"
	linksFolder    = "links"
	programsFolder = "programs"
)

func (d *Datapath) mapsDir() string  { return filepath.Join(d.config.BPFFS, mapsFolder) }
func (d *Datapath) linksDir() string { return filepath.Join(d.config.BPFFS, linksFolder) }
func (d *Datapath) programsDir() string {
	return filepath.Join(d.config.BPFFS, programsFolder, d.version)
}

// load creates the maps or finds them pinned, and loads the programs over them.
func (d *Datapath) load() error {
	if _, err := btf.LoadKernelSpec(); err != nil {
		return fmt.Errorf("the kernel does not describe its types (BTF): %w; use Linux 6.12 or newer with CONFIG_DEBUG_INFO_BTF", err)
	}
	spec, err := loadPilaster()
	if err != nil {
		return fmt.Errorf("read the programs built into this binary: %w", err)
	}
	if err := d.setConstants(spec); err != nil {
		return err
	}
	for _, m := range []string{pilasterMapPilSourcesV1, pilasterMapPilLocalsV1} {
		spec.Maps[m].MaxEntries = uint32(d.config.MaxEndpoints)
	}
	for _, m := range []string{pilasterMapPilTenantsV2, pilasterMapPilKeysV1} {
		spec.Maps[m].MaxEntries = uint32(d.config.MaxTenantIDs) + 1 // tryCipher's, also on a full node
	}
	for _, m := range []string{
		pilasterMapPilSourcesV1, pilasterMapPilLocalsV1, pilasterMapPilTenantsV2, pilasterMapPilKeysV1,
		pilasterMapPilGenerationV1, pilasterMapPilDropsV1, pilasterMapPilEventsV1,
	} {
		spec.Maps[m].Pinning = ebpf.PinByName
	}
	if err := os.MkdirAll(d.mapsDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for maps: %w", err)
	}
	err = spec.LoadAndAssign(&d.objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: d.mapsDir()}})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf("maps pinned in %s have another size or layout: %w; they were left as they are; start with the --max-endpoints and --max-tenant-ids they were made with, or remove all containers of this node first", d.mapsDir(), err)
	}
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel refuses our programs: %w; use Linux 6.12 or newer (bpf_crypto kfuncs, tcx)\n%+v", err, verifier)
	}
	if err != nil {
		return fmt.Errorf("load the packet path: %w; use Linux 6.12 or newer, as root", err)
	}
	return d.pinProgram()
}

// setConstants fills in what the programs are compiled around at load, and names the result.
func (d *Datapath) setConstants(spec *ebpf.CollectionSpec) error {
	sum := sha256.New()
	sum.Write(_PilasterBytes)
	base, baseMask := prefixWords(d.config.Plan.Base)
	private, privateMask := prefixWords(d.config.Plan.Private)
	own, _ := prefixWords(d.config.NodePrefix)
	mark := sha256.Sum256([]byte("pilaster packet mark " + d.config.NodePrefix.String()))
	for name, value := range map[string]any{
		pilasterVarBasePrefix: base, pilasterVarBaseMask: baseMask,
		pilasterVarPrivatePrefix: private, pilasterVarPrivateMask: privateMask,
		pilasterVarOwnNode:       own,
		pilasterVarUplinkIfindex: uint32(d.uplink.Attrs().Index),
		// Programs of two loads run side by side during an upgrade, so they must agree on the mark.
		pilasterVarPacketMark: uint32(mark[0])<<24 | uint32(mark[1])<<16 | uint32(mark[2])<<8 | 1,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	fmt.Fprint(sum, d.config.Plan, d.config.NodePrefix, d.uplink.Attrs().Index)
	d.version = hex.EncodeToString(sum.Sum(nil)[:6])
	return nil
}

// prefixWords is a prefix of at most 64 bits, and its mask, as the programs compare them.
func prefixWords(p netip.Prefix) (prefix, mask uint64) {
	ones := netip.MustParseAddr("ffff:ffff:ffff:ffff::")
	m, _ := ones.Prefix(p.Bits())
	return words(p.Masked().Addr()).Hi, words(m.Addr()).Hi
}

// pinProgram keeps the container program of a version under one pin, so that endpoints made before
// and after a restart run the same program.
func (d *Datapath) pinProgram() error {
	if err := os.MkdirAll(d.programsDir(), 0o700); err != nil {
		return fmt.Errorf("make the folder for programs: %w", err)
	}
	pin := filepath.Join(d.programsDir(), pilasterProgPilContainer)
	program, err := ebpf.LoadPinnedProgram(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		if err := d.objects.PilContainer.Pin(pin); err != nil {
			return fmt.Errorf("pin the container program: %w", err)
		}
		program, err = d.objects.PilContainer.Clone()
	}
	if err != nil {
		return fmt.Errorf("open the container program %s: %w", pin, err)
	}
	d.program = program
	return nil
}

// tryCipher proves that the kernel's cipher is AES-128 as everyone else computes it.
func (d *Datapath) tryCipher() error {
	// A tenant id nobody can be given: the largest belongs to no tenant.
	const id = uint32(address.MaxTenantID)
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
		return fmt.Errorf("the kernel does not run its cipher in a packet program (result %d): %w", result, errors.Join(err, errors.ErrUnsupported))
	}
	got, _ := netip.AddrFromSlice(out[14+8 : 14+24])
	if want := address.NewCipher(key).Encrypt(plain); got != want {
		return fmt.Errorf("the kernel's ecb(aes) turns %v into %v, AES-128 is %v; this kernel cannot be used", plain, got, want)
	}
	return nil
}
