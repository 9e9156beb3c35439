package agent

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/durable"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
)

// TenantPolicies is what the packet path polices a tenant's containers by.
type TenantPolicies struct {
	Tenant    string
	IDs       []address.TenantID // all that belong to it
	Tables    policy.Tables
	Overrides map[netip.Addr]address.AppID // canonical addresses whose container is of another app now
}

// policies are what this node knows of the policies of tenants that live here. They are on disk, so that a start without the orchestrator
// has them in force before any container's packet.
type policies struct {
	disk durable.Disk
	dir  string

	mu sync.Mutex // held while they are compiled and given to the packet path: what was heard last wins
	m  map[string]*policed
}

// policyName tells a tenant's policies apart.
type policyName struct{ Kind, Namespace, Name string }

// Document is a policy as a person wrote it.
type Document struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Text      string `json:"document"`
}

func (d Document) name() policyName { return policyName{d.Kind, d.Namespace, d.Name} }

// policed is a tenant with policies, or of which it is known that it has none.
type policed struct {
	documents map[policyName]Document
	parsed    map[policyName]policy.Policy
	overrides map[netip.Addr]address.AppID
	told      chan struct{} // closed once all of it was heard

	inForce  TenantPolicies
	subjects []address.AppID // of containers here, that the tables were made for
	refused  error           // why what was heard last is not in force
}

func newPoliced() *policed {
	return &policed{documents: map[policyName]Document{}, parsed: map[policyName]policy.Policy{}, overrides: map[netip.Addr]address.AppID{}, told: make(chan struct{})}
}

func (p *policed) isTold() bool {
	select {
	case <-p.told:
		return true
	default:
		return false
	}
}

// PolicyNews is what the orchestrator says of policies and of containers whose app is another one now.
type PolicyNews struct {
	Tenant    string
	Whole     bool // nothing else holds
	Documents []Document
	Ended     []Document // by name
	Overrides map[netip.Addr]address.AppID
	Back      []netip.Addr // are of the app again that they say
}

func (p *policed) hear(n PolicyNews) (*policed, error) {
	next := newPoliced()
	next.told, next.inForce, next.subjects = p.told, p.inForce, p.subjects
	if !n.Whole {
		next.documents, next.parsed, next.overrides = maps.Clone(p.documents), maps.Clone(p.parsed), maps.Clone(p.overrides)
	}
	for _, d := range n.Ended {
		delete(next.documents, d.name())
		delete(next.parsed, d.name())
	}
	for _, d := range n.Documents {
		if had, same := p.documents[d.name()]; same && had == d {
			next.documents[d.name()], next.parsed[d.name()] = d, p.parsed[d.name()]
			continue
		}
		parsed, err := policy.Parse([]byte(d.Text))
		if err == nil && len(parsed) != 1 {
			err = fmt.Errorf("it has %d policies", len(parsed))
		}
		if err != nil {
			return nil, fmt.Errorf("%s %s/%s: %w", d.Kind, d.Namespace, d.Name, err)
		}
		next.documents[d.name()], next.parsed[d.name()] = d, parsed[0]
	}
	for _, a := range n.Back {
		delete(next.overrides, a)
	}
	maps.Copy(next.overrides, n.Overrides)
	return next, nil
}

// ApplyPolicies has what was heard in force, or all as it was: then no container of the tenant is added until something better is heard.
func (c *Core) ApplyPolicies(ctx context.Context, n PolicyNews) error {
	unlock, err := c.byTenant.lock(ctx, n.Tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if !c.tenants.isHosted(n.Tenant) {
		return nil // any more
	}
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	if c.policies.m[n.Tenant] == nil && len(n.Documents) == 0 && len(n.Overrides) == 0 {
		return nil // as most tenants
	}
	had := c.policies.of(n.Tenant)
	next, err := had.hear(n)
	if err == nil {
		err = c.enforce(n.Tenant, next)
	}
	if err != nil {
		had.refused = err
		c.log.Error("policies are not in force as the cluster has them", "tenant", n.Tenant, "error", err)
		return nil // to hear the same again would not help
	}
	if n.Whole && !next.isTold() {
		close(next.told)
	}
	return c.keepPolicies(n.Tenant, next)
}

// keepPolicies writes them. What the tenant's own file says of them is there last, and goes first.
func (c *Core) keepPolicies(name string, p *policed) error {
	if len(p.documents) == 0 && len(p.overrides) == 0 {
		if err := c.tenants.setPoliced(name, false); err != nil {
			return err
		}
		return c.policies.remove(name)
	}
	if err := c.policies.write(name, p); err != nil {
		return err
	}
	return c.tenants.setPoliced(name, true)
}

// of is what is known of a tenant's policies, or that nothing is.
func (p *policies) of(name string) *policed {
	if p.m[name] == nil {
		p.m[name] = newPoliced()
	}
	return p.m[name]
}

// enforce compiles a tenant's policies for the containers that are here, and gives them to the packet path with the other tenants'. The caller holds
// the policies' lock.
func (c *Core) enforce(name string, p *policed) error {
	next, err := c.compile(name, *p)
	if err != nil {
		return err
	}
	if err := c.driver.SetPolicies(c.policies.inForce(name, next.inForce)); err != nil {
		return err
	}
	*p = next
	c.policies.m[name] = p
	return nil
}

func (c *Core) compile(name string, next policed) (policed, error) {
	known, _, ok := c.tenants.get(name)
	if !ok {
		return next, fmt.Errorf("tenant %s is not known here", name)
	}
	apps, subjects := map[address.AppID]map[string]string{}, []address.AppID{}
	for _, a := range known.Apps {
		apps[a.ID] = a.Labels
	}
	for _, r := range c.store.List() {
		if r.Tenant == name {
			subjects = append(subjects, appNow(r, next.overrides))
		}
	}
	slices.Sort(subjects)
	subjects = slices.Compact(subjects)
	tables, err := policy.Compile(name, slices.Collect(maps.Values(next.parsed)), apps, subjects)
	if err != nil {
		return next, err
	}
	next.inForce = TenantPolicies{Tenant: name, Tables: tables, Overrides: next.overrides}
	for _, id := range known.Tenant.IDs {
		next.inForce.IDs = append(next.inForce.IDs, id.ID)
	}
	next.subjects, next.refused = subjects, nil
	return next, nil
}

// appNow is whose rules hold for an endpoint.
func appNow(r endpoint.Record, overrides map[netip.Addr]address.AppID) address.AppID {
	for _, a := range r.Attachments {
		if app, other := overrides[a.Plaintext]; other {
			return app
		}
	}
	return r.App
}

// inForce is what holds for all tenants, with one of them as it is to be.
func (p *policies) inForce(name string, next TenantPolicies) []TenantPolicies {
	all := []TenantPolicies{next}
	for other, t := range p.m {
		if other != name && len(t.inForce.Tables.Subjects) > 0 {
			all = append(all, t.inForce)
		}
	}
	return all
}

// renewPolicies has a tenant's policies in force for all that is known of the tenant now: ids, apps and containers. One without costs nothing.
func (c *Core) renewPolicies(name string) error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.m[name]
	if p == nil || len(p.parsed) == 0 && len(p.overrides) == 0 {
		return nil
	}
	if err := c.enforce(name, p); err != nil {
		p.refused = err
		return fmt.Errorf("policies of tenant %s: %w", name, err)
	}
	return nil
}

// police has a new endpoint's policies in force before anything flows: only the first container of an app needs anything for that.
func (c *Core) police(r endpoint.Record) error {
	c.policies.mu.Lock()
	p := c.policies.m[r.Tenant]
	var ready bool
	var refused error
	if p != nil {
		_, ready = slices.BinarySearch(p.subjects, r.App)
		ready = ready || len(p.parsed) == 0
		refused = p.refused
	}
	c.policies.mu.Unlock()
	switch {
	case refused != nil:
		return refuse(ErrUnavailable, "the policies of tenant %s cannot be enforced on this node: %w\n  nothing was changed; mend them, or use another node", r.Tenant, refused)
	case p == nil || ready:
		return nil
	}
	return c.renewPolicies(r.Tenant)
}

// policiesWait is how long an ADD waits for the policies of a tenant that is new to the node.
const policiesWait = 5 * time.Second

// awaitPolicies waits until all policies of a tenant that has some were heard.
func (c *Core) awaitPolicies(ctx context.Context, name string) error {
	c.policies.mu.Lock()
	told := c.policies.of(name).told
	c.policies.mu.Unlock()
	select {
	case <-told:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(policiesWait):
		return refuse(ErrUnavailable, "the policies of tenant %s have not come within %v\n  nothing was changed; try again when the orchestrator can be reached", name, policiesWait)
	}
}

// forgetPolicies takes a tenant's away with it.
func (c *Core) forgetPolicies(name string) error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.m[name]
	if p == nil {
		return nil
	}
	if len(p.inForce.Tables.Subjects) > 0 {
		if err := c.driver.SetPolicies(c.policies.inForce(name, TenantPolicies{Tenant: name})); err != nil {
			return err
		}
	}
	delete(c.policies.m, name)
	return c.policies.remove(name)
}

// startPolicies has those from the disk in force, all at once: until then what the kernel has holds. It comes before endpoints are brought back. Policies
// that cannot be enforced end the start, for without them containers would do what they may not.
func (c *Core) startPolicies() error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	var all []TenantPolicies
	for _, name := range c.tenants.Names() {
		if c.tenants.isPoliced(name) && c.policies.m[name] == nil {
			return &durable.CorruptError{Path: c.policies.path(name), Err: fmt.Errorf("it is missing, and tenant %s has policies", name)}
		}
	}
	for name, p := range c.policies.m {
		if _, _, known := c.tenants.get(name); !known {
			delete(c.policies.m, name)
			if err := c.policies.remove(name); err != nil {
				return err
			}
			continue
		}
		next, err := c.compile(name, *p)
		if err != nil {
			return fmt.Errorf("policies of tenant %s: %w", name, err)
		}
		*p = next
		all = append(all, next.inForce)
	}
	return c.driver.SetPolicies(all)
}

// unenforced says of which tenants the policies are not in force as they were heard last.
func (c *Core) unenforced() (problems []string) {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(c.policies.m)) {
		if err := c.policies.m[name].refused; err != nil {
			problems = append(problems, fmt.Sprintf("the policies of tenant %s are not in force as the cluster has them: %v\n  those from before hold, and no container of it is added here; mend them with `pilaster policy apply`", name, err))
		}
	}
	return problems
}
