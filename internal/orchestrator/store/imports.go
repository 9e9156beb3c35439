package store

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Mappings of addresses and prefixes outside of the cluster have an origin. One orchestrator writes them, the importer:
// so a lost peer of another orchestrator deletes nothing.

const keyImporter = dirImporter + "now"

// importBatch is how many imported mappings one transaction writes.
const importBatch = 50

// ErrNotImporter means that another orchestrator writes imported mappings.
var ErrNotImporter = errors.New("another orchestrator imports routes")

// BecomeImporter makes an orchestrator the importer if there is none. The lease of its sessions ends that.
func (s *Store) BecomeImporter(ctx context.Context, self string) (is bool, err error) {
	err = s.change(ctx, func(t *txn) error {
		now, err := t.get(keyImporter)
		if is = err == nil && (now == "" || now == self); err != nil || now != "" {
			return err
		}
		t.write(keyImporter, clientv3.OpPut(keyImporter, self, clientv3.WithLease(clientv3.LeaseID(s.lease.Load()))))
		return nil
	})
	return is && err == nil, err
}

// ResignImporter lets another orchestrator become the importer.
func (s *Store) ResignImporter(ctx context.Context, self string) error {
	return s.change(ctx, func(t *txn) error {
		if now, err := t.get(keyImporter); err != nil || now != self {
			return err
		}
		t.delete(keyImporter)
		return nil
	})
}

// Import writes mappings with an origin, and deletes others. It changes none that the cluster has allocated, and none
// of tenants that do not exist. Only the importer may call it; another caller gets ErrNotImporter.
func (s *Store) Import(ctx context.Context, self string, put, remove []*pilasterv1.Mapping) error {
	deleted := make(map[*pilasterv1.Mapping]bool, len(remove))
	for _, m := range remove {
		deleted[m] = true
	}
	for batch := range slices.Chunk(slices.Concat(remove, put), importBatch) {
		err := s.change(ctx, func(t *txn) error {
			if now, err := t.get(keyImporter); err != nil {
				return err
			} else if now != self {
				return ErrNotImporter
			}
			for _, m := range batch {
				if err := t.importMapping(m, deleted[m]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *txn) importMapping(m *pilasterv1.Mapping, deleted bool) error {
	to, err := netip.ParsePrefix(m.To)
	if err != nil {
		return err
	}
	if exists, err := t.get(dirTenants + m.Tenant); err != nil || exists == "" {
		return err
	}
	key, is := mappingKey(m.Tenant, to), new(pilasterv1.Mapping)
	exists, err := t.load(key, is)
	switch {
	case err != nil, exists && is.Origin == "":
		return err
	case !deleted:
		return t.save(key, &pilasterv1.Mapping{
			NextHops: m.NextHops, Mac: m.Mac, Sequence: m.Sequence, Origin: m.Origin,
		})
	case exists:
		t.delete(key)
	}
	return nil
}
