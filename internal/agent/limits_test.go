package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// refused wants an ADD to name the limit and what to do, and to send and change nothing.
func (b *bed) refused(q AddRequest, says ...string) {
	b.t.Helper()
	calls, asked, records, names := len(b.driver.calls), b.orchestrator.calls, b.Endpoints(), b.tenants.Names()
	_, err := b.Add(b.t.Context(), q)
	if !errors.Is(err, refusal.ErrExhausted) {
		b.t.Fatalf("ADD to a full node: %v", err)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			b.t.Errorf("%q does not say %q", err, s)
		}
	}
	if len(b.driver.calls) != calls || b.orchestrator.calls != asked || len(b.Endpoints()) != len(records) ||
		!slices.Equal(b.tenants.Names(), names) {
		b.t.Errorf(
			"an ADD that was refused: driver %v, %d calls, tenants %v",
			b.driver.calls[calls:],
			b.orchestrator.calls-asked,
			b.tenants.Names(),
		)
	}
}

func TestFullOfEndpoints(t *testing.T) {
	b := newBed(t)
	b.max = 3
	b.reopen()
	ids := map[endpoint.ID]bool{}
	red := b.request("c0")
	red.Tenant = "red"
	r, err := b.Add(t.Context(), red)
	if err != nil {
		t.Fatal(err)
	}
	ids[r.ID] = true
	for n := range 2 {
		ids[b.add(fmt.Sprint("c", n+1)).ID] = true
	}
	b.refused(b.request("c3"), "3 of 3 endpoints", "2 of them by tenant blue", "--max-endpoints", "nothing was changed")
	unknown := b.request("c3") // a request for it would create an app
	unknown.Labels = map[string]string{"app": "new"}
	b.refused(unknown, "3 of 3 endpoints")
	if len(ids) != 3 {
		t.Errorf("ids %v", ids)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.add("c4")
}

func TestFullOfTenantIDs(t *testing.T) {
	b := newBed(t)
	b.maxIDs = 2
	b.orchestrator.tenants["two"] = tenant.Tenant{
		Name:       "two",
		Addressing: tenant.Encrypted,
		IDs:        []tenant.ID{{ID: 7, Key: address.Key{7}}, {ID: 8, Key: address.Key{8}}},
	}
	b.reopen()
	b.add("c1")

	two := b.request("c2")
	two.Tenant = "two"
	if _, err := b.Add(t.Context(), two); !errors.Is(err, refusal.ErrExhausted) ||
		!strings.Contains(err.Error(), "1 of 2 tenant-ids") {
		t.Errorf("a tenant with more ids than there is room for: %v", err)
	}
	if names := b.tenants.Names(); !slices.Equal(names, []string{"blue"}) {
		t.Errorf("hosted %v", names)
	}
	red := b.request("c3")
	red.Tenant = "red"
	if _, err := b.Add(t.Context(), red); err != nil {
		t.Fatal(err)
	}
	b.refused(two, "2 of 2 tenant-ids", "--max-tenant-ids")
	b.add("c4") // no new id is needed
}

// A tenant whose new id exceeds the limit keeps its ids, other updates are applied, and the node requests the tenant
// again.
func TestNoRoomForANewKey(t *testing.T) {
	b := newBed(t)
	b.maxIDs = 2
	b.reopen()
	b.add("c1")
	red := b.request("c2")
	red.Tenant = "red"
	if _, err := b.Add(t.Context(), red); err != nil {
		t.Fatal(err)
	}
	rotated := b.orchestrator.tenants["blue"]
	rotated.IDs = append(slices.Clone(rotated.IDs), tenant.ID{ID: 9, Key: address.Key{9}})
	app := []App{{ID: 77, Labels: map[string]string{"app": "x"}}}
	apply := func() {
		t.Helper()
		if err := b.Apply(t.Context(),
			[]TenantState{{Tenant: rotated, Whole: true},
				{Tenant: b.orchestrator.tenants["red"], Apps: app, Whole: true}}, nil); err != nil {
			t.Fatal(err)
		}
		b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true})
		b.applyPolicies(PolicyUpdate{Tenant: "red", Whole: true})
	}
	apply()
	if problems := b.tenants.refusedProblems(); len(problems) != 1 ||
		!strings.Contains(problems[0], "tenant blue has an id that this node could not add") {
		t.Errorf("problems %q", problems)
	}
	if k, _, _ := b.tenants.get("red"); len(k.Apps) != 2 || len(b.driver.ids("blue")) != 1 {
		t.Errorf("red has apps %v, blue ids %v", k.Apps, b.driver.ids("blue"))
	}
	var report pilasterv1.FollowRequest
	b.tenants.Report(&report, true)
	if !slices.Equal(report.IncompleteTenants, []string{"blue"}) ||
		!slices.Equal(report.Hosting[0].Accepts, []uint32{1}) {
		t.Errorf("reported %v", &report)
	}
	if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	apply()
	if problems := b.tenants.refusedProblems(); len(problems) != 0 || len(b.driver.ids("blue")) != 2 {
		t.Errorf("with room again: problems %q, ids %v", problems, b.driver.ids("blue"))
	}
}
