package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// crashing commits some transactions and then fails, like an orchestrator that crashes.
type crashing struct {
	clientv3.KV
	left int // transactions until the crash
}

type failed struct{ clientv3.Txn }

func (failed) If(...clientv3.Cmp) clientv3.Txn        { return failed{} }
func (failed) Then(...clientv3.Op) clientv3.Txn       { return failed{} }
func (failed) Commit() (*clientv3.TxnResponse, error) { return nil, errors.New("crashed") }
func (c *crashing) Txn(ctx context.Context) clientv3.Txn {
	if c.left--; c.left < 0 {
		return failed{}
	}
	return c.KV.Txn(ctx)
}

// openCrashing returns a store that crashes after some transactions.
func openCrashing(t *testing.T, etcd *clientv3.Client, transactions int) *Store {
	t.Helper()
	c := clientv3.NewCtxClient(t.Context())
	c.KV, c.Lease = &crashing{etcd.KV, transactions}, etcd.Lease
	s, err := Open(t.Context(), c, noPlan, discard)
	must(t, err)
	s.committer.maxBatch = maxBatchOf(etcd)
	return s
}

// hostsMany registers a node and writes records of tenants that it hosts.
func hostsMany(t *testing.T, s *Store, n pki.Node, tenants ...string) {
	t.Helper()
	if _, err := s.Register(t.Context(), Registration{Node: n}); err != nil {
		t.Fatal(err)
	}
	var puts []clientv3.Op
	for _, name := range tenants {
		puts = append(puts, clientv3.OpPut(hostingKey(name, n.Name), "{}"), clientv3.OpPut(dirTenants+name, "{}"))
	}
	for part := range slices.Chunk(puts, maxOps) {
		if _, err := s.etcd.Txn(t.Context()).Then(part...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

func manyNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("t", i)
	}
	return names
}

func count(t *testing.T, s *Store, key string, opts ...clientv3.OpOption) int64 {
	t.Helper()
	resp, err := s.etcd.Get(t.Context(), key, append(opts, clientv3.WithCountOnly())...)
	must(t, err)
	return resp.Count
}

// The deletion of a node may crash between any two of its transactions. The first one shuts the machine out, and a
// repeated call completes the deletion.
func testCrash(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, time.Minute)
	s := opened(t, etcd)
	// About as many tenants as fit into one transaction, so that each of the last writes begins another one once.
	for tenants := maxOps - 5; tenants <= maxOps+1; tenants++ {
		done := false
		for transactions := 0; !done; transactions++ {
			n := pki.Node{
				Name: fmt.Sprintf("n%d-%d", tenants, transactions),
				UUID: fmt.Sprintf("00000000-0000-4000-8000-%06d%06d", tenants, transactions),
			}
			hostsMany(t, s, n, manyNames(tenants)...)
			what := fmt.Sprintf("%d tenants, a crash after %d transactions", tenants, transactions)
			done = openCrashing(t, etcd, transactions).DeleteNode(ctx, n.Name, false) == nil
			if _, err := s.Register(ctx, Registration{Node: n}); transactions > 0 && err == nil {
				t.Errorf("%s: the deleted machine registered again", what)
			}
			if !done {
				if err := s.DeleteNode(ctx, n.Name, false); err != nil {
					t.Errorf("%s: repeated deletion: %v", what, err)
				}
			}
			left := count(t, s, dirHosting, clientv3.WithPrefix()) +
				count(t, s, dirNodes+n.Name) + count(t, s, dirUUIDs+n.UUID)
			if left != 0 || count(t, s, dirDeleted+n.UUID) != 1 {
				t.Fatalf("%s: %d records remain, want none and the mark of the deletion", what, left)
			}
			if transactions > 3 {
				t.Fatalf("%d tenants: not deleted after %d transactions", tenants, transactions)
			}
		}
	}
}

// A change reads keys, and then the first transaction of a deletion deletes one of them: the store decides the change
// again.
func testPartialDeletion(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s := opened(t, etcd)
	n := pki.Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}
	tenants := manyNames(maxOps)
	hostsMany(t, s, n, tenants...)
	other := openCrashing(t, etcd, 1)
	tries := 0
	err := s.change(ctx, func(txn *txn) error {
		for i := range maxOps { // more keys than one transaction can compare
			if _, err := txn.get(fmt.Sprint(root, "nothing/", i)); err != nil {
				return err
			}
		}
		was, err := txn.get(hostingKey("t0", "n1"))
		if err != nil {
			return err
		}
		txn.put(root+"test", "was "+was)
		if tries++; tries == 2 { // the first decision is before the queue
			if _, err := other.RecordHosting(ctx, n, 1, nil, tenants); err == nil {
				t.Error("the deletion fit into one transaction, want several")
			}
		}
		return nil
	})
	made, _ := etcd.Get(ctx, root+"test")
	if err != nil || tries != 3 || string(made.Kvs[0].Value) != "was " {
		t.Errorf("%d tries, %v, wrote %v; want 3 tries and \"was \"", tries, err, made)
	}
}

// meddling writes a key between each decision and its transaction.
type meddling struct {
	clientv3.KV
	t     *testing.T
	times int
}

func (m *meddling) Txn(ctx context.Context) clientv3.Txn {
	m.times++
	if _, err := m.Put(ctx, root+"test", fmt.Sprint(m.times)); err != nil {
		m.t.Error(err)
	}
	return m.KV.Txn(ctx)
}

// The deletion of a node succeeds while others write unrelated keys, also with more tenants than one transaction can
// compare.
func testDeletionWithChanges(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s := opened(t, etcd)
	for i, tenants := range [][]string{{"t0"}, manyNames(maxOps)} {
		n := pki.Node{Name: fmt.Sprint("n", i), UUID: fmt.Sprintf("00000000-0000-4000-8000-%012d", i)}
		hostsMany(t, s, n, tenants...)
		if _, err := s.RecordHosting(ctx, n, 1, nil, tenants[1:]); err != nil {
			t.Fatal(err)
		}
		between := &meddling{KV: etcd.KV, t: t}
		c := clientv3.NewCtxClient(t.Context())
		c.KV, c.Lease = between, etcd.Lease
		meddled, err := Open(ctx, c, noPlan, discard)
		must(t, err)
		meddled.committer.maxBatch = maxBatchOf(etcd)
		between.times = 0
		if err := meddled.DeleteNode(ctx, n.Name, false); err != nil {
			t.Errorf("one of %d tenants hosted: %v", len(tenants), err)
		}
		if want := 1 + i; between.times != want {
			t.Errorf("one of %d tenants hosted: %d transactions, want %d", len(tenants), between.times, want)
		}
	}
}
