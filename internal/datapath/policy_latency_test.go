package datapath

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

// TestManyRulesDelayNoOtherTenant: while the policies of a tenant with many rules change all the time, those of another
// tenant, which an ADD waits for, are in force in 50 ms, and status reads the maps' usage in as little.
func TestManyRulesDelayNoOtherTenant(t *testing.T) {
	const (
		manyRules   = 10_000
		manyEntries = 10 * manyRules // ten ports each, all of which change
		most        = 50 * time.Millisecond
		samples     = 300
	)
	b := newPolicyBench(t)
	config := b.datapath.config
	config.MaxRules = 4 * manyEntries
	b.reopen(t, config)
	large := []dpapi.TenantPolicies{rules("a", 0, manyEntries), rules("a", manyEntries, manyEntries)}
	small := []dpapi.TenantPolicies{rules("b", 0, 100), rules("b", 100, 100)}
	for i := range large {
		large[i].Tables.Names = map[uint32]policy.RuleName{}
		for n := range uint32(manyRules) {
			large[i].Tables.Names[uint32(i)*manyRules+n+1] = policy.RuleName{Rule: int(n)}
		}
	}
	must(t, b.datapath.SetPolicies(large[0]))
	var stop atomic.Bool
	var changes []time.Duration
	ended := make(chan error, 1)
	go func() {
		for i := 1; ; i++ {
			began := time.Now()
			err := b.datapath.SetPolicies(large[i%2])
			if changes = append(changes, time.Since(began)); err != nil || stop.Load() && len(changes) >= 3 {
				ended <- err
				return
			}
		}
	}()
	var set, read []time.Duration
	for i := range samples {
		began := time.Now()
		must(t, b.datapath.SetPolicies(small[i%2]))
		set = append(set, time.Since(began))
		began = time.Now()
		b.datapath.PolicyEntries()
		read = append(read, time.Since(began))
		time.Sleep(10 * time.Millisecond)
	}
	stop.Store(true)
	must(t, <-ended)
	if diff := b.differ(t, large[(len(changes))%2], small[(samples-1)%2]); diff != "" {
		t.Errorf("the kernel has other entries: %s", diff)
	}
	p99 := func(d []time.Duration) time.Duration {
		slices.Sort(d)
		return d[len(d)*99/100]
	}
	t.Logf("%d changes of %d entries, median %v; P99 of another tenant's change %v, of reading the usage %v",
		len(changes), manyEntries, changes[len(changes)/2], p99(set), p99(read))
	if p99(set) > most || p99(read) > most {
		t.Errorf("P99 %v and %v, want at most %v", p99(set), p99(read), most)
	}
}

// TestTenantsDropTheSameRules: two tenants have rules with the same numbers and drop them at the same time. The kernel
// then counts for none of them.
func TestTenantsDropTheSameRules(t *testing.T) {
	const manyRules = 5000
	b := newPolicyBench(t)
	tenants := []string{"a", "b"}
	setBoth := func(names map[uint32]policy.RuleName) {
		t.Helper()
		var group errgroup.Group
		for _, name := range tenants {
			next := rules(name, 0, 10)
			next.Tables.Names = names
			group.Go(func() error { return b.datapath.SetPolicies(next) })
		}
		must(t, group.Wait())
	}
	names := map[uint32]policy.RuleName{}
	for n := range uint32(manyRules) {
		names[n+1] = policy.RuleName{Rule: int(n)}
	}
	for range 10 {
		setBoth(names)
		if hits, err := b.datapath.RuleHits(); err != nil || len(hits) != manyRules {
			t.Fatalf("the kernel counts for %d rules, %v; want %d", len(hits), err, manyRules)
		}
		setBoth(nil)
		if hits, err := b.datapath.RuleHits(); err != nil || len(hits) != 0 {
			t.Fatalf("after both tenants have dropped their rules, the kernel counts for %d, %v", len(hits), err)
		}
	}
}
