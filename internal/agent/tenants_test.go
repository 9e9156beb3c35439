package agent_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant that was created again with the same name and id, as after a restore, is a different tenant.
func TestTenantMadeAnewIsRefused(t *testing.T) {
	b := newBed(t)
	made := time.Unix(1e9, 5).UTC()
	blue := b.Orchestrator.Tenants["blue"]
	blue.Created = made
	b.Orchestrator.Tenants["blue"] = blue
	b.MustAdd("c1")
	b.Reopen()
	if held := b.Tenants.Held(agenttest.NodePrefix); !held.Tenants[0].Created.AsTime().Equal(made) {
		t.Errorf("held %v", held)
	}
	blue.Created = made.Add(time.Hour)
	blue.IDs = append(blue.IDs, tenant.ID{ID: 9})
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: blue}}, nil); err == nil ||
		!strings.Contains(err.Error(), "created at") {
		t.Errorf("another blue was taken: %v", err)
	}
	if len(b.Driver.IDs("blue")) != 1 {
		t.Errorf("the kernel has: %v", b.Driver.IDs("blue"))
	}
}

func TestDeletedTenantTakesNoMoreEndpoints(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	if err := b.Apply(t.Context(), nil, []string{"blue", "unknown"}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := b.Add(t.Context(), b.Request("c2")); !errors.Is(err, refusal.ErrNotFound) {
			t.Fatalf("ADD into a deleted tenant: %v", err)
		}
		if len(b.Driver.Active) != 1 {
			t.Fatal("the living endpoint was touched")
		}
		b.Reopen()
	}
}
