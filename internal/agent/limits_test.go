package agent_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// refused checks that an ADD fails with these words (the limit and what to do), and sends and changes nothing.
func (b *bed) refused(q agent.AddRequest, says ...string) {
	b.T.Helper()
	calls, asked, records, names := len(b.Driver.Calls), b.Orchestrator.Calls, b.Endpoints(), b.Tenants.Names()
	_, err := b.Add(b.T.Context(), q)
	if !errors.Is(err, refusal.ErrExhausted) {
		b.T.Fatalf("ADD to a full node: %v", err)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			b.T.Errorf("%q does not say %q", err, s)
		}
	}
	if len(b.Driver.Calls) != calls || b.Orchestrator.Calls != asked || len(b.Endpoints()) != len(records) ||
		!slices.Equal(b.Tenants.Names(), names) {
		b.T.Errorf(
			"an ADD that was refused: driver %v, %d calls, tenants %v",
			b.Driver.Calls[calls:],
			b.Orchestrator.Calls-asked,
			b.Tenants.Names(),
		)
	}
}

func TestFullOfEndpoints(t *testing.T) {
	b := newBed(t)
	b.Max = 3
	b.Reopen()
	ids := map[endpoint.ID]bool{}
	red := b.Request("c0")
	red.Tenant = "red"
	r, err := b.Add(t.Context(), red)
	if err != nil {
		t.Fatal(err)
	}
	ids[r.ID] = true
	for n := range 2 {
		ids[b.MustAdd(fmt.Sprint("c", n+1)).ID] = true
	}
	b.refused(b.Request("c3"), "3 of 3 endpoints", "2 of them by tenant blue", "--max-endpoints", "nothing was changed")
	unknown := b.Request("c3") // a request for it would create an app
	unknown.Labels = map[string]string{"app": "new"}
	b.refused(unknown, "3 of 3 endpoints")
	if len(ids) != 3 {
		t.Errorf("ids %v", ids)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.MustAdd("c4")
}

func TestFullOfTenantIDs(t *testing.T) {
	b := newBed(t)
	b.MaxIDs = 2
	b.Orchestrator.Tenants["two"] = tenant.Tenant{
		Name:       "two",
		Addressing: tenant.Encrypted,
		IDs:        []tenant.ID{{ID: 7, Key: address.Key{7}}, {ID: 8, Key: address.Key{8}}},
	}
	b.Reopen()
	b.MustAdd("c1")

	two := b.Request("c2")
	two.Tenant = "two"
	if _, err := b.Add(t.Context(), two); !errors.Is(err, refusal.ErrExhausted) ||
		!strings.Contains(err.Error(), "1 of 2 tenant-ids") {
		t.Errorf("a tenant with more ids than there is room for: %v", err)
	}
	if names := b.Tenants.Names(); !slices.Equal(names, []string{"blue"}) {
		t.Errorf("hosted %v", names)
	}
	red := b.Request("c3")
	red.Tenant = "red"
	if _, err := b.Add(t.Context(), red); err != nil {
		t.Fatal(err)
	}
	b.refused(two, "2 of 2 tenant-ids", "--max-tenant-ids")
	b.MustAdd("c4") // no new id is needed
}

// A tenant whose new id exceeds the limit keeps its ids, other updates are applied, and the node requests the tenant
// again.
func TestNoRoomForANewKey(t *testing.T) {
	b := newBed(t)
	b.MaxIDs = 2
	b.Reopen()
	b.MustAdd("c1")
	red := b.Request("c2")
	red.Tenant = "red"
	if _, err := b.Add(t.Context(), red); err != nil {
		t.Fatal(err)
	}
	rotated := b.Orchestrator.Tenants["blue"]
	rotated.IDs = append(slices.Clone(rotated.IDs), tenant.ID{ID: 9, Key: address.Key{9}})
	app := []agent.App{{ID: 77, Labels: map[string]string{"app": "x"}}}
	apply := func() {
		t.Helper()
		if err := b.Apply(t.Context(),
			[]agent.TenantState{{Tenant: rotated, Whole: true},
				{Tenant: b.Orchestrator.Tenants["red"], Apps: app, Whole: true}}, nil); err != nil {
			t.Fatal(err)
		}
		b.MustApplyPolicies(policies.Update{Tenant: "blue", Whole: true})
		b.MustApplyPolicies(policies.Update{Tenant: "red", Whole: true})
		b.ApplyServices(services.Update{Tenant: "blue", Whole: true})
		b.ApplyServices(services.Update{Tenant: "red", Whole: true})
	}
	apply()
	if problems := b.Tenants.RefusedProblems(); len(problems) != 1 ||
		!strings.Contains(problems[0], "tenant blue has an id that this node could not add") {
		t.Errorf("problems %q", problems)
	}
	if k, _, _ := b.Tenants.Get("red"); len(k.Apps) != 2 || len(b.Driver.IDs("blue")) != 1 {
		t.Errorf("red has apps %v, blue ids %v", k.Apps, b.Driver.IDs("blue"))
	}
	var report pilasterv1.FollowRequest
	b.Tenants.Report(&report, true)
	if !slices.Equal(report.IncompleteTenants, []string{"blue"}) ||
		!slices.Equal(report.Hosting[0].Accepts, []uint32{1}) {
		t.Errorf("reported %v", &report)
	}
	if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	apply()
	if problems := b.Tenants.RefusedProblems(); len(problems) != 0 || len(b.Driver.IDs("blue")) != 2 {
		t.Errorf("with room again: problems %q, ids %v", problems, b.Driver.IDs("blue"))
	}
}
