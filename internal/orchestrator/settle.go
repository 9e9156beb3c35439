package orchestrator

import (
	"context"
	"maps"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// unsettle remembers a tenant whose ids or apps may be due for a step: an id of its is accepted by the last
// node, or held by none any more, or the last node has answered its round.
func (m *model) unsettle(tenant string) {
	if t := m.tenants[tenant]; t != nil && (len(t.Ids) > 1 || t.RetiringApps != nil) {
		m.unsettled[tenant] = true
	}
}

// due takes the tenants of which one is.
func (m *model) due() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var due []string
	for name := range m.unsettled {
		t, hosting := m.tenants[name], m.hostingOf(name)
		if t != nil && (store.Due(t, hosting) != nil || store.AppsDue(t, hosting)) {
			due = append(due, name)
		}
		delete(m.unsettled, name)
	}
	return due
}

// settle takes the steps that are due for tenants' ids until ctx ends. Other orchestrators may do
// the same; the store decides each step once.
func (s *Server) settle(ctx context.Context) {
	for s.model.await(ctx, func() bool { return len(s.model.unsettled) > 0 }) == nil {
		for _, tenant := range s.model.due() {
			s.settleOne(ctx, tenant)
		}
	}
}

func (s *Server) settleOne(ctx context.Context, tenant string) {
	for {
		step, cancel := context.WithTimeout(ctx, callTimeout)
		err := s.store.Settle(step, tenant)
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

// askEvery is how often tenants are looked at for many apps, and askAgain how long one is left alone after a round in
// which none ended.
const (
	askEvery = time.Second
	askAgain = 30 * time.Second
)

// crowded are tenants that are to have some of their apps end, with how many have.
func (m *model) crowded(isCrowded func(apps int) bool) map[string]int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	crowded := map[string]int{}
	for name, apps := range m.apps {
		if t := m.tenants[name]; t != nil && t.RetiringApps == nil && isCrowded(len(apps)) {
			crowded[name] = m.ended[name]
		}
	}
	return crowded
}

// askApps has nodes asked about apps of crowded tenants, until ctx ends.
func (s *Server) askApps(ctx context.Context) {
	type asked struct {
		at    time.Time
		ended int // before
	}
	last := map[string]asked{}
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		now, crowded := time.Now(), s.model.crowded(s.store.IsCrowded)
		for name, ended := range crowded {
			if was, ok := last[name]; ok && was.ended == ended && now.Sub(was.at) < askAgain {
				continue
			}
			step, cancel := context.WithTimeout(ctx, callTimeout)
			if err := s.store.AskApps(step, name); err != nil && ctx.Err() == nil {
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
		maps.DeleteFunc(last, func(_ string, was asked) bool { return now.Sub(was.at) > askAgain })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
