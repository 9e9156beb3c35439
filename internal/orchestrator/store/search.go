package store

import (
	"context"
	"net/netip"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

// The keys of an overlay's allocations are in numeric order, so one page of keys shows which numbers of a range are
// free. In an almost full overlay a search may read many pages. Only the first decision, before the queue, reads them.
// The decision in the batch starts at the number that the first decision found.

// hints are the free numbers that the last decision found, by CIDR.
type hints map[netip.Prefix]uint64

// Page sizes. The first page is small, because the next number is usually free.
const (
	firstPage = 32
	namesPage = 4096
)

// allocatePrefix returns a prefix that is not allocated: one of previous, which the requester had before and which are
// in quarantine, or the next one that is neither allocated nor in quarantine.
func (t *txn) allocatePrefix(name string, o tenant.Overlay, previous []netip.Prefix, from hints) (netip.Prefix, error) {
	for _, to := range previous {
		if _, ok := o.Contains(to); !ok {
			continue
		}
		if value, err := t.get(mappingKey(name, to)); err != nil || value == "" {
			t.delete(quarantineKey(name, to))
			return to, err
		}
	}
	first, count := o.Given()
	next, err := t.mark(overlayMark(name, o))
	if err != nil {
		return netip.Prefix{}, err
	}
	if hint, ok := from[o.CIDR]; ok {
		next = hint
	}
	n, found, err := t.search(name, o, next%count)
	switch {
	case err != nil:
		return netip.Prefix{}, err
	case found:
		from[o.CIDR] = n
		t.setMark(overlayMark(name, o), (n+1)%count)
		return o.At(first + n), nil
	case o.NodeBits != 0:
		return netip.Prefix{}, refuse(
			Full,
			"all %d subnets /%d of %v of tenant %s are allocated or in quarantine; nothing was changed: use a node "+
				"that has one (`pilaster tenant get %s`), delete nodes that are gone, or create a tenant with a wider "+
				"CIDR or smaller subnets (--node-bits)",
			count,
			o.NodeBits,
			o.CIDR,
			name,
			name,
		)
	}
	return netip.Prefix{}, refuse(
		Full,
		"all %d addresses of %v of tenant %s are in use or in quarantine; nothing was changed: remove containers and "+
			"try again in %d minutes, or create a tenant with a wider CIDR",
		count,
		o.CIDR,
		name,
		quarantineTTL/60,
	)
}

// search returns the first free number from a start, with wrap-around. The commit fails if the number is no longer free
// then.
func (t *txn) search(name string, o tenant.Overlay, from uint64) (n uint64, found bool, err error) {
	first, count := o.Given()
	limit := int64(firstPage)
	for _, part := range [][2]uint64{{from, count}, {0, from}} {
		for at := part[0]; at < part[1]; limit = namesPage {
			taken, complete, err := t.takenPrefixes(name, o, at, part[1], limit)
			if err != nil {
				return 0, false, err
			}
			for ; at < complete; at++ {
				if to := o.At(first + at); !taken[to] && o.Usable(to) {
					return at, true, t.vacant(mappingKey(name, to), quarantineKey(name, to))
				}
			}
		}
	}
	return 0, false, nil
}

// takenPrefixes returns the allocated and quarantined prefixes in a range of numbers. The result is complete for
// numbers below complete.
func (t *txn) takenPrefixes(
	name string,
	o tenant.Overlay,
	at, end uint64,
	limit int64,
) (taken map[netip.Prefix]bool, complete uint64, err error) {
	first, _ := o.Given()
	var gets []clientv3.Op
	for _, key := range []func(string, netip.Prefix) string{mappingKey, quarantineKey} {
		gets = append(
			gets,
			clientv3.OpGet(key(name, o.At(first+at)), clientv3.WithRange(key(name, o.At(first+end-1))+"\x00"),
				clientv3.WithKeysOnly(), clientv3.WithLimit(limit), clientv3.WithRev(t.revision)),
		)
	}
	var resp clientv3.OpResponse
	err = t.tryRead(func(ctx context.Context) (err error) {
		resp, err = t.etcd.Do(ctx, clientv3.OpTxn(nil, gets, nil))
		return err
	})
	if err != nil {
		return nil, 0, unavailable(err)
	}
	taken, complete = map[netip.Prefix]bool{}, end
	for i, dir := range []string{dirMappings + name + "/", dirQuarantine + name + "/"} {
		// Earlier changes of the batch.
		for _, key := range t.groupWrites([]byte(dir), []byte(clientv3.GetPrefixRangeEnd(dir))) {
			to, err := parsePrefixName(strings.TrimPrefix(key, dir))
			if err != nil {
				return nil, 0, err
			}
			taken[to] = true
		}
		page, last := resp.Txn().Responses[i].GetResponseRange(), at
		for _, kv := range page.Kvs {
			to, err := parsePrefixName(strings.TrimPrefix(string(kv.Key), dir))
			if err != nil {
				return nil, 0, err
			}
			if n, ok := o.Contains(to); ok { // keys of the other IP family may be in the range
				taken[to], last = true, n-first
			}
		}
		if page.More {
			complete = min(complete, last+1)
		}
	}
	return taken, complete, nil
}

// vacant makes the commit fail if one of the keys exists then. None of them exists now.
func (t *txn) vacant(keys ...string) error {
	for _, key := range keys {
		t.readings[key] = reading{}
		if _, err := t.get(key); err != nil {
			return err
		}
	}
	return nil
}

// quarantineTTL, in seconds, is how long a released id or prefix is not reused: packets for its old owner may be in
// flight, and some nodes have not received the release yet. Releases within leaseReuse share a lease, so the quarantine
// may be shorter by up to leaseReuse.
const (
	quarantineTTL = 6 * 60
	leaseReuse    = time.Minute
)

// quarantineLease is the lease of keys in quarantine, and until when further keys may share it.
type quarantineLease struct {
	id    clientv3.LeaseID
	until time.Time
}

// quarantine writes a key that expires after quarantineTTL.
func (s *Store) quarantine(t *txn, key, uuid string) error {
	lease, err := s.currentQuarantine(t)
	if err != nil {
		return err
	}
	t.write(key, clientv3.OpPut(key, uuid, clientv3.WithLease(lease)))
	return nil
}

// currentQuarantine returns the lease of what enters quarantine now.
func (s *Store) currentQuarantine(t *txn) (clientv3.LeaseID, error) {
	lease := s.quarantineLease.Load()
	if lease == nil || time.Now().After(lease.until) {
		granted, err := s.etcd.Grant(t.ctx, quarantineTTL)
		if err != nil {
			return 0, unavailable(err)
		}
		lease = &quarantineLease{granted.ID, time.Now().Add(leaseReuse)}
		s.quarantineLease.Store(lease)
	}
	return lease.id, nil
}

// quarantinedOf returns the quarantined prefixes that a node had of a tenant.
func (t *txn) quarantinedOf(name string, n pki.Node) ([]netip.Prefix, error) {
	dir := dirQuarantine + name + "/"
	resp, err := t.read(dir, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	var quarantined []netip.Prefix
	for _, kv := range resp.Kvs {
		if string(kv.Value) != n.UUID {
			continue
		}
		to, err := parsePrefixName(string(kv.Key)[len(dir):])
		if err != nil {
			return nil, err
		}
		quarantined = append(quarantined, to)
	}
	return quarantined, nil
}
