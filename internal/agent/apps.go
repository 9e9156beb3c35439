package agent

import (
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
)

// The numbers of a tenant's apps are few, so those that nobody uses go to other labels. The cluster asks about some,
// and this node says which of them its containers have; of the others it makes no container before the cluster has
// given it the app again. Then it is told to forget those that no node has. It says so when they are not in its memory,
// installedOn its disk and in the packet path any more.

// Retiring are apps that the cluster asks about, or has forgotten.
type Retiring struct {
	Round     uint64          `json:"round"` // another one for each list
	Apps      []address.AppID `json:"apps"`
	Forgotten bool            `json:"forgotten,omitempty"`
}

func (r Retiring) equal(other Retiring) bool {
	return r.Round == other.Round && slices.Equal(r.Apps, other.Apps) && r.Forgotten == other.Forgotten
}

func retiringFromProto(r *pilasterv1.RetiringApps) Retiring {
	if r == nil {
		return Retiring{}
	}
	out := Retiring{Round: r.Round, Forgotten: r.Forgotten}
	for _, app := range r.Apps {
		out.Apps = append(out.Apps, address.AppID(app))
	}
	return out
}

// appOf is an app of a tenant.
type appOf struct {
	tenant string
	app    address.AppID
}

// claim finds the app of labels for a container, which counts as one of it until disclaim, when its record does. Of an
// app that is asked about there must be another already, or the cluster may have been told that there is none.
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

// claimApp counts an app that a container has as used also when it has it no more, until disclaim. 0 is none.
func (t *Tenants) claimApp(name string, app address.AppID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.claimed[appOf{name, app}]++
}

func (t *Tenants) unclaim(name string, app address.AppID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := appOf{name, app}
	if t.claimed[of]--; t.claimed[of] == 0 {
		delete(t.claimed, of)
	}
	t.signalUses(name)
}

// uses tells of which apps of a tenant there are containers here, or are about to be. The caller holds the lock.
func (t *Tenants) uses(name string) func(address.AppID) bool {
	used := t.usedApps(name)
	return func(app address.AppID) bool { return used[app] || t.claimed[appOf{name, app}] > 0 }
}

// signalUses has the cluster know of which apps there are containers, if it wants to. The caller holds the lock.
func (t *Tenants) signalUses(name string) {
	if h := t.m[name]; h != nil && len(h.Retiring.Apps) > 0 {
		t.signal()
	}
}

// retained are the retiring apps of a tenant that this node does not do without. The caller holds the lock.
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

// forgetApps takes those out of a tenant's apps that are to be forgotten, but for those that containers here have. The
// caller holds the lock.
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

// ackRound notes that this node goes by a round that the stream has told, and all before it: it is on disk, and in force.
func (t *Tenants) ackRound(name string, round uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && round != 0 && round == h.Retiring.Round && round != h.ackedRound && !h.unsaved {
		h.ackedRound = round
		t.signal()
	}
}

// mergeApps adds those of which the number is new: one that is known goes to other labels only after this node has
// forgotten it.
func mergeApps(old, news []App) []App {
	if len(news) == 0 {
		return old
	}
	known := map[address.AppID]bool{}
	for _, a := range old {
		known[a.ID] = true
	}
	merged := slices.Clone(old)
	for _, a := range news {
		if !known[a.ID] {
			merged = append(merged, a)
		}
	}
	return merged
}

// usedApps are those of a tenant's containers here: the app that an address says is used as long as there is the
// address.
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
