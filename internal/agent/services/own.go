package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// Reporter sends slices of this node to the orchestrator, which takes all of them or none. A slice without endpoints is
// deleted.
type Reporter interface {
	PutEndpoints(ctx context.Context, slices []service.Slice) error
}

// Errors of a Reporter wrap ErrRefused if the same slices would be refused again, and ErrFull too if the orchestrator
// has no room for them, or for so many at once.
var (
	ErrRefused = errors.New("the orchestrator refused endpoints of services")
	ErrFull    = errors.New("it has no room")
)

// attempt is the last report of a slice.
type attempt struct {
	slice    service.Slice
	at       time.Time
	failures int
	err      error // why it was refused; nil if it was taken
}

// linkState is that of reports to the orchestrator.
type linkState struct {
	running  bool
	failures int       // in a row, and refusals for want of room
	retryAt  time.Time // no report before
	most     int       // slices of a report: half as many after a refused one, twice as many after others
}

// echo is how long the stream may take to send what a report has changed. After that the slice is compared again.
const echo = 5 * time.Second

// A report has at most so many slices and endpoints.
const (
	maxSlices    = 32
	maxEndpoints = 10_000
)

// Linked notes that a stream from the orchestrator has begun: reports do not wait any longer.
func (m *Manager) Linked() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.link.failures, m.link.retryAt = 0, time.Time{}
	m.wake()
}

// findOwn finds the containers on this node that services select.
func (m *Manager) findOwn() {
	m.mu.Lock()
	changed := m.records
	m.records = map[string]bool{}
	m.mu.Unlock()
	if len(changed) == 0 {
		return
	}
	records := map[string][]endpoint.Record{}
	for _, r := range m.config.Endpoints() {
		if changed[r.Tenant] && r.State == endpoint.Active {
			records[r.Tenant] = append(records[r.Tenant], r)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range changed {
		if t := m.tenants[name]; t != nil {
			t.setOwn(ownSlices(name, t.services, records[name], m.config))
		}
	}
}

func (t *tenantServices) setOwn(own map[SliceName]service.Slice) {
	for name, is := range own {
		if !same(t.own[name], is) {
			t.dirty[name.Service] = true
		}
	}
	for name := range t.own {
		if _, stays := own[name]; !stays {
			t.dirty[name.Service] = true
		}
	}
	t.own = own
}

func same(a, b service.Slice) bool { return a.Zone == b.Zone && slices.Equal(a.Endpoints, b.Endpoints) }

// ownSlices returns the slices that this node should have of a tenant's services.
func ownSlices(
	name string, services map[service.Name]service.Service, records []endpoint.Record, c Config,
) map[SliceName]service.Slice {
	candidates := newIndex(services)
	of := map[service.Name][]service.Endpoint{}
	for _, r := range records {
		for _, a := range r.Attachments {
			if !a.Plaintext.IsValid() || !tenant.NetworkHas(a.Network, tenant.Services) {
				continue
			}
			e := service.Endpoint{
				Address: a.Plaintext, Name: service.EndpointName(cmp.Or(r.Pod, r.ContainerID)),
				NotReady: r.Conditions.NotReady, Terminating: r.Conditions.Terminating,
			}
			for _, s := range candidates.selecting(r.Labels) {
				of[s] = append(of[s], e)
			}
		}
	}
	own := map[SliceName]service.Slice{}
	for s, endpoints := range of {
		slices.SortFunc(endpoints, func(a, b service.Endpoint) int { return a.Address.Compare(b.Address) })
		for k, some := range slices.Collect(slices.Chunk(endpoints, service.MaxSliceEndpoints)) {
			slice := ownName(c.Node, k)
			own[SliceName{s, slice}] = service.Slice{
				Tenant: name, Service: s, Name: slice, Node: c.Node, Zone: c.Zone, Endpoints: some,
			}
		}
	}
	return own
}

func ownName(node string, k int) string { return fmt.Sprintf("%s.%d", node, k) }

// index finds the services that select a container by the label of each selector that comes first.
type index struct {
	services map[service.Name]service.Service
	by       map[[2]string][]service.Name
}

func newIndex(services map[service.Name]service.Service) index {
	ix := index{services, map[[2]string][]service.Name{}}
	for name, s := range services {
		if len(s.Selector) > 0 {
			key := slices.Min(slices.Collect(maps.Keys(s.Selector)))
			label := [2]string{key, s.Selector[key]}
			ix.by[label] = append(ix.by[label], name)
		}
	}
	return ix
}

func (ix index) selecting(labels map[string]string) (all []service.Name) {
	for key, value := range labels {
		for _, name := range ix.by[[2]string{key, value}] {
			if selects(ix.services[name], labels) {
				all = append(all, name)
			}
		}
	}
	return all
}

// selects reports whether a service selects a container. A service without a namespace selects those without one.
func selects(s service.Service, labels map[string]string) bool {
	if labels[tenant.NamespaceKey] != s.Namespace {
		return false
	}
	for key, value := range s.Selector {
		if has, ok := labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}

// nextReport returns slices to report now, and marks a report as running; or when there may be some, the zero Time:
// never.
func (m *Manager) nextReport() (batch []service.Slice, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.config.Reporter == nil || m.link.running {
		return nil, time.Time{}
	}
	now := m.config.Now()
	if now.Before(m.link.retryAt) {
		return nil, m.link.retryAt
	}
	var refused []service.Slice
	for name, t := range m.tenants {
		if m.records[name] { // changed since findOwn: without its containers, it would report that they are gone
			continue
		}
		differ, next := t.differences(name, m.config.Node, now)
		at = sooner(at, next)
		for of, s := range differ {
			a, tried := t.reported[of]
			switch {
			case tried && same(a.slice, s) && now.Before(a.due()):
				at = sooner(at, a.due())
			case tried && a.err != nil:
				refused = append(refused, s)
			default:
				batch = append(batch, s)
			}
		}
	}
	if len(batch) == 0 {
		batch = refused // they delay no others
	}
	endpoints := 0
	for i, s := range batch {
		if endpoints += len(s.Endpoints); i > 0 && (i >= m.link.most || endpoints > maxEndpoints) {
			batch = batch[:i]
			break
		}
	}
	m.link.running = len(batch) > 0
	return batch, at
}

// due returns when a report of the same may be repeated.
func (a attempt) due() time.Time {
	if a.err != nil {
		return a.at.Add(pause(a.failures))
	}
	return a.at.Add(echo)
}

// differences returns the slices of this node that the orchestrator lacks, or has in another state, and when to compare
// again what it has taken. Until the stream has had the time to send that, it counts as what the orchestrator has.
func (t *tenantServices) differences(
	name, node string, now time.Time,
) (differ map[SliceName]service.Slice, again time.Time) {
	if !t.whole {
		return nil, again
	}
	differ = map[SliceName]service.Slice{}
	has, again := t.has(now)
	for of, s := range t.own {
		if !same(has[of], s) {
			differ[of] = s
		}
	}
	for of := range has {
		if _, stays := t.own[of]; !stays {
			differ[of] = service.Slice{Tenant: name, Service: of.Service, Name: of.Name, Node: node}
		}
	}
	return differ, again
}

// has returns the slices of this node that the orchestrator has, with what it has taken meanwhile.
func (t *tenantServices) has(now time.Time) (has map[SliceName]service.Slice, again time.Time) {
	has = maps.Clone(t.stored)
	for of, a := range t.reported {
		switch _, wanted := t.own[of]; {
		case now.Before(a.due()) && a.err != nil:
		case now.Before(a.due()):
			if has[of], again = a.slice, sooner(again, a.due()); len(a.slice.Endpoints) == 0 {
				delete(has, of)
			}
		case a.err == nil || !wanted:
			delete(t.reported, of)
		}
	}
	return has, again
}

// report sends a batch and records the result.
func (m *Manager) report(ctx context.Context, batch []service.Slice) {
	err := m.config.Reporter.PutEndpoints(ctx, batch)
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.wake()
	m.link.running = false
	if err != nil && !errors.Is(err, ErrRefused) {
		if m.link.failures == 3 && ctx.Err() == nil {
			m.config.Log.Warn("endpoints of services cannot be reported; retrying", "error", err)
		}
		m.link.retryAt = m.config.Now().Add(pause(m.link.failures))
		m.link.failures++
		return
	}
	if errors.Is(err, ErrFull) { // others wait for room, too
		m.link.retryAt = m.config.Now().Add(pause(m.link.failures))
		m.link.failures++
	} else {
		m.link.failures = 0
	}
	if err == nil {
		m.link.most = min(2*m.link.most, maxSlices)
	} else if m.link.most = max(len(batch)/2, 1); len(batch) > 1 {
		return
	}
	for _, s := range batch {
		at := SliceName{s.Service, s.Name}
		t := m.tenants[s.Tenant]
		if t == nil {
			continue
		}
		a := attempt{slice: s, at: m.config.Now(), err: err}
		if was := t.reported[at]; err != nil && was.err != nil {
			a.failures = was.failures + 1
		}
		t.reported[at] = a
	}
}
