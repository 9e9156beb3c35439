package store

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// UseVTEPs records the prefix of the nodes' tunnel addresses at its first use. Later it must be the same, because a
// node's address follows from the prefix and the node's number.
func (s *Store) UseVTEPs(ctx context.Context, pool netip.Prefix) error {
	return s.change(ctx, func(t *txn) error {
		value, err := t.get(keyCluster)
		if err != nil {
			return err
		}
		var r clusterRecord
		if err := json.Unmarshal([]byte(value), &r); err != nil {
			return fmt.Errorf("the store's cluster record is not readable: %w", err)
		}
		switch {
		case r.VTEPs == pool:
			return nil
		case r.VTEPs.IsValid():
			return refuse(
				Refused,
				"this cluster uses --evpn-vtep-pool %v and cannot change to %v, because its nodes have addresses of it; "+
					"nothing was changed: use %v",
				r.VTEPs,
				pool,
				r.VTEPs,
			)
		case pool.Overlaps(r.plan().Gateway4):
			return refuse(
				Invalid,
				"--evpn-vtep-pool %v overlaps the cluster's gateway prefix %v; nothing was changed: choose another",
				pool,
				r.plan().Gateway4,
			)
		}
		r.VTEPs = pool
		text, err := json.Marshal(r)
		t.put(keyCluster, string(text))
		return err
	})
}

// RaiseSequence records the mobility sequence of an address (RFC 7432 §15), if it is higher than the recorded one. It
// also succeeds if the address is free meanwhile.
func (s *Store) RaiseSequence(ctx context.Context, tenant string, to netip.Prefix, sequence uint64) error {
	return s.change(ctx, func(t *txn) error {
		key := mappingKey(tenant, to)
		m := new(pilasterv1.Mapping)
		if exists, err := t.load(key, m); err != nil || !exists || m.Sequence >= sequence {
			return err
		}
		m.Sequence = sequence
		return t.save(key, m)
	})
}
