package cache

import (
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// markUnreconciled remembers a tenant whose ids or apps may be due for a step: an id of its is accepted by the last
// Node, or held by none any more, or the last node has answered its round.
func (m *Cache) markUnreconciled(tenant string) {
	if t := m.Tenants[tenant]; t != nil && (len(t.Ids) > 1 || t.RetiringApps != nil) {
		m.Unreconciled[tenant] = true
	}
}

// DueTenants takes the tenants of which one is.
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

// NearAppLimit are tenants that are to have some of their apps end, with how many have.
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
