package agent_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/policies"
)

// The first container of a tenant with policies waits until the node has received the policies.
func TestFirstContainerWaitsForPolicies(t *testing.T) {
	b := newBed(t)
	b.Orchestrator.Policies["blue"] = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Add(ctx, b.Request("c1")); !errors.Is(err, context.Canceled) {
		t.Fatalf("it did not wait: %v", err)
	}
	if len(b.Endpoints()) != 0 || len(b.Tenants.Names()) != 0 {
		t.Fatalf("it left something behind: %v, %v", b.Endpoints(), b.Tenants.Names())
	}
	added := make(chan error, 1)
	go func() { _, err := b.Add(t.Context(), b.Request("c1")); added <- err }()
	agenttest.Eventually(t, func() error {
		if !b.Tenants.IsHosted("blue") {
			return errors.New("the tenant is not hosted yet")
		}
		return nil
	})
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if err := <-added; err != nil {
		t.Fatal(err)
	}
	if b.lets(1, 1) {
		t.Error("it was added before its policies were in force")
	}
}

// A tenant gets its first policy, in an update of its own: containers do not wait for further policies.
func TestFirstPolicyOfATenant(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Whole: true})
	b.MustApplyPolicies(agenttest.MorePolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	b.Orchestrator.Policies["blue"] = true
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second/2)
	defer cancel()
	q := b.Request("c2")
	q.Labels = map[string]string{"app": "other"}
	if _, err := b.Add(ctx, q); err != nil {
		t.Error(err)
	}
}

// While the first container of a tenant waits for policies, other containers wait too, even if they need no request.
func TestEachContainerWaitsForPolicies(t *testing.T) {
	b := newBed(t)
	b.Orchestrator.Policies["blue"] = true
	added := make(chan error, 1)
	go func() { _, err := b.Add(t.Context(), b.Request("c1")); added <- err }()
	agenttest.Eventually(t, func() error {
		if b.Tenants.Endpoints("blue") == 0 {
			return errors.New("no endpoint is counted yet")
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // some get no further than the tenant's lock
		if _, err := b.Add(ctx, b.Request("c2")); !errors.Is(err, context.Canceled) {
			t.Fatalf("the second did not wait: %v", err)
		}
	}
	if len(b.Endpoints()) != 0 {
		t.Errorf("before the policies are known there are %v", b.Endpoints())
	}
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if err := <-added; err != nil {
		t.Error(err)
	}
	b.MustAdd("c2")
	if b.lets(1, 1) {
		t.Error("a policy is not in force")
	}
}

// TestContainersWaitForTheFirstStream: the agent receives policy changes of its absence on the first stream, and adds
// no container before.
func TestContainersWaitForTheFirstStream(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	tried := make(chan struct{})
	b.Tried = tried
	b.Reopen()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.Add(ctx, b.Request("c2")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("added before the first event: %v", err)
	}
	if n := len(b.Endpoints()); n != 1 {
		t.Fatalf("%d endpoints", n)
	}
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	close(tried)
	b.MustAdd("c2")
}
