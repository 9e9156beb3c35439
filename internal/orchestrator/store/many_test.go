package store_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// counted counts the requests to etcd.
type counted struct {
	clientv3.KV
	requests atomic.Int64
}

func (c *counted) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	c.requests.Add(1)
	return c.KV.Get(ctx, key, opts...)
}

func (c *counted) Do(ctx context.Context, op clientv3.Op) (clientv3.OpResponse, error) {
	c.requests.Add(1)
	return c.KV.Do(ctx, op)
}

func (c *counted) Txn(ctx context.Context) clientv3.Txn {
	c.requests.Add(1)
	return c.KV.Txn(ctx)
}

// A node with many tenants registers again with another version. One request per tenant would exceed the timeout of the
// call if etcd takes some milliseconds for each.
func testFewRequestsForManyTenants(t *testing.T, etcd *clientv3.Client) {
	const many = 300
	direct := etcd.KV
	count := &counted{KV: direct}
	etcd.KV = count
	defer func() { etcd.KV = direct }()
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	register(t, s, 1)
	r := store.Registration{Node: node(1), Version: "another"}
	var hosted []*pilasterv1.Hosting
	for i := range many {
		tenant, err := s.CreateTenant(ctx, fmt.Sprint("t", i), 0)
		if err != nil {
			t.Fatal(err)
		}
		_, app, err := s.Resolve(ctx, node(1), 1, tenant.Name, map[string]string{"app": "web"})
		if err != nil {
			t.Fatal(err)
		}
		r.Tenants, r.Apps = append(r.Tenants, tenant), append(r.Apps, app)
		hosted = append(hosted, &pilasterv1.Hosting{Tenant: tenant.Name, Accepts: []uint32{1}, Holds: []uint32{1}})
	}
	for what, call := range map[string]func() error{
		"register": func() error { _, err := s.Register(ctx, r); return err },
		"report":   func() error { _, err := s.RecordHosting(ctx, node(1), 2, hosted, nil); return err },
	} {
		before := count.requests.Load()
		if err := call(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if n := count.requests.Load() - before; n > many/5 {
			t.Errorf("%s: %d requests for %d tenants, want at most %d", what, n, many, many/5)
		}
	}
}
