package cache

import (
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// markUnreconciled marks a tenant that may need the next step of its key rotation or app retirement: for example, the
// last node may have accepted an id, released an id, or confirmed the retirement round.
func (m *Cache) markUnreconciled(tenant string) {
	if t := m.Tenants[tenant]; t != nil && (len(t.Ids) > 1 || t.RetiringApps != nil) {
		m.Unreconciled[tenant] = true
	}
}

// DueTenants returns the marked tenants that need a step, and clears the marks.
func (m *Cache) DueTenants() []string {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	var due []string
	for name := range m.Unreconciled {
		t, hosting := m.Tenants[name], m.hostingOf(name)
		if t != nil && (store.Due(t, hosting) != nil || store.AppsDue(t, hosting)) {
			due = append(due, name)
		}
		delete(m.Unreconciled, name)
	}
	return due
}

// NearAppLimit returns the tenants that should start a retirement round, with the number of apps that each has ended so
// far.
func (m *Cache) NearAppLimit(isCrowded func(apps int) bool) map[string]int {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	crowded := map[string]int{}
	for name, apps := range m.Apps {
		if t := m.Tenants[name]; t != nil && t.RetiringApps == nil && isCrowded(len(apps)) {
			crowded[name] = m.endedApps[name]
		}
	}
	return crowded
}
