package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/statefile"
)

// policies are what this node knows of the policies of tenants that live here. They are on disk, so that a start
// without the orchestrator has them in force before any container's packet.
type policies struct {
	disk statefile.Disk
	dir  string

	mu sync.Mutex // heldPrefixes while they are compiled and given to the packet path: what was heard last wins
	m  map[string]*tenantPolicy

	published atomic.Pointer[map[string]policyView] // for those who ask, and do not wait for that
	times     policyTimes
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

// hasPolicies is a tenant with policies, or of which it is known that it has none.
type tenantPolicy struct {
	documents   map[policyName]Document
	parsed      map[policyName]policy.Policy
	parseErrors map[policyName]error // why those of the documents are not among these
	overrides   map[netip.Addr]address.AppID
	synced      chan struct{} // closed once all of it was heard
	awaited     bool          // there are some: no container is added before they are told
	unsaved     bool          // the disk has not all of it: what could not be enforced does not go there, for no start would succeed with it

	enforced dpapi.TenantPolicies
	inputs   compileInputs // that the tables were made for
	lastErr  error         // why what was heard last is not in force

	index   *policy.Index // apply indexed, the apps that were last compiled for
	indexed map[address.AppID]map[string]string
}

// compileInputs are what a tenant's tables are made for beside its policies.
type compileInputs struct {
	ids       []address.TenantID
	apps      map[address.AppID]map[string]string
	subjects  []address.AppID // apply containers here, or all apps
	overrides map[netip.Addr]address.AppID

	atDestination bool // what others' containers send is judged here
}

func (s compileInputs) equal(o compileInputs) bool {
	return s.atDestination == o.atDestination && slices.Equal(s.ids, o.ids) && slices.Equal(s.subjects, o.subjects) &&
		maps.Equal(s.overrides, o.overrides) &&
		sameApps(s.apps, o.apps)
}

func sameApps(a, b map[address.AppID]map[string]string) bool {
	return maps.EqualFunc(a, b, func(a, b map[string]string) bool { return maps.Equal(a, b) })
}

func newTenantPolicy() *tenantPolicy {
	return &tenantPolicy{
		documents:   map[policyName]Document{},
		parsed:      map[policyName]policy.Policy{},
		parseErrors: map[policyName]error{},
		overrides:   map[netip.Addr]address.AppID{},
		synced:      make(chan struct{}),
	}
}

// isBlank tells that there is nothing to enforce.
func (p *tenantPolicy) isBlank() bool { return len(p.documents)+len(p.overrides) == 0 }

// isSettled tells that what was heard is in force and on disk.
func (p *tenantPolicy) isSettled() bool { return p.lastErr == nil && !p.unsaved }

func (p *tenantPolicy) isSynced() bool {
	select {
	case <-p.synced:
		return true
	default:
		return false
	}
}

// PolicyUpdate is what the orchestrator says of policies and of containers whose app is another one now.
type PolicyUpdate struct {
	Tenant         string
	Received       time.Time
	Whole          bool // nothing else holds
	Documents      []Document
	Removed        []Document // by name
	Overrides      map[netip.Addr]address.AppID
	EndedOverrides []netip.Addr // are of the app again that they say
}

// applyPolicies takes note of the news, and tells whether they change anything. What this build cannot read is kept as that: to
// removeTenant it would let by what it forbids.
func (p *tenantPolicy) apply(n PolicyUpdate) (changed bool) {
	if n.Whole {
		n.Removed, n.EndedOverrides = p.missingFrom(n)
	}
	for _, d := range n.Removed {
		if _, had := p.documents[d.name()]; had {
			p.forget(d.name())
			changed = true
		}
	}
	for _, d := range n.Documents {
		if p.documents[d.name()] == d {
			continue
		}
		p.forget(d.name())
		p.documents[d.name()] = d
		if parsed, err := d.parse(); err == nil {
			p.parsed[d.name()] = parsed
		} else {
			p.parseErrors[d.name()] = err
		}
		changed = true
	}
	for _, a := range n.EndedOverrides {
		if _, had := p.overrides[a]; had {
			delete(p.overrides, a)
			changed = true
		}
	}
	for a, app := range n.Overrides {
		if p.overrides[a] != app {
			p.overrides[a] = app
			changed = true
		}
	}
	p.unsaved = p.unsaved || changed
	return changed
}

// missingFrom is what was heard before and is not among the news, which are all that holds.
func (p *tenantPolicy) missingFrom(n PolicyUpdate) (documents []Document, overrides []netip.Addr) {
	said := make(map[policyName]bool, len(n.Documents))
	for _, d := range n.Documents {
		said[d.name()] = true
	}
	for name, d := range p.documents {
		if !said[name] {
			documents = append(documents, d)
		}
	}
	for a := range p.overrides {
		if _, stays := n.Overrides[a]; !stays {
			overrides = append(overrides, a)
		}
	}
	return documents, overrides
}

func (p *tenantPolicy) forget(name policyName) {
	delete(p.documents, name)
	delete(p.parsed, name)
	delete(p.parseErrors, name)
}

func (d Document) parse() (policy.Policy, error) {
	parsed, err := policy.ParseKept(d.Kind, []byte(d.Text))
	if err != nil {
		return policy.Policy{}, fmt.Errorf("%s %s/%s: %w", d.Kind, d.Namespace, d.Name, err)
	}
	return parsed, nil
}

// ApplyPolicies has what was heard in force. What cannot be enforced leaves what was, and is tried again with whatever
// is heard next and for each container of the tenant, which is not added before.
func (c *Core) ApplyPolicies(ctx context.Context, n PolicyUpdate) error {
	unlock, err := c.byTenant.lock(ctx, n.Tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if !c.tenants.isHosted(n.Tenant) {
		return nil // any more
	}
	if _, deleted, _ := c.tenants.get(n.Tenant); deleted {
		return nil // its policies went with it, and its containers that still live stay under them
	}
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.of(n.Tenant)
	if p.apply(n) || !p.isSettled() { // nothing is new of most tenants, which have none, and of what a snapshot repeats
		if err := c.enforce(n.Tenant); err != nil {
			return err
		}
		if p.lastErr == nil {
			c.policies.times.enforced(n.Received)
		}
	}
	if n.Whole && !p.isSynced() {
		close(p.synced)
	}
	if n.Whole {
		c.tenants.setSynced(n.Tenant, true)
	}
	return nil
}

// savePolicies writes them. What the tenant's own file says of them is there last, and goes first.
func (c *Core) savePolicies(name string, p *tenantPolicy) error {
	if p.isBlank() {
		if err := c.tenants.setHasPolicies(name, false); err != nil {
			return err
		}
		return c.policies.remove(name)
	}
	if err := c.policies.write(name, p); err != nil {
		return err
	}
	return c.tenants.setHasPolicies(name, true)
}

// apply is what is known of a tenant's policies, or that nothing is.
func (p *policies) of(name string) *tenantPolicy {
	if p.m[name] == nil {
		p.m[name] = newTenantPolicy()
	}
	return p.m[name]
}

// enforce compiles what is known of a tenant's policies for the containers that are here, gives it to the packet path,
// and keeps it. If that is refused, what was before holds, and the error is the disk's alone. The caller holds the
// policies' lock.
func (c *Core) enforce(name string) error {
	p := c.policies.m[name]
	defer c.policies.publish()
	next, around, err := c.compile(name, p)
	if err == nil && next.Restricts() {
		err = c.seal(name, true)
	}
	if err == nil {
		err = c.driver.SetPolicies(next)
	}
	if err == nil && !next.Restricts() {
		err = c.seal(name, false)
	}
	if err != nil {
		c.noteRefused(name, p, err)
		return nil // sinks hear the same again would not help
	}
	p.enforced, p.inputs, p.lastErr = next, around, nil
	c.tenants.setPolicyProblem(name, nil)
	if !p.unsaved {
		return nil
	}
	if err := c.savePolicies(name, p); err != nil {
		return err
	}
	p.unsaved = false
	return nil
}

// noteRefused notes that what was heard last is not in force.
func (c *Core) noteRefused(name string, p *tenantPolicy, why error) {
	p.lastErr = why
	c.tenants.setPolicyProblem(name, why)
	c.log.Error("policies are not in force as the cluster has them", "tenant", name, "error", why)
}

func (c *Core) compile(name string, p *tenantPolicy) (next dpapi.TenantPolicies, around compileInputs, err error) {
	for _, err := range p.parseErrors {
		return next, around, err
	}
	if around, err = c.compileInputs(name, p); err != nil {
		return next, around, err
	}
	defer c.policies.times.compiled(time.Now())
	next = dpapi.TenantPolicies{Tenant: name, IDs: around.ids, Overrides: around.overrides}
	if p.index == nil || !sameApps(p.indexed, around.apps) {
		p.index, p.indexed = policy.NewIndex(around.apps), around.apps
	}
	all := slices.Collect(maps.Values(p.parsed))
	if next.Tables, err = p.index.Compile(name, all, around.subjects); around.atDestination {
		next.Tables.HoldUnknown(all)
	}
	return next, around, err
}

// compileInputs are those of now.
func (c *Core) compileInputs(name string, p *tenantPolicy) (s compileInputs, err error) {
	known, _, ok := c.tenants.get(name)
	if !ok {
		return s, fmt.Errorf("tenant %s is not known here", name)
	}
	s.apps, s.overrides = map[address.AppID]map[string]string{}, maps.Clone(p.overrides)
	for _, a := range known.Apps {
		s.apps[a.ID] = a.Labels
	}
	for _, id := range known.Tenant.IDs {
		s.ids = append(s.ids, id.ID)
	}
	for _, r := range c.store.List() {
		if r.Tenant != name {
			continue
		}
		s.subjects = append(s.subjects, cmp.Or(r.AppNow, r.App))
		for _, a := range r.Attachments { // apply containers here the node itself knows best
			if delete(s.overrides, a.Plaintext); r.AppNow != 0 && a.Plaintext.IsValid() {
				s.overrides[a.Plaintext] = r.AppNow
			}
		}
	}
	if s.atDestination = known.Tenant.PolicyAtReceiver(); s.atDestination {
		s.subjects = slices.AppendSeq(s.subjects, maps.Keys(s.apps))
	}
	slices.Sort(s.subjects)
	s.subjects = slices.Compact(s.subjects)
	return s, nil
}

// couldRestrict tells whether a policy that is not in audit was heard.
func (p *tenantPolicy) couldRestrict() bool {
	for _, read := range p.parsed {
		if !read.Audit {
			return true
		}
	}
	return false
}

// renewPolicies has a tenant's policies in force for all that is known of the tenant now: ids, apps and containers. One
// without costs nothing.
func (c *Core) renewPolicies(name string) error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.m[name]
	if p == nil || p.isBlank() && p.isSettled() {
		return nil
	}
	if around, err := c.compileInputs(name, p); err == nil && p.isSettled() && around.equal(p.inputs) {
		return nil
	}
	if err := c.enforce(name); err != nil {
		return err
	}
	return p.lastErr
}

// enforceFor has a new endpoint's policies in force before anything flows: only the first container of an app, or of a
// tenant id, needs anything for that.
func (c *Core) enforceFor(r endpoint.Record) error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.m[r.Tenant]
	if p == nil {
		return nil
	}
	var err error
	// The id may be one that came with the answer to another ADD, which has not got so far.
	_, ready := slices.BinarySearch(p.inputs.subjects, r.App)
	if ready = ready && slices.Contains(p.enforced.IDs, r.TenantID); p.lastErr != nil || !ready && len(p.parsed) > 0 {
		if err = c.enforce(r.Tenant); err == nil {
			err = p.lastErr
		}
	}
	if err == nil && p.enforced.Restricts() {
		err = c.checkGuards(r.Tenant, r.Networks())
	}
	if err != nil {
		return refuse(
			ErrUnavailable,
			"the policies of tenant %s cannot be enforced on this node: %w\n  nothing was changed; mend them, or use another node",
			r.Tenant,
			err,
		)
	}
	return nil
}

// retryPolicies is for an endpoint that has gone: policies that there was no room for may have it now.
func (c *Core) retryPolicies(name string) {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	if p := c.policies.m[name]; p == nil || p.lastErr == nil {
		return
	}
	if err := c.enforce(name); err != nil {
		c.log.Error("policies are not kept on disk", "tenant", name, "error", err)
	}
}

// policiesWait is how long an ADD waits for the policies of a tenant that is new to the node.
const policiesWait = 5 * time.Second

// expectPolicies has every container of a tenant wait for them, also those that ask nobody. The caller holds the
// tenant's lock, and counts a container next.
func (c *Core) expectPolicies(name string) {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	c.policies.of(name).awaited = true
}

// awaitPolicies waits until all policies of a tenant that has some were heard. Those that came while this agent was not
// running it knows only then.
func (c *Core) awaitPolicies(ctx context.Context, name string) error {
	if c.tried != nil {
		select {
		case <-c.tried:
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(policiesWait): // an orchestrator that says nothing is as good as one that is away: what is on disk holds
		}
	}
	c.policies.mu.Lock()
	p := c.policies.m[name]
	c.policies.mu.Unlock()
	if p == nil || !p.awaited {
		return nil
	}
	select {
	case <-p.synced:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(policiesWait):
		return refuse(
			ErrUnavailable,
			"the policies of tenant %s have not come within %v\n  nothing was changed; try again when the orchestrator can be reached",
			name,
			policiesWait,
		)
	}
}

// forgetPolicies takes a tenant's away with its last endpoint: of one that lives here no more nothing is heard, and
// what was heard may be old by the time it comes back.
func (c *Core) forgetPolicies(name string) error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	c.tenants.setSynced(name, false)
	c.tenants.setPolicyProblem(name, nil)
	p := c.policies.m[name]
	if p == nil {
		return nil
	}
	if p.isSynced() {
		p.synced = make(chan struct{})
	}
	if p.lastErr != nil || p.enforced.Selects() ||
		len(p.enforced.Overrides) > 0 { // what was refused may be in force in part
		if err := c.driver.SetPolicies(dpapi.TenantPolicies{Tenant: name}); err != nil {
			return err
		}
		if err := c.seal(name, false); err != nil {
			return err
		}
	}
	if err := c.savePolicies(name, newTenantPolicy()); err != nil {
		return err
	}
	delete(c.policies.m, name)
	c.policies.publish()
	return nil
}

// startPolicies has those from the disk in force, all at once: until then what the kernel has holds. It comes before
// endpoints are brought back. A tenant whose policies cannot be enforced, as its apps may have become more since they
// were, does not keep the others from theirs: what the kernel has of them holds on.
func (c *Core) startPolicies() error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	defer c.policies.publish()
	for _, name := range c.tenants.Names() {
		if c.tenants.hasPolicies(name) && c.policies.m[name] == nil {
			return &statefile.CorruptError{
				Path: c.policies.path(name),
				Err:  fmt.Errorf("it is missing, and tenant %s has policies", name),
			}
		}
	}
	var all, held []dpapi.TenantPolicies
	for name, p := range c.policies.m {
		if !c.tenants.isHosted(name) {
			if err := c.savePolicies(name, newTenantPolicy()); err != nil {
				return err
			}
			delete(c.policies.m, name)
			continue
		}
		next, around, err := c.compile(name, p)
		sealed := next.Restricts()
		if err != nil {
			sealed, held = p.couldRestrict(), append(held, dpapi.TenantPolicies{Tenant: name, IDs: around.ids})
			c.noteRefused(name, p, err)
		} else {
			all, p.enforced, p.inputs = append(all, next), next, around
		}
		if err := c.seal(name, sealed); err != nil {
			return err
		}
	}
	err := c.driver.RestorePolicies(all, held)
	if err == nil || len(all) == 0 {
		return err
	}
	c.log.Warn("policies are brought back of one tenant after the other", "error", err)
	if err := c.driver.RestorePolicies(nil, append(held, all...)); err != nil {
		return err
	}
	for _, t := range all {
		p := c.policies.m[t.Tenant]
		p.enforced, p.inputs = dpapi.TenantPolicies{}, compileInputs{}
		if err := c.enforce(t.Tenant); err != nil {
			return err
		}
	}
	return nil
}
