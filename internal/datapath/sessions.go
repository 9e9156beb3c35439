package datapath

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/datapath/policymap"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// Bits of bpf/policy/ct.h's enum seen.
const (
	seenEstablished = 1 << 2
	seenFins        = 1<<3 | 1<<4
	seenReset       = 1 << 5
)

// quotaEntries is the number of entries of the quota map: one for each endpoint, behind entry 0, which holds the sum.
func (d *Datapath) quotaEntries() int { return 1 + d.config.MaxEndpoints }

// recountQuota counts each endpoint's sessions anew: one of the two maps may be new, or from another build. Sessions
// that begin or end meanwhile may be counted wrong until the next start.
func (d *Datapath) recountQuota() error {
	m := d.Objects.PilSessionUsersV1
	users, counts := make([]uint32, m.MaxEntries()), make([]int64, m.MaxEntries())
	err := forEachBucket(d.Objects.PilSessionsV1, func(b *bpfobj.PilasterSessionBucket) {
		for i, tag := range b.Tags {
			if user := b.Entries[i].Key.Endpoint; tag != 0 && int(user) < len(counts) {
				counts[user]++
			}
			counts[0] += int64(bpfobj.BoolToUint32(tag != 0))
		}
	})
	if err != nil {
		return fmt.Errorf("count the sessions: %w", err)
	}
	for i := range users {
		users[i] = uint32(i)
	}
	if _, err := m.BatchUpdate(users, counts, nil); err != nil {
		return fmt.Errorf("write the number of sessions of each endpoint: %w", err)
	}
	return nil
}

// hasSessionMap reports whether a session table of this size is pinned already.
func (d *Datapath) hasSessionMap() bool {
	_, err := os.Lstat(
		filepath.Join(
			d.MapsDir(),
			pinnedMap{bpfobj.PilasterMapPilSessionsV1, bpfobj.PinSessions, d.sessionBuckets()}.pinName(),
		),
	)
	return err == nil
}

// migrateSessions recounts the sessions of an existing table. For a new table it starts the pickup of connections that
// the old one may have had.
func (d *Datapath) migrateSessions(known bool) error {
	if err := d.recountQuota(); err != nil || known {
		return err
	}
	subjects := map[bpfobj.PilasterPolTargetKey]bpfobj.PilasterPolTarget{}
	if err := bpfobj.ReadEntries(d.Objects.PolSubjectsV1, subjects); err != nil {
		return err
	}
	return d.StartPickup(policymap.TenantsWithPolicies(maps.Keys(subjects)))
}

// bucketBatch is how many buckets one system call reads.
const bucketBatch = 256

// Sessions reads the whole session table, bucket by bucket, while packets continue: a session that begins or ends
// meanwhile may be counted or not.
func (d *Datapath) Sessions() (dpapi.Sessions, error) {
	m := d.Objects.PilSessionsV1
	s := dpapi.Sessions{Capacity: int(m.MaxEntries()) * slotsPerBucket}
	now, err := host.Monotonic()
	if err != nil {
		return s, err
	}
	users := map[endpoint.ID]int{}
	err = forEachBucket(m, func(b *bpfobj.PilasterSessionBucket) {
		for i, tag := range b.Tags {
			if place := &b.Entries[i]; tag != 0 && place.Until > now {
				s.Used++
				s.HalfOpen += int(bpfobj.BoolToUint32(isHalfOpen(place.State.Seen)))
				users[endpoint.ID(place.Key.Endpoint)]++
			}
		}
	})
	if err != nil {
		return s, fmt.Errorf("read the sessions: %w", err)
	}
	for id, n := range users {
		if n > s.Most || n == s.Most && id < s.Largest {
			s.Largest, s.Most = id, n
		}
	}
	var each []bpfobj.PilasterSessionCounts
	if err := d.Objects.PilSessionCountsV1.Lookup(uint32(0), &each); err != nil {
		return s, fmt.Errorf("read the counters of sessions: %w", err)
	}
	for _, c := range each {
		s.Begun, s.Evicted, s.Refused = s.Begun+c.Created, s.Evicted+c.Evicted, s.Refused+c.Refused
	}
	return s, nil
}

// isHalfOpen reports whether a session can be evicted for another one: it is not established yet, or has ended.
func isHalfOpen(seen uint8) bool {
	return seen&seenEstablished == 0 || seen&seenReset != 0 || seen&seenFins == seenFins
}

func forEachBucket(m *ebpf.Map, do func(*bpfobj.PilasterSessionBucket)) error {
	keys, buckets := make([]uint32, bucketBatch), make([]bpfobj.PilasterSessionBucket, bucketBatch)
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

// slotsPerBucket is BUCKET_ENTRIES of bpf/policy/ct.h.
const slotsPerBucket = len(bpfobj.PilasterSessionBucket{}.Entries)

// sessionBuckets returns a power of 2, so that the programs find a bucket with a mask.
func (d *Datapath) sessionBuckets() int {
	return 1 << bits.Len(uint((d.config.MaxSessions-1)/slotsPerBucket))
}
