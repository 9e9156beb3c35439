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
			t.Errorf("tenant %q: %v", c.name, err)
		}
		if err := CheckNode(c.name, "00000000-0000-4000-8000-000000000001"); (err == nil) != c.node {
			t.Errorf("node %q: %v", c.name, err)
		}
	}
	for _, uuid := range []string{"", "x", "00000000-0000-4000-8000-00000000000G", "0000000000004000800000000000000001"} {
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
		t.Error("order matters")
	}
	empty, _ := hashLabels(map[string]string{})
	if none, _ := hashLabels(nil); none != empty {
		t.Error("no labels and an empty set differ")
	}
	if other, _ := hashLabels(map[string]string{"a": "1", "b": "3"}); other == first {
		t.Error("another value is the same set")
	}
	if _, err := hashLabels(map[string]string{"": "x"}); err == nil {
		t.Error("an empty key was accepted")
	}
}

// A decision that slept while another orchestrator made the same one must be decided anew. This is
// what a process stopped between reading and writing does.
func testSleeper(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	sleeper, awake := opened(t, etcd), opened(t, etcd)
	var took []uint32
	err := sleeper.change(ctx, func(txn *txn) error {
		id, err := txn.allocateTenantID("slow")
		took = append(took, id)
		if err == nil && len(took) == 2 { // the first decision never waits for its turn
			_, err = awake.CreateTenant(ctx, "fast", 0)
		}
		return err
	})
	must(t, err)
	if len(took) != 3 || took[1] != 1 || took[2] != 2 {
		t.Errorf("decided on ids %v, want 1 until it woke and 2 then", took)
	}
	if sleeper.Conflicts() != 1 {
		t.Errorf("%d conflicts, want 1", sleeper.Conflicts())
	}
}

// A tenant that somebody begins to host while it is being deleted stays.
func testHostedMeanwhile(t *testing.T, etcd *clientv3.Client) {
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
		if tries++; tries == 2 { // the first decision never waits for its turn
			_, err := other.RecordHosting(ctx, n, 1, []*pilasterv1.Hosting{{Tenant: "blue"}}, nil)
			return err
		}
		return nil
	})
	var e *Error
	if !errors.As(err, &e) || e.Reason != Refused || tries != 2 {
		t.Errorf("%d tries, %v; want a refusal at the third", tries, err)
	}
	if _, _, err := s.Resolve(ctx, n, 1, "blue", nil); err != nil {
		t.Errorf("blue is gone: %v", err)
	}

	// Nor does a node go and leave behind what it begins to host meanwhile.
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
		t.Errorf("a node that is gone hosts blue: %v", err)
	}
}

// A tenant that is deleted by another orchestrator while the node that publishes it goes stays deleted.
func testDeletedMeanwhile(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s, other := opened(t, etcd), opened(t, etcd)
	n := pki.Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}
	if _, err := s.Register(ctx, Registration{Node: n, Gateway: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateTenantOn(ctx, tenant.Nimitz, "green", 0, []tenant.Overlay{{CIDR: netip.MustParsePrefix("fd12:3456::/48")}}); err != nil {
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
		if tries++; tries == 2 { // the first decision never waits for its turn
			return other.DeleteTenant(ctx, "green")
		}
		return nil
	})
	if err != nil || tries != 3 {
		t.Errorf("%d tries, %v; want success at the third", tries, err)
	}
	if resp, err := etcd.Get(ctx, dirTenants+"green"); err != nil || len(resp.Kvs) > 0 {
		t.Errorf("green is there again: %v, %v", resp.Kvs, err)
	}
}

// A change that was decided on more than a transaction compares notices what came and what went.
func testLargeChange(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s, other := opened(t, etcd), opened(t, etcd)
	for name, meanwhile := range map[string]func() error{
		"came": func() error { _, err := other.CreateTenant(ctx, "blue", 0); return err },
		"went": func() error { return other.DeleteTenant(ctx, "blue") },
	} {
		if name == "went" {
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
			if tries++; tries == 2 { // the first decision never waits for its turn
				return meanwhile()
			}
			return nil
		})
		made, _ := etcd.Get(ctx, root+"test/"+name, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil || tries != 4 || made.Count != maxOps+1 { // once without a turn, once in vain, once for each part
			t.Errorf("%s: %d tries, %d writes, %v", name, tries, made.Count, err)
		}
	}
}

// A change of many parts keeps nobody waiting until its end.
func testOthersBetween(t *testing.T, etcd *clientv3.Client) {
	ctx := within(t, 20*time.Second)
	s := opened(t, etcd)
	const most = 300
	other, tries, through := make(chan error, 1), 0, false
	err := s.change(ctx, func(txn *txn) error {
		if tries++; tries == 2 { // the first decision never waits for its turn
			go func() { _, err := s.CreateTenant(ctx, "blue", 0); other <- err }()
		}
		select {
		case err := <-other:
			through = true
			return err
		default:
		}
		for i := range s.committer.maxBatch + 1 { // more than is made together with another
			txn.put(fmt.Sprint(root, "test/", tries%2, "/", i), "x")
		}
		if tries == most {
			return errors.New("it waits for the end")
		}
		return nil
	})
	if err != nil || !through {
		t.Errorf("beside a change of %d parts another: %v", tries, err)
	}
}

// One that slept until the revision it reads was compacted away decides anew, too, and a watch
// that did starts over.
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
		if tries <= 2 { // without and with the turn
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
	if err := s.watch(ctx, &revision, func(Batch) { t.Error("told of a revision that is gone") }); !errors.Is(
		err,
		rpctypes.ErrCompacted,
	) {
		t.Errorf("watch from a revision that is gone: %v", err)
	}
}

func TestDeadlineIsAnUnknownOutcome(t *testing.T) {
	client, err := Dial(External{Endpoints: []string{"http://127.0.0.1:1"}}) // nobody listens there
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
