package agent

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant made anew under the same name and id, as after a restore, is another tenant.
func TestTenantMadeAnewIsRefused(t *testing.T) {
	b := newBed(t)
	made := time.Unix(1e9, 5).UTC()
	blue := b.orchestrator.tenants["blue"]
	blue.Created = made
	b.orchestrator.tenants["blue"] = blue
	b.add("c1")
	b.reopen()
	if held := b.tenants.held(nodePrefix); !held.Tenants[0].Created.AsTime().Equal(made) {
		t.Errorf("held %v", held)
	}
	blue.Created = made.Add(time.Hour)
	blue.IDs = append(blue.IDs, tenant.ID{ID: 9})
	if err := b.Apply(t.Context(), []TenantState{{Tenant: blue}}, nil); err == nil ||
		!strings.Contains(err.Error(), "created at") {
		t.Errorf("another blue was taken: %v", err)
	}
	if len(b.driver.ids("blue")) != 1 {
		t.Errorf("the kernel has: %v", b.driver.ids("blue"))
	}
}

func TestDeletedTenantTakesNoMoreEndpoints(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	if err := b.Apply(t.Context(), nil, []string{"blue", "unknown"}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := b.Add(t.Context(), b.request("c2")); !errors.Is(err, refusal.ErrNotFound) {
			t.Fatalf("ADD into a deleted tenant: %v", err)
		}
		if len(b.driver.active) != 1 {
			t.Fatal("the living endpoint was touched")
		}
		b.reopen()
	}
}
