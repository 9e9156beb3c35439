package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/endpoint"
)

// Bits of bpf/session.h's enum seen.
const (
	seenEstablished = 1 << 2
	seenFins        = 1<<3 | 1<<4
	seenReset       = 1 << 5
)

// bucketsAtOnce are read by one system call.
const bucketsAtOnce = 256

// Sessions reads the whole table, bucket by bucket while packets go on: what begins or ends meanwhile may be counted or not.
func (d *Datapath) Sessions() (agent.Sessions, error) {
	m := d.objects.PilSessionsV1
	s := agent.Sessions{Capacity: int(m.MaxEntries()) * placesPerBucket}
	var clock unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &clock); err != nil {
		return s, fmt.Errorf("read the clock: %w", err)
	}
	now := uint64(clock.Nano())
	users := map[endpoint.ID]int{}
	err := eachBucket(m, func(b *pilasterSessionBucket) {
		for i, tag := range b.Tags {
			if place := &b.Places[i]; tag != 0 && place.Until > now {
				s.Used++
				s.HalfOpen += int(oneIf(isHalfOpen(place.State.Seen)))
				users[endpoint.ID(place.Key.Endpoint)]++
			}
		}
	})
	if err != nil {
		return s, fmt.Errorf("read the sessions: %w", err)
	}
	delete(users, 0) // of other nodes' containers
	for id, n := range users {
		if n > s.Most || n == s.Most && id < s.Largest {
			s.Largest, s.Most = id, n
		}
	}
	var each []pilasterSessionCounts
	if err := d.objects.PilSessionCountsV1.Lookup(uint32(0), &each); err != nil {
		return s, fmt.Errorf("read what became of sessions: %w", err)
	}
	for _, c := range each {
		s.Begun, s.Evicted, s.Refused = s.Begun+c.Begun, s.Evicted+c.Evicted, s.Refused+c.Refused
	}
	return s, nil
}

// isHalfOpen tells of a session that it gives way to others: not established yet, or over.
func isHalfOpen(seen uint8) bool {
	return seen&seenEstablished == 0 || seen&seenReset != 0 || seen&seenFins == seenFins
}

func eachBucket(m *ebpf.Map, do func(*pilasterSessionBucket)) error {
	keys, buckets := make([]uint32, bucketsAtOnce), make([]pilasterSessionBucket, bucketsAtOnce)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, buckets, &ebpf.BatchOptions{ElemFlags: uint64(ebpf.LookupLock)})
		for i := range n {
			do(&buckets[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
