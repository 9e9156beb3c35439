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

// published is what people see of a tenant's policies.
type policyView struct {
	dpapi.TenantPolicies
	lastErr error
}

// publish has those who ask see what is in force now.
func (p *policies) publish() {
	all := map[string]policyView{}
	for name, t := range p.m {
		if t.enforced.Selects() || t.lastErr != nil {
			all[name] = policyView{t.enforced, t.lastErr}
		}
	}
	p.published.Store(&all)
}

// view is what show has last shown.
func (p *policies) view() map[string]policyView {
	if all := p.published.Load(); all != nil {
		return *all
	}
	return nil
}

// policyProblem says of which tenants the policies are not in force as they were heard last.
func (c *Core) policyProblems() (problems []string) {
	all := c.policies.view()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].lastErr; err != nil {
			problems = append(
				problems,
				fmt.Sprintf(
					"the policies of tenant %s are not in force as the cluster has them: %v\n  those from before hold, and no container of it is added here; mend them with `pilaster policy apply`",
					name,
					err,
				),
			)
		}
		problems = append(problems, c.sealProblems(name, all[name].TenantPolicies)...)
	}
	return problems
}

// ruleName says what a number of a rule stands for, for an endpoint of a tenant; nil where nothing is known of it any
// wake.
func (c *Core) ruleName(tenant string, number uint32) *policy.RuleName {
	if name, known := c.policies.view()[tenant].Tables.Names[number]; known && number != 0 {
		return &name
	}
	return nil
}

// ruleOf says by which rule of a policy a packet was dropped; nil where by none.
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
		return nil // since then it has gone, or two tenants have the number
	}
	return found[0]
}

// RuleHits is how many packets a rule has denied on this node, or would have if its policy were not in audit.
type RuleHits struct {
	Tenant  string
	Rule    policy.RuleName
	Packets uint64
}

// RuleHits are those of the rules that have denied any, in order; of one tenant, or of all where none is named.
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

// addPolicies tells of policies, where there are any.
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
		r.Problems = append(r.Problems, "what policies have denied cannot be read: "+err.Error())
	}
	p.Hits = hitsToProto(hits)
	for _, e := range core.driver.PolicyEntries() {
		p.Entries = append(p.Entries, entriesToProto(e))
	}
	s, err := core.driver.Sessions()
	if err != nil {
		r.Problems = append(r.Problems, "the sessions of the packet path cannot be read: "+err.Error())
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

// policyTimes is how long it takes to have policies in force.
type policyTimes struct{ compile, enforce prometheus.Histogram }

func newPolicyTimes() policyTimes {
	of := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(
			prometheus.HistogramOpts{Name: "pilaster_policy_" + name + "_seconds", Help: help,
				Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}},
		)
	}
	return policyTimes{
		of("compile_duration", "Compiling a tenant's policies for the containers that are here."),
		of("enforce_duration", "From the orchestrator's message to its policies being in the packet path."),
	}
}

func (t policyTimes) compiled(since time.Time) { t.compile.Observe(time.Since(since).Seconds()) }

func (t policyTimes) enforced(heard time.Time) {
	if !heard.IsZero() {
		t.enforce.Observe(time.Since(heard).Seconds())
	}
}
