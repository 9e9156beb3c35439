package cache

import (
	"cmp"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// policies are the policies of tenants, and the overrides: addresses of containers whose app is not the one in the
// address. Only nodes that host the tenant receive them.
type policies struct {
	Of               map[string]map[PolicyName]*pilasterv1.Policy // by tenant
	read             map[string]map[PolicyName]policy.Policy      // parsed, if this build can parse them
	overrides        map[string]map[string]*pilasterv1.Override   // by tenant and address
	changedOverrides *[]store.Event                               // in the current batch
	changed          map[string]int64                             // by tenant: revision of the last change
}

// Blocks counts the CIDRs in a tenant's policies. The caller holds the lock.
func (p *policies) Blocks(tenant string) (n int) {
	for _, is := range p.read[tenant] {
		n += is.Blocks()
	}
	return n
}

type PolicyName struct{ kind, namespace, name string }

func PolicyNameOf(p *pilasterv1.Policy) PolicyName { return PolicyName{p.Kind, p.Namespace, p.Name} }

func newPolicies() policies {
	return policies{
		map[string]map[PolicyName]*pilasterv1.Policy{},
		map[string]map[PolicyName]policy.Policy{},
		map[string]map[string]*pilasterv1.Override{},
		new([]store.Event),
		map[string]int64{},
	}
}

// succeed takes over when policies changed from those before a read of the whole store. A policy that is gone since
// then was deleted at a revision that is not known.
func (p policies) succeed(before policies, revision int64) {
	for tenant, at := range before.changed {
		p.changed[tenant] = max(p.changed[tenant], at)
		for name := range before.Of[tenant] {
			if p.Of[tenant][name] == nil {
				p.changed[tenant] = revision
			}
		}
	}
}

func (p policies) add(is *pilasterv1.Policy) {
	if p.Of[is.Tenant] == nil {
		p.Of[is.Tenant], p.read[is.Tenant] = map[PolicyName]*pilasterv1.Policy{}, map[PolicyName]policy.Policy{}
	}
	p.Of[is.Tenant][PolicyNameOf(is)] = is
	p.changed[is.Tenant] = max(p.changed[is.Tenant], is.Revision)
	delete(p.read[is.Tenant], PolicyNameOf(is))
	// This build may be unable to parse a policy of another build. The nodes report whether they enforce the policy.
	if read, err := policy.ParseKept(is.Kind, []byte(is.Document)); err == nil {
		p.read[is.Tenant][PolicyNameOf(is)] = read
	}
}

func (p policies) remove(was *pilasterv1.Policy, revision int64) {
	p.changed[was.Tenant] = revision
	delete(p.read[was.Tenant], PolicyNameOf(was))
	if delete(p.Of[was.Tenant], PolicyNameOf(was)); len(p.Of[was.Tenant]) == 0 {
		delete(p.Of, was.Tenant)
		delete(p.read, was.Tenant)
	}
}

func (p policies) removeAll(tenant string) {
	delete(p.Of, tenant)
	delete(p.read, tenant)
	delete(p.changed, tenant)
}

// Changed returns the revision of the last change of a tenant's policies, as far as this process knows: of a deletion
// before its start it does not. The caller holds the lock.
func (p *policies) Changed(tenant string) int64 { return p.changed[tenant] }

// override replaces the overrides that a node reports for a tenant. The addresses belong to that node only.
func (p policies) override(was, is *pilasterv1.Hosting) {
	reported := map[string]bool{}
	for _, o := range is.Overrides {
		reported[o.Address] = true
		o = &pilasterv1.Override{Tenant: is.Tenant, Address: o.Address, App: o.App}
		if proto.Equal(p.overrides[is.Tenant][o.Address], o) {
			continue
		}
		if p.overrides[is.Tenant] == nil {
			p.overrides[is.Tenant] = map[string]*pilasterv1.Override{}
		}
		p.overrides[is.Tenant][o.Address] = o
		*p.changedOverrides = append(*p.changedOverrides, store.Event{Override: o})
	}
	for _, o := range was.GetOverrides() {
		if reported[o.Address] {
			continue
		}
		if delete(p.overrides[is.Tenant], o.Address); len(p.overrides[is.Tenant]) == 0 {
			delete(p.overrides, is.Tenant)
		}
		*p.changedOverrides = append(
			*p.changedOverrides,
			store.Event{EndedOverride: &pilasterv1.Override{Tenant: is.Tenant, Address: o.Address}},
		)
	}
}

// takeOverrides returns and clears the events of overrides.
func (p policies) takeOverrides() []store.Event {
	events := *p.changedOverrides
	*p.changedOverrides = nil
	return events
}

func policyTenantOf(e store.Event) string {
	return cmp.Or(e.Policy.GetTenant(), e.EndedPolicy.GetTenant(), e.Override.GetTenant(), e.EndedOverride.GetTenant())
}

// addWhole adds all policies and overrides of a tenant.
func (p policies) addWhole(d *pilasterv1.Delta, tenant string) {
	d.Policies = slices.AppendSeq(d.Policies, maps.Values(p.Of[tenant]))
	d.Overrides = slices.AppendSeq(d.Overrides, maps.Values(p.overrides[tenant]))
	d.WholePolicies = append(d.WholePolicies, tenant)
}

// policy adds an event of a policy or an override to a delta. It returns false if the node does not receive the event.
func (f *Subscriber) policy(d *pilasterv1.Delta, e store.Event) bool {
	if !f.hosted[policyTenantOf(e)] {
		return false
	}
	switch {
	case e.Policy != nil:
		d.Policies = append(d.Policies, e.Policy)
	case e.EndedPolicy != nil:
		d.EndedPolicies = append(d.EndedPolicies, e.EndedPolicy)
	case e.Override != nil:
		d.Overrides = append(d.Overrides, e.Override)
	case e.EndedOverride != nil:
		d.EndedOverrides = append(d.EndedOverrides, e.EndedOverride)
	}
	return true
}

// eventCost is what events count towards MaxHistoryCost. A policy or a slice may be as large as hundreds of other
// records.
func eventCost(events []store.Event) int {
	n := len(events)
	for _, e := range events {
		n += len(e.Policy.GetDocument())/512 + len(e.Slice.GetEndpoints())/8
	}
	return n
}

// PolicyInputs returns the inputs from which nodes compile a tenant's policies: the policies, the labels of its apps,
// and its network and addressing.
func (m *Cache) PolicyInputs(
	name string,
) (all map[PolicyName]policy.Policy, apps map[address.AppID]map[string]string, of tenant.Tenant) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	all, apps = map[PolicyName]policy.Policy{}, map[address.AppID]map[string]string{}
	maps.Copy(all, m.Policies.read[name])
	for id, app := range m.Apps[name] {
		apps[address.AppID(id)] = app.Labels
	}
	if t := m.Tenants[name]; t != nil {
		of = tenant.Tenant{Name: name, Network: t.Network, Leaving: t.Leaving, Addressing: tenant.Own}
		if t.Addressing <= pilasterv1.Addressing_ADDRESSING_ENCRYPTED {
			of.Addressing = tenant.Encrypted
		}
	}
	return all, apps, of
}

// BlocksOf counts the CIDRs in a tenant's policies.
func (m *Cache) BlocksOf(tenant string) int {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Policies.Blocks(tenant)
}

// HasPolicy reports whether the tenant has this policy with the same document.
func (m *Cache) HasPolicy(tenant string, p *pilasterv1.Policy) bool {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	had := m.Policies.Of[tenant][PolicyNameOf(p)]
	return had != nil && had.Document == p.Document
}

// PoliciesOf returns a tenant's policies, sorted by kind, namespace and name.
func (m *Cache) PoliciesOf(tenant string) (all []*pilasterv1.Policy) {
	m.Mu.RLock()
	for _, p := range m.Policies.Of[tenant] {
		all = append(all, p)
	}
	m.Mu.RUnlock()
	slices.SortFunc(all, func(a, b *pilasterv1.Policy) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Unenforced returns the nodes that do not enforce a tenant's latest policies, with their reasons, sorted by node.
func (m *Cache) Unenforced(tenant string) (all []*pilasterv1.Hosting) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for node, h := range m.Hosting[tenant] {
		if h.Unenforced != "" {
			all = append(all, &pilasterv1.Hosting{Tenant: tenant, Node: node, Unenforced: h.Unenforced})
		}
	}
	slices.SortFunc(all, func(a, b *pilasterv1.Hosting) int { return cmp.Compare(a.Node, b.Node) })
	return all
}
