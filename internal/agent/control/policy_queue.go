package control

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/policies"
)

// policyQueue enforces policy updates of a stream while the stream is read on. Updates of a tenant that arrive during
// its compilation wait, and its next compilation includes all of them. No tenant waits for another one's, except for
// one of enforcedAtOnce places.
type policyQueue struct {
	link    *Link
	core    Core
	running *sync.WaitGroup
	end     context.CancelCauseFunc // of the stream

	mu      sync.Mutex
	tenants map[string]*tenantQueue // those with updates that are not in force
	size    int                     // bytes of the updates that no compilation has taken
	events  []*queuedEvent          // from the first one on that is not applied, in order
	places  chan struct{}
}

// tenantQueue has the updates of one tenant.
type tenantQueue struct {
	waiting []policies.Update
	events  []*queuedEvent // of these updates
	size    int
	taken   chan struct{} // closed when a compilation takes the waiting updates
	idle    chan struct{} // closed when all are in force
}

// queuedEvent is an event without its content. It is applied when its updates, and all events before it, are.
type queuedEvent struct {
	*pilasterv1.FollowResponse
	updates int // that are not in force
}

const (
	// maxUnenforced is the maximum of waiting bytes: the size of the largest message, or of a stream's flow-control
	// window.
	maxUnenforced = 4 << 20
	// enforcedAtOnce is for how many tenants policies are compiled at once, which needs memory.
	enforcedAtOnce = 4
)

// isPolicyOnly reports whether an event contains policy updates and nothing else.
func isPolicyOnly(event *pilasterv1.FollowResponse) bool {
	d := event.GetDelta()
	if d == nil || event.More || event.Refusals != nil {
		return false
	}
	others := len(d.Mappings) + len(d.EndedMappings)
	return d.Node == nil && others+len(tenantsOf(d)) == 0 && !hasServices(d) &&
		len(d.Policies)+len(d.EndedPolicies)+len(d.Overrides)+len(d.EndedOverrides)+len(d.WholePolicies) > 0
}

// tenantsOf returns the tenants whose state, besides policies, an event changes.
func tenantsOf(d *pilasterv1.Delta) (names []string) {
	for _, t := range d.Tenants {
		names = append(names, t.Name)
	}
	for _, a := range d.Apps {
		names = append(names, a.Tenant)
	}
	return slices.Concat(names, d.DeletedTenants, d.WholeTenants)
}

// handleEvent queues the policy updates of an event whose other content is applied. It returns before they are in
// force, unless too much waits already.
func (p *policyQueue) handleEvent(ctx context.Context, event *pilasterv1.FollowResponse) error {
	updates, err := policiesFromProto(event, time.Now())
	if err != nil {
		return fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
	}
	if err := p.awaitRoom(ctx, sizeOf(updates...)); err != nil {
		return err
	}
	e := &queuedEvent{&pilasterv1.FollowResponse{
		Revision: event.Revision, SpreadMs: event.SpreadMs, WithPolicies: event.WithPolicies,
		WithServices: event.WithServices, Refusals: event.Refusals,
	}, len(updates)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = append(p.events, e)
	for _, u := range updates {
		p.add(ctx, u, e)
	}
	p.markApplied()
	return nil
}

// add queues an update of one tenant. The caller holds the lock.
func (p *policyQueue) add(ctx context.Context, u policies.Update, of *queuedEvent) {
	if p.tenants == nil {
		p.tenants, p.places = map[string]*tenantQueue{}, make(chan struct{}, enforcedAtOnce)
	}
	q := p.tenants[u.Tenant]
	if q == nil {
		q = &tenantQueue{taken: make(chan struct{}), idle: make(chan struct{})}
		p.tenants[u.Tenant] = q
		p.running.Go(func() { p.run(ctx, u.Tenant, q) })
	}
	size := sizeOf(u)
	q.waiting, q.events, q.size = append(q.waiting, u), append(q.events, of), q.size+size
	p.size += size
}

// sizeOf returns about how many bytes updates need.
func sizeOf(updates ...policies.Update) (n int) {
	for _, u := range updates {
		n += 64 * (1 + len(u.Removed) + len(u.Overrides) + len(u.EndedOverrides))
		for _, d := range u.Documents {
			n += len(d.Text) + 64
		}
	}
	return n
}

// awaitRoom waits until there is room for so many bytes.
func (p *policyQueue) awaitRoom(ctx context.Context, size int) error {
	for {
		p.mu.Lock()
		var largest *tenantQueue
		for _, q := range p.tenants {
			if largest == nil || q.size > largest.size {
				largest = q
			}
		}
		full := p.size > 0 && p.size+size > maxUnenforced
		var taken chan struct{}
		if largest != nil {
			taken = largest.taken
		}
		p.mu.Unlock()
		if !full {
			return nil
		}
		if err := await(ctx, taken); err != nil {
			return err
		}
	}
}

func await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// wait returns once the queued updates of these tenants are in force; without names, those of all.
func (p *policyQueue) wait(ctx context.Context, tenants ...string) error {
	p.mu.Lock()
	var idle []chan struct{}
	for name, q := range p.tenants {
		if len(tenants) == 0 || slices.Contains(tenants, name) {
			idle = append(idle, q.idle)
		}
	}
	p.mu.Unlock()
	for _, done := range idle {
		if err := await(ctx, done); err != nil {
			return err
		}
	}
	return nil
}

// waitBefore returns once an event may be applied: after the queued updates of the tenants whose state it changes.
func (p *policyQueue) waitBefore(ctx context.Context, event *pilasterv1.FollowResponse) error {
	if d := event.GetDelta(); d != nil && d.Node == nil {
		if names := tenantsOf(d); len(names) > 0 {
			return p.wait(ctx, names...)
		}
		return nil
	}
	if event.GetHeartbeat() != nil {
		return nil
	}
	return p.wait(ctx)
}

// run enforces a tenant's queued updates until there are none. An update that cannot be stored ends the stream; the
// next one repeats it.
func (p *policyQueue) run(ctx context.Context, tenant string, q *tenantQueue) {
	for {
		// A place for each batch: a tenant that always has updates leaves it to others in between.
		select {
		case p.places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		updates, events := p.take(tenant, q)
		err := p.apply(ctx, updates)
		<-p.places
		if err != nil {
			p.end(err)
			return
		}
		if len(updates) == 0 {
			return
		}
		p.mu.Lock()
		for _, e := range events {
			e.updates--
		}
		p.markApplied()
		p.mu.Unlock()
	}
}

func (p *policyQueue) apply(ctx context.Context, updates []policies.Update) error {
	for _, n := range policies.MergeByTenant(updates) {
		if err := p.core.ApplyPolicies(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// take returns a tenant's waiting updates. If there are none, the tenant's queue is done.
func (p *policyQueue) take(tenant string, q *tenantQueue) ([]policies.Update, []*queuedEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	updates, events := q.waiting, q.events
	p.size -= q.size
	q.waiting, q.events, q.size = nil, nil, 0
	close(q.taken)
	q.taken = make(chan struct{})
	if len(updates) == 0 {
		delete(p.tenants, tenant)
		close(q.idle)
	}
	return updates, events
}

// markApplied records the events that are applied, with all before them. The caller holds the lock.
func (p *policyQueue) markApplied() {
	for len(p.events) > 0 && p.events[0].updates == 0 {
		p.link.markApplied(p.events[0].FollowResponse)
		p.events = p.events[1:]
	}
}
