package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// ApplyPolicies applies a policy update. The agent keeps the last received policies even if it could not enforce them,
// and retries on the next update or ADD; until then the previous ones stay in force and no container of the tenant is
// added.
func (c *Core) ApplyPolicies(ctx context.Context, n policies.Update) error {
	unlock, err := c.byTenant.Lock(ctx, n.Tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if !c.tenants.IsHosted(n.Tenant) {
		return nil // not hosted any more
	}
	if _, deleted, _ := c.tenants.Get(n.Tenant); deleted {
		return nil // its last policies stay in force for its remaining containers
	}
	return c.policies.Apply(n)
}

// ApplyServices keeps an update of a tenant's services, which Run writes to the packet path.
func (c *Core) ApplyServices(u services.Update) {
	if _, deleted, _ := c.tenants.Get(u.Tenant); !deleted { // otherwise its last services stay for its last containers
		c.services.Apply(u)
	}
}

// Linked notes that a stream from the orchestrator has begun.
func (c *Core) Linked() { c.services.Linked() }

// SetAddresses sets the addresses of this node, which have changed.
func (c *Core) SetAddresses(is services.Addresses) { c.services.SetAddresses(is) }

// OrchestratorAt notes an address at which the agent calls the orchestrator. No service is exposed at it.
func (c *Core) OrchestratorAt(a netip.Addr) { c.services.OrchestratorAt(a) }

// IsOwn reports whether an address is one of this node.
func (c *Core) IsOwn(a netip.Addr) bool { return c.services.IsOwn(a) }

// Services returns the state of services on this node, with counts if wanted.
func (c *Core) Services(counts bool) services.Status { return c.services.Status(counts) }

// policyProblems names the tenants whose last policy update is not in force.
func (c *Core) policyProblems() (problems []string) {
	all := c.policies.View()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].Err; err != nil {
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
		problems = append(problems, c.sealProblems(name, all[name])...)
	}
	return problems
}

// sealProblems describes a tenant whose containers here are isolated because a network cannot enforce its policies.
func (c *Core) sealProblems(name string, v policies.View) []string {
	known, _, ok := c.tenants.Get(name)
	if !ok || !v.Restricts {
		return nil
	}
	if err := c.networks.CheckGuards(name, c.networksOf(known.Tenant)); err != nil {
		return []string{
			fmt.Sprintf(
				"%v\n  its containers on this node are isolated from it, and none is added: delete its policies, or "+
					"move its containers to other nodes",
				err,
			),
		}
	}
	return nil
}

// ruleName returns the rule with a number in a tenant's policies; nil if it is gone.
func (c *Core) ruleName(tenant string, number uint32) *policy.RuleName {
	if name, known := c.policies.View()[tenant].Tables.Names[number]; known && number != 0 {
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
	for tenant := range c.policies.View() {
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
	for name, t := range c.policies.View() {
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
	LargestTenant  string          // name of the tenant with the most sessions
	Problems       []string
}

// PolicyStatus returns the state of policies; ok is false if no tenant here has policies.
func (c *Core) PolicyStatus() (p PolicyStatus, ok bool) {
	for _, t := range c.policies.View() {
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
	if s.MostOfTenant > 0 {
		p.LargestTenant = c.tenantOf(address.TenantID(s.LargestTenant))
	}
	return p, true
}

// tenantOf returns the name of the tenant with this id or VNI, or the number if no tenant with policies has it.
func (c *Core) tenantOf(id address.TenantID) string {
	for name, t := range c.policies.View() {
		if slices.Contains(t.IDs, id) {
			return name
		}
	}
	return fmt.Sprintf("id %d", id)
}

// PolicyTimes returns the metrics of compilation and enforcement.
func (c *Core) PolicyTimes() []prometheus.Collector {
	return c.policies.Times()
}

// SetHasPolicies stores whether a tenant has policies.
func (t *Tenants) SetHasPolicies(name string, policed bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.m[name]
	if old == nil || old.hasPolicies == policed {
		return nil
	}
	h := *old
	h.hasPolicies = policed
	if err := t.write(&h); err != nil {
		return err
	}
	t.m[name] = &h
	return nil
}

// SetSynced sets whether all policies of a tenant were received. Setting it to false requests them again.
func (t *Tenants) SetSynced(name string, synced bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		h.synced, h.requested = synced, h.requested && synced
		t.signalOffloads(h)
	}
}

// SetPoliciesRevision sets the revision of the store up to which a tenant's policies are in force, unless the report
// says why they are not.
func (t *Tenants) SetPoliciesRevision(name string, revision int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && h.policies != revision {
		h.policies = revision
		t.signalOffloads(h)
	}
}

// SetPolicyProblem reports to the orchestrator why a tenant's last policy update is not in force here, or, with nil,
// that it is.
func (t *Tenants) SetPolicyProblem(name string, why error) {
	words := ""
	if why != nil {
		words = strings.Join(strings.FieldsFunc(why.Error(), func(r rune) bool { return r == '\n' }), ";")
		words = strings.ToValidUTF8(words[:min(len(words), maxProblem)], "")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && h.policyProblem != words {
		h.policyProblem = words
		t.signal()
	}
}

// SetServicesSynced sets whether all services of a tenant were received. Setting it to false requests them again.
func (t *Tenants) SetServicesSynced(name string, synced bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		h.servicesSynced, h.requested = synced, h.requested && synced
	}
}

// Tenant returns a tenant with its keys; false if this node does not know them.
func (t *Tenants) Tenant(name string) (tenant.Tenant, bool) {
	known, _, ok := t.Get(name)
	return known.Tenant, ok && t.Lost(name) == nil
}

// RequestPolicies makes the next stream request all policies: this stream, of an orchestrator without policies, has
// skipped their updates.
func (t *Tenants) RequestPolicies() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range t.m {
		if h.synced {
			h.synced, h.requested = false, true
		}
	}
}

// RequestServices is RequestPolicies for services.
func (t *Tenants) RequestServices() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range t.m {
		if h.servicesSynced {
			h.servicesSynced, h.requested = false, true
		}
	}
}

// PolicyInputs returns a tenant and the labels of its apps; ok is false if this node does not know it. Of a lost tenant
// it returns the ids of its containers here.
func (t *Tenants) PolicyInputs(name string) (_ tenant.Tenant, apps map[address.AppID]map[string]string, ok bool) {
	known, _, ok := t.Get(name)
	apps = make(map[address.AppID]map[string]string, len(known.Apps))
	for _, a := range known.Apps {
		apps[a.ID] = a.Labels
	}
	return known.Tenant, apps, ok && t.Lost(name) == nil
}

// HasPolicies reports whether a tenant has policies.
func (t *Tenants) HasPolicies(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	return h != nil && h.hasPolicies
}
