package datapath

import (
	"context"
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

// usageEntries is the number of entries of the map of endpoints' sessions. Key 0 is no endpoint.
func (d *Datapath) usageEntries() int { return 1 + d.config.MaxEndpoints }

// usageTenants is the number of tenants whose sessions can be counted: during a key rotation a tenant has two ids.
func (d *Datapath) usageTenants() int { return 2 * (d.config.MaxTenantIDs + 1) }

// recountUsage counts the sessions of each endpoint and tenant anew: one of the maps may be new, or from another build.
// Sessions that begin or end meanwhile may be counted wrong until the next start.
func (d *Datapath) recountUsage() error {
	m := d.Objects.PilSessionUsersV1
	endpoints, counts := make([]uint32, m.MaxEntries()), make([]int64, m.MaxEntries())
	tenants := map[uint32]int64{}
	err := forEachBucket(d.Objects.PilSessionsV1, func(b *bpfobj.PilasterSessionBucket) {
		for i, tag := range b.Tags {
			if tag == 0 {
				continue
			}
			k := &b.Entries[i].Key
			tenants[k.Tenant]++
			if int(k.Endpoint) < len(counts) {
				counts[k.Endpoint]++
			}
		}
	})
	if err != nil {
		return fmt.Errorf("count the sessions: %w", err)
	}
	for i := range endpoints {
		endpoints[i] = uint32(i)
	}
	if _, err := m.BatchUpdate(endpoints, counts, nil); err != nil {
		return fmt.Errorf("write the number of sessions of each endpoint: %w", err)
	}
	for id, n := range tenants {
		if err := d.Objects.PilSessionTenantsV1.Put(id, n); err != nil {
			return fmt.Errorf("write the number of sessions of tenant id %d: %w", id, err)
		}
	}
	return d.forgetTenants(func(id uint32, _ int64) bool { return tenants[id] == 0 })
}

// forgetTenants removes tenants from the count of sessions.
func (d *Datapath) forgetTenants(which func(id uint32, sessions int64) bool) error {
	m, counts := d.Objects.PilSessionTenantsV1, map[uint32]int64{}
	if err := bpfobj.ReadEntries(m, counts); err != nil {
		return fmt.Errorf("read the number of sessions of each tenant: %w", err)
	}
	for id, n := range counts {
		if !which(id, n) {
			continue
		}
		if err := m.Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove the number of sessions of tenant id %d: %w", id, err)
		}
	}
	return nil
}

// Attach attaches the program to the endpoint's device. The endpoint begins without sessions, even if another one had
// its number.
func (d *Datapath) Attach(r endpoint.Record) error {
	if err := d.deleteSessions(r.ID); err != nil {
		return err
	}
	return d.Devices.Attach(r)
}

// RemoveDevice removes the endpoint's device and its sessions.
func (d *Datapath) RemoveDevice(ctx context.Context, r endpoint.Record) error {
	if err := d.Devices.RemoveDevice(ctx, r); err != nil {
		return err
	}
	return d.deleteSessions(r.ID)
}

// sweepBuckets is SWEEP_BUCKETS of bpf/pilaster.bpf.c.
const sweepBuckets = 1024

// deleteSessions deletes the sessions of an endpoint that no packet can reach any more, and all expired ones.
func (d *Datapath) deleteSessions(id endpoint.ID) error {
	var used int64
	if err := d.Objects.PilSessionUsersV1.Lookup(uint32(id), &used); err != nil {
		return fmt.Errorf("endpoint %d: read its number of sessions: %w", id, err)
	}
	if used == 0 {
		return nil
	}
	buckets := d.Objects.PilSessionsV1.MaxEntries()
	for first := uint32(0); first < buckets; first += sweepBuckets {
		r := bpfobj.PilasterSweepRequest{Endpoint: uint32(id), Bucket: first}
		if err := bpfobj.RunRequest(d.Objects.PilSweep, &r); err != nil {
			return fmt.Errorf("endpoint %d: delete its sessions: %w", id, err)
		}
	}
	return d.forgetTenants(func(_ uint32, sessions int64) bool { return sessions <= 0 })
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
	if err := d.recountUsage(); err != nil || known {
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

// isHalfOpen reports whether a session is not established yet, or has ended.
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
