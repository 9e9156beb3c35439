package policies

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// compileInputs are the inputs of a compilation besides the policies.
type compileInputs struct {
	ids       []address.TenantID
	apps      map[address.AppID]map[string]string
	subjects  []address.AppID // of containers here, or all apps if atDestination
	overrides map[netip.Addr]address.AppID

	atDestination bool // policy is applied at the destination, also to packets of other nodes' containers
	offloaded     bool // frontends look the rules up: this node has none, and the result depends on no app
}

func (s compileInputs) equal(o compileInputs) bool {
	return s.atDestination == o.atDestination && s.offloaded == o.offloaded &&
		slices.Equal(s.ids, o.ids) && slices.Equal(s.subjects, o.subjects) &&
		maps.Equal(s.overrides, o.overrides) &&
		(s.offloaded || sameApps(s.apps, o.apps))
}

func sameApps(a, b map[address.AppID]map[string]string) bool {
	return maps.EqualFunc(a, b, func(a, b map[string]string) bool { return maps.Equal(a, b) })
}

// Offloaded reports whether frontends look up a tenant's rules for the containers of a node, which then has none. A
// backend that is a frontend of another backend keeps them.
func Offloaded(t tenant.Tenant, node netip.Prefix) (is bool) {
	for _, o := range t.Offloads {
		if o.HasFrontend(node) {
			return false
		}
		is = is || o.Prefix == node && o.Phase == tenant.OffloadActive
	}
	return is
}

func (m *Manager) compile(name string, p *tenantPolicy) (next dpapi.TenantPolicies, around compileInputs, err error) {
	for _, err := range p.parseErrors {
		return next, around, err
	}
	if around, err = m.compileInputs(name, p); err == nil {
		err = p.unread
	}
	if err != nil {
		return next, around, err
	}
	defer m.times.compiled(time.Now())
	next = dpapi.TenantPolicies{Tenant: name, IDs: around.ids, Overrides: around.overrides}
	all := slices.Collect(maps.Values(p.parsed))
	if around.offloaded {
		// Packets with a frontend's verdict need no rules, but are counted here; those without one must not pass.
		if len(all) > 0 {
			next.Tables = policy.Isolating()
			next.Tables.Names, err = policy.Names(name, all)
		}
		p.recount(name, around.apps)
		return next, around, err
	}
	if p.index == nil || !sameApps(p.indexed, around.apps) {
		p.index, p.indexed = policy.NewIndex(around.apps), around.apps
	}
	if next.Tables, err = p.index.Compile(name, all, around.subjects); around.atDestination {
		next.Tables.HoldUnknown(all)
	}
	p.rules = next.Tables.Largest()
	return next, around, err
}

// recount counts how many entries the policies need on a frontend, if policies or apps have changed; 0 if they cannot
// be compiled. A backend tells the orchestrator by it how much room they need when they return.
func (p *tenantPolicy) recount(name string, apps map[address.AppID]map[string]string) {
	if p.index = nil; p.rules > 0 && sameApps(p.indexed, apps) {
		return
	}
	p.rules, p.indexed = 0, apps
	all := slices.Collect(maps.Values(p.parsed))
	if tables, err := policy.NewIndex(apps).Compile(name, all, slices.Sorted(maps.Keys(apps))); err == nil {
		p.rules = tables.Largest()
	}
}

// compileInputs returns the current inputs.
func (m *Manager) compileInputs(name string, p *tenantPolicy) (s compileInputs, err error) {
	known, apps, ok := m.config.Tenants.PolicyInputs(name)
	for _, id := range known.IDs {
		s.ids = append(s.ids, id.ID)
	}
	if !ok {
		return s, fmt.Errorf("this node does not know tenant %s", name)
	}
	s.apps, s.overrides = apps, maps.Clone(p.overrides)
	s.offloaded = Offloaded(known, m.config.Node)
	for _, r := range m.config.Endpoints() {
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
	s.atDestination = known.PolicyAtReceiver()
	if s.offloaded {
		s.subjects = nil
		return s, nil
	}
	if s.atDestination {
		s.subjects = slices.AppendSeq(s.subjects, maps.Keys(s.apps))
	}
	slices.Sort(s.subjects)
	s.subjects = slices.Compact(s.subjects)
	return s, nil
}
