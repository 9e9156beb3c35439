package store

import (
	"net/netip"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

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
