package orchestrator

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// unsettle remembers a tenant whose ids may be due for a step: an id of its is accepted by the last
// node, or held by none any more.
func (m *model) unsettle(tenant string) {
	if t := m.tenants[tenant]; t != nil && len(t.Ids) > 1 {
		m.unsettled[tenant] = true
	}
}

// due takes the tenants whose ids are.
func (m *model) due() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var due []string
	for name := range m.unsettled {
		if t := m.tenants[name]; t != nil && store.Due(t, m.hostingOf(name)) != nil {
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
		s.config.Log.Warn("ids of a tenant are not settled; trying again", "tenant", tenant, "error", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}
