package datapath

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/numeral"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/policy/policytest"
)

// policyBench is a node's tables of policies, which nothing else asks.
type policyBench struct{ *testNode }

func newPolicyBench(t *testing.T) policyBench { return policyBench{newWireOf(t, Veth).nodes[0]} }

// compiled is a case's policies for all its apps.
func compiled(t *testing.T, c policytest.Case) []agent.TenantPolicies {
	t.Helper()
	tables, err := policy.Compile("acme", c.Policies, c.Apps, slices.Sorted(maps.Keys(c.Apps)))
	must(t, err)
	return []agent.TenantPolicies{{IDs: []address.TenantID{7}, Tables: tables}}
}

// ask has the kernel answer a case's queries, and says how many it allowed and refused.
func (b policyBench) ask(t *testing.T, c policytest.Case) (verdicts [2]int) {
	t.Helper()
	local := netip.MustParseAddr("fd00:2::1")
	for _, q := range c.Queries {
		// Both ports, as the session is begun to this one whoever begins it.
		a, err := b.datapath.Why(agent.Question{Tenant: 7, Local: local, Remote: q.Address, LocalApp: q.Subject, RemoteApp: q.Remote, Protocol: q.Protocol, LocalPort: q.Port, RemotePort: q.Port})
		must(t, err)
		if a.Allowed[q.Direction] != q.Allowed {
			t.Fatalf("%s: app %d %v: %v of app %d %v (%v), protocol %d port %d: allowed %v by rule %d, cyclonus says %v", c.Name, q.Subject, c.Apps[q.Subject], q.Direction,
				q.Remote, c.Apps[q.Remote], q.Address, q.Protocol, q.Port, a.Allowed[q.Direction], a.Rules[q.Direction], q.Allowed)
		}
		verdicts[oneIf(q.Allowed)]++
	}
	return verdicts
}

// kernel is what the tables hold, read from the kernel.
func (b policyBench) kernel(t *testing.T) *rulings {
	t.Helper()
	b.datapath.policed = nil
	r, err := b.datapath.rulings()
	must(t, err)
	return r
}

// differ says where the kernel's tables are not as a tenant's policies are.
func (r *rulings) differ(tenants []agent.TenantPolicies) string {
	want := noRulings()
	for _, p := range tenants {
		want.add(p)
	}
	var all []string
	note := func(what string, same bool, has, wants int) {
		if !same {
			all = append(all, fmt.Sprintf("%s: %d entries, want %d", what, has, wants))
		}
	}
	note("subjects", maps.Equal(r.subjects, want.subjects), len(r.subjects), len(want.subjects))
	note("apps", maps.Equal(r.apps, want.apps), len(r.apps), len(want.apps))
	note("blocks", maps.Equal(r.blocks, want.blocks), len(r.blocks), len(want.blocks))
	note("ports", maps.Equal(r.ports, want.ports), len(r.ports), len(want.ports))
	note("ranges", maps.Equal(r.ranges, want.ranges), len(r.ranges), len(want.ranges))
	note("overrides", maps.Equal(r.overrides, want.overrides), len(r.overrides), len(want.overrides))
	note("rules", maps.Equal(r.hits, want.hits), len(r.hits), len(want.hits))
	return strings.Join(all, "; ")
}

// TestPoliciesInKernel: the packet path's own tables and program say of each of cyclonus's cases what cyclonus says, and of policies and packets by
// chance, of either family; and each change leaves the entries of the next policies and no other.
func TestPoliciesInKernel(t *testing.T) {
	const traffics = 50
	sets, seed := 200, uint64(8)
	if os.Getenv("PILASTER_POLICIES_LONG") != "" {
		sets, seed = 10_000, rand.Uint64()
	}
	if s := os.Getenv("PILASTER_POLICIES_SEED"); s != "" {
		_, err := fmt.Sscan(s, &seed)
		must(t, err)
	}
	t.Logf("PILASTER_POLICIES_SEED=%d", seed)
	b := newPolicyBench(t)
	cases, err := policytest.Generated("192.168.1.")
	must(t, err)
	r := rand.New(rand.NewPCG(seed, 8))
	var verdicts [2]int
	for i := range len(cases) + sets {
		var c policytest.Case
		if i < len(cases) {
			c = cases[i]
		} else {
			c, err = policytest.Random(r, traffics)
			must(t, err)
		}
		p := compiled(t, c)
		must(t, b.datapath.SetPolicies(p))
		if diff := b.kernel(t).differ(p); diff != "" {
			t.Fatalf("%s: the kernel has other entries: %s", c.Name, diff)
		}
		n := b.ask(t, c)
		verdicts[0], verdicts[1] = verdicts[0]+n[0], verdicts[1]+n[1]
	}
	all := verdicts[0] + verdicts[1]
	t.Logf("%s of %s compared: %s allowed, %s denied", numeral.Of(all, "verdict", "verdicts"), numeral.Of(len(cases)+sets, "case", "cases"), numeral.Grouped(verdicts[1]), numeral.Grouped(verdicts[0]))
	if verdicts[0] < all/20 || verdicts[1] < all/20 || all < 200_000 {
		t.Error("those are fewer verdicts than cyclonus has, or one of the answers hardly occurs")
	}
}

// big makes cases by chance until one's policies are many entries.
func big(t *testing.T, seed uint64) []agent.TenantPolicies {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 9))
	for range 1000 {
		c, err := policytest.Random(r, 1)
		must(t, err)
		if p := compiled(t, c); len(p[0].Tables.Peers) > 10 && len(p[0].Tables.Blocks) > 2 {
			return p
		}
	}
	t.Fatal("chance makes no big policies")
	return nil
}

// TestPoliciesOutliveTheAgent: another process finds what is in force, and writes nothing where that is what it wants.
func TestPoliciesOutliveTheAgent(t *testing.T) {
	b := newPolicyBench(t)
	p := big(t, 1)
	must(t, b.datapath.SetPolicies(p))
	b.reopen(t, b.datapath.config)
	o := &b.datapath.objects
	for _, m := range []interface{ Freeze() error }{o.PolSubjectsV1, o.PolAppsV1, o.PolBlocksV1, o.PolPortsV1, o.PolRangesV1, o.PolOverridesV1, o.PolHitsV1} {
		must(t, m.Freeze()) // who writes is refused
	}
	if err := b.datapath.SetPolicies(p); err != nil {
		t.Errorf("the same policies are written again: %v", err)
	}
	if diff := b.kernel(t).differ(p); diff != "" {
		t.Errorf("the kernel has other entries: %s", diff)
	}
	if b.datapath.SetPolicies(big(t, 2)) == nil {
		t.Error("other policies are written to tables that nobody can write")
	}
}

// TestTooManyPolicies are refused, and those from before hold.
func TestTooManyPolicies(t *testing.T) {
	b := newPolicyBench(t)
	p, other := big(t, 1), big(t, 2)
	config := b.datapath.config
	config.MaxRules = max(len(p[0].Tables.Peers), len(p[0].Tables.Ports), len(p[0].Tables.Blocks), len(p[0].Tables.Ranges), len(p[0].Tables.Names)) + 1
	b.reopen(t, config)
	must(t, b.datapath.SetPolicies(p))
	err := b.datapath.SetPolicies(append(slices.Clone(p), other...))
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("the node has room for %d; nothing was changed", config.MaxRules)) {
		t.Errorf("%v; want a refusal that says how much there is room for", err)
	}
	if diff := b.kernel(t).differ(p); diff != "" {
		t.Errorf("the kernel has other entries: %s", diff)
	}
	must(t, b.datapath.SetPolicies(nil))
	if diff := b.kernel(t).differ(nil); diff != "" {
		t.Errorf("without policies the kernel has entries: %s", diff)
	}
}
