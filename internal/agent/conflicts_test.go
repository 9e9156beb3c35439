package agent_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// lime returns another tenant like green, with the same publications at this node.
func (b *bed) lime(changes uint64) agent.TenantState {
	lime := b.published(changes, time.Unix(5, 0).UTC())
	lime.Tenant.Name, lime.Tenant.IDs = "lime", []tenant.ID{{ID: 4, Key: [16]byte{4}}}
	return lime
}

// TestRefusedByItsNetwork: a tenant update that a network rejects changes nothing, also not on disk; it is shown as a
// problem and does not block other tenants.
func TestRefusedByItsNetwork(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	made := time.Unix(5, 0).UTC()
	must(b.SetTransit(ctx, []string{"green", "lime"}))
	must(b.Apply(ctx, []agent.TenantState{b.published(1, made)}, nil))

	// An update of lime conflicts with a prefix of green: updates of other tenants are applied, and a restart works.
	b.MustAdd("c1")
	web := agent.TenantState{
		Tenant: b.Orchestrator.Tenants["blue"],
		Apps:   []agent.App{{ID: 77, Labels: map[string]string{"app": "x"}}},
		Whole:  true,
	}
	must(b.Apply(ctx, []agent.TenantState{b.lime(1), web}, nil))
	if problems := b.Tenants.RefusedProblems(); len(problems) != 1 || !strings.Contains(problems[0], "tenant lime") ||
		!strings.Contains(problems[0], "tenants green and lime both have fd70:696c:6100:1:0:ff:0:2") {
		t.Errorf("problems %q", problems)
	}
	if k, _, _ := b.Tenants.Get("blue"); len(k.Apps) != 2 {
		t.Errorf("blue has apps %v", k.Apps)
	}
	if r := b.report(true); !slices.Contains(r.IncompleteTenants, "lime") {
		t.Errorf("it asks for %v", r.IncompleteTenants)
	}
	b.Reopen()
	if problems := b.Tenants.RefusedProblems(); len(problems) != 1 {
		t.Errorf("after a start: problems %q", problems)
	}
	must(b.Apply(ctx, []agent.TenantState{b.lime(1)}, nil))

	// In one event the order does not matter.
	without := b.published(2, made)
	without.Tenant.Publications = nil
	must(b.Apply(ctx, []agent.TenantState{b.lime(1), without}, nil))
	if problems := b.Tenants.RefusedProblems(); len(problems) > 0 {
		t.Errorf("problems %q", problems)
	}
	b.Reopen()
	for name, want := range map[string]int{"green": 0, "lime": 1} {
		if k, _, ok := b.Tenants.Get(name); !ok || len(k.Tenant.Publications) != want {
			t.Errorf("%s is %+v", name, k.Tenant)
		}
	}
}

// TestNoRoomForMore: if an update of a hosted tenant exceeds a limit, the tenant keeps its previous state.
func TestNoRoomForMore(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	_, err := b.Add(ctx, b.Green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	b.MaxMappings = 3
	b.Reopen()
	larger := b.Orchestrator.Tenants["green"]
	larger.Changes++
	for i := range 4 {
		larger.Regions = append(larger.Regions, tenant.Region{
			Name: fmt.Sprint("r", i), CIDRs: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", i+1))},
			Edge: netip.MustParsePrefix(
				"fd70:696c:6100:9::/64",
			), PeerEdge: netip.MustParsePrefix(fmt.Sprintf("fd71:%d::/64", i)), PeerVNI: 9,
		})
	}
	if err := b.Apply(ctx, []agent.TenantState{{Tenant: larger, Whole: true}}, nil); err != nil {
		t.Fatal(err)
	}
	if problems := b.Tenants.RefusedProblems(); len(problems) != 1 ||
		!strings.Contains(problems[0], "no room for 4 more mappings") {
		t.Errorf("problems %q", problems)
	}
	for range 2 { // before and after a restart
		if k, _, _ := b.Tenants.Get("green"); len(k.Tenant.Regions) > 0 || k.Tenant.Changes >= larger.Changes {
			t.Errorf("green is %+v", k.Tenant)
		}
		if _, err := b.Add(ctx, b.Green("c2")); err != nil {
			t.Errorf("an ADD beside it: %v", err)
		}
		if err := b.Delete(ctx, "c2", "eth0"); err != nil {
			t.Errorf("a DEL beside it: %v", err)
		}
		b.Reopen()
	}
	larger.Regions = larger.Regions[:1]
	if err := b.Apply(ctx, []agent.TenantState{{Tenant: larger, Whole: true}}, nil); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	if k, _, _ := b.Tenants.Get("green"); len(k.Tenant.Regions) != 1 || len(b.Tenants.RefusedProblems()) > 0 {
		t.Errorf("green is %+v, problems %q", k.Tenant, b.Tenants.RefusedProblems())
	}
}

// TestStartsWithUnfitTenant: a network refuses a part of a hosted tenant, for example after an upgrade. The agent
// starts nevertheless, with the tenant's containers but without that part, until an update of the tenant is acceptable.
func TestStartsWithUnfitTenant(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	full := b.published(1, time.Unix(5, 0).UTC())
	full.Tenant.Publications = nil
	b.Orchestrator.Tenants["green"] = full.Tenant
	b.Nimitz.Subnets = append(b.Nimitz.Subnets, netip.MustParsePrefix("fd12:1::/64"))
	r, err := b.Add(ctx, b.Green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	path := b.Tenants.Path("green")
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	unfit := strings.Replace(string(sound), "2001:db8::9", "fd12:1::99", 1) // the tenant's own
	if err := os.WriteFile(path, []byte(unfit), 0o600); err != nil || unfit == string(sound) {
		t.Fatal(err)
	}
	for range 2 {
		b.Reopen()
		if problems := b.Tenants.RefusedProblems(); len(problems) != 1 ||
			!strings.Contains(problems[0], "tenant green") ||
			!strings.Contains(problems[0], "own CIDR") {
			t.Errorf("problems %q", problems)
		}
		if r := b.report(true); !slices.Contains(r.IncompleteTenants, "green") ||
			!slices.Contains(r.HostedTenants, "green") {
			t.Errorf("it asks for %v and hosts %v", r.IncompleteTenants, r.HostedTenants)
		}
		if err := b.Check(ctx, agent.CheckRequest{
			ContainerID: "c1", Interface: "eth0", Netns: "/run/netns/c1",
		}); err != nil {
			t.Errorf("its container: %v", err)
		}
		if _, err := b.Add(ctx, b.Green("c2")); err != nil {
			t.Errorf("an ADD beside it: %v", err)
		}
		if err := b.Delete(ctx, "c2", "eth0"); err != nil {
			t.Errorf("a DEL beside it: %v", err)
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != unfit {
			t.Errorf("on disk is\n%s\n%v", now, err)
		}
	}
	if got, _ := b.Store.Get(r.ID); got.State != endpoint.Active {
		t.Errorf("it is %v", got.State)
	}
	if err := b.Apply(ctx, []agent.TenantState{full}, nil); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	if k, _, _ := b.Tenants.Get("green"); len(k.Tenant.UnderlayServices) != 1 || len(b.Tenants.RefusedProblems()) > 0 {
		t.Errorf("after another update green is %+v, problems %q", k.Tenant, b.Tenants.RefusedProblems())
	}
}
