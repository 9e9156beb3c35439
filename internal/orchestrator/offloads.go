package orchestrator

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	offloadBatch   = 5 * time.Millisecond // at least, between two steps, so that one reads reports of several nodes
	offloadRetry   = time.Second          // of a change after an error of the store
	offloadWrites  = 8                    // at once
	offloadRefused = time.Minute          // what the store refused to start is not tried again
	offloadEnded   = time.Minute          // for which the reason of an end is known
	offloadChanges = 5                    // of an offload that are known
)

// offloads runs the controller of offloads with what the cache has, and writes its changes to the store. Several
// orchestrators may do so at the same time: the store applies each change once, and their decisions differ only in what
// the controller and this process remember, which are times.
type offloads struct {
	store   *store.Store
	cache   *cache.Cache
	log     *slog.Logger
	counted func(offload.Kind)                                              // counts a change
	change  func(context.Context, offload.Change) (applied bool, err error) // of a record, in the store

	mu         sync.Mutex // of what follows
	controller *offload.Controller
	records    map[offload.Key]seenRecord
	lags       map[frontendOf]*frontendLag
	refused    map[offload.Key]refusal
	retry      map[offload.Key]time.Time
	changes    map[offload.Key]offloadHistory // that this process made
	ended      map[offload.Key]endedOffload
	result     offload.Result
	names      []string // of all nodes, sorted
}

// refusal is why the store refused to start an offload.
type refusal struct {
	text  string
	until time.Time
}

// offloadHistory has the last changes of an offload, and why the controller stopped it.
type offloadHistory struct {
	id      uint32
	changes []*pilasterv1.OffloadChange
	stopped string
}

// with returns the history after a change.
func (h offloadHistory) with(now time.Time, c offload.Change) offloadHistory {
	h.changes = append(slices.Clone(h.changes), &pilasterv1.OffloadChange{
		At: timestamppb.New(now), Text: string(c.Kind) + ": " + c.Reason,
	})
	h.changes = h.changes[max(0, len(h.changes)-offloadChanges):]
	return h
}

type endedOffload struct {
	*pilasterv1.EndedOffload
	until time.Time
}

func newOffloads(
	s *store.Store,
	c *cache.Cache,
	limits offload.Limits,
	log *slog.Logger,
	counted func(offload.Kind),
) *offloads {
	return &offloads{
		store: s, cache: c, log: log, counted: counted, change: s.ChangeOffload, controller: offload.New(limits),
		records: map[offload.Key]seenRecord{}, lags: map[frontendOf]*frontendLag{}, refused: map[offload.Key]refusal{},
		changes: map[offload.Key]offloadHistory{}, ended: map[offload.Key]endedOffload{},
		retry: map[offload.Key]time.Time{},
	}
}

// run performs the controller's steps until ctx ends, while there are offloads or they may begin by themselves.
func (o *offloads) run(ctx context.Context) {
	seen := int64(0)
	needed := func() bool {
		return len(o.cache.Offloaded) > 0 || o.cache.OffloadAuto || o.cache.OffloadRevision > seen
	}
	for o.cache.Await(ctx, needed) == nil && ctx.Err() == nil {
		var next time.Duration
		began := time.Now()
		seen, next = o.step(ctx)
		pause := max(offloadBatch, time.Since(began)) // at most half of a CPU
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		wait, cancel := context.WithTimeout(ctx, max(0, next-pause))
		_ = o.cache.Await(wait, func() bool { return o.cache.OffloadRevision > seen })
		cancel()
	}
}

// step performs one step. It returns the revision of the reports that it used, and when the next step is due.
func (o *offloads) step(ctx context.Context) (seen int64, next time.Duration) {
	now := time.Now()
	o.mu.Lock()
	in, seen := o.input(now, "")
	o.forget(now)
	result := o.controller.Step(now, in)
	o.result = result
	o.mu.Unlock()
	o.applyAll(ctx, now, result.Changes)
	return seen, result.Next
}

// applyAll writes changes, those of lost frontends first. One that fails is tried again after a time, in which it does
// not delay those of other offloads.
func (o *offloads) applyAll(ctx context.Context, now time.Time, changes []offload.Change) {
	waits := func(c offload.Change) bool { return now.Before(o.retry[c.Key]) }
	changes = slices.DeleteFunc(slices.Clone(changes), waits)
	slices.SortStableFunc(changes, func(a, b offload.Change) int {
		if a.Urgent == b.Urgent {
			return 0
		} else if a.Urgent {
			return -1
		}
		return 1
	})
	var writes errgroup.Group
	writes.SetLimit(offloadWrites)
	for _, c := range changes {
		writes.Go(func() error {
			err := o.apply(ctx, now, c)
			if err != nil && ctx.Err() == nil {
				o.log.Warn("a change of an offload failed; retrying", "tenant", c.Tenant, "node", c.Node, "change",
					c.Kind, "reason", c.Reason, "error", err)
				o.mu.Lock()
				o.retry[c.Key] = time.Now().Add(offloadRetry)
				o.mu.Unlock()
			}
			return nil
		})
	}
	writes.Wait()
	if len(changes) > 0 { // otherwise the next step would decide the same
		wait, cancel := context.WithTimeout(ctx, offloadRetry)
		defer cancel()
		_ = o.cache.Await(wait, func() bool { return o.cache.Revision >= o.store.Revision() })
	}
}

// apply writes a change to the store.
func (o *offloads) apply(ctx context.Context, now time.Time, c offload.Change) (err error) {
	ctx, cancel := context.WithTimeout(ctx, admission.CallTimeout)
	defer cancel()
	applied := false
	if c.Kind == offload.Start {
		applied, err = o.start(ctx, now, c)
	} else {
		undo := o.note(now, c) // first, so that who sees the change knows its reason
		if applied, err = o.change(ctx, c); err != nil || !applied {
			undo()
		}
	}
	if err != nil || !applied {
		return err
	}
	o.counted(c.Kind)
	o.log.Info("an offload changed", "tenant", c.Tenant, "node", c.Node, "change", c.Kind, "phase", c.Phase, "reason",
		c.Reason)
	return nil
}

// note remembers a change of an offload, and returns what forgets it again.
func (o *offloads) note(now time.Time, c offload.Change) (undo func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	is, had := o.records[c.Key], o.changes[c.Key]
	h := offloadHistory{id: is.ID}
	if had.id == is.ID {
		h = had
	}
	if c.Kind == offload.Stop || c.Kind == offload.End && is.Phase != tenant.OffloadEnding {
		h.stopped = c.Reason
	}
	o.changes[c.Key] = h.with(now, c)
	if c.Kind == offload.End {
		o.ended[c.Key] = endedOffload{&pilasterv1.EndedOffload{
			Tenant: c.Tenant, Node: c.Node, Id: is.ID, Reason: h.stopped,
		}, now.Add(offloadEnded)}
	}
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.changes[c.Key] = had
		if e, ended := o.ended[c.Key]; ended && e.Id == is.ID {
			delete(o.ended, c.Key)
		}
	}
}

// start starts an offload. What the store refuses is not tried again for a while; the controller then says why.
func (o *offloads) start(ctx context.Context, now time.Time, c offload.Change) (applied bool, err error) {
	is := store.Offloading{Tenant: c.Tenant, Node: c.Node, Count: c.Want, Automatic: true}
	for _, f := range c.Frontends {
		is.Frontends = append(is.Frontends, f.Node)
	}
	made, err := o.store.StartOffload(ctx, is)
	if err == nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.changes[c.Key] = offloadHistory{id: made.Id}.with(now, c)
		return true, nil
	}
	var refused *store.Error
	if !errors.As(err, &refused) || refused.Reason == store.Unavailable {
		return false, err
	}
	if refused.Reason != store.Exists { // another orchestrator started it
		o.mu.Lock()
		defer o.mu.Unlock()
		o.refused[c.Key] = refusal{refused.Text, now.Add(offloadRefused)}
	}
	return false, nil
}

// forget deletes what belongs to offloads that are gone.
func (o *offloads) forget(now time.Time) {
	maps.DeleteFunc(o.retry, func(_ offload.Key, at time.Time) bool { return !now.Before(at) })
	maps.DeleteFunc(o.refused, func(_ offload.Key, r refusal) bool { return !now.Before(r.until) })
	maps.DeleteFunc(o.changes, func(k offload.Key, h offloadHistory) bool { return o.records[k].ID != h.id })
	maps.DeleteFunc(o.ended, func(_ offload.Key, e endedOffload) bool { return !now.Before(e.until) })
	frontends := map[frontendOf]bool{}
	for k, r := range o.records {
		for _, f := range r.Frontends {
			frontends[frontendOf{k.Tenant, f.Node}] = true
		}
	}
	maps.DeleteFunc(o.lags, func(k frontendOf, _ *frontendLag) bool { return !frontends[k] })
}

// Choose returns the best frontends for a new offload, or an error that says why fewer than n fit.
func (o *offloads) Choose(name, node string, n int) (names []string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	in, _ := o.input(now, name)
	chosen, err := o.controller.Choose(now, in, offload.Key{Tenant: name, Node: node}, n)
	for _, f := range chosen {
		names = append(names, f.Node)
	}
	return names, err
}

// Describe adds to offloads what the nodes have reported about them and what the controller has done. It returns the
// problems of the cluster and of nodes.
func (o *offloads) Describe(all []*pilasterv1.OffloadStatus) (problems []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	in, _ := o.input(time.Now(), "")
	of := map[offload.Key][]string{}
	for _, p := range o.result.Problems {
		switch {
		case p.Tenant != "":
			of[p.Key] = append(of[p.Key], p.Text)
		case p.Node != "":
			problems = append(problems, "node "+p.Node+": "+p.Text)
		default:
			problems = append(problems, p.Text)
		}
	}
	for _, s := range all {
		k := offload.Key{Tenant: s.Tenant, Node: s.Offload.GetNode()}
		s.Problems = of[k]
		if h := o.changes[k]; len(h.changes) > 0 && h.id == s.Offload.GetId() {
			s.Changes, s.LastChange = h.changes, h.changes[len(h.changes)-1].Text
		}
		r, known := o.records[k]
		if !known || r.Since != s.Offload.Since { // it has just changed
			continue
		}
		for _, a := range offload.Awaited(&r.Record, in.Nodes) {
			s.Awaited = append(s.Awaited, &pilasterv1.AwaitedNode{Node: a.Node, Reason: a.Reason})
		}
		if i, ok := slices.BinarySearch(o.names, k.Node); ok {
			s.LostFrontends = in.Nodes[i].Tenants[k.Tenant].Lost
		}
	}
	return problems
}

// Ended returns the offloads that this process ended in the last minute.
func (o *offloads) Ended() (all []*pilasterv1.EndedOffload) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range o.ended {
		if time.Now().Before(e.until) {
			all = append(all, e.EndedOffload)
		}
	}
	return all
}

// Doubt says that most frontends are reported as lost, so that no offload should start; it is empty if they are not.
func (o *offloads) Doubt() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.cache.Mu.RLock()
	defer o.cache.Mu.RUnlock()
	i := slices.IndexFunc(o.result.Problems, func(p offload.Problem) bool { return p.Key == offload.Key{} })
	if !o.result.InDoubt || len(o.cache.Offloaded) == 0 || i < 0 { // without offloads the last result is old
		return ""
	}
	return o.result.Problems[i].Text
}

// phases counts the offloads by phase.
func (o *offloads) phases() map[tenant.OffloadPhase]int {
	o.cache.Mu.RLock()
	defer o.cache.Mu.RUnlock()
	count := map[tenant.OffloadPhase]int{}
	for name := range o.cache.Offloaded {
		for _, is := range o.cache.Tenants[name].GetOffloads() {
			if i := int(is.Phase); i < len(tenant.OffloadPhases) {
				count[tenant.OffloadPhases[i]]++
			}
		}
	}
	return count
}

// inDoubt reports whether more than half of all frontends are reported as lost.
func (o *offloads) inDoubt() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.result.InDoubt
}
