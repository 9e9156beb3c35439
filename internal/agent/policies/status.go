package policies

import (
	"maps"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pilaster.io/pilaster/internal/dpapi"
)

// View is a tenant's policy state for status requests.
type View struct {
	dpapi.TenantPolicies
	Err       error // why the last update is not in force; nil if it is
	Restricts bool  // a policy that is not in audit mode selects an app, here or at a frontend
	Offloaded bool  // frontends look the rules up: the tables here only deny
	Rules     int   // entries of the fullest table that the policies need where they are looked up
}

// publish makes a tenant's policy state visible to Manager.View. The caller holds the lock of the tenant's policies.
func (m *Manager) publish(name string, p *tenantPolicy) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := maps.Clone(m.View())
	if all == nil {
		all = map[string]View{}
	}
	delete(all, name)
	if p.enforced.Selects() || p.lastErr != nil {
		all[name] = View{p.enforced, p.lastErr, p.restricts, p.inputs.offloaded, p.rules}
	}
	m.published.Store(&all)
}

// View returns the state of tenants with policies or with an error, by name. It does not wait for a compilation.
func (m *Manager) View() map[string]View {
	if all := m.published.Load(); all != nil {
		return *all
	}
	return nil
}

// durations measures compilation and enforcement.
type durations struct{ compile, enforce prometheus.Histogram }

func newDurations() durations {
	of := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(
			prometheus.HistogramOpts{Name: "pilaster_policy_" + name + "_seconds", Help: help,
				Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}},
		)
	}
	return durations{
		of("compile_duration", "Compiling a tenant's policies for the containers on this node."),
		of("enforce_duration", "From the orchestrator's message until its policies are in the packet path."),
	}
}

func (t durations) compiled(since time.Time) { t.compile.Observe(time.Since(since).Seconds()) }

func (t durations) enforced(received time.Time) {
	if !received.IsZero() {
		t.enforce.Observe(time.Since(received).Seconds())
	}
}

// Times returns the metrics of compilation and enforcement.
func (m *Manager) Times() []prometheus.Collector {
	return []prometheus.Collector{m.times.compile, m.times.enforce}
}
