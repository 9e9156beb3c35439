package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
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

// ruleOf returns the policy rule that dropped a packet; nil if no rule did.
func (c *Core) ruleOf(e dpapi.Event) *policy.RuleName {
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

func (s *Service) ListRuleHits(
	_ context.Context,
	req *connect.Request[pilasterv1.ListRuleHitsRequest],
) (*connect.Response[pilasterv1.ListRuleHitsResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	hits, err := core.RuleHits(req.Msg.Tenant)
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.ListRuleHitsResponse{Hits: hitsToProto(hits)}), nil
}

func hitsToProto(hits []RuleHits) (all []*pilasterv1.RuleHits) {
	for _, h := range hits {
		all = append(all, &pilasterv1.RuleHits{Tenant: h.Tenant, Rule: ruleToProto(&h.Rule), Packets: h.Packets})
	}
	return all
}

// addPolicies adds the policy status, if there are policies.
func addPolicies(r *pilasterv1.StatusResponse, core *Core) {
	p := &pilasterv1.Policies{}
	for _, t := range core.policies.view() {
		if t.Selects() {
			p.Tenants++
			p.Rules += uint32(len(t.Tables.Names))
		}
	}
	if p.Tenants == 0 {
		return
	}
	r.Policies = p
	hits, err := core.RuleHits("")
	if err != nil {
		r.Problems = append(r.Problems, "reading the hits of policy rules failed: "+err.Error())
	}
	p.Hits = hitsToProto(hits)
	for _, e := range core.driver.PolicyEntries() {
		p.Entries = append(p.Entries, entriesToProto(e))
	}
	s, err := core.driver.Sessions()
	if err != nil {
		r.Problems = append(r.Problems, "reading the sessions of the packet path failed: "+err.Error())
		return
	}
	largest, _ := core.nameOf(s.Largest)
	p.Sessions = &pilasterv1.Sessions{
		Capacity:        uint32(s.Capacity),
		Used:            uint32(s.Used),
		HalfOpen:        uint32(s.HalfOpen),
		Begun:           s.Begun,
		Evicted:         s.Evicted,
		Refused:         s.Refused,
		LargestEndpoint: uint32(s.Largest),
		Largest:         largest,
		LargestUsed:     uint32(s.Most),
	}
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
