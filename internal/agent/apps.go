package agent

import (
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// App ids of a tenant are scarce, so the orchestrator reclaims unused ones for other label sets. It sends a list of
// retiring apps. The node reports which of them its containers use, and creates no container of another listed app
// until the orchestrator assigns this app again. The orchestrator then sends the apps that no node uses as forgotten.
// The node acknowledges them once they are gone from its memory, its disk and the packet path.

// Retiring lists apps that the orchestrator wants to reclaim, or has reclaimed.
type Retiring struct {
	Round     uint64          `json:"round"` // number of the list
	Apps      []address.AppID `json:"apps"`
	Forgotten bool            `json:"forgotten,omitempty"`
}

func (r Retiring) equal(other Retiring) bool {
	return r.Round == other.Round && slices.Equal(r.Apps, other.Apps) && r.Forgotten == other.Forgotten
}

// appOf identifies an app within a tenant.
type appOf struct {
	tenant string
	app    address.AppID
}

// claim finds the app of a label set for a new container. The app counts as used until unclaim; by then the container's
// record counts it. A retiring app is returned only if it is already in use here: the node may have reported that it is
// unused.
func (t *Tenants) claim(name string, identity map[string]string) (app address.AppID, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	if h == nil {
		return 0, false
	}
	if app, ok = h.app(identity); !ok || slices.Contains(h.Retiring.Apps, app) && !t.uses(name)(app) {
		return 0, false
	}
	t.claimed[appOf{name, app}]++
	return app, true
}

// claimApp counts an app as used until unclaim, even if its container gets another app meanwhile. App 0 means none.
func (t *Tenants) claimApp(name string, app address.AppID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.claimed[appOf{name, app}]++
}

// unclaim ends one claim of an app.
func (t *Tenants) unclaim(name string, app address.AppID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := appOf{name, app}
	if t.claimed[of]--; t.claimed[of] == 0 {
		delete(t.claimed, of)
	}
	t.signalUses(name)
}

// uses returns a function that reports whether containers here have an app or are about to get it. The caller holds the
// lock.
func (t *Tenants) uses(name string) func(address.AppID) bool {
	used := t.usedApps(name)
	return func(app address.AppID) bool { return used[app] || t.claimed[appOf{name, app}] > 0 }
}

// signalUses triggers a report if the orchestrator waits for the used apps of the tenant. The caller holds the lock.
func (t *Tenants) signalUses(name string) {
	if h := t.m[name]; h != nil && len(h.Retiring.Apps) > 0 {
		t.signal()
	}
}

// retained returns the retiring apps that this node still needs. The caller holds the lock.
func (t *Tenants) retained(name string) (apps []uint32) {
	h := t.m[name]
	if len(h.Retiring.Apps) == 0 {
		return nil
	}
	is := t.uses(name)
	if h.Retiring.Forgotten {
		known := map[address.AppID]bool{}
		for _, a := range h.Apps {
			known[a.ID] = true
		}
		is = func(app address.AppID) bool { return known[app] }
	}
	for _, app := range h.Retiring.Apps {
		if is(app) {
			apps = append(apps, uint32(app))
		}
	}
	return apps
}

// forgetApps removes forgotten apps from a tenant, except those that containers here use. The caller holds the lock.
func (t *Tenants) forgetApps(h *hosted) {
	if !h.Retiring.Forgotten {
		return
	}
	uses, gone := t.uses(h.Tenant.Name), map[address.AppID]bool{}
	for _, app := range h.Retiring.Apps {
		gone[app] = !uses(app)
	}
	h.Apps = slices.DeleteFunc(slices.Clone(h.Apps), func(a App) bool { return gone[a.ID] })
}

// ackRound acknowledges a round of retiring apps once it is on disk and in force. It includes all earlier rounds.
func (t *Tenants) ackRound(name string, round uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && round != 0 && round == h.Retiring.Round && round != h.ackedRound && !h.unsaved {
		h.ackedRound = round
		t.signal()
	}
}

// mergeApps adds the apps whose id is new. A known id gets other labels only after this node has forgotten it.
func mergeApps(old, added []App) []App {
	if len(added) == 0 {
		return old
	}
	known := map[address.AppID]bool{}
	for _, a := range old {
		known[a.ID] = true
	}
	merged := slices.Clone(old)
	for _, a := range added {
		if !known[a.ID] {
			merged = append(merged, a)
		}
	}
	return merged
}

// usedApps returns the apps of a tenant's containers here. The app in a container's address counts as used as long as
// the address exists.
func (c *Core) usedApps(name string) map[address.AppID]bool {
	used := map[address.AppID]bool{}
	for _, r := range c.store.List() {
		if r.Tenant == name {
			used[r.App] = true
			used[r.AppNow] = true
		}
	}
	maps.DeleteFunc(used, func(app address.AppID, _ bool) bool { return app == 0 })
	return used
}
