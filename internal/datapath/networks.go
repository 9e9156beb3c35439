package datapath

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/network"
)

// networkPart is what the data path does for one network besides its tables' content and its programs. All fields may
// be nil.
type networkPart struct {
	// maps are the network's pinned maps.
	maps func(Config) []pinnedMap
	// kept are those of its maps whose entries no record on this node has.
	kept []keptMap
	// constants are its constants of the programs, by variable.
	constants func(*Datapath) map[string]any
	// stale finds its devices. It loads nothing.
	stale func() ([]network.StaleState, error)
}

// keptMap is a map whose entries are copied from maps of another size at the start.
type keptMap struct {
	pin   string
	mapOf func(*bpfobj.PilasterObjects) *ebpf.Map
	// show describes the entries of a map, for a dump
	show func(*ebpf.Map) ([]string, error)
}

// networkParts returns the part of each network. A network with maps, constants or devices of its own needs an entry.
func networkParts() []networkPart {
	return []networkPart{netpilaPart(), nimitzPart(), ilaPart()}
}

// maxMapName is how much of a map's name the kernel shows (BPF_OBJ_NAME_LEN).
const maxMapName = 15

// LoadNetwork loads the programs and maps of a network that has an object file of its own. It sets the constants of
// bpf/common that the object uses, and shares the maps of this data path with it by name: drop counters, events,
// policies, sessions. The network's other maps are pinned under their names, with their sizes, so that they outlive the
// process; like those of the data path they need a new name for a new layout. Entries of maps of another size are
// copied. The caller fills the maps in Repair, makes its entry program known by SetEntry, and closes the collection.
func (d *Datapath) LoadNetwork(spec *ebpf.CollectionSpec) (*ebpf.Collection, error) {
	for name, value := range d.constants(d.AcceptMark, d.cookie) {
		if v := spec.Variables[name]; v != nil {
			if err := v.Set(value); err != nil {
				return nil, fmt.Errorf("set %s: %w", name, err)
			}
		}
	}
	shared := bpfobj.MapsBySymbol(&d.Objects)
	replacements := map[string]*ebpf.Map{}
	for symbol, m := range spec.Maps {
		switch {
		case shared[symbol] != nil:
			m.MaxEntries = shared[symbol].MaxEntries()
			replacements[symbol] = shared[symbol]
		case strings.HasPrefix(symbol, "."): // constants
		case len(symbol) > maxMapName:
			return nil, fmt.Errorf("map %s: the name has %d characters; choose one with at most %d", symbol,
				len(symbol), maxMapName)
		default:
			m.Name, m.Pinning = fmt.Sprintf("%s_%d", symbol, m.MaxEntries), ebpf.PinByName
			d.networkPins = append(d.networkPins, m.Name)
		}
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Maps: ebpf.MapOptions{PinPath: d.MapsDir()}, MapReplacements: replacements,
	})
	if err != nil {
		return nil, fmt.Errorf("load the programs of a network: %w", err)
	}
	for symbol, m := range c.Maps {
		if spec.Maps[symbol].Pinning != ebpf.PinByName {
			continue
		}
		if err := d.copyOtherSizes(m, symbol, spec.Maps[symbol].Name); err != nil {
			c.Close()
			return nil, err
		}
		d.networkMaps[symbol] = m
	}
	for name, v := range spec.Variables {
		if v.Constant() {
			d.networkConstants[name] = slices.Clone(v.Value)
		}
	}
	return c, nil
}

// AddTraced makes the tracing programs of an object file known, which have the names of those that LoadNetwork has
// loaded. A trace loads them with the same constants and maps.
func (d *Datapath) AddTraced(read func() (*ebpf.CollectionSpec, error)) {
	d.traced = append(d.traced, read)
}

// ilaPart has what the programs of all hooks must know of network ila, also on a node without it, once a tenant uses
// it: no other packet may have addresses that only its containers have on the fabric. The rest of the network has an
// object file of its own.
func ilaPart() networkPart {
	return networkPart{constants: func(d *Datapath) map[string]any {
		prefix, mask := uint64(math.MaxUint64), uint64(0) // no address has it
		if ila, reserved := d.config.Plan.ReservedILA(); reserved {
			prefix, mask = prefixWords(ila.Prefix)
		}
		return map[string]any{bpfobj.PilasterVarIlaPrefix: prefix, bpfobj.PilasterVarIlaMask: mask}
	}}
}

// locator returns the locator of this node; false if it has none.
func (d *Datapath) locator() (netip.Prefix, bool) {
	ila, reserved := d.config.Plan.ReservedILA()
	if !reserved {
		return netip.Prefix{}, false
	}
	locator, err := ila.Locator(d.config.NodePrefix)
	return locator, err == nil
}
