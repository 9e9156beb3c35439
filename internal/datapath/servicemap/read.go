package servicemap

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
)

// read reads the maps, once. An entry that a crash left without the others is removed. The caller holds the lock.
func (d *Tables) read() error {
	if d.frontends != nil {
		return nil
	}
	o := d.objects()
	services := map[bpfobj.PilasterSvcKey]bpfobj.PilasterSvc{}
	numbers := map[uint32]bpfobj.PilasterSvcKey{}
	backends := map[uint32]bpfobj.PilasterSvcBackend{}
	members := map[bpfobj.PilasterSvcMember]uint32{}
	err := errors.Join(
		bpfobj.ForEachEntry(o.PilSvcV1, func(k bpfobj.PilasterSvcKey, v bpfobj.PilasterSvc) { services[k] = v }),
		bpfobj.ForEachEntry(o.PilSvcfrontsV1, func(k uint32, v bpfobj.PilasterSvcFrontend) { numbers[k] = v.Key }),
		bpfobj.ForEachEntry(o.PilSvcbacksV1, func(k uint32, v bpfobj.PilasterSvcBackend) { backends[k] = v }),
		bpfobj.ForEachEntry(o.PilSvcsetsV1, func(k bpfobj.PilasterSvcMember, v uint32) { members[k] = v }),
	)
	if err != nil {
		return fmt.Errorf("read the tables of services: %w", err)
	}
	last, counted := members[counterKey]
	if !counted {
		// An older build removes these tables and keeps the sessions, which hold numbers. The clock is ahead of all
		// numbers of removed tables unless more than one a second was allocated.
		last = uint32(time.Now().Unix())
	}
	d.last, d.reserved = last, last
	keepNumbers, keepBackends := map[uint32]bool{}, map[uint32]bool{}
	keepMembers, keepParts := map[bpfobj.PilasterSvcMember]bool{counterKey: true}, map[bpfobj.PilasterSvcMember]bool{}
	all, of := map[bpfobj.PilasterSvcKey]*frontend{}, map[uint32]*frontend{}
	for k, v := range services {
		f := &frontend{PilasterSvc: v, backends: map[dpapi.Backend]*backend{}}
		all[k], of[v.Frontend] = f, f
		keepNumbers[v.Frontend] = true
		if v.Exposed != 0 {
			if f.members, err = d.readMaglev(v, keepParts); err != nil {
				return err
			}
			continue
		}
		for i := range v.Count {
			at := bpfobj.PilasterSvcMember{Set: v.Set, Index: i}
			keepMembers[at] = true
			f.members = append(f.members, members[at])
		}
		slices.Sort(f.members)
	}
	d.peers, d.backends = map[netip.Addr]uint32{}, 0
	for number, b := range backends {
		if f := of[b.Frontend]; f != nil {
			f.backends[backendOf(b)] = &backend{number, b.Draining != 0}
			keepBackends[number] = true
			d.peers[b.Plain.Addr()]++
			d.backends++
		}
	}
	keepPeers := map[bpfobj.PilasterAddr]bool{}
	for a := range d.peers {
		keepPeers[bpfobj.ToAddr(a)] = true
	}
	d.exposed = newExposure()
	for k, f := range all {
		d.count(k, f)
	}
	err = errors.Join(
		bpfobj.DeleteOthers(o.PilSvcfrontsV1, keepNumbers), bpfobj.DeleteOthers(o.PilSvcbacksV1, keepBackends),
		bpfobj.DeleteOthers(o.PilSvcsetsV1, keepMembers), bpfobj.DeleteOthers(o.PilSvcpeersV1, keepPeers),
		bpfobj.DeleteOthers(o.PilMaglevV1, keepParts), bpfobj.DeleteOthers(o.PilExposedV1, keys(d.exposed.addresses)),
		bpfobj.DeleteOthers(o.PilExtargetsV1, keys(d.exposed.targets)),
		bpfobj.DeleteOthers(o.PilExconnsV1, keys(d.exposed.tenants)),
	)
	if err == nil {
		err = d.repairExposed()
	}
	if err != nil {
		return fmt.Errorf("repair the tables of services: %w", err)
	}
	d.frontends = all
	return nil
}

// keys returns the keys of counts as DeleteOthers takes them.
func keys[K comparable](counts map[K]int) map[K]bool {
	all := make(map[K]bool, len(counts))
	for k := range counts {
		all[k] = true
	}
	return all
}

// Services returns the frontends in the kernel.
func (d *Tables) Services() ([]dpapi.FrontendKey, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.read(); err != nil {
		return nil, err
	}
	all := make([]dpapi.FrontendKey, 0, len(d.frontends))
	for k := range d.frontends {
		all = append(all, frontendKeyOf(k))
	}
	return all, nil
}

// exposedBy returns the number of the tenant that an exposed frontend is of, or 0.
func (d *Tables) exposedBy(k dpapi.FrontendKey) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.frontends[keyOf(k)]; f != nil {
		return f.Exposed
	}
	return 0
}

// LookupService reads a frontend from the kernel.
func (d *Tables) LookupService(key dpapi.FrontendKey) (dpapi.Frontend, bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := dpapi.Frontend{FrontendKey: key}
	o := d.objects()
	is, found, err := bpfobj.Lookup[bpfobj.PilasterSvc](o.PilSvcV1, keyOf(key))
	if err != nil || !found {
		return f, false, err
	}
	f.Affinity = time.Duration(is.Affinity) * time.Second
	if is.Exposed != 0 {
		kind, _, err := bpfobj.Lookup[uint32](o.PilExposedV1, keyOf(key).Address)
		if err != nil {
			return f, false, err
		}
		f.Exposed = dpapi.Exposed{Services: is.Exposed, Node: kind == exposedNode}
	}
	numbers, err := d.membersOf(key, is)
	if err != nil {
		return f, false, err
	}
	for _, number := range numbers {
		b, _, err := bpfobj.Lookup[bpfobj.PilasterSvcBackend](o.PilSvcbacksV1, number)
		if err != nil {
			return f, false, err
		}
		f.Backends = append(f.Backends, backendOf(b))
	}
	if err := d.read(); err != nil {
		return f, false, err
	}
	if has := d.frontends[keyOf(key)]; has != nil {
		for b, is := range has.backends {
			if is.draining {
				f.Draining = append(f.Draining, b)
			}
		}
	}
	return f, true, nil
}

// membersOf reads the numbers of the backends of a frontend.
func (d *Tables) membersOf(key dpapi.FrontendKey, is bpfobj.PilasterSvc) (numbers []uint32, err error) {
	if is.Exposed != 0 {
		return d.readMaglev(is, map[bpfobj.PilasterSvcMember]bool{})
	}
	for i := range is.Count {
		at := bpfobj.PilasterSvcMember{Set: is.Set, Index: i}
		number, found, err := bpfobj.Lookup[uint32](d.objects().PilSvcsetsV1, at)
		if err != nil || !found {
			return nil, fmt.Errorf("service %v: endpoint %d of its set is missing: %w", key.Address, i, err)
		}
		numbers = append(numbers, number)
	}
	return numbers, nil
}

// ServiceCounts returns what clients on this node have done since the frontends were made.
func (d *Tables) ServiceCounts() (map[dpapi.FrontendKey]dpapi.ServiceCounts, error) {
	all := map[dpapi.FrontendKey]dpapi.ServiceCounts{}
	err := bpfobj.ForEachEntry(d.objects().PilSvcfrontsV1, func(_ uint32, v bpfobj.PilasterSvcFrontend) {
		all[frontendKeyOf(v.Key)] = dpapi.ServiceCounts{Flows: v.Flows, Refused: v.Refused}
	})
	return all, err
}
