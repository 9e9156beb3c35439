package oncache

import (
	"errors"
	"fmt"
)

// Causes of a cache miss, in the order of enum once_cause in bpf/oncache/state.h, whose first value is a hit.
var missCauses = []string{
	"no-lease", "packet", "hop-limit", "tcp-flags", "fin", "segments", "congested", "sender", "syn-ack", "unverified",
	"unknown", "void", "expired", "device", "no-route", "too-long", "failed",
}

// notLearnt are the causes why a packet that was to be learnt from was not.
var notLearnt = []string{"changed-before", "untracked", "unreplied", "nat", "checksum", "flooded", "changed-meanwhile"}

// Stats are counters since Open, and numbers of entries.
type Stats struct {
	Out, In Direction
	// Entries per map.
	Flows, Remote, VTEPs, Local int
	Evicted                     uint64 // entries that Evict removed
}

// Direction has counters of packets: out from containers, in from the uplink.
type Direction struct {
	Hits      uint64
	Misses    map[string]uint64 // by cause
	Learnt    uint64
	NotLearnt map[string]uint64 // by cause
}

// Stats reads the counters. Each map has all causes as keys.
func (o *Cache) Stats() (s Stats, err error) {
	if s.Out, err = o.direction(1); err != nil {
		return s, err
	}
	if s.In, err = o.direction(2); err != nil {
		return s, err
	}
	err = errors.Join(
		each(o.objects.OnceFilter, func(flowKey, verdict) { s.Flows++ }),
		each(o.objects.OnceEgress, func(innerKey, egressEntry) { s.Remote++ }),
		each(o.objects.OnceVtep, func([16]byte, vtepEntry) { s.VTEPs++ }),
		each(o.objects.OnceIngress, func(innerKey, ingressEntry) { s.Local++ }))
	if err != nil {
		return s, fmt.Errorf("oncache: count the entries: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	s.Evicted = o.evicted
	return s, nil
}

// direction reads the counters of one direction (enum once_way).
func (o *Cache) direction(way int) (Direction, error) {
	d := Direction{Misses: map[string]uint64{}, NotLearnt: map[string]uint64{}}
	causes := 1 + len(missCauses) + 1 + len(notLearnt)
	for i := range causes {
		var perCPU []uint64
		if err := o.objects.OnceCounters.Lookup(uint32(way*causes+i), &perCPU); err != nil {
			return d, fmt.Errorf("oncache: read counter %d: %w", way*causes+i, err)
		}
		var sum uint64
		for _, n := range perCPU {
			sum += n
		}
		learnt := 1 + len(missCauses)
		switch {
		case i == 0:
			d.Hits = sum
		case i < learnt:
			d.Misses[missCauses[i-1]] = sum
		case i == learnt:
			d.Learnt = sum
		default:
			d.NotLearnt[notLearnt[i-learnt-1]] = sum
		}
	}
	return d, nil
}
