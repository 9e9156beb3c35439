package store_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// policies are of one document.
func policies(document string, names ...string) (all []*pilasterv1.Policy) {
	for _, name := range names {
		all = append(
			all,
			&pilasterv1.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: name, Document: document, Rules: 1},
		)
	}
	return all
}

// kept is what the store has below a directory, by key, with the revision of each key.
func kept(t *testing.T, etcd *clientv3.Client, dir string) map[string]int64 {
	t.Helper()
	resp, err := etcd.Get(t.Context(), "/pilaster/1/"+dir, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]int64{}
	for _, kv := range resp.Kvs {
		all[strings.TrimPrefix(string(kv.Key), "/pilaster/1/"+dir)] = kv.ModRevision
	}
	return all
}

// applied is what became of each, by its first letters.
func applied(t *testing.T, s *store.Store, name string, all []*pilasterv1.Policy, dryRun bool) string {
	t.Helper()
	changes, err := s.ApplyPolicies(t.Context(), name, all, store.Applying{DryRun: dryRun})
	if err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	for _, c := range changes {
		said.WriteString(strings.ToLower(strings.TrimPrefix(c.Change.String(), "POLICY_CHANGE_")[:2]))
	}
	return said.String()
}

func testPolicies(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	if got := applied(t, s, "blue", policies("1", "a", "b"), true); got != "crcr" {
		t.Errorf("a dry run says %s", got)
	}
	if is := kept(t, etcd, "policies/"); len(is) != 0 {
		t.Errorf("a dry run left %v", is)
	}
	if got := applied(t, s, "blue", policies("1", "a", "b"), false); got != "crcr" {
		t.Errorf("first %s", got)
	}
	for name, want := range map[string]bool{"blue": true, "red": false, "blu": false} {
		if has, err := s.HasPolicies(t.Context(), name); err != nil || has != want {
			t.Errorf("tenant %s has policies: %v, %v", name, has, err)
		}
	}
	was := kept(t, etcd, "policies/blue/")
	if len(was) != 2 || was["NetworkPolicy/shop/a"] == 0 || was["NetworkPolicy/shop/a"] != was["NetworkPolicy/shop/b"] {
		t.Fatalf("kept is %v, want two of one transaction", was)
	}
	if got := applied(t, s, "blue", append(policies("1", "a"), policies("2", "b", "c")...), false); got != "uncocr" {
		t.Errorf("then %s", got)
	}
	if is := kept(t, etcd, "policies/blue/"); is["NetworkPolicy/shop/a"] != was["NetworkPolicy/shop/a"] ||
		is["NetworkPolicy/shop/b"] == was["NetworkPolicy/shop/b"] ||
		len(is) != 3 {
		t.Errorf("kept is %v after %v", is, was)
	}
	revision := s.Revision()
	if got := applied(t, s, "blue", policies("2", "b", "c"), false); got != "unun" || s.Revision() != revision {
		t.Errorf("what is as it was: %s, at revision %d after %d", got, s.Revision(), revision)
	}

	refusals := map[string]error{}
	_, refusals["no tenant"] = s.ApplyPolicies(t.Context(), "green", policies("1", "a"), store.Applying{})
	refusals["no policy"] = s.DeletePolicies(t.Context(), "blue", policies("", "a", "z"))
	refusals["another's"] = s.DeletePolicies(t.Context(), "red", policies("", "a"))
	for _, err := range refusals {
		refused(t, err, store.NotFound)
	}
	refused(t, refusals["no policy"], store.NotFound, "networkpolicy/shop/z", "nothing was changed")
	_, err := s.ApplyPolicies(t.Context(), "blue", policies("1", strings.Repeat("x", 2000)), store.Applying{})
	refused(t, err, store.Invalid)
	if is := kept(t, etcd, "policies/"); len(is) != 3 {
		t.Errorf("after refusals %v is kept", is)
	}
	if err := s.DeletePolicies(t.Context(), "blue", policies("", "a", "b")); err != nil {
		t.Fatal(err)
	}
	if is := kept(t, etcd, "policies/"); len(is) != 1 {
		t.Errorf("after a deletion %v is kept", is)
	}
	if err := s.DeleteTenant(t.Context(), "blue"); err != nil {
		t.Fatal(err)
	}
	if is := kept(t, etcd, "policies/"); len(is) != 0 {
		t.Errorf("of a tenant that is gone %v is kept", is)
	}
}

// What is applied together is changed together, or refused: by its number, by its size, and by what the tenant may
// have.
func testManyPolicies(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	most := 125
	if len(etcd.Endpoints()) == 0 {
		most = 1021
	}
	numbered := func(from, n int) (all []*pilasterv1.Policy) {
		var names []string
		for i := range n {
			names = append(names, fmt.Sprint("p", from+i))
		}
		return policies("1", names...)
	}
	_, err := s.ApplyPolicies(t.Context(), "blue", numbered(0, most+1), store.Applying{DryRun: true})
	refused(t, err, store.Full, "at once", fmt.Sprint(most), "nothing was changed")
	if got := applied(t, s, "blue", numbered(0, most), false); got != strings.Repeat("cr", most) {
		t.Errorf("said is %s", got)
	}
	revisions := map[int64]bool{}
	for _, revision := range kept(t, etcd, "policies/blue/") {
		revisions[revision] = true
	}
	if len(revisions) != 1 {
		t.Errorf("%d policies were made in %d transactions", most, len(revisions))
	}
	_, err = s.ApplyPolicies(
		t.Context(),
		"blue",
		policies(strings.Repeat("x", 64<<10), strings.Fields("a b c d e f g h i j k l m n o p q")...),
		store.Applying{DryRun: true},
	)
	refused(t, err, store.Full, "1024 KiB that the store changes at once", "nothing was changed")
	if err := s.DeletePolicies(t.Context(), "blue", numbered(0, most)); err != nil {
		t.Fatal(err)
	}

	var puts []clientv3.Op
	for i := range 10_000 {
		puts = append(
			puts,
			clientv3.OpPut(fmt.Sprint("/pilaster/1/policies/blue/NetworkPolicy/shop/q", i), `{"document":"1"}`),
		)
		if len(puts) == 100 {
			if _, err := etcd.Txn(t.Context()).Then(puts...).Commit(); err != nil {
				t.Fatal(err)
			}
			puts = nil
		}
	}
	_, err = s.ApplyPolicies(t.Context(), "blue", numbered(0, 2), store.Applying{})
	refused(t, err, store.Full, "10000 policies, 2 more are new", "maximum is 10000", "nothing was changed")
	if got := applied(t, s, "blue", policies("2", "q0", "q1"), false); got != "coco" {
		t.Errorf("of those that are there: %s", got)
	}
}

// What all policies of a tenant have together is bounded: each node that hosts it has them. What is more from before
// may become less.
func testLongPolicies(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("x", 520<<10)
	for i := range 31 {
		if got := applied(t, s, "blue", policies(long, fmt.Sprint("p", i)), false); got != "cr" {
			t.Fatalf("policy %d: %s", i, got)
		}
	}
	_, err := s.ApplyPolicies(t.Context(), "blue", policies(long, "more"), store.Applying{})
	refused(t, err, store.Full, "520 KiB more", "maximum is 16384 KiB", "nothing was changed")
	_, err = s.ApplyPolicies(t.Context(), "blue", policies(long+long[:300<<10], "p0"), store.Applying{DryRun: true})
	refused(t, err, store.Full, "300 KiB more", "nothing was changed")
	if is := kept(t, etcd, "policies/blue/"); len(is) != 31 {
		t.Errorf("after refusals %d are kept", len(is))
	}
	if got := applied(t, s, "red", policies(long, "p0"), false); got != "cr" {
		t.Errorf("of another tenant: %s", got)
	}

	if _, err := etcd.Put(t.Context(), "/pilaster/1/policies/blue/NetworkPolicy/shop/older", fmt.Sprintf(`{"document":%q}`, long+long)); err != nil {
		t.Fatal(err)
	}
	if got := applied(t, s, "blue", policies(long[1:], "p0"), false); got != "co" {
		t.Errorf("what has too much and becomes shorter: %s", got)
	}
	_, err = s.ApplyPolicies(t.Context(), "blue", policies(long, "p0"), store.Applying{})
	refused(t, err, store.Full)
	if got := applied(t, s, "blue", append(policies(long[2:], "p0"), policies("", "short")...), false); got != "cocr" {
		t.Errorf("what becomes shorter with one more: %s", got)
	}
}

// A node says of its own containers which app they are of, and what it has said goes when it says otherwise, or hosts
// the tenant no more.
func testOverrides(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	register(t, s, 1)
	register(t, s, 2)
	sequence := uint64(0)
	say := func(n int, name string, overrides ...*pilasterv1.Override) error {
		sequence++
		is, err := s.RecordHosting(
			t.Context(),
			node(n),
			sequence,
			[]*pilasterv1.Hosting{{Tenant: name, Accepts: []uint32{1}, Holds: []uint32{1}, Overrides: overrides}},
			nil,
		)
		if len(is.Overtaken) > 0 || err != nil {
			t.Fatalf("overtaken are %v; %v", is.Overtaken, err)
		}
		return errors.Join(is.Refused[name]...)
	}
	noted := func() string {
		t.Helper()
		resp, err := etcd.Get(t.Context(), "/pilaster/1/hosting/blue/n1")
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) == 0 {
			return ""
		}
		return string(resp.Kvs[0].Value)
	}
	const own, other = "fd70:696c:6100:1:0:100:500:7", "fd70:696c:6100:1:0:100:500:8"
	if err := say(1, "blue", &pilasterv1.Override{Address: own, App: 9}); err != nil {
		t.Fatal(err)
	}
	if is := noted(); !strings.Contains(is, own) {
		t.Errorf("noted is %s", is)
	}
	was := kept(t, etcd, "hosting/")["blue/n1"]
	if err := say(1, "blue", &pilasterv1.Override{Address: own, App: 9}); err != nil ||
		kept(t, etcd, "hosting/")["blue/n1"] != was {
		t.Errorf("said again it is noted again (%v)", err)
	}
	if _, _, err := s.Resolve(t.Context(), node(1), 99, "blue", nil); err != nil {
		t.Fatal(err)
	}
	if is := noted(); !strings.Contains(is, own) || !strings.Contains(is, "99") {
		t.Errorf("after a Resolve noted is %s", is)
	}
	sequence = 100
	for name, c := range map[string]struct {
		override *pilasterv1.Override
		want     store.Reason
	}{
		"another node's":           {&pilasterv1.Override{Address: "fd70:696c:6100:2:0:100:500:7", App: 9}, store.Refused},
		"another tenant's":         {&pilasterv1.Override{Address: "fd70:696c:6100:1:0:200:500:7", App: 9}, store.Refused},
		"the node's own":           {&pilasterv1.Override{Address: "fd70:696c:6100:1::1", App: 9}, store.Refused},
		"a guest's":                {&pilasterv1.Override{Address: "fd70:696c:6100:1:0:1ff:0:7", App: 9}, store.Refused},
		"what containers see":      {&pilasterv1.Override{Address: "fc12::7", App: 9}, store.Refused},
		"none":                     {&pilasterv1.Override{Address: "x", App: 9}, store.Invalid},
		"IPv4":                     {&pilasterv1.Override{Address: "10.0.0.1", App: 9}, store.Invalid},
		"on an interface":          {&pilasterv1.Override{Address: own + "%eth0", App: 9}, store.Invalid},
		"written in another way":   {&pilasterv1.Override{Address: "fd70:696c:6100:1:0:0100:500:7", App: 9}, store.Invalid},
		"no app":                   {&pilasterv1.Override{Address: own}, store.Invalid},
		"an app that is reserved":  {&pilasterv1.Override{Address: own, App: 0xff00}, store.Invalid},
		"a tenant in the override": {&pilasterv1.Override{Tenant: "red", Address: own, App: 9}, store.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			// It costs those beside it nothing.
			refused(
				t,
				say(1, "blue", c.override, &pilasterv1.Override{Address: other, App: 7}),
				c.want,
				"n1",
				"blue",
				"it was not recorded",
			)
			if is := noted(); !strings.Contains(is, other) || strings.Contains(is, own) ||
				c.override.Address != "x" && strings.Contains(is, c.override.Address) {
				t.Errorf("noted is %s", is)
			}
		})
	}
	refused(
		t,
		say(1, "blue", &pilasterv1.Override{Address: own, App: 9}, &pilasterv1.Override{Address: own, App: 8}),
		store.Invalid,
		"reports two apps",
	)
	if is := noted(); strings.Count(is, own) != 1 || !strings.Contains(is, `9`) {
		t.Errorf("after refusals noted is %s", is)
	}
	if err := say(1, "blue"); err != nil {
		t.Fatal(err)
	}
	if is := noted(); is == "" || strings.Contains(is, own) {
		t.Errorf("after its end noted is %s", is)
	}
}
