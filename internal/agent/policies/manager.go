package policies

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Manager has the policies of hosted tenants. They are on disk, so that a start without the orchestrator enforces them
// before the first packet of a container.
type Manager struct {
	config  Config
	disk    statefile.Disk
	dir     string
	damages *statefile.Damages

	mu      sync.Mutex // for the map; each tenant has a lock of its own, so that no tenant waits for another's rules
	tenants map[string]*tenantPolicy

	published atomic.Pointer[map[string]View] // read without waiting for a compilation
	times     durations
}

// Config is what a Manager needs of the agent.
type Config struct {
	Tenants   Tenants
	Endpoints func() []endpoint.Record // on this node
	Node      netip.Prefix             // of this node
	Driver    dpapi.Policies
	// Seal isolates a tenant's containers on networks that cannot enforce its policies, or ends that.
	Seal func(tenant string, sealed bool) error
	// CheckGuards returns why one of these networks enforces no policies of a tenant on this node, or nil.
	CheckGuards func(tenant string, networks []string) error
	// Tried is closed after the first contact with the orchestrator, or a bounded time after the start without one;
	// nil: do not wait.
	Tried <-chan struct{}
	Log   *slog.Logger
}

// Tenants is what a Manager reads and records of the node's tenants.
type Tenants interface {
	Names() []string
	IsHosted(name string) bool
	// PolicyInputs returns a tenant and the labels of its apps; ok is false if the node does not know the tenant.
	PolicyInputs(name string) (t tenant.Tenant, apps map[address.AppID]map[string]string, ok bool)
	HasPolicies(name string) bool
	// Lost returns why the tenant's file could not be read; nil if the node knows the tenant.
	Lost(name string) error
	SetHasPolicies(name string, has bool) error
	SetSynced(name string, synced bool)
	SetPoliciesRevision(name string, revision int64)
	SetPolicyProblem(name string, why error)
}

// Connect gives the manager what it needs of the agent, before any other method is called.
func (m *Manager) Connect(c Config) { m.config = c }

// Apply applies an update of a hosted tenant. The manager keeps the last received policies even if it could not enforce
// them, and retries on the next update or ADD; until then the previous ones stay in force and EnforceFor refuses new
// endpoints of the tenant. The caller holds the tenant's lock.
func (m *Manager) Apply(n Update) error {
	p := m.lockOrCreate(n.Tenant)
	defer p.mu.Unlock()
	if p.apply(n) || !p.isSettled() { // nothing changes for most tenants of a snapshot
		if err := m.enforce(n.Tenant, p); err != nil {
			return err
		}
		if p.lastErr == nil {
			m.times.enforced(n.Received)
		}
	}
	if n.Whole && !p.isSynced() {
		close(p.synced)
	}
	if n.Whole {
		m.config.Tenants.SetSynced(n.Tenant, true)
	}
	if n.Whole || len(n.Documents)+len(n.Removed) > 0 {
		m.config.Tenants.SetPoliciesRevision(n.Tenant, n.Revision)
	}
	return nil
}

// save writes the policies to disk. The flag in the tenant's own file is set last and cleared first.
func (m *Manager) save(name string, p *tenantPolicy) error {
	if p.isBlank() {
		if err := m.config.Tenants.SetHasPolicies(name, false); err != nil {
			return err
		}
		return m.remove(name)
	}
	if err := m.write(name, p); err != nil {
		return err
	}
	return m.config.Tenants.SetHasPolicies(name, true)
}

// lock returns the policies of a tenant with their lock held, or nil if there are none.
func (m *Manager) lock(name string) *tenantPolicy {
	return m.lockEntry(name, func() *tenantPolicy { return nil })
}

// lockOrCreate is lock; it creates an empty entry.
func (m *Manager) lockOrCreate(name string) *tenantPolicy { return m.lockEntry(name, newTenantPolicy) }

func (m *Manager) lockEntry(name string, create func() *tenantPolicy) *tenantPolicy {
	for {
		m.mu.Lock()
		p := m.tenants[name]
		if p == nil {
			if p = create(); p != nil {
				m.tenants[name] = p
			}
		}
		m.mu.Unlock()
		if p == nil {
			return nil
		}
		p.mu.Lock()
		if !p.removed {
			return p
		}
		p.mu.Unlock()
	}
}

// drop removes an entry whose lock is held.
func (m *Manager) drop(name string, p *tenantPolicy) {
	p.removed = true
	m.mu.Lock()
	delete(m.tenants, name)
	m.mu.Unlock()
	m.publish(name, newTenantPolicy())
}

// enforce compiles a tenant's policies for the containers on this node, installs them in the packet path, and stores
// them. If the packet path refuses them, the previous ones stay in force and the refusal is recorded; the returned
// error is of the disk only. The caller holds the lock of the tenant's policies.
func (m *Manager) enforce(name string, p *tenantPolicy) error {
	defer func() { m.publish(name, p) }()
	next, around, err := m.compile(name, p)
	restricts := p.restrictsWith(next, around)
	if err == nil && restricts {
		err = m.config.Seal(name, true)
	}
	if err == nil {
		err = m.config.Driver.SetPolicies(next)
	}
	if err == nil && !restricts {
		err = m.config.Seal(name, false)
	}
	if err != nil {
		m.noteRefused(name, p, err)
		return nil // a new stream with the same policies would not help
	}
	p.enforced, p.inputs, p.restricts, p.lastErr = next, around, restricts, nil
	m.config.Tenants.SetPolicyProblem(name, nil)
	if !p.unsaved {
		return nil
	}
	if err := m.save(name, p); err != nil {
		return err
	}
	p.unsaved = false
	return nil
}

// noteRefused records that the last update is not in force.
func (m *Manager) noteRefused(name string, p *tenantPolicy, why error) {
	p.lastErr = why
	m.config.Tenants.SetPolicyProblem(name, why)
	m.config.Log.Error("the last policy update is not in force", "tenant", name, "error", why)
}

// Renew enforces a tenant's policies for its current ids, apps and containers. It does nothing for tenants without
// policies.
func (m *Manager) Renew(name string) error {
	p := m.lock(name)
	if p == nil {
		return nil
	}
	defer p.mu.Unlock()
	if p.isBlank() && p.isSettled() {
		return nil
	}
	if around, err := m.compileInputs(name, p); err == nil && p.isSettled() && around.equal(p.inputs) {
		if around.offloaded {
			p.recount(name, around.apps)
			m.publish(name, p)
		}
		return nil
	}
	if err := m.enforce(name, p); err != nil {
		return err
	}
	return p.lastErr
}

// EnforceFor enforces the policies for a new endpoint before its packets flow. Only the first container of an app or of
// a tenant id needs a compilation.
func (m *Manager) EnforceFor(r endpoint.Record) error {
	p := m.lock(r.Tenant)
	if p == nil {
		return nil
	}
	defer p.mu.Unlock()
	var err error
	// The id may have arrived with the answer to another ADD that has not reached this point.
	_, ready := slices.BinarySearch(p.inputs.subjects, r.App)
	ready = ready || p.inputs.offloaded
	if ready = ready && slices.Contains(p.enforced.IDs, r.TenantID); p.lastErr != nil || !ready && len(p.parsed) > 0 {
		if err = m.enforce(r.Tenant, p); err == nil {
			err = p.lastErr
		}
	}
	if err == nil && p.restricts {
		err = m.config.CheckGuards(r.Tenant, r.Networks())
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

// Retry retries refused policies after an endpoint has gone, which may have made room.
func (m *Manager) Retry(name string) {
	p := m.lock(name)
	if p == nil {
		return
	}
	defer p.mu.Unlock()
	if p.lastErr == nil {
		return
	}
	if err := m.enforce(name, p); err != nil {
		m.config.Log.Error("writing policies to disk failed", "tenant", name, "error", err)
	}
}

// maxWait is how long an ADD waits for the policies of a newly hosted tenant.
const maxWait = 5 * time.Second

// Expect makes every ADD of a tenant wait for its policies, also ADDs that need no request to the orchestrator. The
// caller holds the tenant's lock, and counts a container next.
func (m *Manager) Expect(name string) {
	p := m.lockOrCreate(name)
	defer p.mu.Unlock()
	p.awaited = true
}

// Await waits until all policies of a tenant with policies are received. Policies that changed while the agent did not
// run are known only then.
func (m *Manager) Await(ctx context.Context, name string) error {
	if m.config.Tried != nil {
		select {
		case <-m.config.Tried:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	p := m.lock(name)
	if p == nil {
		return nil
	}
	awaited, synced := p.awaited, p.synced
	p.mu.Unlock()
	if !awaited {
		return nil
	}
	select {
	case <-synced:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(maxWait):
		return refusal.New(
			refusal.ErrUnavailable,
			"the policies of tenant %s did not arrive within %v\n  nothing was changed; try again when the "+
				"orchestrator can be reached",
			name,
			maxWait,
		)
	}
}

// Forget removes the policies of a tenant with its last endpoint: the node receives no further updates, so they could
// be outdated when the tenant returns.
func (m *Manager) Forget(name string) error {
	m.config.Tenants.SetSynced(name, false)
	m.config.Tenants.SetPolicyProblem(name, nil)
	p := m.lock(name)
	if p == nil {
		return nil
	}
	defer p.mu.Unlock()
	if p.isSynced() {
		p.synced = make(chan struct{})
	}
	if p.lastErr != nil || p.enforced.Selects() ||
		len(p.enforced.Overrides) > 0 { // refused policies may be in force in part
		if err := m.config.Driver.SetPolicies(dpapi.TenantPolicies{Tenant: name}); err != nil {
			return err
		}
		if err := m.config.Seal(name, false); err != nil {
			return err
		}
	}
	if err := m.save(name, newTenantPolicy()); err != nil {
		return err
	}
	m.drop(name, p)
	return nil
}

// Start installs the policies from disk, all at once; until then the kernel's previous policies apply. It runs before
// endpoints are restored, and before any other method is called. If a tenant's policies cannot be enforced, for example
// because it has more apps now, the kernel's previous policies of that tenant stay, and those of the others are
// installed.
func (m *Manager) Start() error {
	for _, name := range m.config.Tenants.Names() {
		if why := m.config.Tenants.Lost(name); why != nil {
			// Its file said whether it has policies. A later save also restores that.
			if m.tenants[name] == nil {
				m.tenants[name] = unreadPolicy(why)
			}
			m.tenants[name].unsaved = true
			continue
		}
		if m.config.Tenants.HasPolicies(name) && m.tenants[name] == nil {
			missing := &statefile.CorruptError{
				Path: m.path(name),
				Err:  fmt.Errorf("it is missing, but tenant %s has policies", name),
			}
			if err := m.damages.SetAside(missing, instead(name)); err != nil {
				return err
			}
			m.tenants[name] = unreadPolicy(missing)
		}
	}
	var all, held []dpapi.TenantPolicies
	for name, p := range m.tenants {
		if !m.config.Tenants.IsHosted(name) {
			if err := m.save(name, newTenantPolicy()); err != nil {
				return err
			}
			m.drop(name, p)
			continue
		}
		next, around, err := m.compile(name, p)
		sealed := p.restrictsWith(next, around)
		if err != nil {
			sealed, held = p.couldRestrict(), append(held, dpapi.TenantPolicies{
				Tenant: name, IDs: around.ids, Lost: m.config.Tenants.Lost(name) != nil,
			})
			m.noteRefused(name, p, err)
		} else {
			all, p.enforced, p.inputs, p.restricts = append(all, next), next, around, sealed
		}
		m.publish(name, p)
		if err := m.config.Seal(name, sealed); err != nil {
			return err
		}
	}
	err := m.config.Driver.RestorePolicies(all, held)
	if err == nil || len(all) == 0 {
		return err
	}
	m.config.Log.Warn("restoring all policies at once failed; restoring them tenant by tenant", "error", err)
	if err := m.config.Driver.RestorePolicies(nil, append(held, all...)); err != nil {
		return err
	}
	for _, t := range all {
		p := m.tenants[t.Tenant]
		p.enforced, p.inputs, p.restricts = dpapi.TenantPolicies{}, compileInputs{}, false
		if err := m.enforce(t.Tenant, p); err != nil {
			return err
		}
	}
	return nil
}
