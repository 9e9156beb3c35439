package store_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Two orchestrators use one etcd concurrently and never allocate the same prefix or id.
func testTwoStores(t *testing.T, etcd *clientv3.Client) {
	ctx := t.Context()
	stores := []*store.Store{open(t, etcd, address.Plan{}), open(t, etcd, address.Plan{})}
	const each = 40
	var mu sync.Mutex
	prefixes, ids := map[string]string{}, map[uint32]string{}
	made := map[string]int{}
	var work sync.WaitGroup
	for i := range each * len(stores) {
		work.Go(func() {
			s := stores[i%2]
			n, err := s.Register(ctx, store.Registration{Node: node(i)})
			if err != nil {
				t.Error(err)
				return
			}
			name := fmt.Sprintf("t%d", i/2) // both stores create it
			tenant, err := s.CreateTenant(ctx, name, 0)
			mu.Lock()
			defer mu.Unlock()
			if other, taken := prefixes[n.Prefix]; taken {
				t.Errorf("prefix %s was allocated to %s and %s", n.Prefix, other, n.Name)
			}
			prefixes[n.Prefix] = n.Name
			if err != nil {
				refused(t, err, store.Exists)
				return
			}
			made[name]++
			if other, taken := ids[tenant.Ids[0].Id]; taken {
				t.Errorf("tenant id %d was allocated to %s and %s", tenant.Ids[0].Id, other, name)
			}
			ids[tenant.Ids[0].Id] = name
		})
	}
	work.Wait()
	for name, n := range made {
		if n != 1 {
			t.Errorf("tenant %s was created %d times, want once", name, n)
		}
	}
	if len(made) != each {
		t.Errorf("%d tenants created, want %d", len(made), each)
	}
	if stores[0].Conflicts()+stores[1].Conflicts() == 0 {
		t.Error("the stores had no conflict, so the test checked nothing")
	}
}

func testWatch(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(t.Context(), "before", 0); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	batches := make(chan store.Batch, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Watch(ctx, func(b store.Batch) { batches <- b })
	}()
	defer func() { cancel(); <-done }()

	whole := <-batches
	if !whole.Whole || len(whole.Events) != 1 || whole.Events[0].Tenant.GetName() != "before" {
		t.Fatalf("first batch: got %+v, want the whole state with tenant before", whole)
	}
	register(t, s, 1)
	if b := <-batches; b.Whole || b.Revision <= whole.Revision || b.Events[0].Node.GetName() != "n1" {
		t.Fatalf("new node: got %+v, want one event of node n1", b)
	}
	if _, _, err := s.Resolve(ctx, node(1), 1, "before", nil); err != nil {
		t.Fatal(err)
	}
	want := &pilasterv1.Hosting{Tenant: "before", Node: "n1", Accepts: []uint32{1}, Holds: []uint32{1}, Sequence: 1}
	if b := <-batches; len(b.Events) != 2 || !proto.Equal(b.Events[0].Hosting, want) || b.Events[1].App.GetId() != 1 {
		t.Fatalf("new app: got %+v, want events of %v and app 1", b, want)
	}
	if err := s.DeleteNode(ctx, "n1", false); err != nil {
		t.Fatal(err)
	}
	if b := <-batches; len(b.Events) != 2 {
		t.Fatalf("node deleted: got %+v, want 2 events", b)
	}
	if err := s.DeleteTenant(ctx, "before"); err != nil {
		t.Fatal(err)
	}
	if b := <-batches; len(b.Events) != 2 || b.Events[0].DeletedTenant != "before" ||
		b.Events[1].EndedApp.GetTenant() != "before" {
		t.Fatalf("tenant deleted: got %+v, want the end of the tenant and of its app", b)
	}
}
