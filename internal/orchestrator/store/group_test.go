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

// gated lets transactions through one at a time, when it is told to, and counts them.
type gated struct {
	clientv3.KV
	gate  chan struct{} // nil: open
	at    chan struct{} // one waits
	fails error         // what the next one ends with, without having changed anything
	made  int
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

// openGated is a store whose next transaction, of a change of no meaning, waits at its gate: what is asked of it now
// waits together.
func openGated(t *testing.T, etcd *clientv3.Client) (s *Store, g *gated, together func(...func() error) []error) {
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
			waits(t, s, i+1)
		}
		before := g.made
		g.gate <- struct{}{}
		<-g.at
		if g.made != before+1 {
			t.Errorf("%d transactions", g.made-before)
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

// waits returns when so many changes wait.
func waits(t *testing.T, s *Store, n int) {
	t.Helper()
	for {
		if s.Waiting() == n {
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatal("they do not wait")
		case <-time.After(time.Millisecond):
		}
	}
}

func testMade(t *testing.T, s *Store, want map[string]string) {
	t.Helper()
	for key, value := range want {
		resp, err := s.etcd.Get(t.Context(), root+"test/"+key)
		must(t, err)
		if got := readingOf(resp.Kvs).value; got != value {
			t.Errorf("%s is %q, want %q", key, got, value)
		}
	}
}

// count1 counts a key up, and says what it was.
func count1(t *txn, key string) (string, error) {
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

// Changes that wait together are made by one transaction, each on those before it, and a refused one leaves nothing
// behind.
func testTogether(t *testing.T, etcd *clientv3.Client) {
	s, g, together := openGated(t, etcd)
	ctx := t.Context()
	saw := make([]string, 4)
	counts := func(i int, then error) func() error {
		return func() error {
			return s.change(ctx, func(t *txn) (err error) {
				saw[i], err = count1(t, "all")
				if i == 0 || t.group == nil { // the others would be refused by themselves
					return err
				}
				t.put(fmt.Sprint(root, "test/", i), "x")
				return errors.Join(err, then)
			})
		}
	}
	no := refuse(Refused, "no")
	before := s.Revision()
	errs := together(counts(0, nil), counts(1, nil), counts(2, no), counts(3, nil))
	if fmt.Sprint(errs) != "[<nil> <nil> no <nil>]" {
		t.Errorf("answered %v", errs)
	}
	if fmt.Sprint(saw) != "[ i ii ii]" {
		t.Errorf("they saw %q", saw)
	}
	testMade(t, s, map[string]string{"all": "iii", "1": "x", "2": "", "3": "x"})
	if g.made != 2 || s.Revision() != before+2 {
		t.Errorf("%d transactions, %d revisions", g.made, s.Revision()-before)
	}
}

// One that would have to wait behind too many is refused at once, and those that wait are made.
func testTooManyWait(t *testing.T, etcd *clientv3.Client) {
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
			waits(t, s, i)
		}
	}
	if err := put("3"); reasonOf(err) != Unavailable || !strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("the third that would wait: %v", err)
	}
	for range cap(g.gate) {
		g.gate <- struct{}{}
	}
	work.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	g.gate = nil
	testMade(t, s, map[string]string{"0": "x", "1": "x", "2": "x", "3": ""})
}

// What is refused because of a change that is then not made is not refused.
func testRefusedInVain(t *testing.T, etcd *clientv3.Client) {
	s, g, together := openGated(t, etcd)
	ctx := t.Context()
	crashed := errors.New("crashed")
	create := func(name string) func() error {
		return func() error { _, err := s.CreateTenant(ctx, name, 0); return err }
	}
	errs := together(create("blue"), func() error {
		g.fails = nil
		return s.change(ctx, func(t *txn) error {
			if t.group != nil {
				g.fails = crashed
			}
			if was, err := t.get(dirTenants + "blue"); err != nil || was != "" {
				return errors.Join(err, refuse(Exists, "blue is there"))
			}
			t.put(root+"test/none", "x")
			return nil
		})
	}, func() error {
		return s.change(ctx, func(t *txn) error {
			_, err := count1(t, "none")
			if t.group != nil && err == nil {
				return refuse(Refused, "whatever the others do")
			}
			return err
		})
	})
	if reasonOf(errs[0]) != Unavailable || !errors.Is(errs[0], crashed) || reasonOf(errs[1]) != Unavailable ||
		reasonOf(errs[2]) != Refused {
		t.Errorf("answered %v", errs)
	}
	testMade(t, s, map[string]string{"none": ""})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Errorf("again: %v", err)
	}
}

// Another orchestrator is first: all that wait together are decided anew, also who was refused.
func testOtherFirst(t *testing.T, etcd *clientv3.Client) {
	s, _, together := openGated(t, etcd)
	other := opened(t, etcd)
	ctx := t.Context()
	var tries [2]int
	errs := together(func() error {
		return s.change(ctx, func(t *txn) error {
			was, err := t.get(root + "test/mine")
			if err != nil || was == "other's" {
				return errors.Join(err, refuse(Refused, "other's"))
			}
			t.put(root+"test/mine", "mine")
			if tries[0]++; tries[0] == 2 { // the first decision never waits for its turn
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
		t.Errorf("answered %v after %v tries, %d conflicts", errs, tries, s.Conflicts())
	}
	testMade(t, s, map[string]string{"mine": "other's", "second": "after other's"})
}

// Who is refused because of one before it is decided anew too when another orchestrator was first with what else that
// was decided on.
func testRefusedOnOld(t *testing.T, etcd *clientv3.Client) {
	s, _, together := openGated(t, etcd)
	other := opened(t, etcd)
	ctx := t.Context()
	tries := 0
	errs := together(func() error {
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
			if tries++; tries == 2 { // the first decision never waits for its turn
				if err := other.change(ctx, func(t *txn) error { t.put(root+"test/other", "x"); return nil }); err != nil {
					return err
				}
			}
			if mine != "" && others == "" {
				return refuse(Refused, "mine alone")
			}
			t.put(root+"test/both", mine+others)
			return nil
		})
	})
	if errs[0] != nil || errs[1] != nil || tries != 3 || s.Conflicts() != 1 {
		t.Errorf("answered %v after %d tries, %d conflicts", errs, tries, s.Conflicts())
	}
	testMade(t, s, map[string]string{"both": "xx"})
}

// Who comes after one that takes whole directories away sees them gone, as all else that it took.
func testAfterSweep(t *testing.T, etcd *clientv3.Client) {
	ctx := t.Context()
	must(
		t,
		opened(
			t,
			etcd,
		).change(ctx, func(t *txn) error { t.put(root+"test/of", "x"); t.put(root+"test/of/1", "x"); return nil }),
	)
	s, _, together := openGated(t, etcd)
	errs := together(func() error {
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
				err = refuse(Refused, "half of it")
			}
			t.put(root+"test/saw", "saw "+of+one)
			return err
		})
	})
	if errs[0] != nil || errs[1] != nil {
		t.Errorf("answered %v", errs)
	}
	testMade(t, s, map[string]string{"of": "", "of/1": "", "saw": "saw "})
}

// One that is too large for a transaction is made in several while small ones wait with it; one that has become larger
// than it was at first goes with others no more; and one that reads or deletes a whole directory sees what those before
// it wrote there.
func testLargeInCompany(t *testing.T, etcd *clientv3.Client) {
	s, _, together := openGated(t, etcd)
	ctx := t.Context()
	small := func(i int) func() error {
		return func() error {
			return s.change(ctx, func(t *txn) error { _, err := count1(t, fmt.Sprint("small/", i)); return err })
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
		if t.group == nil { // the first decision never waits for its turn
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
	sweep := func() error {
		return s.change(ctx, func(t *txn) error { t.deleteAll(root + "test/small/"); return nil })
	}
	for i, err := range together(small(1), puts("large", func(*txn) int { return 3 * maxOps }), small(2), list, puts("grows", grows), puts("too", grows), sweep, small(3)) {
		if err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
	for name, want := range map[string]int64{"large": 3 * maxOps, "grows": 100, "too": 100, "small": 1} {
		if n := count(t, s, root+"test/"+name+"/", clientv3.WithPrefix()); n != want {
			t.Errorf("%d of %s, want %d", n, name, want)
		}
	}
	testMade(t, s, map[string]string{"small/3": "i", "listed": "[1 2]"})
}

// Who gives up before its turn changes nothing, and nobody else notices.
func testGivenUp(t *testing.T, etcd *clientv3.Client) {
	s, g, together := openGated(t, etcd)
	gone, giveUp := context.WithCancel(t.Context())
	answered := make(chan error)
	counts := func(ctx context.Context, key string) error {
		return s.change(ctx, func(t *txn) error { _, err := count1(t, key); return err })
	}
	errs := together(
		func() error { err := counts(gone, "gone"); answered <- err; return err },
		func() error { return counts(t.Context(), "all") },
		func() error {
			giveUp()
			if err := <-answered; reasonOf(err) != Unavailable || !errors.Is(err, context.Canceled) {
				t.Errorf("who gave up heard %v", err)
			}
			return counts(t.Context(), "all")
		})
	if errs[1] != nil || errs[2] != nil {
		t.Errorf("answered %v", errs)
	}
	testMade(t, s, map[string]string{"gone": "", "all": "ii"})

	// The last one of a transaction that nobody answers.
	ctx, giveUp := context.WithCancel(t.Context())
	g.gate = make(chan struct{}, 1)
	go func() {
		<-g.at
		giveUp()
		g.gate <- struct{}{}
	}()
	if err := counts(ctx, "last"); reasonOf(err) != Unavailable {
		t.Errorf("who gave up while it was made heard %v", err)
	}
}

// A lease that etcd has forgotten is the matter of those who need it.
func testForgottenLease(t *testing.T, etcd *clientv3.Client) {
	s, _, together := openGated(t, etcd)
	ctx, n := t.Context(), pki.Node{Name: "n1", UUID: "00000000-0000-4000-8000-000000000001"}
	other := opened(t, etcd)
	if _, err := other.Register(ctx, Registration{Node: n}); err != nil {
		t.Fatal(err)
	}
	must(t, s.EndSessions(ctx))
	create := func(name string) func() error {
		return func() error { _, err := s.CreateTenant(ctx, name, 0); return err }
	}
	errs := together(create("blue"), func() error { return s.Connect(ctx, n, Session{"o", "i", "s"}) }, create("red"))
	if errs[0] != nil || errs[2] != nil || reasonOf(errs[1]) != Unavailable {
		t.Errorf("answered %v", errs)
	}
}

// A change whose decision panics fails by itself, and those in its company are made.
func testPanicInCompany(t *testing.T, etcd *clientv3.Client) {
	s, _, together := openGated(t, etcd)
	tries := 0
	errs := together(
		func() error {
			return s.change(t.Context(), func(t *txn) error {
				if tries++; tries == 2 { // the first decision is the caller's own
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
		t.Errorf("errors %v, want one of the first alone", errs)
	}
	for key, want := range map[string]int{"test/bad": 0, "test/good": 1} {
		if resp, err := etcd.Get(t.Context(), root+key); err != nil || len(resp.Kvs) != want {
			t.Errorf("%s: %v, %v", key, resp, err)
		}
	}
}
