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
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/statefile"
)

// policies are the policies of hosted tenants. They are on disk, so that a start without the orchestrator enforces them
// before the first packet of a container.
type policies struct {
	disk statefile.Disk
	dir  string

	mu sync.Mutex // held during compilation and installation, so that the last update wins
	m  map[string]*tenantPolicy

	published atomic.Pointer[map[string]policyView] // read without waiting for a compilation
	times     policyTimes
}

// policyName identifies a policy within a tenant.
type policyName struct{ Kind, Namespace, Name string }

// Document is a policy as its author wrote it.
type Document struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Text      string `json:"document"`
}

func (d Document) name() policyName { return policyName{d.Kind, d.Namespace, d.Name} }

// tenantPolicy is the policy state of one tenant; it may be empty.
type tenantPolicy struct {
	documents   map[policyName]Document
	parsed      map[policyName]policy.Policy
	parseErrors map[policyName]error // of the documents that could not be parsed
	overrides   map[netip.Addr]address.AppID
	synced      chan struct{} // closed once all policies of the tenant were received
	awaited     bool          // the tenant has policies: ADDs wait until they are received
	// the disk lacks the last update: only enforceable policies are stored, so that every start succeeds
	unsaved bool

	enforced dpapi.TenantPolicies
	inputs   compileInputs // of the last successful compilation
	lastErr  error         // why the last update is not in force; nil if it is

	index   *policy.Index // built for the apps in indexed
	indexed map[address.AppID]map[string]string
}

// compileInputs are the inputs of a compilation besides the policies.
type compileInputs struct {
	ids       []address.TenantID
	apps      map[address.AppID]map[string]string
	subjects  []address.AppID // of containers here, or all apps if atDestination
	overrides map[netip.Addr]address.AppID

	atDestination bool // policy is applied at the destination, also to packets of other nodes' containers
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

// isBlank reports that there is nothing to enforce.
func (p *tenantPolicy) isBlank() bool { return len(p.documents)+len(p.overrides) == 0 }

// isSettled reports that the last update is in force and on disk.
func (p *tenantPolicy) isSettled() bool { return p.lastErr == nil && !p.unsaved }

func (p *tenantPolicy) isSynced() bool {
	select {
	case <-p.synced:
		return true
	default:
		return false
	}
}

// PolicyUpdate is an update of a tenant's policies and app overrides.
type PolicyUpdate struct {
	Tenant         string
	Received       time.Time
	Whole          bool // the update is complete: all other policies and overrides are removed
	Documents      []Document
	Removed        []Document // only the names are set
	Overrides      map[netip.Addr]address.AppID
	EndedOverrides []netip.Addr // containers whose app is again the one in their address
}

// apply applies an update and reports whether it changes anything. It keeps documents that this build cannot parse:
// dropping them would allow what they deny.
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

// missingFrom returns the known documents and overrides that a complete update does not contain.
func (p *tenantPolicy) missingFrom(n PolicyUpdate) (documents []Document, overrides []netip.Addr) {
	listed := make(map[policyName]bool, len(n.Documents))
	for _, d := range n.Documents {
		listed[d.name()] = true
	}
	for name, d := range p.documents {
		if !listed[name] {
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

// ApplyPolicies applies a policy update. The agent keeps the last received policies even if it could not enforce them,
// and retries on the next update or ADD; until then the previous ones stay in force and no container of the tenant is
// added.
func (c *Core) ApplyPolicies(ctx context.Context, n PolicyUpdate) error {
	unlock, err := c.byTenant.Lock(ctx, n.Tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if !c.tenants.isHosted(n.Tenant) {
		return nil // not hosted any more
	}
	if _, deleted, _ := c.tenants.Get(n.Tenant); deleted {
		return nil // its last policies stay in force for its remaining containers
	}
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.of(n.Tenant)
	if p.apply(n) || !p.isSettled() { // nothing changes for most tenants of a snapshot
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

// savePolicies writes the policies to disk. The flag in the tenant's own file is set last and cleared first.
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

// of returns the policies of a tenant; it creates an empty entry.
func (p *policies) of(name string) *tenantPolicy {
	if p.m[name] == nil {
		p.m[name] = newTenantPolicy()
	}
	return p.m[name]
}

// enforce compiles a tenant's policies for the containers on this node, installs them in the packet path, and stores
// them. If the packet path refuses them, the previous ones stay in force and the refusal is recorded; the returned
// error is of the disk only. The caller holds the policies' lock.
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
		return nil // a new stream with the same policies would not help
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

// noteRefused records that the last update is not in force.
func (c *Core) noteRefused(name string, p *tenantPolicy, why error) {
	p.lastErr = why
	c.tenants.setPolicyProblem(name, why)
	c.log.Error("the last policy update is not in force", "tenant", name, "error", why)
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

// compileInputs returns the current inputs.
func (c *Core) compileInputs(name string, p *tenantPolicy) (s compileInputs, err error) {
	known, _, ok := c.tenants.Get(name)
	if !ok {
		return s, fmt.Errorf("this node does not know tenant %s", name)
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
		for _, a := range r.Attachments { // for containers here local state is newer
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

// couldRestrict reports whether a policy that is not in audit mode was received.
func (p *tenantPolicy) couldRestrict() bool {
	for _, read := range p.parsed {
		if !read.Audit {
			return true
		}
	}
	return false
}

// renewPolicies enforces a tenant's policies for its current ids, apps and containers. It does nothing for tenants
// without policies.
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

// enforceFor enforces the policies for a new endpoint before its packets flow. Only the first container of an app or of
// a tenant id needs a compilation.
func (c *Core) enforceFor(r endpoint.Record) error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	p := c.policies.m[r.Tenant]
	if p == nil {
		return nil
	}
	var err error
	// The id may have arrived with the answer to another ADD that has not reached this point.
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
		return refusal.New(
			refusal.ErrUnavailable,
			"the policies of tenant %s cannot be enforced on this node: %w\n  nothing was changed; correct them, or "+
				"use another node",
			r.Tenant,
			err,
		)
	}
	return nil
}

// retryPolicies retries refused policies after an endpoint has gone, which may have made room.
func (c *Core) retryPolicies(name string) {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	if p := c.policies.m[name]; p == nil || p.lastErr == nil {
		return
	}
	if err := c.enforce(name); err != nil {
		c.log.Error("writing policies to disk failed", "tenant", name, "error", err)
	}
}

// policiesWait is how long an ADD waits for the policies of a newly hosted tenant.
const policiesWait = 5 * time.Second

// expectPolicies makes every ADD of a tenant wait for its policies, also ADDs that need no request to the orchestrator.
// The caller holds the tenant's lock, and counts a container next.
func (c *Core) expectPolicies(name string) {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	c.policies.of(name).awaited = true
}

// awaitPolicies waits until all policies of a tenant with policies are received. Policies that changed while the agent
// did not run are known only then.
func (c *Core) awaitPolicies(ctx context.Context, name string) error {
	if c.tried != nil {
		select {
		case <-c.tried:
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(policiesWait): // like an orchestrator that cannot be reached: the policies on disk apply
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
		return refusal.New(
			refusal.ErrUnavailable,
			"the policies of tenant %s did not arrive within %v\n  nothing was changed; try again when the "+
				"orchestrator can be reached",
			name,
			policiesWait,
		)
	}
}

// forgetPolicies removes the policies of a tenant with its last endpoint: the node receives no further updates, so they
// could be outdated when the tenant returns.
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
		len(p.enforced.Overrides) > 0 { // refused policies may be in force in part
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

// startPolicies installs the policies from disk, all at once; until then the kernel's previous policies apply. It runs
// before endpoints are restored. If a tenant's policies cannot be enforced, for example because it has more apps now,
// the kernel's previous policies of that tenant stay, and those of the others are installed.
func (c *Core) startPolicies() error {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	defer c.policies.publish()
	for _, name := range c.tenants.Names() {
		if c.tenants.hasPolicies(name) && c.policies.m[name] == nil {
			return &statefile.CorruptError{
				Path: c.policies.path(name),
				Err:  fmt.Errorf("it is missing, but tenant %s has policies", name),
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
	c.log.Warn("restoring all policies at once failed; restoring them tenant by tenant", "error", err)
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
