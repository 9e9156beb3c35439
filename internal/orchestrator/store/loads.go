package store

import (
	"context"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// RecordLoad records what a connected node reports of its load. The record expires with this orchestrator; package cache
// drops it when the node's stream ends, so that the end of a stream writes nothing more. It does nothing for a machine
// that has no stream.
func (s *Store) RecordLoad(ctx context.Context, n pki.Node, instance string, load *pilasterv1.NodeLoad) error {
	value, err := protojson.Marshal(load)
	if err != nil {
		return fmt.Errorf("encode the load of node %s: %w", n.Name, err)
	}
	return s.changeQueued(ctx, func(t *txn) error {
		if _, err := t.member(n); err != nil {
			return err
		}
		is, err := t.session(n.Name, instance)
		if err != nil || is.None() {
			return err
		}
		key := dirLoads + n.Name
		t.write(key, clientv3.OpPut(key, string(value), clientv3.WithLease(clientv3.LeaseID(s.lease.Load()))))
		return nil
	}, weight{writes: 1, compares: 4}, nodeKeys(n)...)
}

// SetOffloadAuto records whether the controller starts and ends offloads by the nodes' loads.
func (s *Store) SetOffloadAuto(ctx context.Context, on bool) error {
	value := "off"
	if on {
		value = "on"
	}
	return s.change(ctx, func(t *txn) error {
		is, err := t.get(keyOffloadAuto)
		if err != nil || is == value {
			return err
		}
		t.put(keyOffloadAuto, value)
		return nil
	})
}
