package agent_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// lets reports whether the policies in the packet path allow TCP to port 80 from one app to another.
func (b *bed) lets(from, to address.AppID) bool {
	b.Driver.Mu.Lock()
	defer b.Driver.Mu.Unlock()
	return b.Driver.Policies["blue"].Tables.Decide(
		to,
		policy.Ingress,
		from,
		netip.IPv6Unspecified(),
		policy.TCP,
		80,
	).Allowed
}

func TestPoliciesAreInForce(t *testing.T) {
	b := newBed(t)
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if b.Driver.Policies["blue"].Tables.Subjects != nil {
		t.Error("policies of a tenant that does not live here came in force")
	}
	b.MustAdd("c1")
	if !b.lets(1, 1) {
		t.Error("a tenant without policies is policed")
	}
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if b.lets(1, 1) {
		t.Error("a policy is not in force")
	}
	b.MustApplyPolicies(agenttest.MorePolicies("blue", agenttest.Document("web", agenttest.WebFromDB)))
	if b.lets(2, 1) {
		t.Error("an app that is not known matches a selector")
	}
	if err := b.Apply(t.Context(),
		[]agent.TenantState{{
			Tenant: b.Orchestrator.Tenants["blue"],
			Apps:   []agent.App{{ID: 2, Labels: map[string]string{"app": "db"}}},
		}},
		nil); err != nil {
		t.Fatal(err)
	}
	if !b.lets(2, 1) || b.lets(1, 1) {
		t.Error("an app that has become known is not in force")
	}

	b.Reopen()
	if !b.lets(2, 1) || b.lets(1, 1) {
		t.Error("policies are not in force after a start")
	}

	b.MustApplyPolicies(
		policies.Update{
			Tenant:    "blue",
			Overrides: map[netip.Addr]address.AppID{netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7"): 2},
		},
	)
	if b.Driver.Policies["blue"].Overrides[netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7")] != 2 {
		t.Error("an override is not in force")
	}
	b.MustApplyPolicies(
		policies.Update{
			Tenant:         "blue",
			Removed:        []policies.Document{agenttest.Document("deny", ""), agenttest.Document("web", "")},
			EndedOverrides: []netip.Addr{netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7")},
		},
	)
	if !b.lets(1, 1) || len(b.Driver.Policies["blue"].Overrides) != 0 {
		t.Error("policies that have ended are in force")
	}

	b.MustApplyPolicies(agenttest.MorePolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	if len(b.Driver.Policies) != 0 {
		t.Errorf("policies of a tenant that has left: %v", b.Driver.Policies)
	}
}

// Policies that cannot be enforced leave the previous ones in force, are reported, and block ADDs of containers they
// would not cover.
func TestPoliciesThatAreRefused(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	for _, c := range []struct {
		name   string
		update policies.Update
		fail   error
	}{
		{"of a newer kind", policies.Update{Tenant: "blue",
			Documents: []policies.Document{{Kind: "Firewall", Name: "f", Text: `{"kind":"Firewall"}`}}}, nil},
		{"too many", agenttest.MorePolicies("blue", agenttest.Document("web", agenttest.WebFromDB)),
			errors.New("no room")},
	} {
		b.Driver.Fail["SetPolicies"] = c.fail
		b.MustApplyPolicies(c.update)
		if b.lets(1, 1) {
			t.Errorf("%s: what was before is not in force", c.name)
		}
		if problems := b.PolicyProblems(); len(problems) != 1 || !strings.Contains(problems[0], "tenant blue") {
			t.Errorf("%s: problems %q", c.name, problems)
		}
		if _, err := b.Add(t.Context(), b.Request("c2")); !errors.Is(err, refusal.ErrUnavailable) {
			t.Errorf("%s: an endpoint was added: %v", c.name, err)
		}
		b.Driver.Fail["SetPolicies"] = nil
		b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
		if problems := b.PolicyProblems(); len(problems) != 0 {
			t.Errorf("%s: problems when all is well again: %q", c.name, problems)
		}
	}
	b.MustAdd("c2")
}

// A build that enforces no policies does not start if there are policies. This build does not start if they were lost.
func TestPoliciesAreNotLost(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	text := func() string {
		b.T.Helper()
		text, err := os.ReadFile(filepath.Join(b.Dir, state.TenantsFolder, "blue.json"))
		if err != nil {
			b.T.Fatal(err)
		}
		return string(text)
	}
	if strings.Contains(text(), "policed") {
		t.Error("a tenant without policies cannot be read by older builds")
	}
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if !strings.Contains(text(), `"policed"`) {
		t.Error("older builds would start and enforce nothing")
	}
	if s, err := agent.ReadDiskState(b.Dir); len(s.Policies["blue"].Documents) != 1 || !s.Tenants[0].Policed ||
		strings.Contains(err.Error(), state.PoliciesFolder) { // the bed has no node
		t.Errorf("a dump has %+v, %v", s, err)
	}
	if _, err := agent.ReadDiskState(t.TempDir()); strings.Contains(err.Error(), state.PoliciesFolder) {
		t.Errorf("of a build without policies: %v", err)
	}
	file := filepath.Join(b.Dir, state.PoliciesFolder, "blue.json")
	if err := os.Rename(file, file+".lost"); err != nil {
		t.Fatal(err)
	}
	var corrupt *statefile.CorruptError
	if err := b.TryReopen(); !errors.As(err, &corrupt) || corrupt.Path != file {
		t.Errorf("a start without the policies: %v", err)
	}
	if err := os.Rename(file+".lost", file); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Whole: true})
	if _, err := os.Stat(file); strings.Contains(text(), "policed") || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("policies that have ended are still there: %v", err)
	}
}

// Policies that could not be enforced are kept and retried with the next update.
func TestRefusedPoliciesAreTriedAgain(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("web", agenttest.WebFromDB)))
	b.MustApplyPolicies(
		agenttest.MorePolicies("blue", policies.Document{Kind: "Firewall", Name: "f", Text: `{"kind":"Firewall"}`}),
	)
	b.MustApplyPolicies(agenttest.MorePolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if err := b.Apply(t.Context(),
		[]agent.TenantState{{
			Tenant: b.Orchestrator.Tenants["blue"],
			Apps:   []agent.App{{ID: 2, Labels: map[string]string{"app": "db"}}},
		}},
		nil); err != nil {
		t.Fatal(err)
	}
	if problems := b.PolicyProblems(); len(problems) != 1 || !strings.Contains(problems[0], "Firewall") {
		t.Errorf("policies that cannot be parsed are dropped by the next update: %q", problems)
	}
	said := func() string {
		var report pilasterv1.FollowRequest
		b.Tenants.Report(&report, false)
		return report.Hosting[0].Unenforced
	}
	if s := said(); !strings.Contains(s, "Firewall") {
		t.Errorf("the node reports %q", s)
	}
	if _, err := b.Add(t.Context(), b.Request("c2")); !errors.Is(err, refusal.ErrUnavailable) {
		t.Errorf("an endpoint was added: %v", err)
	}
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Removed: []policies.Document{{Kind: "Firewall", Name: "f"}}})
	if problems := b.PolicyProblems(); len(problems) != 0 || !b.lets(2, 1) {
		t.Errorf("it has ended, and the others are not in force: %q", problems)
	}
	if s := said(); s != "" {
		t.Errorf("the problem is resolved, but the node reports %q", s)
	}

	b.Driver.Fail["SetPolicies"] = agenttest.ErrFake
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Removed: []policies.Document{agenttest.Document("web", "")}})
	b.Driver.Fail["SetPolicies"] = nil
	b.MustAdd("c2")
	if b.lets(2, 1) {
		t.Error("a container was added under policies from before")
	}
	b.Reopen()
	if b.lets(2, 1) {
		t.Error("what came in force later is not on disk")
	}
}

// A tenant whose policies cannot be enforced at the start does not block other tenants: its previous policies stay in
// force, and no container of it is added.
func TestStartWithPoliciesThatAreRefused(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	b.Driver.Fail["RestorePolicies"], b.Driver.Fail["SetPolicies"] = agenttest.ErrFake, agenttest.ErrFake
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "RestorePolicies" { // the second call has only held tenants
			b.Driver.During = func(string, endpoint.Record) { b.Driver.Fail["RestorePolicies"] = nil }
		}
	}
	b.Reopen()
	if b.lets(1, 1) {
		t.Error("what was in force holds no more")
	}
	if problems := b.PolicyProblems(); len(problems) != 1 || !strings.Contains(problems[0], "tenant blue") {
		t.Errorf("problems %q", problems)
	}
	if _, err := b.Add(t.Context(), b.Request("c2")); !errors.Is(err, refusal.ErrUnavailable) ||
		!errors.Is(err, agenttest.ErrFake) {
		t.Errorf("an endpoint was added: %v", err)
	}
	b.Driver.Fail["SetPolicies"] = nil
	b.MustAdd("c2")
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Removed: []policies.Document{agenttest.Document("deny", "")}})
	if problems := b.PolicyProblems(); len(problems) != 0 || !b.lets(1, 1) {
		t.Errorf("all is well again: %q", problems)
	}
}

// If the packet path refuses the policies for a new container, its ADD fails, and other containers are not affected.
func TestRoomForPolicies(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("web", agenttest.WebFromDB)))
	b.Driver.During = func(call string, _ endpoint.Record) {
		b.Driver.Fail["SetPolicies"] = nil
		if len(b.Endpoints()) > 1 {
			b.Driver.Fail["SetPolicies"] = agenttest.ErrFake
		}
	}
	q := b.Request("c2")
	q.Labels = map[string]string{"app": "other"}
	if _, err := b.Add(t.Context(), q); !errors.Is(err, refusal.ErrUnavailable) || !errors.Is(err, agenttest.ErrFake) {
		t.Fatalf("added: %v", err)
	}
	if problems := b.PolicyProblems(); len(problems) != 0 {
		t.Errorf("problems without that container: %q", problems)
	}
}

// A node receives no policies of a transit tenant without endpoints: its next container waits for the current ones.
func TestPoliciesOfACarriedTenant(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	if err := b.SetTransit(t.Context(), []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("web", agenttest.WebFromDB)))
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	if !b.Tenants.Needed("blue") {
		t.Fatal("it is not a transit tenant")
	}
	b.Orchestrator.Policies["blue"] = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Add(ctx, b.Request("c2")); !errors.Is(err, context.Canceled) {
		t.Errorf("it did not wait: %v", err)
	}
	b.Reopen()
}

// If a container gets a new id of its tenant, policies are compiled for this id before the container's packets flow.
func TestPoliciesOfANewID(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	rotated := b.Orchestrator.Tenants["blue"]
	rotated.IDs, rotated.Changes = []tenant.ID{
		{ID: 1, Key: agenttest.BlueKey, OnlyAccepted: true},
		{ID: 7, Key: address.Key{7}},
	}, 1
	b.Orchestrator.Tenants["blue"] = rotated
	b.Driver.Fail["CreateDevice"] = agenttest.ErrFake
	q := b.Request("c2")
	q.Labels = map[string]string{"app": "other"}
	if _, err := b.Add(t.Context(), q); !errors.Is(err, agenttest.ErrFake) { // but its answer has added the id
		t.Fatal(err)
	}
	b.Driver.Fail["CreateDevice"] = nil
	if r := b.MustAdd("c3"); r.TenantID != 7 {
		t.Fatalf("it has id %d", r.TenantID)
	}
	if ids := b.Driver.Policies["blue"].IDs; !slices.Contains(ids, 7) {
		t.Errorf("it is not policed: the packet path knows policies of ids %v", ids)
	}
}

// If a tenant is deleted in the cluster, its policies stay in force for the containers that still run.
func TestPoliciesOfADeletedTenant(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	if err := b.Apply(t.Context(), nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Removed: []policies.Document{agenttest.Document("deny", "")}})
	if b.lets(1, 1) {
		t.Error("its containers may do what they might not")
	}
}

// A snapshot with unchanged policies changes nothing in the packet path.
func TestPoliciesThatAreInForceAlready(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	whole := policies.Update{
		Tenant:    "blue",
		Whole:     true,
		Documents: []policies.Document{agenttest.Document("web", agenttest.WebFromDB)},
		Overrides: map[netip.Addr]address.AppID{netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7"): 2},
	}
	b.MustApplyPolicies(whole)
	b.Reopen()
	b.Driver.Calls = nil
	b.MustApplyPolicies(whole)
	if err := b.Apply(t.Context(),
		[]agent.TenantState{{
			Tenant: b.Orchestrator.Tenants["blue"],
			Apps:   []agent.App{{ID: 1, Labels: map[string]string{"app": "web"}}},
			Whole:  true,
		}}, nil); err != nil {
		t.Fatal(err)
	}
	if slices.Contains(b.Driver.Calls, "SetPolicies") {
		t.Error("it was all done again")
	}
	whole.Overrides = nil
	b.MustApplyPolicies(whole)
	if len(b.Driver.Policies["blue"].Overrides) != 0 {
		t.Error("an override that has ended is in force")
	}
}

// Updates of a transit tenant contain no policies and services. Once the node hosts the tenant, the agent requests
// them, even on a stream that resumes.
func TestPoliciesAreAskedFor(t *testing.T) {
	b := newBed(t)
	incomplete := func(want string) {
		t.Helper()
		var said pilasterv1.FollowRequest
		b.Tenants.Report(&said, true)
		if got := strings.Join(said.IncompleteTenants, " "); got != want {
			t.Errorf("asked is for %q, want %q", got, want)
		}
	}
	if err := b.SetTransit(t.Context(), []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: b.Orchestrator.Tenants["blue"], Whole: true}},
		nil); err != nil {
		t.Fatal(err)
	}
	incomplete("")
	b.MustAdd("c1")
	incomplete("blue")
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Whole: true})
	incomplete("blue")
	b.ApplyServices(services.Update{Tenant: "blue", Whole: true})
	incomplete("")
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	incomplete("")
	b.MustAdd("c1")
	incomplete("blue")
}
