package orchestrator

import (
	"context"
	"maps"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/admission"
)

// reconcile performs the steps that tenants' key rotations and app retirements need, until ctx ends. Several
// orchestrators may do so at the same time: a transaction of the store performs each step once.
func (s *Server) reconcile(ctx context.Context) {
	for s.cache.Await(ctx, func() bool { return len(s.cache.Unreconciled) > 0 }) == nil {
		for _, tenant := range s.cache.DueTenants() {
			s.reconcileTenant(ctx, tenant)
		}
	}
}

func (s *Server) reconcileTenant(ctx context.Context, tenant string) {
	for {
		step, cancel := context.WithTimeout(ctx, admission.CallTimeout)
		err := s.store.Reconcile(step, tenant)
		cancel()
		if err == nil || ctx.Err() != nil {
			return
		}
		s.config.Log.Warn("reconciling a tenant's ids and apps failed; retrying", "tenant", tenant, "error", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// roundEvery is how often tenants are checked against their app limit. roundRetry is the pause for a tenant after a
// round in which no app ended.
const (
	roundEvery = time.Second
	roundRetry = 30 * time.Second
)

// retireApps starts retirement rounds for tenants near their app limit, until ctx ends.
func (s *Server) retireApps(ctx context.Context) {
	type attempt struct {
		at    time.Time
		ended int // apps that had ended before it
	}
	last := map[string]attempt{}
	tick := time.NewTicker(roundEvery)
	defer tick.Stop()
	for {
		now, crowded := time.Now(), s.cache.NearAppLimit(s.store.NearAppLimit)
		for name, ended := range crowded {
			if was, ok := last[name]; ok && was.ended == ended && now.Sub(was.at) < roundRetry {
				continue
			}
			step, cancel := context.WithTimeout(ctx, admission.CallTimeout)
			if err := s.store.BeginAppRound(step, name); err != nil && ctx.Err() == nil {
				s.config.Log.Warn(
					"starting a retirement round of a tenant's apps failed; retrying",
					"tenant",
					name,
					"error",
					err,
				)
			} else {
				last[name] = attempt{now, ended}
			}
			cancel()
		}
		maps.DeleteFunc(last, func(_ string, was attempt) bool { return now.Sub(was.at) > roundRetry })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
