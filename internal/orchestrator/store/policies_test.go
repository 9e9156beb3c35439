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

// policies returns policies with the same document.
func policies(document string, names ...string) (all []*pilasterv1.Policy) {
	for _, name := range names {
		all = append(
			all,
			&pilasterv1.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: name, Document: document, Rules: 1},
		)
	}
	return all
}

// revisions returns the revisions of the keys below a directory.
func revisions(t *testing.T, etcd *clientv3.Client, dir string) map[string]int64 {
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

// applied applies policies and returns the first two letters of each result: cr, co or un.
func applied(t *testing.T, s *store.Store, name string, all []*pilasterv1.Policy, dryRun bool) string {
	t.Helper()
	changes, err := s.ApplyPolicies(t.Context(), name, all, store.Applying{DryRun: dryRun})
	if err != nil {
		t.Fatal(err)
	}
	var results strings.Builder
	for _, c := range changes {
		results.WriteString(strings.ToLower(strings.TrimPrefix(c.Change.String(), "POLICY_CHANGE_")[:2]))
	}
	return results.String()
}

func testPolicies(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	if got := applied(t, s, "blue", policies("1", "a", "b"), true); got != "crcr" {
		t.Errorf("a dry run returned %s, want crcr", got)
	}
	if is := revisions(t, etcd, "policies/"); len(is) != 0 {
		t.Errorf("a dry run wrote %v", is)
	}
	if got := applied(t, s, "blue", policies("1", "a", "b"), false); got != "crcr" {
		t.Errorf("new policies: %s, want crcr", got)
	}
	for name, want := range map[string]bool{"blue": true, "red": false, "blu": false} {
		if has, err := s.HasPolicies(t.Context(), name); err != nil || has != want {
			t.Errorf("tenant %s has policies: %v, %v; want %v", name, has, err, want)
		}
	}
	was := revisions(t, etcd, "policies/blue/")
	if len(was) != 2 || was["NetworkPolicy/shop/a"] == 0 || was["NetworkPolicy/shop/a"] != was["NetworkPolicy/shop/b"] {
		t.Fatalf("the store has %v, want two policies of one transaction", was)
	}
	if got := applied(t, s, "blue", append(policies("1", "a"), policies("2", "b", "c")...), false); got != "uncocr" {
		t.Errorf("an equal, a changed and a new policy: %s, want uncocr", got)
	}
	if is := revisions(t, etcd, "policies/blue/"); is["NetworkPolicy/shop/a"] != was["NetworkPolicy/shop/a"] ||
		is["NetworkPolicy/shop/b"] == was["NetworkPolicy/shop/b"] ||
		len(is) != 3 {
		t.Errorf("the store has %v after %v; want a unchanged, b changed, c new", is, was)
	}
	revision := s.Revision()
	if got := applied(t, s, "blue", policies("2", "b", "c"), false); got != "unun" || s.Revision() != revision {
		t.Errorf("equal policies: %s, revision %d; want unun, revision %d", got, s.Revision(), revision)
	}

	refusals := map[string]error{}
	_, refusals["unknown tenant"] = s.ApplyPolicies(t.Context(), "green", policies("1", "a"), store.Applying{})
	refusals["unknown policy"] = s.DeletePolicies(t.Context(), "blue", policies("", "a", "z"))
	refusals["policy of another tenant"] = s.DeletePolicies(t.Context(), "red", policies("", "a"))
	for _, err := range refusals {
		refused(t, err, store.NotFound)
	}
	refused(t, refusals["unknown policy"], store.NotFound, "networkpolicy/shop/z", "nothing was changed")
	_, err := s.ApplyPolicies(t.Context(), "blue", policies("1", strings.Repeat("x", 2000)), store.Applying{})
	refused(t, err, store.Invalid)
	if is := revisions(t, etcd, "policies/"); len(is) != 3 {
		t.Errorf("after refusals the store has %v, want 3 policies", is)
	}
	if err := s.DeletePolicies(t.Context(), "blue", policies("", "a", "b")); err != nil {
		t.Fatal(err)
	}
	if is := revisions(t, etcd, "policies/"); len(is) != 1 {
		t.Errorf("after a deletion the store has %v, want 1 policy", is)
	}
	if err := s.DeleteTenant(t.Context(), "blue"); err != nil {
		t.Fatal(err)
	}
	if is := revisions(t, etcd, "policies/"); len(is) != 0 {
		t.Errorf("after the deletion of the tenant the store has %v, want no policy", is)
	}
}

// Policies of one call are changed in one transaction. A call is refused if it exceeds the limit of a transaction in
// number or size, or the limit of the tenant.
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
		t.Errorf("%d new policies: got %s", most, got)
	}
	seen := map[int64]bool{}
	for _, revision := range revisions(t, etcd, "policies/blue/") {
		seen[revision] = true
	}
	if len(seen) != 1 {
		t.Errorf("%d policies were written in %d transactions, want 1", most, len(seen))
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
		t.Errorf("existing policies of a tenant at its limit: %s, want coco", got)
	}
}

// The size of all policies of a tenant has a limit, because each node that hosts the tenant has them. A tenant that
// exceeds the limit already may shrink.
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
			t.Fatalf("policy %d: %s, want cr", i, got)
		}
	}
	_, err := s.ApplyPolicies(t.Context(), "blue", policies(long, "more"), store.Applying{})
	refused(t, err, store.Full, "520 KiB more", "maximum is 16384 KiB", "nothing was changed")
	_, err = s.ApplyPolicies(t.Context(), "blue", policies(long+long[:300<<10], "p0"), store.Applying{DryRun: true})
	refused(t, err, store.Full, "300 KiB more", "nothing was changed")
	if is := revisions(t, etcd, "policies/blue/"); len(is) != 31 {
		t.Errorf("after refusals the store has %d policies, want 31", len(is))
	}
	if got := applied(t, s, "red", policies(long, "p0"), false); got != "cr" {
		t.Errorf("a policy of another tenant: %s, want cr", got)
	}

	older := fmt.Sprintf(`{"document":%q}`, long+long)
	if _, err := etcd.Put(t.Context(), "/pilaster/1/policies/blue/NetworkPolicy/shop/older", older); err != nil {
		t.Fatal(err)
	}
	if got := applied(t, s, "blue", policies(long[1:], "p0"), false); got != "co" {
		t.Errorf("a shorter policy of a tenant above the limit: %s, want co", got)
	}
	_, err = s.ApplyPolicies(t.Context(), "blue", policies(long, "p0"), store.Applying{})
	refused(t, err, store.Full)
	if got := applied(t, s, "blue", append(policies(long[2:], "p0"), policies("", "short")...), false); got != "cocr" {
		t.Errorf("a shorter policy and a new one: %s, want cocr", got)
	}
}

func override(address string, app uint32) *pilasterv1.Override {
	return &pilasterv1.Override{Address: address, App: app}
}

// A node may report overrides of its own containers only. The next report replaces them.
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
	report := func(n int, name string, overrides ...*pilasterv1.Override) error {
		sequence++
		is, err := s.RecordHosting(
			t.Context(),
			node(n),
			sequence,
			[]*pilasterv1.Hosting{{Tenant: name, Accepts: []uint32{1}, Holds: []uint32{1}, Overrides: overrides}},
			nil,
		)
		if len(is.Overtaken) > 0 || err != nil {
			t.Fatalf("overtaken tenants %v, %v; want none", is.Overtaken, err)
		}
		return errors.Join(is.Refused[name]...)
	}
	record := func() string {
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
	if err := report(1, "blue", override(own, 9)); err != nil {
		t.Fatal(err)
	}
	if is := record(); !strings.Contains(is, own) {
		t.Errorf("the record is %s, want override %s in it", is, own)
	}
	was := revisions(t, etcd, "hosting/")["blue/n1"]
	if err := report(1, "blue", override(own, 9)); err != nil ||
		revisions(t, etcd, "hosting/")["blue/n1"] != was {
		t.Errorf("an equal report changed the record (%v)", err)
	}
	if _, _, err := s.Resolve(t.Context(), node(1), 99, "blue", nil); err != nil {
		t.Fatal(err)
	}
	if is := record(); !strings.Contains(is, own) || !strings.Contains(is, "99") {
		t.Errorf("after a Resolve the record is %s, want override %s and sequence 99", is, own)
	}
	sequence = 100
	for name, c := range map[string]struct {
		override *pilasterv1.Override
		want     store.Reason
	}{
		"another node":             {override("fd70:696c:6100:2:0:100:500:7", 9), store.Refused},
		"another tenant":           {override("fd70:696c:6100:1:0:200:500:7", 9), store.Refused},
		"the node itself":          {override("fd70:696c:6100:1::1", 9), store.Refused},
		"reserved app in address":  {override("fd70:696c:6100:1:0:1ff:0:7", 9), store.Refused},
		"plaintext address":        {override("fc12::7", 9), store.Refused},
		"no address":               {override("x", 9), store.Invalid},
		"IPv4":                     {override("10.0.0.1", 9), store.Invalid},
		"zone":                     {override(own+"%eth0", 9), store.Invalid},
		"not canonical":            {override("fd70:696c:6100:1:0:0100:500:7", 9), store.Invalid},
		"no app":                   {override(own, 0), store.Invalid},
		"override to reserved app": {override(own, 0xff00), store.Invalid},
		"tenant in the override":   {&pilasterv1.Override{Tenant: "red", Address: own, App: 9}, store.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			// The other override of the report is recorded.
			refused(
				t,
				report(1, "blue", c.override, override(other, 7)),
				c.want,
				"n1",
				"blue",
				"it was not recorded",
			)
			if is := record(); !strings.Contains(is, other) || strings.Contains(is, own) ||
				c.override.Address != "x" && strings.Contains(is, c.override.Address) {
				t.Errorf("the record is %s, want only override %s", is, other)
			}
		})
	}
	refused(
		t,
		report(1, "blue", override(own, 9), override(own, 8)),
		store.Invalid,
		"reports two apps",
	)
	if is := record(); strings.Count(is, own) != 1 || !strings.Contains(is, `9`) {
		t.Errorf("after refusals the record is %s, want override %s once", is, own)
	}
	if err := report(1, "blue"); err != nil {
		t.Fatal(err)
	}
	if is := record(); is == "" || strings.Contains(is, own) {
		t.Errorf("after a report without overrides the record is %s, want none of %s", is, own)
	}
}
