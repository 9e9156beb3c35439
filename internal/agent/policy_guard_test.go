package agent_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/policy"
)

// sends reports whether the policies in the packet path allow an app of green to open connections.
func (b *bed) sends(app address.AppID) bool {
	b.Driver.Mu.Lock()
	defer b.Driver.Mu.Unlock()
	return b.Driver.Policies["green"].Tables.Decide(
		app,
		policy.Egress,
		1,
		netip.IPv6Unspecified(),
		policy.TCP,
		80,
	).Allowed
}

// TestRulesOfOthersApps: if policy is applied at the destination, a node has the rules of all apps, and connections of
// unknown apps are denied.
func TestRulesOfOthersApps(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(agenttest.AllPolicies("green", agenttest.Document("db", agenttest.MutedDB)))
	if !b.sends(1) || b.sends(2) {
		t.Errorf("app 1 may begin something: %v; app 2, which is not known: %v", b.sends(1), b.sends(2))
	}
	apps := []agent.App{{2, map[string]string{"app": "db"}}, {3, map[string]string{"app": "cache"}}}
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: b.Orchestrator.Tenants["green"], Apps: apps}},
		nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if b.sends(2) || !b.sends(3) || b.sends(4) {
			t.Errorf(
				"who may begin something: db %v, cache %v, who is not known %v",
				b.sends(2),
				b.sends(3),
				b.sends(4),
			)
		}
		b.Reopen()
	}
	b.MustApplyPolicies(agenttest.AllPolicies("green", agenttest.Document("web", agenttest.WebFromDB)))
	if !b.sends(4) {
		t.Error("no policy has a say in what is begun, and who is not known may begin nothing")
	}
}

// TestUnpolicedNetworkIsSealed: on a network that enforces no policies, the containers of a tenant with policies are
// isolated until it has none, also after a restart. Meanwhile only other tenants can add containers.
func TestUnpolicedNetworkIsSealed(t *testing.T) {
	b := newBedOfTwo(t)
	b.Nimitz.Unpoliced = errors.New("it judges nothing")
	r, err := b.Add(t.Context(), b.Green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	open := func() (sends, receives bool) {
		for _, e := range b.Nimitz.Has {
			switch e := e.(type) {
			case pipeline.Sender:
				sends = true
			case pipeline.Forward:
				receives = receives || e.Port == pipeline.Port(r.ID)
			}
		}
		return sends, receives
	}
	for _, c := range []struct {
		name   string
		do     func()
		sealed bool
	}{
		{"no policies", func() { b.MustApplyPolicies(policies.Update{Tenant: "green", Whole: true}) }, false},
		{"a policy in audit", func() {
			audited := strings.Replace(agenttest.MutedDB,
				`"name":"db"`, `"name":"db","annotations":{"pilaster.io/audit":"true"}`, 1)
			b.MustApplyPolicies(agenttest.MorePolicies("green", agenttest.Document("db", audited)))
		}, false},
		{"a policy", func() {
			b.MustApplyPolicies(policies.Update{Tenant: "green",
				Documents: []policies.Document{agenttest.Document("db", agenttest.MutedDB)}})
		}, true},
		{"a start", b.Reopen, true},
		{"the tenant updated", func() {
			if err := b.Apply(t.Context(),
				[]agent.TenantState{{Tenant: b.Orchestrator.Tenants["green"],
					Apps: []agent.App{{2, map[string]string{"app": "db"}}}}}, nil); err != nil {
				t.Fatal(err)
			}
		}, true},
		{"none any more", func() {
			b.MustApplyPolicies(policies.Update{Tenant: "green",
				Removed: []policies.Document{agenttest.Document("db", "")}})
		}, false},
	} {
		c.do()
		if sends, receives := open(); sends == c.sealed || receives == c.sealed {
			t.Errorf("%s: sends %v, receives %v", c.name, sends, receives)
		}
		if problems := strings.Join(b.PolicyProblems(), "; "); strings.Contains(problems,
			"it judges nothing") != c.sealed {
			t.Errorf("%s: problems %q", c.name, problems)
		}
		if err := b.Check(t.Context(),
			agent.CheckRequest{ContainerID: "c1", Interface: "eth0", Netns: "/run/netns/c1"}); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if _, err := b.Add(t.Context(), b.Green("c2")); c.sealed != errors.Is(err, refusal.ErrUnavailable) ||
			c.sealed && !strings.Contains(err.Error(), "it judges nothing") {
			t.Errorf("%s: another container: %v", c.name, err)
		}
		if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
			t.Fatal(err)
		}
	}

	b.MustApplyPolicies(agenttest.MorePolicies("green", agenttest.Document("db", agenttest.MutedDB)))
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
	if r, err = b.Add(t.Context(), b.Green("c1")); err != nil { // the tenant has none when it comes back
		t.Fatal(err)
	}
	if sends, receives := open(); !sends || !receives {
		t.Errorf("the tenant is cut off by policies from before: sends %v, receives %v", sends, receives)
	}
}
