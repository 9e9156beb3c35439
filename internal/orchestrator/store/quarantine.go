package store

import (
	"net/netip"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// quarantineTTL, in seconds, is how long nobody else gets what was given back: packets for it may be on their way, and nodes
// that do not know of it yet. What goes within leaseReuse goes by one lease, so it rests that much less.
const (
	quarantineTTL = 6 * 60
	leaseReuse    = time.Minute
)

// quarantineLease is one that keys of what rests live under.
type quarantineLease struct {
	id    clientv3.LeaseID
	until time.Time
}

// quarantine writes the key of what rests. It goes by itself.
func (s *Store) quarantine(t *txn, key, uuid string) error {
	lease := s.quarantineLease.Load()
	if lease == nil || time.Now().After(lease.until) {
		granted, err := s.etcd.Grant(t.ctx, quarantineTTL)
		if err != nil {
			return unavailable(err)
		}
		lease = &quarantineLease{granted.ID, time.Now().Add(leaseReuse)}
		s.quarantineLease.Store(lease)
	}
	t.write(key, clientv3.OpPut(key, uuid, clientv3.WithLease(lease.id)))
	return nil
}

// quarantinedOf is what a node had of a tenant a moment ago.
func (t *txn) quarantinedOf(name string, n pki.Node) ([]netip.Prefix, error) {
	dir := dirQuarantine + name + "/"
	resp, err := t.read(dir, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	var rested []netip.Prefix
	for _, kv := range resp.Kvs {
		if string(kv.Value) != n.UUID {
			continue
		}
		to, err := parsePrefixName(string(kv.Key)[len(dir):])
		if err != nil {
			return nil, err
		}
		rested = append(rested, to)
	}
	return rested, nil
}
