package agent

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

// policyView is a tenant's policy state for status requests.
type policyView struct {
	dpapi.TenantPolicies
	lastErr error
}

// publish makes the current policy state visible to view.
func (p *policies) publish() {
	all := map[string]policyView{}
	for name, t := range p.m {
		if t.enforced.Selects() || t.lastErr != nil {
			all[name] = policyView{t.enforced, t.lastErr}
		}
	}
	p.published.Store(&all)
}

// view returns the state of the last publish.
func (p *policies) view() map[string]policyView {
	if all := p.published.Load(); all != nil {
		return *all
	}
	return nil
}

// policyProblems names the tenants whose last policy update is not in force.
func (c *Core) policyProblems() (problems []string) {
	all := c.policies.view()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].lastErr; err != nil {
			problems = append(
				problems,
				fmt.Sprintf(
					"the last policy update of tenant %s is not in force: %v\n  the previous policies apply, and no "+
						"container of it is added here; correct them with `pilaster policy apply`",
					name,
					err,
				),
			)
		}
		problems = append(problems, c.sealProblems(name, all[name].TenantPolicies)...)
	}
	return problems
}

// ruleName returns the rule with a number in a tenant's policies; nil if it is gone.
func (c *Core) ruleName(tenant string, number uint32) *policy.RuleName {
	if name, known := c.policies.view()[tenant].Tables.Names[number]; known && number != 0 {
		return &name
	}
	return nil
}

// RuleOf returns the policy rule that dropped a packet; nil if no rule did.
func (c *Core) RuleOf(e dpapi.Event) *policy.RuleName {
	if e.Rule == 0 {
		return nil
	}
	if r, here := c.store.Get(e.Endpoint); here {
		return c.ruleName(r.Tenant, e.Rule)
	}
	var found []*policy.RuleName
	for tenant := range c.policies.view() {
		if name := c.ruleName(tenant, e.Rule); name != nil {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		return nil // the rule has gone, or two tenants have the number
	}
	return found[0]
}

// RuleHits counts the packets that a rule denied on this node, or would have denied if its policy were not in audit
// mode.
type RuleHits struct {
	Tenant  string
	Rule    policy.RuleName
	Packets uint64
}

// RuleHits returns the rules with hits, in order; of one tenant, or of all if tenant is empty.
func (c *Core) RuleHits(tenant string) ([]RuleHits, error) {
	counted, err := c.driver.RuleHits()
	if err != nil {
		return nil, err
	}
	var all []RuleHits
	for name, t := range c.policies.view() {
		if tenant != "" && name != tenant {
			continue
		}
		for number, rule := range t.Tables.Names {
			if n := counted[number]; n > 0 {
				all = append(all, RuleHits{name, rule, n})
			}
		}
	}
	slices.SortFunc(all, func(a, b RuleHits) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Rule.String(), b.Rule.String()))
	})
	return all, nil
}

// PolicyStatus is the state of policies on this node.
type PolicyStatus struct {
	Tenants, Rules int // with policies in the packet path
	Hits           []RuleHits
	Entries        []dpapi.Entries
	Sessions       *dpapi.Sessions // nil if they could not be read
	Largest        string          // name of the endpoint with the most sessions
	Problems       []string
}

// PolicyStatus returns the state of policies; ok is false if no tenant here has policies.
func (c *Core) PolicyStatus() (p PolicyStatus, ok bool) {
	for _, t := range c.policies.view() {
		if t.Selects() {
			p.Tenants++
			p.Rules += len(t.Tables.Names)
		}
	}
	if p.Tenants == 0 {
		return p, false
	}
	var err error
	if p.Hits, err = c.RuleHits(""); err != nil {
		p.Problems = append(p.Problems, "reading the hits of policy rules failed: "+err.Error())
	}
	p.Entries = c.driver.PolicyEntries()
	s, err := c.driver.Sessions()
	if err != nil {
		p.Problems = append(p.Problems, "reading the sessions of the packet path failed: "+err.Error())
		return p, true
	}
	p.Sessions = &s
	p.Largest, _ = c.NameOf(s.Largest)
	return p, true
}

// PolicyTimes returns the metrics of compilation and enforcement.
func (c *Core) PolicyTimes() []prometheus.Collector {
	return []prometheus.Collector{c.policies.times.compile, c.policies.times.enforce}
}

// policyTimes measures compilation and enforcement.
type policyTimes struct{ compile, enforce prometheus.Histogram }

func newPolicyTimes() policyTimes {
	of := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(
			prometheus.HistogramOpts{Name: "pilaster_policy_" + name + "_seconds", Help: help,
				Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}},
		)
	}
	return policyTimes{
		of("compile_duration", "Compiling a tenant's policies for the containers on this node."),
		of("enforce_duration", "From the orchestrator's message until its policies are in the packet path."),
	}
}

func (t policyTimes) compiled(since time.Time) { t.compile.Observe(time.Since(since).Seconds()) }

func (t policyTimes) enforced(received time.Time) {
	if !received.IsZero() {
		t.enforce.Observe(time.Since(received).Seconds())
	}
}
