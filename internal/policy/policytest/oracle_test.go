package policytest_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/policy/policytest"
)

// TestGeneratedCasesOfCyclonus: all steps of all cases that cyclonus generates, all probes, both ends of each, with
// IPv4 and with IPv6 addresses.
func TestGeneratedCasesOfCyclonus(t *testing.T) {
	for _, prefix := range []string{"192.168.1.", "fd00:1::"} {
		t.Run(prefix, func(t *testing.T) {
			cases, err := policytest.Generated(prefix)
			if err != nil {
				t.Fatal(err)
			}
			var n tally
			for _, c := range cases {
				n.judge(t, c)
			}
			n.report(t)
			if n.verdicts < 200_000 {
				t.Errorf("that is fewer than cyclonus has")
			}
		})
	}
}

// TestRandomPoliciesAgainstCyclonus: a thousand random sets of policies and pods, with 80,000 packets in total.
func TestRandomPoliciesAgainstCyclonus(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const sets, traffics = 1_000, 80
	r := rand.New(rand.NewPCG(7, 7))
	var n tally
	for range sets {
		c, err := policytest.Random(r, traffics)
		if err != nil {
			t.Fatal(err)
		}
		n.judge(t, c)
	}
	n.report(t)
}

// tally counts the comparisons.
type tally struct{ cases, verdicts, allowed, restricted int }

func (n *tally) judge(t *testing.T, c policytest.Case) {
	t.Helper()
	tables, err := policy.Compile("acme", c.Policies, c.Apps, slices.Sorted(maps.Keys(c.Apps)))
	if err != nil {
		t.Fatalf("%s: %v", c.Name, err)
	}
	n.cases++
	for _, q := range c.Queries {
		got := tables.Decide(q.Subject, q.Direction, q.Remote, q.Address, q.Protocol, q.Port)
		if got.Allowed != q.Allowed {
			t.Fatalf(
				"%s: app %d %v: %s of app %d %v (%v), protocol %d port %d: allowed %v by %q, cyclonus says %v\n%+v",
				c.Name,
				q.Subject,
				c.Apps[q.Subject],
				q.Direction,
				q.Remote,
				c.Apps[q.Remote],
				q.Address,
				q.Protocol,
				q.Port,
				got.Allowed,
				tables.Names[got.Rule],
				q.Allowed,
				c.Policies,
			)
		}
		n.verdicts++
		if q.Allowed {
			n.allowed++
		}
		if got.Rule != 0 {
			n.restricted++
		}
	}
}

func (n *tally) report(t *testing.T) {
	t.Helper()
	t.Logf(
		"%s of %s compared: %s allowed, %s denied; a rule decided %s",
		humanize.Of(n.verdicts, "verdict", "verdicts"),
		humanize.Of(n.cases, "case", "cases"),
		humanize.Grouped(n.allowed),
		humanize.Grouped(n.verdicts-n.allowed),
		humanize.Grouped(n.restricted),
	)
	if n.allowed < n.verdicts/20 || n.verdicts-n.allowed < n.verdicts/20 {
		t.Error("one of the answers hardly occurs")
	}
}
