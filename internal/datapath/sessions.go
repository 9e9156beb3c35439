package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

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

// usageEntries is the number of entries of the map of endpoints' sessions. It does not depend on the settings: after a
// restart with a lower --max-endpoints, endpoints with higher numbers may be alive. Key 0 is no endpoint.
const usageEntries = 1 << 16

// usageTenants is the number of tenants whose sessions can be counted: during a key rotation a tenant has two ids.
func (d *Datapath) usageTenants() int { return 2 * (d.config.MaxTenantIDs + 1) }

// recountUsage counts the sessions of each endpoint and tenant anew: one of the maps may be new, or programs of a build
// that does not count may have changed the table. It counts bucket by bucket. Meanwhile, programs count their changes
// of buckets that are done, and no others.
func (d *Datapath) recountUsage() error {
	now, err := host.Monotonic()
	if err != nil {
		return err
	}
	endpoints := make([]uint32, usageEntries)
	for i := range endpoints {
		endpoints[i] = uint32(i)
	}
	m := d.Objects.PilSessionUsersV1
	if err := m.Put(endpoints[0], int64(now)); err != nil {
		return fmt.Errorf("begin to count the sessions: %w", err)
	}
	awaitPrograms()
	if _, err := m.BatchUpdate(endpoints[1:], make([]int64, usageEntries-1), nil); err != nil {
		return fmt.Errorf("clear the number of sessions of each endpoint: %w", err)
	}
	tenants, err := bpfobj.MapKeys[uint32](d.Objects.PilSessionTenantsV1)
	if err == nil {
		err = bpfobj.DeleteKeys(d.Objects.PilSessionTenantsV1, tenants)
	}
	if err != nil {
		return fmt.Errorf("clear the number of sessions of each tenant: %w", err)
	}
	if err := d.sweepSessions(0); err != nil {
		return fmt.Errorf("count the sessions: %w", err)
	}
	return nil
}

// awaitPrograms waits until all programs have ended that run now: they may still count by what they have read. The
// kernel does not wait if it has one CPU only, or if some have no timer (nohz_full). Then a packet that is in a program
// just now may be counted twice, until the next start.
func awaitPrograms() {
	const membarrierGlobal = 1 // MEMBARRIER_CMD_GLOBAL, which is synchronize_rcu
	unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0)
}

// forgetTenants removes tenants without policies from the count of sessions, once it is 0. Only tenants with policies
// begin sessions.
func (d *Datapath) forgetTenants() error {
	m, counts := d.Objects.PilSessionTenantsV1, map[uint32]int64{}
	if err := bpfobj.ReadEntries(m, counts); err != nil {
		return fmt.Errorf("read the number of sessions of each tenant: %w", err)
	}
	maps.DeleteFunc(counts, func(_ uint32, sessions int64) bool { return sessions > 0 })
	return d.ForEachWithoutPolicies(maps.Keys(counts), func(id uint32) error {
		if err := m.Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove the number of sessions of tenant id %d: %w", id, err)
		}
		return nil
	})
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
	if err := d.sweepSessions(id); err != nil {
		return fmt.Errorf("endpoint %d: delete its sessions: %w", id, err)
	}
	if err := d.Objects.PilSessionUsersV1.Put(uint32(id), int64(0)); err != nil {
		return fmt.Errorf("endpoint %d: clear its number of sessions: %w", id, err)
	}
	return d.forgetTenants()
}

// sweepSessions deletes all expired sessions, and those of an endpoint. It counts the sessions of buckets that the last
// recount has not counted.
func (d *Datapath) sweepSessions(id endpoint.ID) error {
	buckets := d.Objects.PilSessionsV1.MaxEntries()
	for first := uint32(0); first < buckets; first += sweepBuckets {
		r := bpfobj.PilasterSweepRequest{Endpoint: uint32(id), Bucket: first}
		if err := bpfobj.RunRequest(d.Objects.PilSweep, &r); err != nil {
			return err
		}
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
	users, tenants := map[endpoint.ID]int{}, map[uint32]int{}
	err = forEachBucket(m, func(b *bpfobj.PilasterSessionBucket) {
		for i, tag := range b.Tags {
			if place := &b.Entries[i]; tag != 0 && place.Until > now {
				s.Used++
				s.HalfOpen += int(bpfobj.BoolToUint32(isHalfOpen(place.State.Seen)))
				users[endpoint.ID(place.Key.Endpoint)]++
				tenants[place.Key.Tenant]++
			}
		}
	})
	if err != nil {
		return s, fmt.Errorf("read the sessions: %w", err)
	}
	s.Largest, s.Most = largestUser(users)
	s.LargestTenant, s.MostOfTenant = largestUser(tenants)
	var each []bpfobj.PilasterSessionCounts
	if err := d.Objects.PilSessionCountsV1.Lookup(uint32(0), &each); err != nil {
		return s, fmt.Errorf("read the counters of sessions: %w", err)
	}
	for _, c := range each {
		s.Begun, s.Evicted, s.Refused = s.Begun+c.Created, s.Evicted+c.Evicted, s.Refused+c.Refused
	}
	return s, nil
}

// sweepEvery is the least time between two passes of TenantSessions over the table, 10 ms for one of default size.
const sweepEvery = 10 * time.Second

// TenantSessions returns the number of sessions of each tenant, by its id or VNI. It frees expired ones first, unless
// it has done so a short time ago.
func (d *Datapath) TenantSessions() (used map[uint32]int, capacity int, err error) {
	if err := d.sweepIfDue(); err != nil {
		return nil, 0, fmt.Errorf("free expired sessions: %w", err)
	}
	counts := map[uint32]int64{}
	if err := bpfobj.ReadEntries(d.Objects.PilSessionTenantsV1, counts); err != nil {
		return nil, 0, fmt.Errorf("read the number of sessions of each tenant: %w", err)
	}
	used = map[uint32]int{}
	for id, n := range counts {
		used[id] = int(max(0, n))
	}
	return used, int(d.Objects.PilSessionsV1.MaxEntries()) * slotsPerBucket, nil
}

func (d *Datapath) sweepIfDue() error {
	d.sweptMu.Lock()
	defer d.sweptMu.Unlock()
	if time.Since(d.swept) < sweepEvery {
		return nil
	}
	d.swept = time.Now()
	return d.sweepSessions(0)
}

// largestUser returns who has the most sessions, and how many; among equals the lowest id.
func largestUser[ID cmp.Ordered](users map[ID]int) (largest ID, most int) {
	for id, n := range users {
		if n > most || n == most && id < largest {
			largest, most = id, n
		}
	}
	return largest, most
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

// EndpointSessions returns the sessions of an endpoint.
func (d *Datapath) EndpointSessions(id endpoint.ID) ([]dpapi.Session, error) {
	now, err := host.Monotonic()
	if err != nil {
		return nil, err
	}
	var all []dpapi.Session
	err = forEachBucket(d.Objects.PilSessionsV1, func(b *bpfobj.PilasterSessionBucket) {
		for i, tag := range b.Tags {
			is := &b.Entries[i]
			if tag == 0 || is.Until <= now || is.Key.Endpoint != uint32(id) {
				continue
			}
			k := is.Key
			all = append(all, dpapi.Session{
				Local:  netip.AddrPortFrom(k.Local.Addr(), k.LocalPort),
				Remote: netip.AddrPortFrom(k.Remote.Addr(), k.RemotePort),
				Tenant: k.Tenant, Protocol: k.Proto, Direction: k.Dir,
				State: dpapi.SessionState{
					Version: is.State.Version, First: is.State.First, Seen: is.State.Seen, Protocol: is.State.Proto,
					NAT: is.State.Nat,
				},
			})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("endpoint %d: read its sessions: %w", id, err)
	}
	return all, nil
}

// KeepSessions adds sessions to an endpoint, except those that it has already. It returns how many there was no room
// for.
func (d *Datapath) KeepSessions(id endpoint.ID, all []dpapi.Session) (left int, err error) {
	for _, s := range all {
		r := bpfobj.PilasterKeepRequest{
			Key: bpfobj.PilasterSessionKey{
				Local: bpfobj.ToAddr(s.Local.Addr()), Remote: bpfobj.ToAddr(s.Remote.Addr()),
				LocalPort: s.Local.Port(), RemotePort: s.Remote.Port(),
				Endpoint: uint32(id), Tenant: s.Tenant, Proto: s.Protocol, Dir: s.Direction,
			},
			State: bpfobj.PilasterSessionState{
				Version: s.State.Version, First: s.State.First, Seen: s.State.Seen, Proto: s.State.Protocol,
				Nat: s.State.NAT,
			},
		}
		result, err := bpfobj.TryRequest(d.Objects.PilKeepSession, &r)
		if err != nil || result > 1 {
			return left, fmt.Errorf("endpoint %d: add a session: result %d, %w", id, result, err)
		}
		left += int(result)
	}
	return left, nil
}
