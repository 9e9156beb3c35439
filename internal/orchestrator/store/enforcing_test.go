package store_test

import (
	"fmt"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// enforcing registers a node that enforces policies on these networks.
func enforcing(t *testing.T, s *store.Store, n int, networks ...string) {
	t.Helper()
	r := store.Registration{Node: node(n), Version: fmt.Sprint("v", n), Enforces: networks}
	if _, err := s.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
}

// Only nodes that enforce policies may host a tenant with policies.
func testEnforcing(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(ctx, name, 0); err != nil {
			t.Fatal(err)
		}
	}
	nimitz(t, s, "green", "10.0.0.0/16")
	enforcing(t, s, 1)
	enforcing(t, s, 2, tenant.Netpila)
	enforcing(t, s, 3, tenant.Netpila, tenant.Nimitz)
	sequence := uint64(0)
	resolve := func(n int, name string) error {
		sequence++
		_, _, err := s.Resolve(ctx, node(n), sequence, name, nil)
		return err
	}
	apply := func(name string, how store.Applying, all ...*pilasterv1.Policy) error {
		_, err := s.ApplyPolicies(ctx, name, all, how)
		return err
	}
	leave := func(n int, name string) {
		t.Helper()
		sequence++
		if _, err := s.RecordHosting(ctx, node(n), sequence, nil, []string{name}); err != nil {
			t.Fatal(err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	audit := policies("1", "audit")
	audit[0].Audit = true
	enforced := policies("2", "audit")[0]

	must(resolve(1, "blue"))
	must(resolve(3, "blue"))
	refused(
		t,
		apply("blue", store.Applying{}, policies("1", "a")...),
		store.Refused,
		"n1 (build v1, on network netpila)",
		"--force",
		"nothing was changed",
	)
	refused(t, apply("blue", store.Applying{DryRun: true}, policies("1", "a")...), store.Refused, "n1")
	must(apply("blue", store.Applying{}, audit...))
	must(resolve(1, "blue"))
	refused(t, apply("blue", store.Applying{}, enforced), store.Refused, "n1")
	leave(1, "blue")
	must(apply("blue", store.Applying{}, enforced))
	refused(
		t,
		resolve(1, "blue"),
		store.Refused,
		"tenant blue has policies",
		"node n1 enforces none on network netpila",
		"upgrade its agent, which is build v1",
	)
	must(resolve(2, "blue"))
	must(s.DeletePolicies(ctx, "blue", []*pilasterv1.Policy{enforced}))
	must(resolve(1, "blue"))

	// With Force a policy is accepted; later nodes are still refused.
	must(apply("blue", store.Applying{Force: true}, policies("1", "a")...))
	must(apply("blue", store.Applying{}, policies("1", "b")...))
	refused(t, resolve(1, "blue"), store.Refused, "n1")

	// n2 enforces policies, but not on the tenant's network.
	must(resolve(2, "green"))
	refused(
		t,
		apply("green", store.Applying{}, policies("1", "a")...),
		store.Refused,
		"n2 (build v2, on network nimitz)",
	)
	leave(2, "green")
	must(apply("green", store.Applying{}, policies("1", "a")...))
	refused(t, resolve(2, "green"), store.Refused, "node n2 enforces none on network nimitz", "`pilaster status` on n2")
	must(resolve(3, "green"))
	if _, err := s.Migrate(ctx, "green", tenant.Netpila, 0); err != nil {
		t.Fatal(err)
	}
	refused(t, resolve(2, "green"), store.Refused, "network nimitz")

	// A registration changes the networks on which the node enforces policies.
	enforcing(t, s, 1, tenant.Netpila)
	must(resolve(1, "blue"))
	enforcing(t, s, 1)
	refused(t, resolve(1, "blue"), store.Refused, "n1")

	// The error names 10 nodes at most.
	for n := 10; n < 25; n++ {
		enforcing(t, s, n)
		must(resolve(n, "red"))
	}
	refused(
		t,
		apply("red", store.Applying{}, policies("1", "a")...),
		store.Refused,
		"15 nodes that would not enforce policies",
		"n19 (build v19, on network netpila) and 5 more",
	)
}

// A node that would not enforce policies starts to host a tenant, while the tenant gets its first policy: the store
// refuses one of the two.
func testConcurrentPolicyAndHosting(t *testing.T, etcd *clientv3.Client) {
	ctx, stores := t.Context(), []*store.Store{open(t, etcd, address.Plan{}), open(t, etcd, address.Plan{})}
	enforcing(t, stores[0], 1)
	const rounds = 40
	hosted, enforced := 0, 0
	for i := range rounds {
		name := fmt.Sprintf("t%d", i)
		if _, err := stores[0].CreateTenant(ctx, name, 0); err != nil {
			t.Fatal(err)
		}
		var resolved, applied error
		var both sync.WaitGroup
		both.Go(func() { _, _, resolved = stores[0].Resolve(ctx, node(1), uint64(i)+1, name, nil) })
		both.Go(func() {
			_, applied = stores[i%2].ApplyPolicies(ctx, name, policies("1", "a"), store.Applying{})
		})
		both.Wait()
		switch {
		case resolved == nil && applied == nil:
			t.Fatalf("round %d: the node hosts tenant %s, and the tenant has a policy; want one refused", i, name)
		case resolved == nil:
			refused(t, applied, store.Refused, "n1")
			hosted++
		case applied == nil:
			refused(t, resolved, store.Refused, "n1")
			enforced++
		default:
			t.Fatalf("round %d: both were refused, want one: %v; %v", i, resolved, applied)
		}
	}
	t.Logf("of %d rounds the node was first in %d, the policy in %d", rounds, hosted, enforced)
}
