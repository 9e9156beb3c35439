package agent_test

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
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

// TestEgressOfTenants: a node keeps a tenant's egress rules, nodes and protected prefixes across restarts. The stream
// changes protected prefixes without a change of the tenant, and a late answer to Resolve does not take them back.
func TestEgressOfTenants(t *testing.T) {
	b := newBed(t)
	prefix := netip.MustParsePrefix
	blue := b.Orchestrator.Tenants["blue"]
	b.MustAdd("c1")
	if has, _, _ := b.Tenants.Get("blue"); has.Tenant.MayLeave() {
		t.Errorf("blue has egress rules %+v", has.Tenant.Egress)
	}
	blue.Changes, blue.Network = 3, tenant.DefaultNetwork
	blue.Egress = []tenant.EgressRule{
		{To: prefix("2001:db8:8::/48")},
		{To: prefix("::/0"), Allow: true, Via: []tenant.EgressGateway{
			{Node: "n2", Prefix: prefix("fd70:696c:6100:2::/64"), Address: netip.MustParseAddr("2001:db8:7::9")},
		}},
	}
	blue.Nodes = []netip.Prefix{prefix("fd70:696c:6100::/40")}
	blue.Protected = []netip.Prefix{prefix("2001:db8:5::/48")}
	blue.ServicesNumber = 5
	b.Orchestrator.Tenants["blue"] = blue
	now := blue
	now.Protected = []netip.Prefix{prefix("2001:db8:6::/48")}
	for i, step := range []struct {
		streamed *tenant.Tenant
		want     tenant.Tenant
	}{{&blue, blue}, {&now, now}, {nil, now}} {
		if step.streamed != nil {
			if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: *step.streamed}}, nil); err != nil {
				t.Fatal(err)
			}
		} else {
			request := b.Request("c2")
			request.Labels = map[string]string{"app": "new"}
			if _, err := b.Add(t.Context(), request); err != nil { // with blue as the answer
				t.Fatal(err)
			}
		}
		for range 2 {
			if has, _, _ := b.Tenants.Get("blue"); !has.Tenant.Equal(step.want) ||
				!b.Driver.Tenants["blue"].Equal(step.want) {
				t.Errorf("step %d: %+v, in the packet path %+v; want %+v", i, has.Tenant,
					b.Driver.Tenants["blue"], step.want)
			}
			b.Reopen()
		}
	}
	none := b.Orchestrator.Tenants["red"]
	none.Name, none.Addressing, none.IDs, none.Changes = "blue", blue.Addressing, blue.IDs, 4
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: none}}, nil); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(b.Dir, "tenants", "blue.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"egress", "nodes", "protected"} { // which the last build does not know
		if strings.Contains(string(text), field) {
			t.Errorf("the file of a tenant without egress has %s: %s", field, text)
		}
	}
}
