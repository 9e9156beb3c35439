package orchestrator

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Periods of offloads. They begin at a time that another orchestrator may have written: where the clocks differ, a wait
// is longer or shorter by that. Packets of nodes that have not acknowledged are lost if an offload ends too early.
const (
	offloadEvery = 50 * time.Millisecond  // at most, between two looks at offloads that change
	offloadBatch = 5 * time.Millisecond   // at least, so that acknowledgements of several nodes are read at once
	offloadRetry = time.Second            // after an error of the store
	dualRun      = 200 * time.Millisecond // both backend and frontends have acknowledged, some senders have not
	maxAwaited   = 2 * time.Second        // for nodes that are not needed for safety; packets to draining frontends
)

// advanceOffloads performs the steps of offloads, until ctx ends. Several orchestrators may do so at the same time: a
// transaction of the store performs each step once.
func (s *Server) advanceOffloads(ctx context.Context) {
	for s.cache.Await(ctx, func() bool { return len(s.cache.Offloading) > 0 }) == nil {
		seen, pause := s.cache.CurrentRevision(), offloadBatch
		for _, name := range s.cache.OffloadingTenants() {
			if err := s.advanceTenant(ctx, name); err != nil && ctx.Err() == nil {
				s.config.Log.Warn("a step of a tenant's offloads failed; retrying", "tenant", name, "error", err)
				pause = offloadRetry
			}
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		wait, cancel := context.WithTimeout(ctx, offloadEvery-offloadBatch)
		_ = s.cache.Await(wait, func() bool { return s.cache.Revision > seen }) // time passes, too
		cancel()
	}
}

func (s *Server) advanceTenant(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, admission.CallTimeout)
	defer cancel()
	type step struct{ was, next *pilasterv1.Offload }
	var steps []step
	s.cache.Mu.RLock()
	for _, o := range s.cache.Tenants[name].GetOffloads() {
		if next, due := nextPhase(o, s.cache.Hosting[name], s.cache.Connected, time.Now()); due {
			steps = append(steps, step{o, next})
		}
	}
	s.cache.Mu.RUnlock()
	for _, step := range steps {
		if err := s.store.AdvanceOffload(ctx, name, step.was, step.next); err != nil {
			return err
		}
	}
	return nil
}

// nextPhase decides the next step of an offload by the reports of the nodes that host its tenant. It returns the
// offload after the step, nil for one that ends; due is whether there is a step.
func nextPhase(
	o *pilasterv1.Offload,
	hosting map[string]*pilasterv1.Hosting,
	connected func(node string) bool,
	now time.Time,
) (next *pilasterv1.Offload, due bool) {
	awaited, passed := store.Awaited(o, hosting, connected), now.Sub(o.Changed.AsTime())
	next = proto.CloneOf(o)
	switch o.Phase {
	case pilasterv1.OffloadPhase_OFFLOAD_PHASE_PREPARING:
		if len(awaited) > 0 {
			return nil, false
		}
		if !activate(next.Frontends) {
			next.Phase = pilasterv1.OffloadPhase_OFFLOAD_PHASE_DUAL
		}
		return next, true
	case pilasterv1.OffloadPhase_OFFLOAD_PHASE_DUAL:
		needed := slices.ContainsFunc(awaited, func(a store.AwaitedNode) bool { return a.Needed })
		next.Phase = pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE
		return next, len(awaited) == 0 || !needed && passed >= dualRun || passed >= maxAwaited
	case pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE:
		next.Frontends = slices.DeleteFunc(next.Frontends, (*pilasterv1.Frontend).GetDraining)
		return next, len(next.Frontends) < len(o.Frontends) && passed >= maxAwaited
	case pilasterv1.OffloadPhase_OFFLOAD_PHASE_RETURNING:
		next.Phase = pilasterv1.OffloadPhase_OFFLOAD_PHASE_ENDING
		return next, len(awaited) == 0
	case pilasterv1.OffloadPhase_OFFLOAD_PHASE_ENDING:
		return nil, len(awaited) == 0 || passed >= maxAwaited
	}
	return nil, false
}

// activate makes frontends active if none is: the largest power of two.
func activate(all []*pilasterv1.Frontend) (changed bool) {
	if slices.ContainsFunc(all, func(f *pilasterv1.Frontend) bool { return !f.Draining }) {
		return false
	}
	for i, f := range all {
		f.Draining = i >= store.ActiveOf(len(all))
	}
	return len(all) > 0
}
