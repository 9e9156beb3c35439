package evpn

import (
	"bytes"
	"cmp"
	"slices"
)

// group has the accepted routes about one record, the best first. So a change costs a search and one copy, even if a
// peer announces a MAC many times.
type group []*entry

// compare orders routes about one record. A higher mobility sequence is newer (RFC 7432 §15); of equal ones the lower
// VTEP wins (§15.1), which all speakers decide alike. The rest makes the order independent of what arrived first.
func (e *entry) compare(other *entry) int {
	a, b := &e.route, &other.route
	return cmp.Or(
		-cmp.Compare(sticky(a), sticky(b)),
		-cmp.Compare(a.Sequence, b.Sequence),
		cmp.Compare(isStale(e), isStale(other)),
		a.VTEP.Compare(b.VTEP),
		bytes.Compare(a.MAC[:], b.MAC[:]),
		bytes.Compare(a.RouterMAC[:], b.RouterMAC[:]),
		-cmp.Compare(a.L3VNI, b.L3VNI), // with an L3 VNI before without
		a.Key.compare(b.Key),
		e.peer.addr.Compare(other.peer.addr),
	)
}

func sticky(r *Route) int {
	if r.Sticky {
		return 1
	}
	return 0
}

func isStale(e *entry) int {
	if e.stale.IsZero() {
		return 0
	}
	return 1
}

func (g group) with(e *entry) group {
	i, _ := slices.BinarySearchFunc(g, e, (*entry).compare)
	return slices.Insert(g, i, e)
}

func (g group) without(e *entry) group {
	i, found := slices.BinarySearchFunc(g, e, (*entry).compare)
	if !found {
		return g
	}
	return slices.Delete(g, i, i+1)
}

// MaxPaths is the maximum number of routes about one record that are imported from one peer. They differ in the route
// distinguisher, of which a peer can have any number, and each change of one takes time in proportion to their number.
const MaxPaths = 128

// bounded is the key whose group has a bounded number of routes of each peer: that of the address, of the prefix or of
// the VTEP. A MAC may have any number of addresses, but a bounded number of routes without one.
func (r *Route) bounded() RecordKey {
	all := r.records()
	return all[len(all)-1]
}

// isFull reports whether the group of a bounded key has as many routes of a peer as it may have.
func (t *Table) isFull(p *peer, key RecordKey) bool {
	g, n := t.groups[key], 0
	if len(g) < MaxPaths {
		return false
	}
	for _, e := range g {
		if e.peer == p && e.route.bounded() == key {
			n++
		}
	}
	return n >= MaxPaths
}

// wait adds an entry to those that wait for room in groups, or removes it, if it is one.
func (e *entry) wait(add bool) {
	if e.reason != TooManyPaths {
		return
	}
	key := e.route.bounded()
	all := e.peer.waiting[key]
	switch {
	case !add:
		if delete(all, e); len(all) == 0 {
			delete(e.peer.waiting, key)
		}
	case all == nil:
		e.peer.waiting[key] = map[*entry]bool{e: true}
	default:
		all[e] = true
	}
}

// admit checks entries of a peer again that wait for room in the groups of some keys.
func (t *Table) admit(p *peer, keys []RecordKey) {
	for _, key := range keys {
		for e := range p.waiting[key] {
			if t.isFull(p, key) {
				break
			}
			t.checkAgain(e)
		}
	}
}

// MaxMembers is the maximum number of VTEPs to which a segment's frames are replicated: those with the lowest
// addresses.
const MaxMembers = 64

// decide updates the record of a key after its group, or the cluster's own containers, changed.
func (t *Table) decide(key RecordKey) {
	g := t.groups[key]
	if key.Kind == RecordMember {
		t.decideMember(key, len(g) > 0)
		return
	}
	t.write(key, len(g) > 0 && !t.own[key])
}

// decideMember keeps the order of a segment's VTEPs, and moves the boundary at MaxMembers.
func (t *Table) decideMember(key RecordKey, exists bool) {
	all := t.members[key.VNI]
	i, found := slices.BinarySearchFunc(all, key, RecordKey.Compare)
	switch {
	case exists && !found:
		all = slices.Insert(all, i, key)
		if len(all) > MaxMembers {
			t.write(all[MaxMembers], false)
		}
	case !exists && found:
		all = slices.Delete(all, i, i+1)
		if len(all) >= MaxMembers {
			t.write(all[MaxMembers-1], true)
		}
	}
	t.members[key.VNI] = all
	if len(all) == 0 {
		delete(t.members, key.VNI)
	}
	t.write(key, exists && i < MaxMembers)
}

// write sets or deletes the record of a key. The group of an existing record has a route.
func (t *Table) write(key RecordKey, exists bool) {
	before, existed := t.records[key]
	if !exists {
		if existed {
			delete(t.records, key)
			t.changed[key] = true
		}
		return
	}
	record := t.groups[key][0].record(key)
	if existed && record == before {
		return
	}
	t.records[key] = record
	t.changed[key] = true
}

func (e *entry) record(key RecordKey) Record {
	r := &e.route
	record := Record{RecordKey: key, Tenant: e.tenant.Name, VTEP: r.VTEP, Stale: !e.stale.IsZero()}
	switch key.Kind {
	case RecordHost:
		record.HostMAC, record.Sequence = r.MAC, r.Sequence
		if r.L3VNI != 0 {
			record.L3VNI, record.RouterMAC = r.L3VNI, r.RouterMAC
		}
	case RecordMAC:
		record.Sequence = r.Sequence
	case RecordPrefix:
		record.L3VNI, record.RouterMAC = key.VNI, r.RouterMAC
	}
	return record
}
