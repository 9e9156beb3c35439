package store

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

func TestNames(t *testing.T) {
	for _, c := range []struct {
		name         string
		tenant, node bool
	}{
		{"blue", true, true}, {"b", true, true}, {"0", true, true}, {"a-b", true, true},
		{"n1.example.org", false, true},
		{"", false, false}, {"Blue", false, false}, {"-a", false, false}, {"a-", false, false}, {"a/b", false, false},
		{"a..b", false, false}, {".a", false, false}, {"a.", false, false}, {"ü", false, false}, {"a\n", false, false},
		{"a23456789012345678901234567890123456789012345678901234567890123", true, true},
		{"a234567890123456789012345678901234567890123456789012345678901234", false, false},
	} {
		if err := checkTenant(c.name); (err == nil) != c.tenant {
			t.Errorf("tenant %q: got %v, want valid: %v", c.name, err, c.tenant)
		}
		if err := CheckNode(c.name, "00000000-0000-4000-8000-000000000001"); (err == nil) != c.node {
			t.Errorf("node %q: got %v, want valid: %v", c.name, err, c.node)
		}
	}
	for _, uuid := range []string{
		"", "x", "00000000-0000-4000-8000-00000000000G", "0000000000004000800000000000000001",
	} {
		if CheckNode("n1", uuid) == nil {
			t.Errorf("UUID %q was accepted", uuid)
		}
	}
}

func TestLabelsAreASet(t *testing.T) {
	same := []map[string]string{{"a": "1", "b": "2"}, {"b": "2", "a": "1"}}
	first, err := hashLabels(same[0])
	must(t, err)
	if second, _ := hashLabels(same[1]); first != second {
		t.Error("the hash depends on the order of the labels")
	}
	empty, _ := hashLabels(map[string]string{})
	if none, _ := hashLabels(nil); none != empty {
		t.Error("nil and empty labels have different hashes")
	}
	if other, _ := hashLabels(map[string]string{"a": "1", "b": "3"}); other == first {
		t.Error("labels with another value have the same hash")
	}
	if _, err := hashLabels(map[string]string{"": "x"}); err == nil {
		t.Error("an empty key was accepted")
	}
}

// A process is suspended between its reads and its commit, while another orchestrator commits the same change: the
// suspended process decides its change again.
func testSuspended(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	suspended, other := opened(t, etcd), opened(t, etcd)
	var allocated []uint32
	err := suspended.change(ctx, func(txn *txn) error {
		id, err := txn.allocateTenantID("slow")
		allocated = append(allocated, id)
		if err == nil && len(allocated) == 2 { // the first decision is before the queue
			_, err = other.CreateTenant(ctx, "fast", 0)
		}
		return err
	})
	must(t, err)
	if len(allocated) != 3 || allocated[1] != 1 || allocated[2] != 2 {
		t.Errorf("the decisions allocated ids %v, want 1, 1, 2", allocated)
	}
	if suspended.Conflicts() != 1 {
		t.Errorf("%d conflicts, want 1", suspended.Conflicts())
	}
}

// A node starts to host a tenant while another orchestrator deletes the tenant or the node: the deletion is decided
// again.
func testConcurrentHosting(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s, other := opened(t, etcd), opened(t, etcd)
	n := pki.Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}
	if _, err := s.Register(ctx, Registration{Node: n}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	tries := 0
	err := s.change(ctx, func(txn *txn) error {
		if err := txn.deleteTenant("blue"); err != nil {
			return err
		}
		if tries++; tries == 2 { // the first decision is before the queue
			_, err := other.RecordHosting(ctx, n, 1, []*pilasterv1.Hosting{{Tenant: "blue"}}, nil)
			return err
		}
		return nil
	})
	var e *Error
	if !errors.As(err, &e) || e.Reason != Refused || tries != 2 {
		t.Errorf("%d tries, %v; want 2 tries and then a refusal", tries, err)
	}
	if _, _, err := s.Resolve(ctx, n, 1, "blue", nil); err != nil {
		t.Errorf("tenant blue does not exist: %v", err)
	}

	// The deletion of the node also deletes the record of a tenant that the node just started to host.
	if _, err := s.RecordHosting(ctx, n, 1, nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	tries = 0
	err = s.change(ctx, func(txn *txn) error {
		if err := s.deleteNode(txn, "n1", false); err != nil {
			return err
		}
		if tries++; tries == 2 {
			_, err := other.RecordHosting(ctx, n, 1, []*pilasterv1.Hosting{{Tenant: "blue"}}, nil)
			return err
		}
		return nil
	})
	if err != nil || tries != 3 {
		t.Errorf("%d tries, %v; want success at the third", tries, err)
	}
	if err := s.DeleteTenant(ctx, "blue"); err != nil {
		t.Errorf("the deleted node still hosts tenant blue: %v", err)
	}
}

// One orchestrator deletes a tenant while another deletes the node that publishes the tenant: the tenant stays deleted.
func testConcurrentDeletion(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s, other := opened(t, etcd), opened(t, etcd)
	n := pki.Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}
	if _, err := s.Register(ctx, Registration{Node: n, Gateway: true}); err != nil {
		t.Fatal(err)
	}
	overlays := []tenant.Overlay{{CIDR: netip.MustParsePrefix("fd12:3456::/48")}}
	if _, err := s.CreateTenantOn(ctx, tenant.Nimitz, "green", 0, overlays); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreatePublication(ctx, "green", "web", netip.MustParseAddr("fd12:3456::5"), "n1"); err != nil {
		t.Fatal(err)
	}
	tries := 0
	err := s.change(ctx, func(txn *txn) error {
		if err := s.deleteNode(txn, "n1", true); err != nil {
			return err
		}
		if tries++; tries == 2 { // the first decision is before the queue
			return other.DeleteTenant(ctx, "green")
		}
		return nil
	})
	if err != nil || tries != 3 {
		t.Errorf("%d tries, %v; want success at the third", tries, err)
	}
	if resp, err := etcd.Get(ctx, dirTenants+"green"); err != nil || len(resp.Kvs) > 0 {
		t.Errorf("tenant green exists again: %v, %v", resp.Kvs, err)
	}
}

// A change that read more keys than a transaction can compare detects new and deleted keys.
func testLargeChange(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s, other := opened(t, etcd), opened(t, etcd)
	for name, meanwhile := range map[string]func() error{
		"created": func() error { _, err := other.CreateTenant(ctx, "blue", 0); return err },
		"deleted": func() error { return other.DeleteTenant(ctx, "blue") },
	} {
		if name == "deleted" {
			other.CreateTenant(ctx, "blue", 0)
		} else {
			other.DeleteTenant(ctx, "blue")
		}
		tries := 0
		err := s.change(ctx, func(txn *txn) error {
			for i := range maxOps {
				if _, err := txn.get(fmt.Sprint(root, "nothing/", i)); err != nil {
					return err
				}
			}
			if _, err := txn.get(dirTenants + "blue"); err != nil {
				return err
			}
			for i := range maxOps + 1 {
				key := fmt.Sprint(root, "test/", name, i)
				if there, err := txn.get(key); err != nil {
					return err
				} else if there == "" {
					txn.put(key, "x")
				}
			}
			if tries++; tries == 2 { // the first decision is before the queue
				return meanwhile()
			}
			return nil
		})
		made, _ := etcd.Get(ctx, root+"test/"+name, clientv3.WithPrefix(), clientv3.WithCountOnly())
		// One decision before the queue, one whose commit fails, and one for each of the two parts.
		if err != nil || tries != 4 || made.Count != maxOps+1 {
			t.Errorf("%s: %d tries, %d writes, %v; want 4 tries, %d writes", name, tries, made.Count, err, maxOps+1)
		}
	}
}

// Other changes are committed between the transactions of a large change.
func testChangesBetweenParts(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s := opened(t, etcd)
	const most = 300
	other, tries, committed := make(chan error, 1), 0, false
	err := s.change(ctx, func(txn *txn) error {
		if tries++; tries == 2 { // the first decision is before the queue
			go func() { _, err := s.CreateTenant(ctx, "blue", 0); other <- err }()
		}
		select {
		case err := <-other:
			committed = true
			return err
		default:
		}
		for i := range s.committer.maxBatch + 1 { // more than one transaction
			txn.put(fmt.Sprint(root, "test/", tries%2, "/", i), "x")
		}
		if tries == most {
			return errors.New("the other change waits for the end of this one")
		}
		return nil
	})
	if err != nil || !committed {
		t.Errorf("after %d tries the other change was committed: %v, %v; want true", tries, committed, err)
	}
}

// A change whose revision is compacted during its decision is decided again. A watch from a compacted revision fails.
func testCompacted(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s := opened(t, etcd)
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	tries := 0
	err := s.change(ctx, func(txn *txn) error {
		tries++
		if _, err := txn.get(keyTenantMark); err != nil {
			return err
		}
		if tries <= 2 { // before the queue and in the batch
			resp, err := etcd.Put(ctx, "/elsewhere", "")
			if err != nil {
				return err
			}
			if _, err := etcd.Compact(ctx, resp.Header.Revision); err != nil {
				return err
			}
		}
		_, err := txn.allocateTenantID("red")
		return err
	})
	if err != nil || tries != 3 {
		t.Errorf("%d tries, %v; want 3", tries, err)
	}

	revision := int64(1)
	err = s.watch(ctx, &revision, func(Batch) { t.Error("the watch reported a batch of a compacted revision") })
	if !errors.Is(err, rpctypes.ErrCompacted) {
		t.Errorf("watch from a compacted revision: got %v, want ErrCompacted", err)
	}
}

func TestTimeoutIsUnavailable(t *testing.T) {
	client, err := Dial(External{Endpoints: []string{"http://127.0.0.1:1"}}) // a closed port
	must(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = Open(ctx, client, noPlan, discard)
	var e *Error
	if !errors.As(err, &e) || e.Reason != Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
}
