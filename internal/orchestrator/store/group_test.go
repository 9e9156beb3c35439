package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// gated counts transactions, and delays each until the test opens the gate.
type gated struct {
	clientv3.KV
	gate  chan struct{} // receives one token per transaction; nil: no delay
	at    chan struct{} // has one token per transaction that waits at the gate
	fails error         // result of the next transaction, which then changes nothing
	made  int           // transactions
}

type gatedTxn struct {
	clientv3.Txn
	g *gated
}

func (t gatedTxn) If(c ...clientv3.Cmp) clientv3.Txn    { return gatedTxn{t.Txn.If(c...), t.g} }
func (t gatedTxn) Then(ops ...clientv3.Op) clientv3.Txn { return gatedTxn{t.Txn.Then(ops...), t.g} }
func (t gatedTxn) Commit() (*clientv3.TxnResponse, error) {
	t.g.made++
	t.g.at <- struct{}{}
	<-t.g.gate
	if err := t.g.fails; err != nil {
		t.g.fails = nil
		return nil, err
	}
	return t.Txn.Commit()
}
func (g *gated) Txn(ctx context.Context) clientv3.Txn {
	if g.gate == nil {
		return g.KV.Txn(ctx)
	}
	return gatedTxn{g.KV.Txn(ctx), g}
}

// openGated returns a store, and a function that runs calls in one batch: the function queues the calls while another
// transaction waits at the gate.
func openGated(t *testing.T, etcd *clientv3.Client) (s *Store, g *gated, batch func(...func() error) []error) {
	t.Helper()
	g = &gated{KV: etcd.KV, at: make(chan struct{}, 100)}
	c := clientv3.NewCtxClient(t.Context())
	c.KV, c.Lease = g, etcd.Lease
	s, err := Open(t.Context(), c, noPlan, discard)
	must(t, err)
	s.committer.maxBatch = maxBatchOf(etcd)
	g.gate = make(chan struct{}, 100)
	return s, g, func(calls ...func() error) []error {
		t.Helper()
		var work sync.WaitGroup
		work.Go(func() { s.change(t.Context(), func(t *txn) error { t.put(root+"test/first", "x"); return nil }) })
		<-g.at
		errs := make([]error, len(calls))
		for i, call := range calls {
			work.Go(func() { errs[i] = call() })
			awaitQueue(t, s, i+1)
		}
		before := g.made
		g.gate <- struct{}{}
		<-g.at
		if g.made != before+1 {
			t.Errorf("%d transactions for the batch, want 1", g.made-before)
		}
		for range cap(g.gate) {
			select {
			case g.gate <- struct{}{}:
			default:
			}
		}
		work.Wait()
		g.gate = nil
		return errs
	}
}

// awaitQueue returns when n changes are queued.
func awaitQueue(t *testing.T, s *Store, n int) {
	t.Helper()
	for {
		if s.Waiting() == n {
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatalf("%d changes are queued, want %d", s.Waiting(), n)
		case <-time.After(time.Millisecond):
		}
	}
}

// checkValues compares values of the store, by key; "" means that the key does not exist.
func checkValues(t *testing.T, s *Store, want map[string]string) {
	t.Helper()
	for key, value := range want {
		resp, err := s.etcd.Get(t.Context(), root+"test/"+key)
		must(t, err)
		if got := readingOf(resp.Kvs).value; got != value {
			t.Errorf("%s is %q, want %q", key, got, value)
		}
	}
}

// increment appends a letter to a value, and returns the value before.
func increment(t *txn, key string) (string, error) {
	was, err := t.get(root + "test/" + key)
	t.put(root+"test/"+key, was+"i")
	return was, err
}

func reasonOf(err error) Reason {
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return 0
}

// The changes of a batch are committed in one transaction. Each change sees the writes of earlier changes of the batch,
// and a refused change writes nothing.
func testBatch(t *testing.T, etcd *clientv3.Client) {
	s, g, batch := openGated(t, etcd)
	ctx := t.Context()
	read := make([]string, 4)
	counts := func(i int, then error) func() error {
		return func() error {
			return s.change(ctx, func(t *txn) (err error) {
				read[i], err = increment(t, "all")
				if i == 0 || t.group == nil { // the refusal must come in the batch, not in the first decision
					return err
				}
				t.put(fmt.Sprint(root, "test/", i), "x")
				return errors.Join(err, then)
			})
		}
	}
	no := refuse(Refused, "no")
	before := s.Revision()
	errs := batch(counts(0, nil), counts(1, nil), counts(2, no), counts(3, nil))
	if fmt.Sprint(errs) != "[<nil> <nil> no <nil>]" {
		t.Errorf("errors %v, want one of the third change", errs)
	}
	if fmt.Sprint(read) != "[ i ii ii]" {
		t.Errorf("the changes read %q, want [ i ii ii]", read)
	}
	checkValues(t, s, map[string]string{"all": "iii", "1": "x", "2": "", "3": "x"})
	if g.made != 2 || s.Revision() != before+2 {
		t.Errorf("%d transactions, %d revisions; want 2 and 2", g.made, s.Revision()-before)
	}
}

// When the queue is full, the store refuses a change at once and commits the queued ones.
func testFullQueue(t *testing.T, etcd *clientv3.Client) {
	s, g, _ := openGated(t, etcd)
	s.committer.maxWaiting = 2
	put := func(key string) error {
		return s.change(t.Context(), func(t *txn) error { t.put(root+"test/"+key, "x"); return nil })
	}
	var work sync.WaitGroup
	errs := make([]error, 3)
	for i := range errs {
		work.Go(func() { errs[i] = put(fmt.Sprint(i)) })
		if i == 0 {
			<-g.at
		} else {
			awaitQueue(t, s, i)
		}
	}
	if err := put("3"); reasonOf(err) != Unavailable || !strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a change behind a full queue: got %v, want Unavailable", err)
	}
	for range cap(g.gate) {
		g.gate <- struct{}{}
	}
	work.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	g.gate = nil
	checkValues(t, s, map[string]string{"0": "x", "1": "x", "2": "x", "3": ""})
}

// A change is refused because of an earlier change of its batch, and then the commit of the batch fails: the caller of
// the refused change receives the error of the commit, not the refusal.
func testRefusalAfterFailedCommit(t *testing.T, etcd *clientv3.Client) {
	s, g, batch := openGated(t, etcd)
	ctx := t.Context()
	crashed := errors.New("crashed")
	create := func(name string) func() error {
		return func() error { _, err := s.CreateTenant(ctx, name, 0); return err }
	}
	errs := batch(create("blue"), func() error {
		g.fails = nil
		return s.change(ctx, func(t *txn) error {
			if t.group != nil {
				g.fails = crashed
			}
			if was, err := t.get(dirTenants + "blue"); err != nil || was != "" {
				return errors.Join(err, refuse(Exists, "blue exists"))
			}
			t.put(root+"test/none", "x")
			return nil
		})
	}, func() error {
		return s.change(ctx, func(t *txn) error {
			_, err := increment(t, "none")
			if t.group != nil && err == nil {
				return refuse(Refused, "independent of the others")
			}
			return err
		})
	})
	if reasonOf(errs[0]) != Unavailable || !errors.Is(errs[0], crashed) || reasonOf(errs[1]) != Unavailable ||
		reasonOf(errs[2]) != Refused {
		t.Errorf("errors %v, want Unavailable, Unavailable, Refused", errs)
	}
	checkValues(t, s, map[string]string{"none": ""})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Errorf("create blue again: %v", err)
	}
}

// Another orchestrator commits first: the whole batch is decided again, also the changes that were refused.
func testConflict(t *testing.T, etcd *clientv3.Client) {
	s, _, batch := openGated(t, etcd)
	other := opened(t, etcd)
	ctx := t.Context()
	var tries [2]int
	errs := batch(func() error {
		return s.change(ctx, func(t *txn) error {
			was, err := t.get(root + "test/mine")
			if err != nil || was == "other's" {
				return errors.Join(err, refuse(Refused, "other's"))
			}
			t.put(root+"test/mine", "mine")
			if tries[0]++; tries[0] == 2 { // the first decision is before the queue
				return other.change(ctx, func(t *txn) error { t.put(root+"test/mine", "other's"); return nil })
			}
			return nil
		})
	}, func() error {
		return s.change(ctx, func(t *txn) error {
			tries[1]++
			was, err := t.get(root + "test/mine")
			if err != nil || was == "mine" {
				return errors.Join(err, refuse(Exists, "mine"))
			}
			t.put(root+"test/second", "after "+was)
			return nil
		})
	})
	if reasonOf(errs[0]) != Refused || errs[1] != nil || tries != [2]int{2, 3} || s.Conflicts() != 1 {
		t.Errorf("errors %v, %v tries, %d conflicts; want Refused and none, [2 3], 1", errs, tries, s.Conflicts())
	}
	checkValues(t, s, map[string]string{"mine": "other's", "second": "after other's"})
}

// A refusal depends on an earlier change of the batch, and on a key that another orchestrator then changes: the store
// decides the refused change again.
func testRefusalAfterConflict(t *testing.T, etcd *clientv3.Client) {
	s, _, batch := openGated(t, etcd)
	other := opened(t, etcd)
	ctx := t.Context()
	tries := 0
	errs := batch(func() error {
		return s.change(ctx, func(t *txn) error { t.put(root+"test/mine", "x"); return nil })
	}, func() error {
		return s.change(ctx, func(t *txn) error {
			mine, err := t.get(root + "test/mine")
			if err != nil {
				return err
			}
			others, err := t.get(root + "test/other")
			if err != nil {
				return err
			}
			if tries++; tries == 2 { // the first decision is before the queue
				err := other.change(ctx, func(t *txn) error { t.put(root+"test/other", "x"); return nil })
				if err != nil {
					return err
				}
			}
			if mine != "" && others == "" {
				return refuse(Refused, "only mine")
			}
			t.put(root+"test/both", mine+others)
			return nil
		})
	})
	if errs[0] != nil || errs[1] != nil || tries != 3 || s.Conflicts() != 1 {
		t.Errorf("errors %v, %d tries, %d conflicts; want none, 3, 1", errs, tries, s.Conflicts())
	}
	checkValues(t, s, map[string]string{"both": "xx"})
}

// If a change deletes a whole directory, later changes of the same batch see all its deletions.
func testAfterRangeDeletion(t *testing.T, etcd *clientv3.Client) {
	ctx := t.Context()
	must(t, opened(t, etcd).change(ctx, func(t *txn) error {
		t.put(root+"test/of", "x")
		t.put(root+"test/of/1", "x")
		return nil
	}))
	s, _, batch := openGated(t, etcd)
	errs := batch(func() error {
		return s.change(
			ctx,
			func(t *txn) error { t.delete(root + "test/of"); t.deleteAll(root + "test/of/"); return nil },
		)
	}, func() error {
		return s.change(ctx, func(t *txn) error {
			of, err := t.get(root + "test/of")
			if err != nil {
				return err
			}
			one, err := t.get(root + "test/of/1")
			if err == nil && of != one {
				err = refuse(Refused, "only one of the keys is deleted")
			}
			t.put(root+"test/saw", "saw "+of+one)
			return err
		})
	})
	if errs[0] != nil || errs[1] != nil {
		t.Errorf("errors %v, want none", errs)
	}
	checkValues(t, s, map[string]string{"of": "", "of/1": "", "saw": "saw "})
}

// A change that is too large for a transaction is committed in several, with small changes in the same queue. A change
// that became larger than its estimate leaves the batch. A change that reads or deletes a whole directory sees the
// writes of earlier changes.
func testLargeChangeInBatch(t *testing.T, etcd *clientv3.Client) {
	s, _, batch := openGated(t, etcd)
	ctx := t.Context()
	small := func(i int) func() error {
		return func() error {
			return s.change(ctx, func(t *txn) error { _, err := increment(t, fmt.Sprint("small/", i)); return err })
		}
	}
	puts := func(name string, n func(*txn) int) func() error {
		return func() error {
			return s.change(ctx, func(t *txn) error {
				for i := range n(t) {
					key := fmt.Sprint(root, "test/", name, "/", i)
					if there, err := t.get(key); err != nil {
						return err
					} else if there == "" {
						t.put(key, "x")
					}
				}
				return nil
			})
		}
	}
	grows := func(t *txn) int {
		if t.group == nil { // the first decision, before the queue
			return 1
		}
		return 100
	}
	list := func() error {
		return s.change(ctx, func(t *txn) error {
			names, err := t.names(root + "test/small/")
			t.put(root+"test/listed", fmt.Sprint(names))
			return err
		})
	}
	deleteSmall := func() error {
		return s.change(ctx, func(t *txn) error { t.deleteAll(root + "test/small/"); return nil })
	}
	large := puts("large", func(*txn) int { return 3 * maxOps })
	errs := batch(small(1), large, small(2), list, puts("grows", grows), puts("too", grows), deleteSmall, small(3))
	for i, err := range errs {
		if err != nil {
			t.Errorf("change %d: %v", i, err)
		}
	}
	for name, want := range map[string]int64{"large": 3 * maxOps, "grows": 100, "too": 100, "small": 1} {
		if n := count(t, s, root+"test/"+name+"/", clientv3.WithPrefix()); n != want {
			t.Errorf("%d keys of %s, want %d", n, name, want)
		}
	}
	checkValues(t, s, map[string]string{"small/3": "i", "listed": "[1 2]"})
}

// A change whose context ends while it is queued changes nothing and does not affect the others.
func testCanceled(t *testing.T, etcd *clientv3.Client) {
	s, g, batch := openGated(t, etcd)
	canceled, cancel := context.WithCancel(t.Context())
	answered := make(chan error)
	counts := func(ctx context.Context, key string) error {
		return s.change(ctx, func(t *txn) error { _, err := increment(t, key); return err })
	}
	errs := batch(
		func() error { err := counts(canceled, "canceled"); answered <- err; return err },
		func() error { return counts(t.Context(), "all") },
		func() error {
			cancel()
			if err := <-answered; reasonOf(err) != Unavailable || !errors.Is(err, context.Canceled) {
				t.Errorf("the canceled call returned %v, want Unavailable", err)
			}
			return counts(t.Context(), "all")
		})
	if errs[1] != nil || errs[2] != nil {
		t.Errorf("errors %v, want none of the others", errs)
	}
	checkValues(t, s, map[string]string{"canceled": "", "all": "ii"})

	// The context of the only change of a transaction ends while the transaction waits for etcd.
	ctx, cancel := context.WithCancel(t.Context())
	g.gate = make(chan struct{}, 1)
	go func() {
		<-g.at
		cancel()
		g.gate <- struct{}{}
	}()
	if err := counts(ctx, "last"); reasonOf(err) != Unavailable {
		t.Errorf("a call that was canceled during its commit returned %v, want Unavailable", err)
	}
}

// When etcd has lost a lease, only the changes that use the lease fail.
func testLostLease(t *testing.T, etcd *clientv3.Client) {
	s, _, batch := openGated(t, etcd)
	ctx, n := t.Context(), pki.Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}
	other := opened(t, etcd)
	if _, err := other.Register(ctx, Registration{Node: n}); err != nil {
		t.Fatal(err)
	}
	must(t, s.EndSessions(ctx))
	create := func(name string) func() error {
		return func() error { _, err := s.CreateTenant(ctx, name, 0); return err }
	}
	errs := batch(create("blue"), func() error { return s.Connect(ctx, n, Session{"o", "i", "s"}) }, create("red"))
	if errs[0] != nil || errs[2] != nil || reasonOf(errs[1]) != Unavailable {
		t.Errorf("errors %v, want Unavailable of the second", errs)
	}
}

// A change whose decision panics fails; the other changes of its batch are committed.
func testPanicInBatch(t *testing.T, etcd *clientv3.Client) {
	s, _, batch := openGated(t, etcd)
	tries := 0
	errs := batch(
		func() error {
			return s.change(t.Context(), func(t *txn) error {
				if tries++; tries == 2 { // the first decision is in the goroutine of the caller
					panic("a bug")
				}
				t.put(root+"test/bad", "x")
				return nil
			})
		},
		func() error {
			return s.change(t.Context(), func(t *txn) error { t.put(root+"test/good", "x"); return nil })
		},
	)
	if errs[0] == nil || errs[1] != nil {
		t.Errorf("errors %v, want one of the first change only", errs)
	}
	for key, want := range map[string]int{"test/bad": 0, "test/good": 1} {
		if resp, err := etcd.Get(t.Context(), root+key); err != nil || len(resp.Kvs) != want {
			t.Errorf("%s: %v, %v; want %d keys", key, resp, err, want)
		}
	}
}
