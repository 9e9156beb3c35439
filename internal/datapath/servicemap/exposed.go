package servicemap

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
)

// Capacity of the maps of exposed ports. A table of Maglev that is replaced and its successor exist at the same time.
const (
	MaxAddresses = 4_096
	MaxTargets   = 65_536
	MaxParts     = 2 * usedParts
	usedParts    = 8_192 // of 256 slots
)

const partSlots = len(bpfobj.PilasterMaglevPart{}.Backends)

// Kinds of addresses, as exposed_kind in C.
const (
	exposedAddress = uint32(1)
	exposedNode    = uint32(2)
)

// exposure counts what the maps have because of exposed frontends.
type exposure struct {
	addresses map[bpfobj.PilasterAddr]int
	kinds     map[bpfobj.PilasterAddr]uint32 // as written since the maps were read
	targets   map[bpfobj.PilasterSvcKey]int
	tenants   map[uint32]int // tables of connections, by the number of services
	parts     int
}

func newExposure() exposure {
	return exposure{
		addresses: map[bpfobj.PilasterAddr]int{}, kinds: map[bpfobj.PilasterAddr]uint32{},
		targets: map[bpfobj.PilasterSvcKey]int{}, tenants: map[uint32]int{},
	}
}

// maglevNumbers returns the numbers of backends in the slots of the table of a frontend.
func maglevNumbers(wanted []dpapi.Backend, has map[dpapi.Backend]*backend) []uint32 {
	all := slices.Clone(wanted)
	slices.SortFunc(all, func(a, b dpapi.Backend) int {
		return cmp.Or(a.Plain.Compare(b.Plain), cmp.Compare(a.Port, b.Port))
	})
	all = slices.Compact(all)
	names := make([]string, len(all))
	for i, b := range all {
		names[i] = netip.AddrPortFrom(b.Plain, b.Port).String()
	}
	slots := service.Maglev(names, service.MaglevSize(len(all)))
	numbers := make([]uint32, len(slots))
	for i, of := range slots {
		numbers[i] = has[all[of]].number
	}
	return numbers
}

func partsOf(slots int) int { return (slots + partSlots - 1) / partSlots }

// writeMaglev writes the table of a set.
func (d *Tables) writeMaglev(set uint32, numbers []uint32) error {
	parts := make([]bpfobj.PilasterMaglevPart, partsOf(len(numbers)))
	for i := range parts {
		copy(parts[i].Backends[:], numbers[i*partSlots:])
	}
	if err := bpfobj.WriteEntries(d.objects().PilMaglevV1, keysOf(set, len(parts)), parts); err != nil {
		return fmt.Errorf("write a table of endpoints: %w", err)
	}
	return nil
}

// readMaglev returns the backends of the table of a set, sorted, and adds the keys of its parts to keep.
func (d *Tables) readMaglev(v bpfobj.PilasterSvc, keep map[bpfobj.PilasterSvcMember]bool) ([]uint32, error) {
	seen := map[uint32]bool{}
	for i, at := range keysOf(v.Set, partsOf(int(v.Count))) {
		part, _, err := bpfobj.Lookup[bpfobj.PilasterMaglevPart](d.objects().PilMaglevV1, at)
		if err != nil {
			return nil, fmt.Errorf("read a table of endpoints: %w", err)
		}
		keep[at] = true
		for _, number := range part.Backends[:min(partSlots, int(v.Count)-i*partSlots)] {
			seen[number] = true
		}
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

// repairExposed writes what a crash has left out: the ports of containers and the tables of connections of frontends
// that packets use already.
func (d *Tables) repairExposed() error {
	for target := range d.exposed.targets {
		if err := d.objects().PilExtargetsV1.Put(target, uint32(1)); err != nil {
			return err
		}
	}
	for number := range d.exposed.tenants {
		if err := d.addConnections(number); err != nil {
			return err
		}
	}
	return nil
}

// addConnections makes the table of connections of a tenant, if it has none.
func (d *Tables) addConnections(number uint32) error {
	if err := bpfobj.AddConnections(d.objects().PilExconnsV1, number); err != nil {
		return fmt.Errorf("exposed ports of services %d: %w", number, err)
	}
	return nil
}

// target returns the port of a container of this node that is a backend of an exposed frontend.
func (d *Tables) target(of bpfobj.PilasterSvcKey, b dpapi.Backend) (bpfobj.PilasterSvcKey, bool) {
	return bpfobj.PilasterSvcKey{Address: bpfobj.ToAddr(b.Seen), Port: networkOrder(b.Port), Proto: of.Proto},
		d.host.NodePrefix.Contains(b.Plain)
}

// count adds a frontend, as the kernel has it, to what is exposed.
func (d *Tables) count(key bpfobj.PilasterSvcKey, f *frontend) {
	if f.Exposed == 0 {
		return
	}
	d.exposed.addresses[key.Address]++
	d.exposed.tenants[f.Exposed]++
	d.exposed.parts += partsOf(int(f.Count))
	for b := range f.backends {
		if target, here := d.target(key, b); here {
			d.exposed.targets[target]++
		}
	}
}

// expose writes what an exposed frontend needs before packets use it: the ports of containers of this node, and the
// tenant's table of connections. was is nil if it is new.
func (d *Tables) expose(key bpfobj.PilasterSvcKey, was, is *frontend) error {
	if is.Exposed == 0 {
		return nil
	}
	for b := range is.backends {
		target, here := d.target(key, b)
		if !here || (was != nil && was.backends[b] != nil) {
			continue
		}
		if d.exposed.targets[target] == 0 {
			if err := d.objects().PilExtargetsV1.Put(target, uint32(1)); err != nil {
				return fmt.Errorf("write port %d of endpoint %v: %w", b.Port, b.Plain, err)
			}
		}
		d.exposed.targets[target]++
	}
	d.exposed.parts += partsOf(int(is.Count))
	if was != nil {
		return nil
	}
	if err := d.addConnections(is.Exposed); err != nil {
		return err
	}
	d.exposed.tenants[is.Exposed]++
	return nil
}

// announce makes packets to the address of an exposed frontend use it. was is nil if it is new.
func (d *Tables) announce(key bpfobj.PilasterSvcKey, was, is *frontend, node bool) error {
	if is.Exposed == 0 {
		return nil
	}
	kind := exposedAddress
	if node {
		kind = exposedNode
	}
	if d.exposed.kinds[key.Address] != kind {
		if err := d.objects().PilExposedV1.Put(key.Address, kind); err != nil {
			return fmt.Errorf("expose address %v: %w", key.Address.Addr(), err)
		}
		d.exposed.kinds[key.Address] = kind
	}
	if was == nil {
		d.exposed.addresses[key.Address]++
	}
	return nil
}

// conceal takes the address of a frontend that is deleted from the packets, if it has no other port.
func (d *Tables) conceal(key bpfobj.PilasterSvcKey, f *frontend) error {
	if f.Exposed == 0 {
		return nil
	}
	if d.exposed.addresses[key.Address]--; d.exposed.addresses[key.Address] > 0 {
		return nil
	}
	delete(d.exposed.addresses, key.Address)
	delete(d.exposed.kinds, key.Address)
	return bpfobj.Delete(d.objects().PilExposedV1, key.Address)
}

// forget removes the table of Maglev and the ports of containers that a frontend no longer has; is is nil if it is
// gone, and then the tenant's table of connections if no other frontend needs it.
func (d *Tables) forget(key bpfobj.PilasterSvcKey, was, is *frontend) error {
	if was.Exposed == 0 {
		return nil
	}
	o := d.objects()
	if is == nil || is.Set != was.Set {
		if err := bpfobj.DeleteKeys(o.PilMaglevV1, keysOf(was.Set, partsOf(int(was.Count)))); err != nil {
			return err
		}
	}
	d.exposed.parts -= partsOf(int(was.Count))
	for b := range was.backends {
		target, here := d.target(key, b)
		if !here || (is != nil && is.backends[b] != nil) {
			continue
		}
		if d.exposed.targets[target]--; d.exposed.targets[target] > 0 {
			continue
		}
		delete(d.exposed.targets, target)
		if err := bpfobj.Delete(o.PilExtargetsV1, target); err != nil {
			return err
		}
	}
	if is != nil {
		return nil
	}
	if d.exposed.tenants[was.Exposed]--; d.exposed.tenants[was.Exposed] > 0 {
		return nil
	}
	delete(d.exposed.tenants, was.Exposed)
	return bpfobj.Delete(o.PilExconnsV1, was.Exposed)
}
