package store

import (
	"net/netip"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// restTTL, in seconds, is how long nobody else gets what was given back: packets for it may be on their way, and nodes
// that do not know of it yet. What goes within restTogether goes by one lease, so it rests that much less.
const (
	restTTL      = 6 * 60
	restTogether = time.Minute
)

// restLease is one that keys of what rests live under.
type restLease struct {
	id    clientv3.LeaseID
	until time.Time
}

// rest writes the key of what rests. It goes by itself.
func (s *Store) rest(t *txn, key, uuid string) error {
	lease := s.resting.Load()
	if lease == nil || time.Now().After(lease.until) {
		granted, err := s.etcd.Grant(t.ctx, restTTL)
		if err != nil {
			return unavailable(err)
		}
		lease = &restLease{granted.ID, time.Now().Add(restTogether)}
		s.resting.Store(lease)
	}
	t.write(key, clientv3.OpPut(key, uuid, clientv3.WithLease(lease.id)))
	return nil
}

// restedOf is what a node had of a tenant a moment ago.
func (t *txn) restedOf(name string, n pki.Node) ([]netip.Prefix, error) {
	dir := dirResting + name + "/"
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
