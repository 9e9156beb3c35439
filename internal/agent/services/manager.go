package services

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// Manager has the services of hosted tenants. It has no state on disk: until the orchestrator has sent the services,
// those that an earlier process wrote stay in the packet path.
type Manager struct {
	config Config
	due    chan struct{} // has a value while there may be work

	writing sync.Mutex // held while the packet path is written
	mu      sync.Mutex // for the fields below; may be locked while writing is, not the other way around
	tenants map[string]*tenantServices
	records map[string]bool          // tenants whose containers here have changed
	awaited map[string]chan struct{} // of tenants whose services are to be written; see Expect
	link    linkState

	addresses Addresses // of this node; the caller must not change them

	// exposed has who wrote each exposed frontend last. An external address, a node port or a host port may pass from
	// one owner to another: what the former one deletes later must not be the frontend of the new one.
	exposed map[dpapi.FrontendKey]owner
	hosts   publishers
}

// Config is what a Manager needs of the agent.
type Config struct {
	Node, Zone string // of this node; the zone may be empty
	Plan       address.Plan
	Tenants    Tenants
	Endpoints  func() []endpoint.Record // on this node, without those that are being created
	Driver     dpapi.Services
	Reporter   Reporter  // nil: endpoints of this node are not reported
	Addresses  Addresses // of this node at the start; see SetAddresses
	Now        func() time.Time
	Log        *slog.Logger
}

// Addresses are those of a node.
type Addresses struct {
	Own   []netip.Addr // all that are valid beyond a link; no service has one of them as an external address here
	Ports []netip.Addr // at which hosts outside of the cluster reach node ports
	// orchestrator are those at which the agent calls it: no service has one as an external address here, or the
	// agent would call the service
	orchestrator []netip.Addr
}

func (a Addresses) equal(b Addresses) bool {
	return slices.Equal(a.Own, b.Own) && slices.Equal(a.Ports, b.Ports) && slices.Equal(a.orchestrator, b.orchestrator)
}

// forbid returns whose address is none that a service may have at this node, and what to do; "" if it may.
func (a Addresses) forbid(external netip.Addr) (whose, remedy string) {
	switch {
	case slices.Contains(a.Own, external):
		return "one of this node's own", "use another, or remove it from the node's interface"
	case slices.Contains(a.orchestrator, external):
		return "that of the orchestrator", "use another"
	}
	return "", ""
}

// Tenants is what a Manager reads and records of the node's tenants.
type Tenants interface {
	IsHosted(name string) bool
	// Tenant returns a tenant with its keys; false if this node does not know them.
	Tenant(name string) (tenant.Tenant, bool)
	// SetServicesSynced sets whether all services of a tenant were received.
	SetServicesSynced(name string, synced bool)
}

// New returns a manager without services.
func New(c Config) *Manager {
	if c.Now == nil {
		c.Now = time.Now
	}
	m := &Manager{
		config: c, due: make(chan struct{}, 1), tenants: map[string]*tenantServices{}, records: map[string]bool{},
		awaited: map[string]chan struct{}{}, link: linkState{most: maxSlices},
		addresses: c.Addresses, exposed: map[dpapi.FrontendKey]owner{},
		hosts: publishers{by: map[portNumber][]*publisher{}},
	}
	m.restore(c.Endpoints())
	return m
}

func (m *Manager) wake() {
	select {
	case m.due <- struct{}{}:
	default: // a signal is pending
	}
}

// Update is an update of a tenant's services. What ends is removed before the rest is added.
type Update struct {
	Tenant      string
	Whole       bool // the update is complete: all other services and slices are removed
	Services    []service.Service
	Ended       []service.Name // with their slices
	Slices      []service.Slice
	EndedSlices []SliceName
}

// SliceName is the name of a slice within its tenant.
type SliceName struct {
	Service service.Name
	Name    string
}

// Apply keeps an update of a tenant that the node hosts; Run writes it to the packet path.
func (m *Manager) Apply(u Update) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.config.Tenants.IsHosted(u.Tenant) {
		return
	}
	t := m.tenants[u.Tenant]
	if t == nil {
		t = newTenantServices()
		m.tenants[u.Tenant] = t
	}
	t.apply(u, m.config.Node)
	if u.Whole {
		m.config.Tenants.SetServicesSynced(u.Tenant, true)
	}
	m.records[u.Tenant] = true // a service may select other containers
	m.wake()
}

// EndpointsChanged notes that a tenant's containers on this node have changed.
func (m *Manager) EndpointsChanged(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tenants[name] != nil {
		m.records[name] = true
		m.wake()
	}
}

// TenantChanged notes that a tenant may have other keys.
func (m *Manager) TenantChanged(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hosts.changed = true
	m.wake()
}

// SetAddresses sets the addresses of this node, which have changed.
func (m *Manager) SetAddresses(is Addresses) {
	m.mu.Lock()
	defer m.mu.Unlock()
	is.orchestrator = m.addresses.orchestrator
	m.addresses = is
	m.hosts.changed = true
	m.wake()
}

// OrchestratorAt notes an address at which the agent calls the orchestrator.
func (m *Manager) OrchestratorAt(a netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.Contains(m.addresses.orchestrator, a) {
		return
	}
	m.addresses.orchestrator = append(slices.Clone(m.addresses.orchestrator), a)
	m.wake()
}

// Expect makes Await wait for the services of a newly hosted tenant.
func (m *Manager) Expect(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tenants[name] == nil && m.awaited[name] == nil {
		m.awaited[name] = make(chan struct{})
	}
}

// arrived ends the wait for a tenant's services. The caller holds the lock.
func (m *Manager) arrived(name string) {
	if m.awaited[name] != nil {
		close(m.awaited[name])
		delete(m.awaited, name)
	}
}

// maxWait is how long Await waits.
const maxWait = 5 * time.Second

// Await waits until the services of a newly hosted tenant are in the packet path, so that its first container reaches
// them. It returns false if they are not there within 5 s.
func (m *Manager) Await(ctx context.Context, name string) bool {
	m.mu.Lock()
	awaited := m.awaited[name]
	m.mu.Unlock()
	if awaited == nil {
		return true
	}
	select {
	case <-awaited:
		return true
	case <-ctx.Done():
	case <-time.After(maxWait):
	}
	return false
}

// Forget removes the services of a tenant that the node does not host any more. The orchestrator then deletes the
// slices that the node has reported.
func (m *Manager) Forget(t tenant.Tenant) error {
	m.writing.Lock()
	defer m.writing.Unlock()
	m.mu.Lock()
	delete(m.tenants, t.Name)
	delete(m.records, t.Name)
	m.arrived(t.Name)
	maps.DeleteFunc(m.exposed, func(_ dpapi.FrontendKey, of owner) bool { return of == owner{tenant: t.Name} })
	m.config.Tenants.SetServicesSynced(t.Name, false)
	m.mu.Unlock()
	prefix, err := m.config.Plan.TenantServices(t.ServicesNumber)
	if err != nil {
		return nil // it has had no service
	}
	return m.config.Driver.KeepServices(prefix, nil)
}

// Run writes services to the packet path, and reports endpoints, until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	var reports sync.WaitGroup
	defer reports.Wait()
	for {
		m.findOwn()
		next := m.write()
		if batch, at := m.nextReport(); len(batch) > 0 {
			reports.Go(func() { m.report(ctx, batch) })
		} else {
			next = sooner(next, at)
		}
		var again <-chan time.Time
		if !next.IsZero() {
			again = time.After(next.Sub(m.config.Now()))
		}
		select {
		case <-m.due:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// sooner returns the earlier time; the zero Time is never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Pauses before a failed call is repeated.
const (
	leastPause = 250 * time.Millisecond
	mostPause  = 15 * time.Second
)

func pause(failures int) time.Duration { return min(leastPause<<min(failures, 10), mostPause) }

// write writes what has changed to the packet path, and returns when a failed write has to be repeated; never is the
// zero Time.
func (m *Manager) write() (next time.Time) {
	m.writing.Lock()
	defer m.writing.Unlock()
	next = m.publishAll()
	for _, name := range m.names() {
		m.mu.Lock()
		t := m.tenants[name]
		known, ok := m.config.Tenants.Tenant(name)
		if t == nil || !ok || m.config.Now().Before(t.retryAt) {
			if t != nil && ok {
				next = sooner(next, t.retryAt)
			}
			m.mu.Unlock()
			continue
		}
		if m.records[name] { // changed since findOwn: the next pass has its containers
			m.mu.Unlock()
			continue
		}
		t.setAddresses(m.addresses)
		work := t.work(known, &m.hosts, m.config)
		if work.isEmpty() && t.whole {
			m.arrived(name)
		}
		if work.isEmpty() {
			m.mu.Unlock()
			continue
		}
		if work.prefix.IsValid() {
			work.keys = append(work.keys, m.hostPortKeys()...)
		}
		work.leaveOthers(owner{tenant: name}, m.exposed)
		m.mu.Unlock()
		err := work.write(m.config.Driver)
		m.mu.Lock()
		if err == nil {
			work.noteExposed(owner{tenant: name}, m.exposed)
		}
		t.note(work, err, m.config.Now())
		m.arrived(name)
		next = sooner(next, t.retryAt)
		m.mu.Unlock()
		if err != nil {
			m.config.Log.Error("writing services of a tenant to the packet path failed", "tenant", name, "error", err)
		}
	}
	return next
}

func (m *Manager) names() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.tenants))
}
