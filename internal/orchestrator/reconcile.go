package orchestrator

import (
	"context"
	"maps"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// markUnreconciled remembers a tenant whose ids or apps may be due for a step: an id of its is accepted by the last
// node, or held by none any more, or the last node has answered its round.
func (m *cache) markUnreconciled(tenant string) {
	if t := m.tenants[tenant]; t != nil && (len(t.Ids) > 1 || t.RetiringApps != nil) {
		m.unreconciled[tenant] = true
	}
}

// due takes the tenants of which one is.
func (m *cache) due() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var due []string
	for name := range m.unreconciled {
		t, hosting := m.tenants[name], m.hostingOf(name)
		if t != nil && (store.Due(t, hosting) != nil || store.AppsDue(t, hosting)) {
			due = append(due, name)
		}
		delete(m.unreconciled, name)
	}
	return due
}

// reconcile takes the steps that are due for tenants' ids until ctx ends. Other orchestrators may do
// the same; the store decides each step once.
func (s *Server) reconcile(ctx context.Context) {
	for s.cache.await(ctx, func() bool { return len(s.cache.unreconciled) > 0 }) == nil {
		for _, tenant := range s.cache.due() {
			s.reconcileTenant(ctx, tenant)
		}
	}
}

func (s *Server) reconcileTenant(ctx context.Context, tenant string) {
	for {
		step, cancel := context.WithTimeout(ctx, callTimeout)
		err := s.store.Reconcile(step, tenant)
		cancel()
		if err == nil || ctx.Err() != nil {
			return
		}
		s.config.Log.Warn("ids and apps of a tenant are not settled; trying again", "tenant", tenant, "error", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// roundEvery is how often tenants are looked at for many apps, and roundRetry how long one is left alone after a round in
// which none ended.
const (
	roundEvery = time.Second
	roundRetry = 30 * time.Second
)

// nearAppLimit are tenants that are to have some of their apps end, with how many have.
func (m *cache) nearAppLimit(isCrowded func(apps int) bool) map[string]int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	crowded := map[string]int{}
	for name, apps := range m.apps {
		if t := m.tenants[name]; t != nil && t.RetiringApps == nil && isCrowded(len(apps)) {
			crowded[name] = m.endedApps[name]
		}
	}
	return crowded
}

// retireApps has nodes asked about apps of crowded tenants, until ctx ends.
func (s *Server) retireApps(ctx context.Context) {
	type asked struct {
		at    time.Time
		ended int // before
	}
	last := map[string]asked{}
	tick := time.NewTicker(roundEvery)
	defer tick.Stop()
	for {
		now, crowded := time.Now(), s.cache.nearAppLimit(s.store.NearAppLimit)
		for name, ended := range crowded {
			if was, ok := last[name]; ok && was.ended == ended && now.Sub(was.at) < roundRetry {
				continue
			}
			step, cancel := context.WithTimeout(ctx, callTimeout)
			if err := s.store.BeginAppRound(step, name); err != nil && ctx.Err() == nil {
				s.config.Log.Warn(
					"nodes are not asked about apps of a tenant; trying again",
					"tenant",
					name,
					"error",
					err,
				)
			} else {
				last[name] = asked{now, ended}
			}
			cancel()
		}
		maps.DeleteFunc(last, func(_ string, was asked) bool { return now.Sub(was.at) > roundRetry })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
